-- What one API key uses, over all gateways. KEYS: a hash. ARGV: gateway, ms after which a silent gateway's sessions do
-- not count, ms of a period; then amount and limit of requests, of tokens and of sessions; then the gateway's sessions
-- where they are reported. What was used of a rate drains evenly in the course of its period.
local key, gateway = KEYS[1], ARGV[1]
local stale, period = tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local rates = {
  {name = 'requests', amount = tonumber(ARGV[4]), limit = tonumber(ARGV[5])},
  {name = 'tokens', amount = tonumber(ARGV[6]), limit = tonumber(ARGV[7])},
}
local amount, limit, reported = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10]

for _, rate in ipairs(rates) do
  if rate.limit > 0 then
    local known = redis.call('HMGET', key, rate.name, rate.name .. '_at')
    local passed = math.max(0, now - tonumber(known[2] or now))
    rate.used = math.max(0, tonumber(known[1] or 0) - passed * rate.limit / period)
    local over = rate.used + rate.amount - rate.limit
    if rate.amount > 0 and over > 0 then
      return {rate.name, math.ceil(over * period / rate.limit)}
    end
  end
end

-- Sessions of each gateway, as `n:GATEWAY`, and when it was last heard of, as `b:GATEWAY`.
local total, own = 0, 0
local fields = redis.call('HGETALL', key)
local counts, heard = {}, {}
for index = 1, #fields, 2 do
  local kind, name = string.sub(fields[index], 1, 2), string.sub(fields[index], 3)
  if kind == 'n:' then
    counts[name] = tonumber(fields[index + 1])
  elseif kind == 'b:' then
    heard[name] = tonumber(fields[index + 1])
  end
end
for name, count in pairs(counts) do
  if name == gateway then
    own = count
  elseif now - (heard[name] or 0) > stale then
    redis.call('HDEL', key, 'n:' .. name, 'b:' .. name)
  else
    total = total + count
  end
end
if amount > 0 and limit > 0 and total + own + amount > limit then
  return {'sessions', 0}
end

for _, rate in ipairs(rates) do
  if rate.limit > 0 then
    redis.call('HSET', key, rate.name, math.max(0, rate.used + rate.amount), rate.name .. '_at', now)
  end
end
own = reported ~= '' and tonumber(reported) or math.max(0, own + amount)
if own > 0 then
  redis.call('HSET', key, 'n:' .. gateway, own, 'b:' .. gateway, now)
else
  redis.call('HDEL', key, 'n:' .. gateway, 'b:' .. gateway)
end
redis.call('PEXPIRE', key, 2 * math.max(period, stale))
return {'', 0}
