-- Has an order stand for a while from now, and everybody look what stands.
--
-- KEYS  the store's marker, and the order's record
-- ARGV  the salt that the caller knows the store by; the order, packed; for how long it stands, in seconds and
--       nanoseconds, both 0 to end it; 'pause' where one that ends later is left as it is, and one that is ended would stand
--       again if the clock were set back

local time = redis.call('TIME')
local marker, record = redis.call('GET', KEYS[1]) or '', redis.call('GET', KEYS[2])
if string.sub(marker, 1, 16) ~= ARGV[1] then
  return 0
end
local order, s, ns = ARGV[2], time[1] + ARGV[3], time[2] * 1000 + ARGV[4]
if ns >= 1e9 then
  s, ns = s + 1, ns - 1e9
end
if ARGV[5] == 'pause' and record and #record == #order then
  local known, known_ns = struct.unpack('>i8i8', record, 17)
  if known > s or (known == s and known_ns > ns) then
    s, ns = known, known_ns
  end
end
local ends = struct.pack('>i8i8', s, ns)
if ARGV[5] == 'pause' and ARGV[3] + ARGV[4] == 0 then
  redis.call('UNLINK', KEYS[2])
else
  -- Other numbers that have ended are still known for a day.
  redis.call('SET', KEYS[2], string.sub(order, 1, 16) .. ends .. ends .. string.sub(order, 49), 'EXAT', s + 86400)
end
local orders = (struct.unpack('>I4', marker, 17) + 1) % 4294967296
redis.call('SET', KEYS[1], string.sub(marker, 1, 16) .. struct.pack('>I4', orders) .. string.sub(marker, 21))
return 1
