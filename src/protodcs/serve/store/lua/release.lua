-- Gives a stream up, so that anyone can acquire it. Answers 0.
-- It must never change a stream that has another worker by now.
-- KEYS: meta
-- ARGV: fence
if not refusal(ARGV[1], read_meta(KEYS[1], 'fence', 'holder')) then
  redis.call('HDEL', KEYS[1], 'holder', 'incarnation')
end
return 0
