-- Delete the oldest entries of a stream's decision log if it has too many, too large or too old ones. Returns how many were
-- deleted, at most the given number.
-- It must never create a key of a stream that does not exist.
-- KEYS: meta, decision log, ranges of positions that were rolled back
-- ARGV: maximum number of entries, maximum bytes, time of the oldest entry in milliseconds, milliseconds after which a log
-- that gets no entries expires, maximum number of entries to delete
local meta, log, roll_backs = unpack(KEYS)

local found = read_meta(meta, 'log_bytes')
if not found then
  return 0
end
local entries, bytes = redis.call('XLEN', log), tonumber(found[1] or '0')
local deleted = 0
for _, entry in ipairs(redis.call('XRANGE', log, '-', '+', 'COUNT', ARGV[5])) do
  local data = entry[2][2]
  -- The data begins with the time.
  local time = tonumber(string.match(data, '^%[(%d+)') or '0')
  if entries <= tonumber(ARGV[1]) and bytes <= tonumber(ARGV[2]) and time >= tonumber(ARGV[3]) then
    break
  end
  entries, bytes, deleted = entries - 1, bytes - #data, deleted + 1
end
if deleted > 0 then
  redis.call('XTRIM', log, 'MAXLEN', entries)
  redis.call('HSET', meta, 'log_bytes', bytes)
end
if entries == 0 then
  redis.call('HSET', meta, 'log_bytes', 0)
  redis.call('DEL', roll_backs)
else
  redis.call('PEXPIRE', log, ARGV[4])
  redis.call('PEXPIRE', roll_backs, ARGV[4])
end
return deleted
