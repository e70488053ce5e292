-- Makes an owner the one that may write to a stream. Answers its epoch, and what the stream was created with.
-- It must never take a stream from another owner whose lease lives, nor hand out an epoch twice. Whether a lease lives
-- is what Redis' own expiry says: no clock of an owner is asked.
-- It carries neither snapshot nor records: megabytes that pass through a script hold up everybody else in Redis.
-- KEYS: meta, journal
-- ARGV: owner, incarnation, what the keys of leases begin with
local meta, journal = unpack(KEYS)
local owner, incarnation, leases = unpack(ARGV)

local found, newer = read_meta(meta, 'holder', 'incarnation', 'start', 'birth')
if not found then
  return newer or {'UNKNOWN'}
end
local holder = found[1]
-- A lease names the incarnation that renewed it: what a dead one held is free though its successor lives.
if holder and holder ~= owner and redis.call('GET', leases .. holder) == found[2] then
  return {'HELD', holder}
end
local finish = tonumber(found[3]) + redis.call('LLEN', journal)
-- A Redis whose memory is full refuses a script that begins by adding to it, but not one that begins by taking away:
-- so a stream can still be acquired then, and deleted.
redis.call('HDEL', meta, 'holder', 'incarnation')
local epoch = redis.call('HINCRBY', meta, 'epoch', 1)
-- Where this epoch begins: only what stands behind it can be a repetition by this epoch.
redis.call('HSET', meta, 'holder', owner, 'incarnation', incarnation, 'base', finish)
return {'OK', epoch, found[4]}
