-- Saves a snapshot under a name, as the newest of the saved ones. Answers 0.
-- It must never write for a fence that is not the newest, nor touch the newest snapshot or the journal.
-- KEYS: meta, saved snapshots, their order, usage of the tenants
-- ARGV: fence, name, tenant, snapshot
local meta, saved, order, usage = unpack(KEYS)
local fence, name, tenant, snapshot = unpack(ARGV)

local refused = refusal(fence, read_meta(meta, 'fence', 'holder'))
if refused then
  return refused
end
count_for_stream(meta, usage, tenant, #snapshot - redis.call('HSTRLEN', saved, name))
redis.call('HSET', saved, name, snapshot)
redis.call('ZADD', order, redis.call('HINCRBY', meta, 'kept', 1), name)
return 0
