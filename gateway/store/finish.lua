-- The end of a run: with an outcome it is finished, without one it is suspended.
local refused = refusal(ARGV[5])
if refused then
  return refused
end
if ARGV[6] then
  redis.call('HSET', meta, 'outcome', ARGV[6])
end
return own(epoch, true)
