-- Adds notices of records that are in the journal. Answers 0. If the records were refused, so are the notices; those that
-- are there already are not added again.
-- KEYS: meta, journal, notices of the stream, notices of the tenant
-- ARGV: fence, maximum number of notices of a stream, of a tenant, milliseconds that those of a tenant are stored without
-- a new one, stream, for each notice its id (position plus one, number) and its data
local meta, journal, notices, of_tenant = unpack(KEYS)

local found, other_layout = read_meta(meta, 'fence', 'holder', 'start')
if refusal(ARGV[1], found, other_layout) then
  return 0
end
local finish = tonumber(found[3]) + redis.call('LLEN', journal)
for i = 6, #ARGV, 2 do
  if tonumber(string.match(ARGV[i], '^%d+')) <= finish then
    -- An id that is not above the newest one is an error: this is a repetition.
    local added = redis.pcall('XADD', notices, 'MAXLEN', ARGV[2], ARGV[i], 'd', ARGV[i + 1])
    if type(added) == 'string' then
      redis.call('XADD', of_tenant, 'MAXLEN', '~', ARGV[3], '*', 's', ARGV[5], 'i', ARGV[i], 'd', ARGV[i + 1])
      redis.call('PEXPIRE', of_tenant, ARGV[4])
    end
  end
end
return 0
