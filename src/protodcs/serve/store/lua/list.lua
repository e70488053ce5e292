-- Return streams of one tenant in the order of their ids: for each its id, when it was created, and its summary.
-- It must never look at the streams of other tenants, nor write.
-- KEYS: sorted set of the tenant's streams
-- ARGV: what the keys of meta hashes begin with, from where on as ZRANGEBYLEX takes it, how many
local streams = redis.call('ZRANGEBYLEX', KEYS[1], ARGV[2], '+', 'LIMIT', 0, ARGV[3])
local rows = {}
for i, stream in ipairs(streams) do
  local found = redis.call('HMGET', ARGV[1] .. stream, 'time', 'summary')
  rows[i] = {stream, found[1] or '0', found[2] or ''}
end
return rows
