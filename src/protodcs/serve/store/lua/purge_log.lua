-- Delete entries of a stream's decision log. Returns how many there were.
-- KEYS: meta, decision log
-- ARGV: ids of the entries
local meta, log = unpack(KEYS)

if not read_meta(meta) then
  return 0
end
local deleted, bytes = 0, 0
for _, id in ipairs(ARGV) do
  local found = redis.call('XRANGE', log, id, id)
  if #found == 1 then
    bytes = bytes + #found[1][2][2]
    deleted = deleted + redis.call('XDEL', log, id)
  end
end
if deleted > 0 then
  redis.call('HINCRBY', meta, 'log_bytes', -bytes)
end
return deleted
