if missing() then
  return reply('MISSING')
end
local known = redis.call('HMGET', meta, 'owner', 'lease')
if known[1] ~= owner and tonumber(known[2]) > now() then
  return reply('LEASED')
end
redis.call('HSET', meta, 'outcome', '')
return own(stored() + 1, now() + lease)
