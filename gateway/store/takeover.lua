if missing() then
  return reply('MISSING')
end
local force, nonce, kept = ARGV[5] == '1', ARGV[6], tonumber(ARGV[7])
local nonces = redis.call('HGET', meta, 'takeovers') or ''
if string.find(' ' .. nonces .. ' ', ' ' .. nonce .. ' ', 1, true) then -- done long ago
  if redis.call('HGET', meta, 'owner') ~= owner then
    return reply('FENCED')
  end
  return record(0)
end
if not force and redis.call('HGET', meta, 'owner') ~= owner and lease_left() > 0 then
  return reply('LEASED')
end
own(stored() + 1)
local latest = {nonce}
for known in string.gmatch(nonces, '%S+') do
  if #latest < kept then
    latest[#latest + 1] = known
  end
end
redis.call('HSET', meta, 'takeovers', table.concat(latest, ' '))
return record(0)
