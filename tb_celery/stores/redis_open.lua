-- Makes the store's marker, and notes in it that there was another before, where the caller knows of one. Where nobody
-- does, there may have been one until the server was started.
--
-- KEYS  the marker
-- ARGV  the salt that the caller knew the store by, or ''; a new one

local time = redis.call('TIME')
local marker, known = redis.call('GET', KEYS[1]), ARGV[1]
if not marker then
  -- Orders are lost as well: whoever heeded some has to notice, however many are given from now on.
  local salt, orders, made, lost = known, struct.unpack('>I4', ARGV[2]), time[1], 1
  if known == '' then
    local info = redis.pcall('INFO', 'server')
    local uptime = type(info) == 'string' and string.match(info, 'uptime_in_seconds:(%d+)') or 0
    salt, orders, made, lost = ARGV[2], 0, time[1] - uptime, 2
  end
  marker = salt .. struct.pack('>I4i8i8B', orders, made, time[2] * 1000, lost)
  redis.call('SET', KEYS[1], marker)
elseif known ~= '' and #marker == 37 and string.sub(marker, 1, 16) ~= known and string.byte(marker, 37) ~= 1 then
  -- Lost at some time until now: who made it did not know of any loss.
  marker = string.sub(marker, 1, 20) .. struct.pack('>i8i8B', time[1], time[2] * 1000, 1)
  redis.call('SET', KEYS[1], marker)
end
return marker
