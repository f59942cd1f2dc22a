local keep, tokens, params = tonumber(ARGV[5]), ARGV[6], ARGV[7]
local whole = keep + #tokens / 4
if missing() then
  return reply('MISSING')
end
if fenced() then
  return reply('FENCED')
end
local known = redis.call('HMGET', meta, 'prompt_length', 'params')
if ahead(true) or keep < tonumber(known[1]) or keep > length() then
  return reply('MISMATCH')
end
if epoch > stored() then
  redis.call('SET', log, string.sub(redis.call('GET', log), 1, keep * 4) .. tokens)
  redis.call('HSET', meta, 'params', params or known[2])
  changed()
elseif whole ~= length() or not holds(keep * 4, tokens) or (params and params ~= known[2]) then
  return reply('MISMATCH')
end
return own(epoch)
