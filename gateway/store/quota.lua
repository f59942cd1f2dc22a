-- What one API key uses, over all gateways. KEYS: a hash. ARGV: gateway, number of its charge, ms after which a silent
-- gateway's sessions do not count, ms of a period; then of requests and of tokens the amount, the gateway's total with
-- it, and the limit; then of sessions the amount, how many the gateway runs with it, and the limit. What was used of a
-- rate drains evenly in the course of its period.
--
-- A charge may be repeated, and one whose reply is awaited no more may be carried out late. So each carries what
-- its gateway has in all: whatever the charges before it did or did not do is made good first, the same number is
-- carried out once, and an older one not at all. Fields of a gateway: `s:` number and `v:` verdict of its last charge,
-- `r:` and `t:` totals of requests and tokens, `n:` sessions, `b:` time of its latest charge.
local key, gateway, number = KEYS[1], ARGV[1], tonumber(ARGV[2])
local stale, period = tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function rate(name, total, first)
  local given = {tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])}
  return {name = name, field = total .. gateway, amount = given[1], total = given[2], limit = given[3]}
end
local rates = {rate('requests', 'r:', 5), rate('tokens', 't:', 8)}
local amount, running, limit = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])

local known = redis.call('HMGET', key, 's:' .. gateway, 'v:' .. gateway)
local last = tonumber(known[1] or 0)
if number <= last then
  local refused, wait = string.match(number == last and known[2] or 'stale 0', '^(%a*) (%d+)$')
  return {refused, tonumber(wait)}
end

local refused, wait = '', 0
for _, each in ipairs(rates) do
  local before = redis.call('HMGET', key, each.name, each.name .. '_at', each.field)
  local passed = math.max(0, now - tonumber(before[2] or now))
  local made_good = before[3] and each.total - each.amount - tonumber(before[3]) or 0
  each.used = math.max(0, math.max(0, tonumber(before[1] or 0) - passed * each.limit / period) + made_good)
  local over = each.used + each.amount - each.limit
  if refused == '' and each.limit > 0 and each.amount > 0 and over > 0 then
    refused, wait = each.name, math.ceil(over * period / each.limit)
  end
end

local others = 0
local fields = redis.call('HGETALL', key)
local counts, latest = {}, {}
for index = 1, #fields, 2 do
  local kind, name = string.sub(fields[index], 1, 2), string.sub(fields[index], 3)
  if kind == 'n:' then
    counts[name] = tonumber(fields[index + 1])
  elseif kind == 'b:' then
    latest[name] = tonumber(fields[index + 1])
  end
end
for name, count in pairs(counts) do
  if name ~= gateway then
    if now - (latest[name] or 0) > stale then
      for _, kind in ipairs({'n:', 'b:', 's:', 'v:', 'r:', 't:'}) do
        redis.call('HDEL', key, kind .. name)
      end
    else
      others = others + count
    end
  end
end
if refused == '' and amount > 0 and limit > 0 and others + running > limit then
  refused, wait = 'sessions', 0
end

local kept = refused == '' and 1 or 0
for _, each in ipairs(rates) do
  redis.call('HSET', key, each.field, each.total - (1 - kept) * each.amount)
  if each.limit > 0 then
    redis.call('HSET', key, each.name, math.max(0, each.used + kept * each.amount), each.name .. '_at', now)
  end
end
redis.call('HSET', key, 'n:' .. gateway, running - (1 - kept) * amount, 'b:' .. gateway, now)
redis.call('HSET', key, 's:' .. gateway, number, 'v:' .. gateway, refused .. ' ' .. string.format('%d', wait))
redis.call('PEXPIRE', key, 2 * math.max(period, stale))
return {refused, wait}
