-- Part of every script in this folder: the version of the layout, the check of who may write to a stream, and the count
-- of the bytes of each tenant.
-- A script checks everything before its first write, because Redis does not undo what a script did before it failed.
local SCHEMA = 6

-- Return the given fields of a stream's meta hash; nothing if there is no such stream; nothing and a reply if its layout
-- is another one.
local function read_meta(meta, ...)
  local found = redis.call('HMGET', meta, 'schema', ...)
  local schema = table.remove(found, 1)
  if schema and tonumber(schema) ~= SCHEMA then
    return nil, {'LAYOUT', schema}
  end
  return schema and found
end

-- Return a reply if this fence may not write, else nothing. `found` comes from `read_meta`, with the fields fence and
-- holder first.
local function refusal(fence, found, other_layout)
  if not found then
    return other_layout or {'FENCED', false, false}
  end
  if found[1] ~= fence then
    return {'FENCED', found[1], found[2]}
  end
  return nil
end

-- Add bytes, or remove them if the number is negative, from what a tenant uses. A tenant without streams has no entry.
local function count_for_tenant(usage, tenant, bytes)
  if bytes ~= 0 and redis.call('HINCRBY', usage, tenant, bytes) == 0 then
    redis.call('HDEL', usage, tenant)
  end
end

-- The same for all of a stream but its journal, and for its tenant.
local function count_for_stream(meta, usage, tenant, bytes)
  if bytes ~= 0 then
    redis.call('HINCRBY', meta, 'state_bytes', bytes)
  end
  count_for_tenant(usage, tenant, bytes)
end
