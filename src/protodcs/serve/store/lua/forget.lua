-- Forgets a kept snapshot, if it is there. Answers 0.
-- It must never forget for an epoch that is not the newest.
-- KEYS: meta, kept snapshots, their order
-- ARGV: epoch, name
local meta, kept, order = unpack(KEYS)

local refused = refusal(ARGV[1], read_meta(meta, 'epoch', 'holder'))
if refused then
  return refused
end
redis.call('HDEL', kept, ARGV[2])
redis.call('ZREM', order, ARGV[2])
return 0
