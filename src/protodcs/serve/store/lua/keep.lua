-- Keeps a snapshot under a name, as the youngest of the kept ones. Answers 0.
-- It must never write for a fence that is not the newest, nor touch the newest snapshot or the journal.
-- KEYS: meta, kept snapshots, their order
-- ARGV: fence, name, snapshot
local meta, kept, order = unpack(KEYS)

local refused = refusal(ARGV[1], read_meta(meta, 'fence', 'holder'))
if refused then
  return refused
end
redis.call('HSET', kept, ARGV[2], ARGV[3])
redis.call('ZADD', order, redis.call('HINCRBY', meta, 'kept', 1), ARGV[2])
return 0
