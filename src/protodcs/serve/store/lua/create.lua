-- Begins a stream and makes it a user of its shared blobs. Answers 1, or 0 if the stream exists already.
-- It must never touch a stream that exists, nor begin one of whose shared blobs one is missing: it could not be loaded.
-- KEYS: meta, sorted set of the tenant's streams, an epoch above those of all deleted streams, usage of the tenants; then for
-- each shared blob its key, and how many streams of each tenant use it
-- ARGV: stream, spec, incarnation of the stream, tenant, position of its first record; then the names of the shared blobs
local meta, streams, past, usage = unpack(KEYS)
local stream, spec, created, tenant, start = unpack(ARGV)

if redis.call('EXISTS', meta) == 1 then
  return 0
end
for at = 5, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[at]) == 0 then
    return {'MISSING'}
  end
end
local shared = cmsgpack.pack({unpack(ARGV, 6)})
-- A stream that was deleted and comes again goes on above its old epochs: else one who held it in its former life
-- could come back with an epoch that is the newest once more.
local epoch = redis.call('GET', past) or '0'
redis.call('HSET', meta, 'schema', SCHEMA, 'spec', spec, 'shared', shared, 'created', created, 'epoch', epoch,
  'fence', epoch .. ':nobody', 'start', start, 'base', 0, 'kept', 0, 'state_bytes', 0, 'journal_bytes', 0,
  'time', redis.call('TIME')[1])
redis.call('ZADD', streams, 0, stream)
count_for_stream(meta, usage, tenant, #spec)
for at = 5, #KEYS, 2 do
  -- A blob counts once for each tenant that uses it.
  if redis.call('HINCRBY', KEYS[at + 1], tenant, 1) == 1 then
    count_for_tenant(usage, tenant, redis.call('STRLEN', KEYS[at]))
  end
  redis.call('PERSIST', KEYS[at])
end
return 1
