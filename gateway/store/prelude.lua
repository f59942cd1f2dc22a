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

local function reply(word)
  return {word, stored(), redis.call('STRLEN', log) / 4}
end

-- A record is both keys: one of them lost to eviction is a lost session.
local function missing()
  return redis.call('EXISTS', meta, log) < 2
end

local function fenced()
  local present = stored()
  return epoch < present or (epoch == present and redis.call('HGET', meta, 'owner') ~= owner)
end

local function own(number, until_ms)
  redis.call('HSET', meta, 'epoch', string.format('%d', number), 'owner', owner, 'lease', string.format('%d', until_ms))
  redis.call('PEXPIRE', meta, ttl)
  redis.call('PEXPIRE', log, ttl)
  return reply('OK')
end
