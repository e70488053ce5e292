-- Give a worker the right to write to a stream. Returns its epoch, what the stream was created with, its incarnation and when
-- it was created.
-- It must never take a stream from another worker whose lease lives, unless the caller names that holder and the last such
-- takeover of the stream is long enough ago. Redis' own expiry decides whether a lease lives: no clock of a worker is
-- involved. If Redis lost writes, an epoch may be given out twice: the token tells the two apart.
-- It reads neither snapshot nor records: megabytes that pass through a script delay every other client of Redis.
-- KEYS: meta, journal, a mark that exists for a while after a takeover
-- ARGV: worker, incarnation of the worker, prefix of the lease keys, token; for a takeover also: the holder, how long the
-- mark exists in milliseconds, prefix of the hashes of taken streams, stream
local meta, journal, mark = unpack(KEYS)
local worker, incarnation, leases, token, take_from, pause, taken, stream = unpack(ARGV)

local found, other_layout = read_meta(meta, 'holder', 'incarnation', 'start', 'spec', 'created', 'time')
if not found then
  return other_layout or {'UNKNOWN'}
end
local holder = found[1]
-- A lease names the incarnation that renewed it: what a dead one held is free though its successor lives.
local lives = holder and holder ~= worker and redis.call('GET', leases .. holder) == found[2]
if lives and (holder ~= take_from or redis.call('EXISTS', mark) == 1) then
  return {'HELD', holder}
end
local finish = tonumber(found[3]) + redis.call('LLEN', journal)
-- If its memory is full, Redis refuses a script whose first write adds data, but not one whose first write removes some:
-- so a stream can still be acquired then, and deleted.
redis.call('HDEL', meta, 'holder', 'incarnation')
local epoch = redis.call('HINCRBY', meta, 'epoch', 1)
-- base: the position where this epoch begins. Only records behind it can be a repetition by this epoch.
redis.call('HSET', meta, 'fence', epoch .. ':' .. token, 'holder', worker, 'incarnation', incarnation, 'base', finish)
if lives then
  redis.call('SET', mark, worker, 'PX', pause)
  -- The holder's next renewal returns this hash, so that it stops answering from memory. It exists for longer than a
  -- lease: a holder that does not renew before it expires discards all that it has in memory.
  redis.call('HSET', taken .. holder, stream, epoch)
  redis.call('PEXPIRE', taken .. holder, pause)
end
return {'OK', epoch, found[4], found[5], found[6]}
