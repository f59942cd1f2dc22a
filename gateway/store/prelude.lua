-- Shared by all scripts. KEYS: meta hash, token string. ARGV: owner, TTL and lease in ms, epoch, then the script's own.
local meta, log = KEYS[1], KEYS[2]
local owner, ttl, lease, epoch = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function stored()
  return tonumber(redis.call('HGET', meta, 'epoch') or 0)
end

local function length()
  return redis.call('STRLEN', log) / 4
end

local function reply(word)
  return {word, stored(), length()}
end

-- Milliseconds that the lease still runs. One that begins in the future is of another server's clock, from before a
-- failover: it counts as lapsed, or a dead owner could keep its session for as long as the clocks differ.
local function lease_left()
  local known = redis.call('HMGET', meta, 'lease', 'leased_at')
  local present = now()
  if present < tonumber(known[2] or 0) then
    return 0
  end
  return math.max(0, tonumber(known[1]) - present)
end

-- The record with its tokens from `start` on, or none where the log ends before.
local function record(start)
  start = math.min(start, length())
  local answer = reply('OK')
  for _, name in ipairs({'params', 'prompt_length', 'owner', 'outcome'}) do
    answer[#answer + 1] = redis.call('HGET', meta, name)
  end
  answer[#answer + 1] = lease_left()
  answer[#answer + 1] = start
  answer[#answer + 1] = redis.call('GETRANGE', log, start * 4, -1)
  return answer
end

-- A record is both keys: one of them lost to eviction is a lost session.
local function missing()
  return redis.call('EXISTS', meta, log) < 2
end

local function fenced()
  local present = stored()
  return epoch < present or (epoch == present and redis.call('HGET', meta, 'owner') ~= owner)
end

-- Only a write that raises its owner's own epoch may be ahead, by one: any other proves that the store lost something.
local function ahead(raises)
  local mine = redis.call('HGET', meta, 'owner') == owner
  return epoch > stored() + (raises and mine and 1 or 0)
end

-- Of a write that leaves the log as it is, by an owner that knows it to be so long; nil where nothing is wrong with it.
local function refusal(shown)
  if missing() then
    return reply('MISSING')
  end
  if fenced() then
    return reply('FENCED')
  end
  if ahead(false) or (tonumber(shown) or 0) > length() then
    return reply('MISMATCH')
  end
end

-- Whether the log holds exactly these packed tokens from a byte on.
local function holds(at, tokens)
  return #tokens == 0 or redis.call('GETRANGE', log, at, at + #tokens - 1) == tokens
end

-- Whether the log, hence an outcome, is of the past.
local function changed()
  redis.call('HSET', meta, 'outcome', '')
end

-- A lease given up (0) stays so under its epoch: the late repeat of an earlier write must not bring it back.
local function own(number, given_up)
  local present = now()
  local until_ms = present + lease
  if given_up or (number == stored() and redis.call('HGET', meta, 'lease') == '0') then
    until_ms = 0
  end
  redis.call('HSET', meta, 'epoch', string.format('%d', number), 'owner', owner)
  redis.call('HSET', meta, 'lease', string.format('%d', until_ms), 'leased_at', string.format('%d', present))
  redis.call('PEXPIRE', meta, ttl)
  redis.call('PEXPIRE', log, ttl)
  return reply('OK')
end
