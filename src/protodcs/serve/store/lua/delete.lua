-- Forgets a stream and all that belongs to it, and its shared blobs if nobody else uses them. Answers 0.
-- It must never delete for a fence that is not the newest, nor a blob that another stream uses.
-- KEYS: meta, journal, snapshot, kept snapshots, their order, a snapshot left lying where Redis died, the tenant's streams, an
-- epoch above those of all deleted streams, usage of the tenants, decision log, ranges of positions that were rolled back,
-- notices
-- ARGV: fence, stream, what the keys of shared blobs begin with, what the keys of their users begin with, tenant
local meta, journal, snapshot, kept, order, ready, streams, past, usage, log, roll_backs, notices = unpack(KEYS)
local fence, stream, blobs, users, tenant = unpack(ARGV)

local found, other_layout = read_meta(meta, 'fence', 'holder', 'shared', 'epoch', 'state_bytes', 'journal_bytes')
local refused = refusal(fence, found, other_layout)
if refused then
  return refused
end
-- First what frees memory, as a Redis that is full would not begin with anything else.
redis.call('DEL', meta, journal, snapshot, kept, order, ready, log, roll_backs, notices)
local above = tonumber(found[4]) + 1
if above > tonumber(redis.call('GET', past) or '0') then
  redis.call('SET', past, above)
end
redis.call('ZREM', streams, stream)
count_for_tenant(usage, tenant, -tonumber(found[5]) - tonumber(found[6]))
for _, name in ipairs(cmsgpack.unpack(found[3])) do
  local blob, uses = blobs .. name, users .. name
  if redis.call('HINCRBY', uses, tenant, -1) == 0 then
    redis.call('HDEL', uses, tenant)
    count_for_tenant(usage, tenant, -redis.call('STRLEN', blob))
  end
  if redis.call('EXISTS', uses) == 0 then
    redis.call('DEL', blob)
  end
end
return 0
