-- Part of every script in this folder: the version of the layout, and the check of who may write to a stream.
-- It must never write. A script checks everything before its first write, because Redis does not undo what a script did
-- before it failed.
local SCHEMA = 2

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
