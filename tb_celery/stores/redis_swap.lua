-- Puts records in the place of those that were seen, where these still stand.
--
-- KEYS  the records
-- ARGV  for each: what was seen, what is to take its place, and until which millisecond that is kept
--
-- Returns the places in KEYS of those that are others by now.

local missed = {}
for i, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[3 * i - 2] then
    redis.call('SET', key, ARGV[3 * i - 1], 'PXAT', ARGV[3 * i])
  else
    missed[#missed + 1] = i
  end
end
return missed
