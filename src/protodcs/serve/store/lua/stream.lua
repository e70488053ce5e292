-- Stands at the top of every script of this folder: the layout's version, and who may write to a stream.
-- It must never write. A script checks everything before its first write to a stream, because Redis does not undo what
-- a script did before it failed.
local SCHEMA = 1

-- What a meta hash says in these fields. Nothing if there is no such stream; nothing, and an answer that says so, if its
-- layout is newer than this script.
local function read_meta(meta, ...)
  local found = redis.call('HMGET', meta, 'schema', ...)
  local schema = table.remove(found, 1)
  if schema and tonumber(schema) > SCHEMA then
    return nil, {'NEWER', schema}
  end
  return schema and found
end

-- Why an epoch may not write, given what `read_meta` found when it was asked for the epoch and the holder first; nothing
-- if it may. Epochs are compared as they are spelled: both sides write plain decimals.
local function refusal(epoch, found, newer)
  if not found then
    return newer or {'FENCED', false, false}
  end
  if found[1] ~= epoch then
    return {'FENCED', found[1], found[2]}
  end
  return nil
end
