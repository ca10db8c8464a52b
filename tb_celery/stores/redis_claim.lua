-- Has a claim take the place of what was seen under its name, where that still stands.
--
-- KEYS  the store's marker, and the claim's record
-- ARGV  the salt that the caller knows the store by; what was seen, or ''; what is to take its place, and until which
--       millisecond that is kept; 'news' where everybody has to look what stands

local marker = redis.call('GET', KEYS[1]) or ''
if string.sub(marker, 1, 16) ~= ARGV[1] or (redis.call('GET', KEYS[2]) or '') ~= ARGV[2] then
  return 0
end
redis.call('SET', KEYS[2], ARGV[3], 'PXAT', ARGV[4])
if ARGV[5] == 'news' then
  local orders = (struct.unpack('>I4', marker, 17) + 1) % 4294967296
  redis.call('SET', KEYS[1], string.sub(marker, 1, 16) .. struct.pack('>I4', orders) .. string.sub(marker, 21))
end
return 1
