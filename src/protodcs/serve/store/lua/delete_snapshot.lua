-- Deletes a saved snapshot, if it is there. Answers 0.
-- It must never delete for a fence that is not the newest.
-- KEYS: meta, saved snapshots, their order, usage of the tenants
-- ARGV: fence, name, tenant
local meta, saved, order, usage = unpack(KEYS)
local fence, name, tenant = unpack(ARGV)

local refused = refusal(fence, read_meta(meta, 'fence', 'holder'))
if refused then
  return refused
end
local bytes = redis.call('HSTRLEN', saved, name)
-- First what frees memory: a Redis that is full refuses a script whose first write adds data.
redis.call('HDEL', saved, name)
redis.call('ZREM', order, name)
count_for_stream(meta, usage, tenant, -bytes)
return 0
