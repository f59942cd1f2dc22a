local at, tokens = tonumber(ARGV[5]) * 4, ARGV[6]
if missing() then
  return reply('MISSING')
end
if fenced() then
  return reply('FENCED')
end
local length = redis.call('STRLEN', log)
if at == length then
  redis.call('APPEND', log, tokens)
elseif at < 0 or at + #tokens > length or (#tokens > 0 and redis.call('GETRANGE', log, at, at + #tokens - 1) ~= tokens) then
  return reply('MISMATCH')
end
return own(epoch, now() + lease)
