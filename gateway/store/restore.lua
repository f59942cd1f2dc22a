local params, prompt_length, tokens = ARGV[5], ARGV[6], ARGV[7]
if fenced() then
  return reply('FENCED')
end
-- What was written since under the same epoch stays: this may be the late repeat of a restoration long done.
local same = epoch == stored() and redis.call('HGET', meta, 'params') == params
if missing() or not same or not holds(0, tokens) then
  redis.call('HSET', meta, 'params', params, 'prompt_length', prompt_length)
  redis.call('SET', log, tokens)
  changed()
end
return own(epoch)
