if missing() then
  return reply('MISSING')
end
if fenced() then
  return reply('FENCED')
end
redis.call('HSET', meta, 'outcome', ARGV[5])
return own(epoch, 0)
