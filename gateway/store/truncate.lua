local length = tonumber(ARGV[5])
if missing() then
  return reply('MISSING')
end
if fenced() then
  return reply('FENCED')
end
local present = redis.call('STRLEN', log) / 4
local prompt = tonumber(redis.call('HGET', meta, 'prompt_length'))
if length < prompt or length > present or (length < present and epoch == stored()) then
  return reply('MISMATCH')
end
if length < present then
  redis.call('SET', log, redis.call('GETRANGE', log, 0, length * 4 - 1))
end
return own(epoch, now() + lease)
