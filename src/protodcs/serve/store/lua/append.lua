-- Appends records to the journal of a stream, and entries to its decision log, all or none. Answers 0 when they are there.
-- It must never write for a fence that is not the newest, leave a gap, or append a record twice: a batch that is there
-- already, whole and from this epoch, is a repetition after a lost answer and is answered like the first.
-- KEYS: meta, journal, usage of the tenants, decision log, ranges of positions that were rolled back
-- ARGV: fence, position of the first record, tenant, summary, a range that is rolled back (or empty), number of log entries,
-- for each log entry its id and its data, records...
local meta, journal, usage, log, roll_backs = unpack(KEYS)

local found, other_layout = read_meta(meta, 'fence', 'holder', 'start', 'base')
local refused = refusal(ARGV[1], found, other_layout)
if refused then
  return refused
end
-- The place of the first record in ARGV.
local head = 7 + 2 * tonumber(ARGV[6])
local first, count = tonumber(ARGV[2]), #ARGV - head + 1
local start, base = tonumber(found[3]), tonumber(found[4])
local finish = start + redis.call('LLEN', journal)

if first == finish then
  -- Before the first write: keys of another type raise an error here.
  redis.call('XLEN', log)
  redis.call('LLEN', roll_backs)
  local bytes = 0
  for i = head, #ARGV do
    bytes = bytes + #ARGV[i]
  end
  redis.call('HINCRBY', meta, 'journal_bytes', bytes)
  redis.call('HSET', meta, 'summary', ARGV[4])
  count_for_tenant(usage, ARGV[3], bytes)
  -- In portions, because Lua hands over only some thousand arguments at once.
  for from = head, #ARGV, 1000 do
    redis.call('RPUSH', journal, unpack(ARGV, from, math.min(from + 999, #ARGV)))
  end
  local log_bytes = 0
  for i = 7, head - 1, 2 do
    redis.call('XADD', log, ARGV[i], 'd', ARGV[i + 1])
    log_bytes = log_bytes + #ARGV[i + 1]
  end
  if log_bytes > 0 then
    redis.call('HINCRBY', meta, 'log_bytes', log_bytes)
  end
  if ARGV[5] ~= '' then
    redis.call('RPUSH', roll_backs, ARGV[5])
  end
  return 0
end
if first > finish then
  return {'WRONG', 'the journal ends at ' .. finish .. ': records between are missing'}
end
if first < base or first + count > finish then
  return {'WRONG', 'this epoch began at ' .. base .. ' and the journal ends at ' .. finish
    .. ': some of these positions are taken, and it is no repetition'}
end
-- What a snapshot covers is no longer there to compare with.
local seen = math.max(first, start)
local there = seen < first + count and redis.call('LRANGE', journal, seen - start, first + count - 1 - start) or {}
for i = 1, #there do
  if there[i] ~= ARGV[head - 1 + seen - first + i] then
    return {'WRONG', 'another record stands at ' .. (seen + i - 1) .. ' already'}
  end
end
return 0
