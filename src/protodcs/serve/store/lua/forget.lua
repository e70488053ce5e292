-- Forgets a kept snapshot, if it is there. Answers 0.
-- It must never forget for a fence that is not the newest.
-- KEYS: meta, kept snapshots, their order
-- ARGV: fence, name
local meta, kept, order = unpack(KEYS)

local refused = refusal(ARGV[1], read_meta(meta, 'fence', 'holder'))
if refused then
  return refused
end
redis.call('HDEL', kept, ARGV[2])
redis.call('ZREM', order, ARGV[2])
return 0
