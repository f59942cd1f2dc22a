if missing() then
  return reply('MISSING')
end
local known, force = redis.call('HMGET', meta, 'owner', 'lease'), ARGV[5] == '1'
if not force and known[1] ~= owner and tonumber(known[2]) > now() then
  return reply('LEASED')
end
own(stored() + 1)
return record(0)
