local at, tokens = tonumber(ARGV[5]) * 4, ARGV[6]
local raises = #tokens == 0
if missing() then
  return reply('MISSING')
end
if fenced() then
  return reply('FENCED')
end
local present = redis.call('STRLEN', log)
if ahead(raises) or at < 0 or at > present then
  return reply('MISMATCH')
end
if at == present and not raises then
  redis.call('APPEND', log, tokens)
  changed()
elseif at < present and (epoch > stored() or at + #tokens > present or not holds(at, tokens)) then
  return reply('MISMATCH')
end
return own(epoch)
