-- Ends the lease of a worker. Answers 0.
-- It must never end the lease of another incarnation of the same name.
-- KEYS: lease
-- ARGV: incarnation
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return 0
