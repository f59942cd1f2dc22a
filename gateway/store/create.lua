local params, prompt_length, tokens = ARGV[5], ARGV[6], ARGV[7]
if redis.call('EXISTS', meta, log) > 0 then
  local known = redis.call('HMGET', meta, 'epoch', 'owner', 'params')
  local same = tonumber(known[1]) == epoch and known[2] == owner and known[3] == params
  if not same or redis.call('GET', log) ~= tokens then
    return reply('EXISTS')
  end
else
  redis.call('HSET', meta, 'params', params, 'prompt_length', prompt_length, 'outcome', '')
  redis.call('SET', log, tokens)
end
return own(epoch)
