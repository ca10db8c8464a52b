-- One decision over any number of limits, all or nothing: what `acquire` in tb_celery/arithmetic.py says, to the nanosecond.
--
-- KEYS  the store's marker, then the record of each limit asked
-- ARGV  what the caller knows the store by: its salt, and how often something was ordered;
--       what it asks: '' as a plain caller, 'look' to see the states alone, 'settle' to draw or give back (a cost below
--       0) what a call cost more or less than was taken, else its place in line, packed;
--       each limit's charge, packed;
--       and from a caller that was shown states which it had to settle, for each limit two strings: the record that it
--       was shown, and the one to put in its place ('' for none).
--
-- Returns the decision, packed; or the states, to be settled by the caller (other numbers than the record was written
-- with, a clock that was set back, a store that lost its state, no record of ours); or 0 where the store is another one
-- than the caller knows, or something was ordered since.
--
-- A Lua number is a double, and nanoseconds since 1970 do not fit into one. So each instant and each span of time is
-- two numbers, of which the second is named `_ns`: whole seconds, and nanoseconds from 0 to 999999999.

local call, pack, unpacked = redis.call, struct.pack, struct.unpack

local function plus(s, ns, more, more_ns)
  ns = ns + more_ns
  if ns >= 1e9 then
    return s + more + 1, ns - 1e9
  end
  return s + more, ns
end

local function minus(s, ns, less, less_ns)
  ns = ns - less_ns
  if ns < 0 then
    return s - less - 1, ns + 1e9
  end
  return s - less, ns
end

local function later(s, ns, than, than_ns)
  return s > than or (s == than and ns > than_ns)
end

local function latest(s, ns, other, other_ns)
  if later(other, other_ns, s, ns) then
    return other, other_ns
  end
  return s, ns
end

local time = call('TIME')
local now, now_ns = tonumber(time[1]), time[2] * 1000
local asked, count = ARGV[2], #KEYS - 1
local seen = call('MGET', unpack(KEYS))
local limits, found, marker = {}, {}, seen[1] or ''
local puzzled = asked == 'look'

if string.sub(marker, 1, 20) ~= ARGV[1] then
  return 0
end

for i = 1, count do
  -- Of what is no string, MGET says that it is not there, and GET that it is none.
  local record = seen[i + 1] or call('GET', KEYS[i + 1])
  local numbers, cost, cost_ns, span, span_ns = unpacked('>c16i8i8i8i8', ARGV[i + 2])
  local full, full_ns, booked, booked_ns, keep, debt = now, now_ns, now, now_ns, 0, 0
  local settled = ARGV[count + 2 + 2 * i] or ''
  local changed = settled ~= '' and ARGV[count + 1 + 2 * i] == (record or '')
  found[i] = record
  record = changed and settled or record
  if not record then
    local made, made_ns, lost = unpacked('>i8i8B', marker, 21)
    made, made_ns = plus(made, made_ns, span, span_ns)
    lost = lost == 1 or (lost == 2 and later(span, span_ns, 3600, 0))
    puzzled = puzzled or (lost and later(made, made_ns, now, now_ns))
  elseif #record ~= 57 or string.sub(record, 1, 16) ~= numbers then
    puzzled = true
  else
    full, full_ns, booked, booked_ns, keep, debt = unpacked('>i8i8i8i8i8B', record, 17)
    local most, most_ns = plus(now, now_ns, span, span_ns)
    puzzled = puzzled or (debt == 0 and later(full, full_ns, most, most_ns))
  end
  limits[i] = {
    numbers = numbers, cost = cost, cost_ns = cost_ns, span = span, span_ns = span_ns,
    full = full, full_ns = full_ns, booked = booked, booked_ns = booked_ns, keep = keep,
    changed = changed, pause = string.byte(numbers) >= 0x80,
  }
end

if puzzled then
  return {pack('>i8i8', now, now_ns), marker, unpack(found)}
end

local function save(i)
  local limit = limits[i]
  local most, most_ns = plus(now, now_ns, limit.span, limit.span_ns)
  local debt = later(limit.full, limit.full_ns, most, most_ns) and 1 or 0
  local state = pack('>i8i8i8i8i8B', limit.full, limit.full_ns, limit.booked, limit.booked_ns, limit.keep, debt)
  -- From then on the limit is full and nobody waits, so it may be forgotten.
  local s, ns = latest(limit.full, limit.full_ns, limit.booked, limit.booked_ns)
  s, ns = latest(s, ns, limit.keep, 0)
  call('SET', KEYS[i + 1], limit.numbers .. state, 'PXAT', s * 1000 + math.ceil(ns / 1e6))
end

local function answer(at, at_ns, binding, booked)
  local limit = limits[binding]
  return pack('>i8i8i8i8i8i8I2B', now, now_ns, at, at_ns, limit.full, limit.full_ns, binding - 1, booked)
end

local function grant(binding)
  for i, limit in ipairs(limits) do
    if not limit.pause then
      local full, full_ns = latest(limit.full, limit.full_ns, now, now_ns)
      limit.full, limit.full_ns = plus(full, full_ns, limit.cost, limit.cost_ns)
      limit.booked, limit.booked_ns = latest(limit.booked, limit.booked_ns, limit.full, limit.full_ns)
      save(i)
    end
  end
  return answer(now, now_ns, binding, 0)
end

local function refuse(at, at_ns, binding, booked)
  local written = false
  for i, limit in ipairs(limits) do
    if limit.changed then
      save(i)
      written = true
    end
  end
  if not written then
    -- It is there already, and stays as it is: but on a server that has become a replica, whose states are old, no
    -- command that could write is carried out.
    call('SET', KEYS[1], '', 'NX')
  end
  return answer(at, at_ns, binding, booked)
end

if asked == 'settle' then
  for i, limit in ipairs(limits) do
    local before, before_ns = latest(limit.full, limit.full_ns, now, now_ns)
    local most, most_ns = plus(now, now_ns, 2305843009, 213693952)
    local full, full_ns = plus(before, before_ns, limit.cost, limit.cost_ns)
    full, full_ns = latest(full, full_ns, now, now_ns)
    if later(full, full_ns, most, most_ns) then
      full, full_ns = most, most_ns
    end
    local booked, booked_ns = full, full_ns
    if later(limit.booked, limit.booked_ns, before, before_ns) then
      local ahead, ahead_ns = minus(limit.booked, limit.booked_ns, before, before_ns)
      booked, booked_ns = plus(booked, booked_ns, ahead, ahead_ns)
      -- Its last bit has a meaning of its own.
      if booked_ns % 2 ~= limit.booked_ns % 2 then
        booked, booked_ns = plus(booked, booked_ns, 0, 1)
      end
    end
    limit.full, limit.full_ns, limit.booked, limit.booked_ns = full, full_ns, booked, booked_ns
    save(i)
  end
  return answer(now, now_ns, 1, 0)
end

local ready, ready_ns, binding
for i, limit in ipairs(limits) do
  local at, at_ns = latest(limit.full, limit.full_ns, now, now_ns)
  if not later(limit.cost, limit.cost_ns, limit.span, limit.span_ns) then
    -- Who costs more needs a full one, and then owes the rest.
    at, at_ns = plus(at, at_ns, limit.cost, limit.cost_ns)
    at, at_ns = minus(at, at_ns, limit.span, limit.span_ns)
  end
  if i == 1 or later(at, at_ns, ready, ready_ns) then
    ready, ready_ns, binding = at, at_ns, i
  end
end
local there = not later(ready, ready_ns, now, now_ns)

if asked == '' then
  if there then
    return grant(binding)
  end
  return refuse(ready, ready_ns, binding, 0)
end

local kind, own, own_ns, soonest, soonest_ns, patience, patience_ns, longest, longest_ns, unclaimed, unclaimed_ns, far, far_ns, resumed, resumed_ns =
  unpacked('>Bi8i8i8i8i8i8i8i8i8i8i8i8i8i8', asked)
local has_turn, has_end, ahead = kind % 2 == 1, kind % 4 >= 2, kind >= 4
local on_turn = has_turn and not later(own, own_ns, now, now_ns)
if on_turn then
  if there then
    return grant(binding)
  end
  local wait, wait_ns = minus(ready, ready_ns, now, now_ns)
  if not later(wait, wait_ns, patience, patience_ns) then
    return refuse(ready, ready_ns, binding, 0)
  end
end

-- Where the line ends for each limit, and the turn that is next there.
local turn, turn_ns, slowest
local free = true
for i, limit in ipairs(limits) do
  local late, late_ns, idle, idle_ns, spare, spare_ns, large, quota = unpacked('>i8i8i8i8i8i8Bc8', ARGV[i + 2], 49)
  local line, line_ns = now, now_ns
  local since, since_ns = minus(now, now_ns, limit.full, limit.full_ns)
  -- Until a pause ends nobody can claim a turn, so none is lost.
  local rested, rested_ns = latest(limit.full, limit.full_ns, resumed, resumed_ns)
  rested, rested_ns = minus(now, now_ns, rested, rested_ns)
  local lost = not later(unclaimed, unclaimed_ns, rested, rested_ns)
  if lost and later(idle, idle_ns, rested, rested_ns) then
    local next_turn, next_turn_ns = minus(limit.booked, limit.booked_ns, limit.span, limit.span_ns)
    lost = not later(next_turn, next_turn_ns, now, now_ns)
  end
  if not lost then
    line, line_ns = latest(limit.booked, limit.booked_ns, limit.full, limit.full_ns)
    line, line_ns = latest(line, line_ns, now, now_ns)
  end
  limit.line, limit.line_ns = line, line_ns
  -- Whether anybody is in it: where nobody is, the bit that marks it says nothing.
  limit.awaited = not lost and later(limit.booked, limit.booked_ns, latest(limit.full, limit.full_ns, now, now_ns))
  limit.filled, limit.filled_ns = plus(line, line_ns, limit.cost, limit.cost_ns)
  local at, at_ns = line, line_ns
  if ahead or not later(limit.cost, limit.cost_ns, limit.span, limit.span_ns) then
    at, at_ns = minus(limit.filled, limit.filled_ns, limit.span, limit.span_ns)
  end
  limit.open = not later(at, at_ns, now, now_ns)
  limit.large, limit.quota = large == 1, quota
  if not limit.open then
    -- Whether there are tokens that no turn needs now.
    if limit.booked_ns % 2 == 1 or spare < 0 then
      free = free and not later(late, late_ns, since, since_ns)
    else
      local enough, enough_ns = plus(now, now_ns, spare, spare_ns)
      free = free and not later(limit.full, limit.full_ns, enough, enough_ns)
    end
  end
  if i == 1 or later(at, at_ns, turn, turn_ns) then
    turn, turn_ns, slowest = at, at_ns, i
  end
end

-- Until s, ns; its last bit tells whether there is anybody in line who wants more than one token.
local function book(limit, s, ns)
  if limit.pause then
    return
  end
  local most, most_ns = plus(now, now_ns, far, far_ns)
  if later(s, ns, most, most_ns) then
    s, ns = most, most_ns
  end
  local large = limit.large or (limit.booked_ns % 2 == 1 and limit.awaited)
  if (ns % 2 == 1) ~= large then
    s, ns = plus(s, ns, 0, 1)
  end
  limit.booked, limit.booked_ns, limit.changed = s, ns, true
end

if ahead then
  for _, limit in ipairs(limits) do
    -- Full from now on, or turns in a bucket that has been full for a while would count as lost.
    if not limit.pause then
      limit.full, limit.full_ns = latest(limit.full, limit.full_ns, now, now_ns)
    end
    book(limit, limit.filled, limit.filled_ns)
  end
  local soon, soon_ns = plus(now, now_ns, 0, 1)
  turn, turn_ns = latest(turn, turn_ns, soon, soon_ns)
  return refuse(turn, turn_ns, slowest, 1)
end
if free then
  for _, limit in ipairs(limits) do
    local mark = limit.booked_ns % 2
    limit.booked, limit.booked_ns = limit.line, limit.line_ns
    if limit.open then
      limit.booked, limit.booked_ns = limit.filled, limit.filled_ns
      if limit.awaited and limit.booked_ns % 2 ~= mark then
        limit.booked, limit.booked_ns = plus(limit.booked, limit.booked_ns, 0, 1)
      end
    end
  end
  return grant(binding)
end
if has_turn and not on_turn then
  if later(own, own_ns, turn, turn_ns) then
    own, own_ns = turn, turn_ns
  end
  return refuse(own, own_ns, binding, 1)
end

local wait, wait_ns = minus(turn, turn_ns, now, now_ns)
if later(wait, wait_ns, patience, patience_ns) then
  local back, back_ns = plus(now, now_ns, soonest, soonest_ns)
  turn, turn_ns = latest(turn, turn_ns, back, back_ns)
end
wait, wait_ns = minus(turn, turn_ns, now, now_ns)
if has_end and later(wait, wait_ns, longest, longest_ns) then
  return refuse(turn, turn_ns, slowest, 0)
end
-- The bucket and key that binds; a pause, which may be of all keys, binds all of its bucket.
local digits = limits[slowest].pause and 4 or 8
local binds = string.sub(limits[slowest].quota, 1, digits)
for _, limit in ipairs(limits) do
  if not later(turn, turn_ns, limit.line, limit.line_ns) or string.sub(limit.quota, 1, digits) == binds then
    local booked, booked_ns = latest(limit.line, limit.line_ns, turn, turn_ns)
    book(limit, plus(booked, booked_ns, limit.cost, limit.cost_ns))
  end
end
return refuse(turn, turn_ns, slowest, 1)
