-- Puts a shared blob, if it is not there. Answers 0.
-- It must never change a blob, nor let one expire that a stream uses. One that no stream came to use goes by itself,
-- else a creation that failed half-way would leave it behind for ever.
-- KEYS: shared blob, users of the blob
-- ARGV: data, milliseconds until it goes
redis.call('SET', KEYS[1], ARGV[1], 'NX')
if redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
