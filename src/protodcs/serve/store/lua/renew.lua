-- Renew the lease of an owner. Returns the incarnation that held it before (or nothing), and the time of Redis: seconds
-- since 1970, and microseconds.
-- It must never replace the lease of another incarnation that lives, unless the caller takes over from it.
-- KEYS: lease
-- ARGV: incarnation, milliseconds, '1' to take over
local holder = redis.call('GET', KEYS[1])
if not holder or holder == ARGV[1] or ARGV[3] == '1' then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
local time = redis.call('TIME')
return {holder, time[1], time[2]}
