-- Answers what is known of a stream, all of one moment.
-- It must never write, nor carry snapshots or records: it is asked often.
-- KEYS: meta, journal
-- ARGV: what the keys of leases begin with
local meta, journal = unpack(KEYS)

local found, other_layout = read_meta(meta, 'spec', 'epoch', 'holder', 'incarnation', 'start', 'created', 'state_bytes',
  'journal_bytes')
if not found then
  return other_layout or {'UNKNOWN'}
end
local spec, epoch, holder, incarnation, start, created, state_bytes, journal_bytes = unpack(found)
if holder and redis.call('GET', ARGV[1] .. holder) ~= incarnation then
  holder = false
end
local size = tonumber(state_bytes) + tonumber(journal_bytes)
return {'OK', spec, tonumber(epoch), holder, tonumber(start), redis.call('LLEN', journal), size, created}
