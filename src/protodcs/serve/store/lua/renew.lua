-- Renew the lease of a worker. Returns the incarnation that held it before (or nothing), the time of Redis: seconds
-- since 1970, and microseconds; then the streams that others took from this worker, each followed by its new epoch.
-- It must never replace the lease of another incarnation that lives, unless the caller takes over from it.
-- KEYS: lease, hash of taken streams
-- ARGV: incarnation, milliseconds, '1' to take over
local holder = redis.call('GET', KEYS[1])
if not holder or holder == ARGV[1] or ARGV[3] == '1' then
  -- A Redis that is full refuses a script whose first write adds data. Workers need their leases then too.
  redis.call('DEL', KEYS[1])
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
local reply = redis.call('TIME')
table.insert(reply, 1, holder)
for _, field in ipairs(redis.call('HGETALL', KEYS[2])) do
  table.insert(reply, field)
end
return reply
