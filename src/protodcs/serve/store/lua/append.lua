-- Appends records to the journal of a stream, all or none. Answers 0 when they are there.
-- It must never write for a fence that is not the newest, leave a gap, or append a record twice: a batch that is there
-- already, whole and from this epoch, is a repetition after a lost answer and is answered like the first.
-- KEYS: meta, journal, usage of the tenants
-- ARGV: fence, position of the first record, tenant, summary, records...
local meta, journal, usage = unpack(KEYS)

local found, other_layout = read_meta(meta, 'fence', 'holder', 'start', 'base')
local refused = refusal(ARGV[1], found, other_layout)
if refused then
  return refused
end
local first, count = tonumber(ARGV[2]), #ARGV - 4
local start, base = tonumber(found[3]), tonumber(found[4])
local finish = start + redis.call('LLEN', journal)

if first == finish then
  local bytes = 0
  for i = 5, #ARGV do
    bytes = bytes + #ARGV[i]
  end
  redis.call('HINCRBY', meta, 'journal_bytes', bytes)
  redis.call('HSET', meta, 'summary', ARGV[4])
  count_for_tenant(usage, ARGV[3], bytes)
  -- In portions, because Lua hands over only some thousand arguments at once.
  for from = 5, #ARGV, 1000 do
    redis.call('RPUSH', journal, unpack(ARGV, from, math.min(from + 999, #ARGV)))
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
  if there[i] ~= ARGV[4 + seen - first + i] then
    return {'WRONG', 'another record stands at ' .. (seen + i - 1) .. ' already'}
  end
end
return 0
