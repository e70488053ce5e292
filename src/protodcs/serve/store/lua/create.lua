-- Begins a stream and makes it a user of its shared blob. Answers 1, or 0 if the stream exists already.
-- It must never touch a stream that exists, nor begin one whose shared blob is missing: it could not be loaded.
-- KEYS: meta, sorted set of the tenant's streams, shared blob, how many streams of each tenant use the blob, an epoch above those of all
-- deleted streams, usage of the tenants
-- ARGV: stream, spec, name of the shared blob, incarnation of the stream, tenant, position of its first record
local meta, streams, blob, users, past, usage = unpack(KEYS)
local stream, spec, shared, created, tenant, start = unpack(ARGV)

if redis.call('EXISTS', meta) == 1 then
  return 0
end
if redis.call('EXISTS', blob) == 0 then
  return {'MISSING'}
end
-- A stream that was deleted and comes again goes on above its old epochs: else one who held it in its former life
-- could come back with an epoch that is the newest once more.
local epoch = redis.call('GET', past) or '0'
redis.call('HSET', meta, 'schema', SCHEMA, 'spec', spec, 'shared', shared, 'created', created, 'epoch', epoch,
  'fence', epoch .. ':nobody', 'start', start, 'base', 0, 'kept', 0, 'state_bytes', 0, 'journal_bytes', 0,
  'time', redis.call('TIME')[1])
redis.call('ZADD', streams, 0, stream)
count_for_stream(meta, usage, tenant, #spec)
-- A blob counts once for each tenant that uses it.
if redis.call('HINCRBY', users, tenant, 1) == 1 then
  count_for_tenant(usage, tenant, redis.call('STRLEN', blob))
end
redis.call('PERSIST', blob)
return 1
