-- Answers what is known of a stream, all of one moment.
-- It must never write, nor carry snapshots or records: it is asked often.
-- KEYS: meta, journal, snapshot, kept snapshots, their order
-- ARGV: what the keys of leases begin with
local meta, journal, snapshot, kept, order = unpack(KEYS)

local found, other_layout = read_meta(meta, 'birth', 'epoch', 'holder', 'incarnation', 'start', 'created')
if not found then
  return other_layout or {'UNKNOWN'}
end
local birth, epoch, holder, incarnation, start, created = unpack(found)
if holder and redis.call('GET', ARGV[1] .. holder) ~= incarnation then
  holder = false
end
-- The journal's bytes are estimated by Redis from a few of its records, so that a long one costs no more.
local size = #birth + redis.call('STRLEN', snapshot) + (redis.call('MEMORY', 'USAGE', journal) or 0)
for _, name in ipairs(redis.call('ZRANGE', order, 0, -1)) do
  size = size + redis.call('HSTRLEN', kept, name)
end
return {'OK', birth, tonumber(epoch), holder, tonumber(start), redis.call('LLEN', journal), size, created}
