-- Keeps a snapshot under a name, as the youngest of the kept ones. Answers 0.
-- It must never write for a fence that is not the newest, nor touch the newest snapshot or the journal.
-- KEYS: meta, kept snapshots, their order, usage of the tenants
-- ARGV: fence, name, tenant, snapshot
local meta, kept, order, usage = unpack(KEYS)
local fence, name, tenant, snapshot = unpack(ARGV)

local refused = refusal(fence, read_meta(meta, 'fence', 'holder'))
if refused then
  return refused
end
count_for_stream(meta, usage, tenant, #snapshot - redis.call('HSTRLEN', kept, name))
redis.call('HSET', kept, name, snapshot)
redis.call('ZADD', order, redis.call('HINCRBY', meta, 'kept', 1), name)
return 0
