-- The end of a run: with an outcome it is finished, without one it is suspended.
local shown, outcome = tonumber(ARGV[5]), ARGV[6]
if missing() then
  return reply('MISSING')
end
if fenced() then
  return reply('FENCED')
end
if ahead(false) or (shown and shown > length()) then
  return reply('MISMATCH')
end
if outcome then
  redis.call('HSET', meta, 'outcome', outcome)
end
return own(epoch, true)
