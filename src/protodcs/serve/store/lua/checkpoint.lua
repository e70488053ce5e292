-- Replace the snapshot of a stream and cut its journal behind it, in one step. Returns 0 when it is done.
-- It must never write for a fence that is not the newest, cut a record that the snapshot does not cover, or put an
-- older snapshot in the place of a newer one: from the epoch of the newer one it is a repetition after a lost answer,
-- and there is nothing to do.
-- The snapshot lies ready under a key of its own, written in the same transaction, because megabytes that pass through a
-- script hold up everybody else in Redis. It must never be left lying there.
-- KEYS: meta, journal, snapshot, the new snapshot, usage of the tenants
-- ARGV: fence, how many records the new snapshot covers, tenant
local meta, journal, snapshot, ready, usage = unpack(KEYS)

local function checkpoint()
  local found, other_layout = read_meta(meta, 'fence', 'holder', 'start', 'covered_by', 'journal_bytes')
  local refused = refusal(ARGV[1], found, other_layout)
  if refused then
    return refused
  end
  local position = tonumber(ARGV[2])
  local start = tonumber(found[3])
  local finish = start + redis.call('LLEN', journal)

  if position > finish then
    return {'WRONG', 'the journal ends at ' .. finish .. ': a snapshot cannot cover more'}
  end
  if position < start then
    if found[4] ~= ARGV[1] then
      return {'WRONG', 'a snapshot that covers ' .. start .. ' records is there already'}
    end
    return 0
  end
  -- Records that overtook the snapshot stay. They are few, so they may pass through the script.
  local left = 0
  for _, record in ipairs(redis.call('LRANGE', journal, position - start, -1)) do
    left = left + #record
  end
  local bytes = redis.call('STRLEN', ready) - redis.call('STRLEN', snapshot)
  redis.call('RENAME', ready, snapshot)
  redis.call('LTRIM', journal, position - start, -1)
  redis.call('HSET', meta, 'start', position, 'covered_by', ARGV[1], 'journal_bytes', left)
  count_for_stream(meta, usage, ARGV[3], bytes)
  count_for_tenant(usage, ARGV[3], left - tonumber(found[5]))
  return 0
end

-- A key of another type, which is no key of this service, raises an error.
local done, reply = pcall(checkpoint)
redis.call('DEL', ready)
return done and reply or redis.error_reply(reply.err)
