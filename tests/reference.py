"""What is promised of quotas, counted as plainly as can be: what tests/test_models.py holds every store to.

Nothing here comes from the package. Tokens are exact fractions. Where a promise leaves open how
many there are (after damage, say), two counts go on side by side: the ``least`` that must be there, and the ``most``
that can be. Instants are nanoseconds, as the stores' clock reads them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

SECOND = 10**9
BEGINNING = -(1 << 80)
"""Before everything."""
LOST_AFTER = 4
"""Tokens' time, and a second, for which a limit is full before turns that nobody came for are taken to be lost."""


class Numbers(NamedTuple):
    """A capacity, and the whole nanoseconds that a token takes to refill."""

    capacity: Fraction
    interval: int

    @classmethod
    def of(cls, capacity: float | Fraction, rate: float | Fraction) -> Numbers:
        """As they count: no faster than they were written, and the capacity is whole nanoseconds, too."""
        tokens = Fraction(str(capacity))
        parts = tokens.denominator
        return cls(tokens, parts * ceil(SECOND / (Fraction(str(rate)) * parts)))

    @property
    def span(self) -> int:
        return int(self.capacity * self.interval)

    def worth(self, tokens: Fraction) -> int:
        """Nanoseconds of refill, rounded up."""
        return ceil(tokens * self.interval)


def worth_in(numbers: Numbers, declared: Numbers, tokens: Fraction) -> int:
    """Nanoseconds of refill by ``numbers`` that so many tokens of a limit are worth; both times rounded up."""
    return ceil(Fraction(declared.worth(tokens) * numbers.interval, declared.interval))


class Place(NamedTuple):
    """What an asker in line says of itself, in nanoseconds."""

    turn: int | None = None
    soonest: int = 0
    patience: int = 0
    longest: int | None = None


class Answer(NamedTuple):
    """What a store told."""

    allowed: bool
    now: int
    at: int
    booked: bool
    bucket: str


def lacking(before: Numbers, after: Numbers) -> Fraction:
    """Tokens that go with a part of the capacity: a faster and smaller limit may be another one of the bucket."""
    is_faster = after.interval < before.interval
    return max(Fraction(0), before.capacity - after.capacity) if is_faster else Fraction(0)


def carried(level: Fraction, before: Numbers, after: Numbers) -> Fraction:
    """The tokens there are where other numbers take the place of those before."""
    lower = level - lacking(before, after)
    return min(lower if level < 0 else max(lower, Fraction(0)), after.capacity)


class Meter:
    """The tokens of one limit of one key."""

    def __init__(self, numbers: Numbers, now: int, least: Fraction, most: Fraction) -> None:
        self.numbers = numbers
        self.at = now
        self.least = min(least, numbers.capacity)
        self.mosts = {numbers: min(most, numbers.capacity)}
        """By all the numbers in force at some time since the last look: those may have counted at once, or not yet."""
        self.is_sure = True
        """Whether there is a record of it, or it is full."""
        self.tails = {numbers: BEGINNING}
        """By the same numbers."""
        self.full_since = BEGINNING if self.least == numbers.capacity else now
        self.owes = False
        """Whether more was drawn than there was, as of the last look."""
        self.full_from = BEGINNING
        """When it could be full at the earliest, as of the last look."""

    @property
    def most(self) -> Fraction:
        return max(self.mosts.values())

    @most.setter
    def most(self, most: Fraction) -> None:
        self.mosts = dict.fromkeys(self.mosts, most)

    @property
    def tail(self) -> int:
        """The latest turn of those in line: who comes next need not wait for longer than its own tokens take then."""
        return max(self.tails.values())

    @tail.setter
    def tail(self, tail: int) -> None:
        self.tails = dict.fromkeys(self.tails, tail)

    def elapse(self, now: int) -> None:
        passed = now - self.at
        slow, low = max(each.interval for each in self.mosts), min(each.capacity for each in self.mosts)
        if self.least < low:
            self.full_since = self.at + ceil((low - self.least) * slow)
        self.least = min(self.least + Fraction(passed, slow), low)
        self.mosts = {
            each: min(most + Fraction(passed, each.interval), each.capacity) for each, most in self.mosts.items()
        }
        self.at = now

    def set_back(self, now: int) -> None:
        """The clock was."""
        self.least -= Fraction(self.at - now, min(each.interval for each in self.tails))
        self.full_since = max(self.full_since, self.at)
        self.at = now

    def shift(self, by: int) -> None:
        """The same instants, on a clock that reads otherwise."""
        self.at += by
        self.tails = {numbers: tail + by * (tail > BEGINNING) for numbers, tail in self.tails.items()}
        self.full_since += by
        self.full_from += by

    def empty(self) -> None:
        """Its record may be lost."""
        self.least = min(self.least, Fraction(0))
        self.most = max(self.most, Fraction(0))
        self.is_sure = False
        self.full_since = self.at

    def wanted(self, numbers: Numbers) -> None:
        """Other numbers are in force: a store may have them count from now, or from the next decision."""
        self.tails[numbers], self.mosts[numbers] = self._moved(numbers), self._carried(numbers)
        self.least = min(self.least, *(carried(self.least, each, numbers) for each in self.tails))

    def look(self, numbers: Numbers) -> None:
        """A decision is made by ``numbers``: the tokens stay what they are."""
        if not self.owes:
            # A clock that was set back makes it empty at worst, and then the line moves along.
            self.least = max(self.least, Fraction(0))
            ahead = max(0, self.full_from - self.numbers.span - self.at)
            self.tails = {each: tail - ahead for each, tail in self.tails.items()}
            self.full_from -= ahead
        if numbers != self.numbers:
            was_full = any(most >= each.capacity for each, most in self.mosts.items())
            # What is full may be forgotten, and then it is full by other numbers, too.
            most = self._carried(numbers) if self.is_sure else self.most
            self.mosts[numbers] = numbers.capacity if was_full else most
            self.full_since = max(self.full_since, self.at)
        if {numbers} != self.tails.keys():
            least = min(carried(self.least, each, numbers) for each in self.tails)
            self.least = least - Fraction(2, numbers.interval)
            self.tails, self.mosts = {numbers: self._moved(numbers)}, {numbers: self._carried(numbers)}
            self.numbers = numbers
        self.is_sure = True
        self.least = min(self.least, numbers.capacity)
        self.most = min(self.most, numbers.capacity)
        self.note()

    def note(self) -> None:
        """What is known at a look."""
        self.owes = self.least < 0
        if self.most < self.numbers.capacity:  # else since then, or later
            self.full_from = self.at + int((self.numbers.capacity - self.most) * self.numbers.interval)

    def draw(self, worth: int) -> None:
        """So many nanoseconds' worth of tokens, or give them back."""
        tokens = Fraction(worth, self.numbers.interval)
        self.least = min(self.least - tokens, self.numbers.capacity)
        self.most = min(self.most - tokens, self.numbers.capacity)
        self.full_since = self.at
        self.note()

    def ready(self, worth: int) -> tuple[int, int]:
        """When the tokens can be there at the earliest, and when they must be."""
        need = min(Fraction(worth, self.numbers.interval), self.numbers.capacity)
        early, late = (max(0, ceil((need - level) * self.numbers.interval)) for level in (self.most, self.least))
        return self.at + early, self.at + late

    def promised(self, worth: int, at: int) -> None:
        """Somebody was told when the tokens will be there."""
        need = min(Fraction(worth, self.numbers.interval), self.numbers.capacity)
        self.least = max(self.least, min(need - Fraction(at - self.at, self.numbers.interval), self.most))
        self.note()

    def is_idle(self) -> bool:
        """Whether it has been full for so long that nobody is taken to be in line."""
        is_full = self.least == self.numbers.capacity
        return is_full and self.full_since + SECOND + LOST_AFTER * self.numbers.interval <= self.at

    def _carried(self, numbers: Numbers) -> Fraction:
        """The most tokens, where ``numbers`` count from now."""
        return max(carried(most, each, numbers) for each, most in self.mosts.items())

    def _moved(self, numbers: Numbers) -> int:
        """The latest turn, where ``numbers`` count from now: of as many tokens, which take another time."""
        tails = [BEGINNING]
        for before, tail in self.tails.items():
            if tail > BEGINNING and before != numbers:
                ratio, ahead = Fraction(numbers.interval, before.interval), Fraction(tail - self.at)
                # What is over for long is full, and no fuller.
                ahead *= ratio if ahead > 0 or ratio < 1 else Fraction(1)
                tails.append(ceil(self.at + ahead + lacking(before, numbers) * numbers.interval) + 2)
            else:
                tails.append(tail)
        return max(tails)


class Drawn(NamedTuple):
    """What a call takes from one limit."""

    meter: Meter
    bucket: str
    worth: int

    @property
    def beyond(self) -> int:
        """What it owes then, where it costs more than the limit holds."""
        return max(0, self.worth - self.meter.numbers.span)

    @property
    def need(self) -> int:
        return self.worth - self.beyond


Quota = tuple[str, str | None]


@dataclass
class Reference:
    """Buckets, their keys, and who stands in line.

    Args:
        declared: the limits of each bucket, from the fastest.
        now: what the clock reads.
    """

    declared: dict[str, list[Numbers]]
    now: int
    elapsed: int = 0
    """Nanoseconds that have passed, also while the clock was set back or began anew."""
    meters: dict[Quota, list[Meter]] = field(default_factory=dict)
    grants: dict[Quota, list[list[tuple[int, Fraction]]]] = field(default_factory=dict)
    """When, by ``elapsed``, and how many tokens were taken and not given back; a new list when it was made full."""
    pauses: dict[Quota, int] = field(default_factory=dict)
    """When each ends."""
    resumed: dict[Quota, int] = field(default_factory=dict)
    """When each that is over ended: where the clock is set back, it may stand until then again."""
    changes: dict[tuple[str, int], tuple[Numbers, int]] = field(default_factory=dict)
    """The numbers that were ordered for a limit, and until when."""
    emptied: tuple[int, int] | None = None
    """When state was lost, at the earliest and at the latest: what has no record was empty then ..."""
    is_surely_lost: bool = True
    """... or may have been."""

    # -- time

    def elapse(self, now: int) -> None:
        """The clock reads ``now``, and goes on from there."""
        if now < self.now:
            for meter in self._all():
                meter.set_back(now)
            for quota in [quota for quota, until in self.pauses.items() if until <= self.now]:
                self.resumed[quota] = max(self.pauses.pop(quota), self.resumed.get(quota, now))
            if self.emptied:
                self.emptied = min(self.emptied[0], now), self.emptied[1]
            self.now = now
            self._note_numbers()
        else:
            self.elapsed += now - self.now
            for instant in sorted({now, *(end for _, end in self.changes.values() if self.now < end < now)}):
                for meter in self._all():
                    meter.elapse(instant)
                self.now = instant
                self._note_numbers()

    def reboot(self, now: int, down: int, error: int) -> None:
        """The clock begins anew after some time, by the wall clock, which was stepped meanwhile."""
        self.elapse(self.now + down)
        self.elapse(self.now + error)
        by = now - self.now
        for meter in self._all():
            meter.shift(by)
        self.pauses = {quota: until + by for quota, until in self.pauses.items()}
        self.resumed = {quota: until + by for quota, until in self.resumed.items()}
        self.changes = {which: (numbers, until + by) for which, (numbers, until) in self.changes.items()}
        if self.emptied:
            self.emptied = self.emptied[0] + by, self.emptied[1] + by
        self.now = now

    def numbers_stand(self, buckets: Iterable[str], until: int) -> bool:
        """Whether no other numbers come into force between now and then."""
        between = range(min(self.now, until) + 1, max(self.now, until) + 1)
        return not any(bucket in buckets and end in between for (bucket, _), (_, end) in self.changes.items())

    def instants(self) -> list[int]:
        """Those at which something is different from before."""
        found = [*self.pauses.values()]
        found += [until for _, until in self.changes.values()]
        for meter in self._all():
            one, full = (meter.ready(worth)[1] for worth in (meter.numbers.interval, meter.numbers.span))
            found += [one, full, full + SECOND, full + SECOND + LOST_AFTER * meter.numbers.interval, meter.tail]
        return sorted({instant for instant in found if instant >= self.now})

    def quiet_from(self, bucket: str, key: str | None) -> int:
        """When it is not paused any more, and so long full that nobody is in line."""
        _, paused = self.paused([bucket], key)
        ends = [paused]
        for meter in self._meters(bucket, key):
            slowest = max(each.interval for each in (*meter.tails, *self.in_force(bucket)))
            largest = max(each.capacity for each in (*meter.tails, *self.in_force(bucket)))
            full = self.now + ceil((largest - meter.least) * slowest)
            ends.append(max(full, meter.full_since, paused) + SECOND + LOST_AFTER * slowest + 2)
        return max(ends)

    def drained_by(self, line: list[tuple[dict[str, Fraction], str | None, int, int]]) -> int:
        """By when, as ``elapsed`` counts, a line is served at the latest, if nobody else comes.

        Args:
            line: what each asks for, with which key, when it comes back, and how soon it can after that.
        """
        looked = copy.deepcopy(self)
        end, work = looked.elapsed, 0
        for costs, key, due, soonest in line:
            call = looked.drawn_by(costs, key)
            ready = [looked.paused(costs, key)[1], *(drawn.meter.ready(drawn.worth)[1] for drawn in call)]
            end = max(end, due, *(looked.elapsed + at - self.now for at in ready))
            end = max(end, *(looked.elapsed + drawn.meter.tail - self.now for drawn in call))
            # By the slower of the numbers in force and those declared, as the former may end meanwhile.
            slowest = [
                drawn.worth
                * max(each.interval for each in [*self.declared[drawn.bucket], drawn.meter.numbers])
                // drawn.meter.numbers.interval
                for drawn in call
            ]
            work += max(slowest) + soonest
        # Twice: those for whom it was not enough, as others had been there before, come once more.
        return end + 2 * work + SECOND

    # -- orders

    def pause(self, bucket: str, key: str | None, span: int) -> None:
        self.pauses[bucket, key] = max(self.pauses.get((bucket, key), 0), self.now + span)

    def resume(self, bucket: str, key: str | None) -> None:
        self.pauses.pop((bucket, key), None)

    def change(self, bucket: str, place: int, numbers: Numbers, span: int) -> None:
        self.changes[bucket, place] = numbers, self.now + span
        self._note_numbers()

    def unchange(self, bucket: str, place: int) -> None:
        self.changes.pop((bucket, place), None)
        self._note_numbers()

    def redeclare(self, bucket: str, declared: list[Numbers]) -> None:
        """Everybody declares other numbers from now on."""
        self.declared[bucket] = declared
        self._note_numbers()

    def paused(self, buckets: Iterable[str], key: str | None) -> tuple[int, int]:
        """When the pauses of a call have ended, at the earliest and at the latest."""
        quotas = [(bucket, each) for bucket in buckets for each in {None, key}]
        early = max(self.now, *(self.pauses.get(quota, self.now) for quota in quotas))
        return early, max(early, *(self.resumed.get(quota, early) for quota in quotas))

    def in_force(self, bucket: str) -> list[Numbers]:
        return [
            changed[0] if (changed := self.changes.get((bucket, place))) and changed[1] > self.now else numbers
            for place, numbers in enumerate(self.declared[bucket])
        ]

    # -- what is lost

    def lose_records(self) -> None:
        """Any record may be lost, and none is found."""
        self.emptied = self.now, self.now
        self.is_surely_lost = False
        for meter in self._all():
            meter.empty()

    def keep_orders(self, paused: set[Quota], changed: set[tuple[str, int]]) -> None:
        """Those that stand yet; the others are lost."""
        self.pauses = {quota: until for quota, until in self.pauses.items() if until <= self.now or quota in paused}
        self.changes = {
            which: order for which, order in self.changes.items() if order[1] <= self.now or which in changed
        }
        self._note_numbers()

    def lose_everything(self) -> None:
        """Every record is lost, and every order."""
        self.emptied = self.now, self.now
        self.is_surely_lost = True
        self.meters.clear()
        self.pauses.clear()
        self.resumed.clear()
        self.changes.clear()

    def reset(self, bucket: str, key: str | None) -> None:
        """Full again, and nobody in line."""
        for quota in [quota for quota in self.meters if quota[0] == bucket and key in {None, quota[1]}]:
            del self.meters[quota]
        self.meters[bucket, key] = [
            Meter(each, self.now, each.capacity, each.capacity) for each in self.in_force(bucket)
        ]
        for quota, grants in self.grants.items():
            if quota[0] == bucket and key in {None, quota[1]}:
                grants.append([])

    # -- asks

    def settle(self, bucket: str, key: str | None, tokens: Fraction) -> None:
        """A call cost so many tokens more than were taken, or less."""
        for drawn in self.drawn_by({bucket: tokens}, key):
            meter = drawn.meter
            if meter.tail + meter.numbers.span > self.now:
                meter.tail += max(0, drawn.worth) + 1
            meter.draw(drawn.worth)
        grants = self.grants.setdefault((bucket, key), [[]])[-1]
        while tokens < 0 and grants:
            at, taken = grants.pop()
            if taken + tokens > 0:
                grants.append((at, taken + tokens))
            tokens += taken

    def lost_answer(self, costs: dict[str, Fraction], key: str | None) -> None:
        """Somebody has asked and did not live to hear the answer: the tokens may be taken, a turn may be booked."""
        turns = [*self.paused(costs, key)]
        drawn = []
        for bucket, tokens in costs.items():
            in_force = zip(self._meters(bucket, key), self.in_force(bucket), self.declared[bucket], strict=True)
            for meter, numbers, declared in in_force:
                worth = worth_in(numbers, declared, tokens)
                drawn.append((meter, worth))
                meter.least -= Fraction(worth, numbers.interval)
                meter.owes = meter.owes or meter.least < 0
                meter.is_sure = False
                meter.full_since = max(meter.full_since, self.now)
                slowest = max(each.interval for each in meter.tails)
                turns += [meter.tail + worth, self.now + ceil(max(Fraction(0), -meter.least) * slowest)]
        for meter, worth in drawn:
            meter.tail = max(turns) + worth + 1

    def asked(self, costs: dict[str, Fraction], key: str | None, place: Place | None, told: Answer) -> None:
        """Hold an answer against what is promised, and count what follows from it."""
        assert told.now == self.now
        call = self.drawn_by(costs, key)
        instants = [self.paused(costs, key), *(drawn.meter.ready(drawn.worth) for drawn in call)]
        early, late = map(max, zip(*instants, strict=True))
        if place is None or (place.turn is not None and place.turn <= self.now):
            self._asked_now(call, place, told, early, late)
        else:
            self._asked_in_line(call, place, told, early, late)
        if told.allowed:
            assert early <= self.now, "granted what is not there, or in a pause"
            for drawn in call:
                drawn.meter.draw(drawn.worth)
            for bucket, tokens in costs.items():
                self.grants.setdefault((bucket, key), [[]])[-1].append((self.elapsed, tokens))

    def _asked_now(self, call: list[Drawn], place: Place | None, told: Answer, early: int, late: int) -> None:
        """By a plain caller, or by one whose turn has come."""
        if told.allowed:
            return
        assert late > self.now, "refused what is there"
        if told.booked:
            assert place is not None, "a plain caller got a turn"
            assert late - self.now > place.patience, "a patient caller lost its turn"
            self._booked(call, place, told, early, late)
        elif place is None or (early - self.now <= place.patience and told.at <= late):
            assert early <= told.at <= late, "told another instant than that at which the tokens are there"
            for drawn in call:
                drawn.meter.promised(drawn.worth, told.at)
        else:
            self._turned_away(call, place, told, late)

    def _asked_in_line(self, call: list[Drawn], place: Place, told: Answer, early: int, late: int) -> None:
        """By one who comes for the first time, or before its turn."""
        if told.allowed:
            for drawn in call:
                self._forget_line(drawn.meter, late)
                if drawn.meter.tail + drawn.meter.numbers.span > self.now:
                    drawn.meter.tail = max(drawn.meter.tail, self.now + drawn.beyond)
            return
        if place.turn is not None and place.turn > self.now:
            assert told.booked
            assert told.at <= place.turn, "a turn was put off"
            assert self.now < told.at
            assert self._end_of_line(call, late) > self.now, "refused what is there, and nobody waits"
        elif told.booked:
            self._booked(call, place, told, early, late)
        else:
            self._turned_away(call, place, told, late)

    def _end_of_line(self, call: list[Drawn], late: int) -> int:
        """The latest turn that somebody who joins may be given."""
        turns = [late]
        for drawn in call:
            self._forget_line(drawn.meter, late)
            if drawn.meter.tail > BEGINNING:
                turns.append(drawn.meter.tail + drawn.need)
        return max(turns)

    def _forget_line(self, meter: Meter, late: int) -> None:
        if meter.is_idle() and late == self.now:
            meter.tail = BEGINNING

    def _turned_away(self, call: list[Drawn], place: Place, told: Answer, late: int) -> None:
        """By one who does not want to wait for so long."""
        assert place.longest is not None, "refused without a turn"
        assert told.at - self.now > place.longest
        end = self._end_of_line(call, late)
        assert end > self.now, "refused what is there, and nobody waits"
        assert told.at <= max(end + 2, self.now + place.soonest)

    def _booked(self, call: list[Drawn], place: Place, told: Answer, early: int, late: int) -> None:
        end = self._end_of_line(call, late)
        assert end > self.now, "refused what is there, and nobody waits"
        assert told.at <= max(end + 2, self.now + place.soonest), "a turn later than the line is long"
        assert told.at >= early, "a turn before the tokens can be there"
        assert told.at - self.now <= place.patience or told.at >= self.now + place.soonest
        assert place.longest is None or told.at - self.now <= place.longest
        for drawn in call:
            meter = drawn.meter
            full = meter.ready(meter.numbers.span)[1]
            if drawn.bucket == told.bucket or max(full, meter.tail + meter.numbers.span) >= told.at:
                meter.full_since = max(meter.full_since, self.now)
                meter.tail = max(meter.tail, told.at + drawn.beyond) + 1

    def drawn_by(self, costs: dict[str, Fraction], key: str | None) -> list[Drawn]:
        """What a call draws by the numbers in force, which count from now."""
        call: list[Drawn] = []
        for bucket, tokens in costs.items():
            in_force = self.in_force(bucket)
            meters = self._meters(bucket, key)
            written = [(meter.tails, meter.least) for meter in meters]
            for meter, numbers in zip(meters, in_force, strict=True):
                is_changed = meter.numbers != numbers
                if self.emptied and meter.most >= meter.numbers.capacity:
                    # What is full may be forgotten, and is without a record then.
                    meter.least = min(meter.least, self._unseen(meter.numbers).least)
                meter.look(numbers)
                if self.emptied and is_changed:
                    # Without a record it was empty when state was lost, and fills by the numbers of whoever looks.
                    unseen = self._unseen(numbers)
                    meter.least, meter.most = min(meter.least, unseen.least), max(meter.most, unseen.most)
                    meter.note()
            if [[*tails] for tails, _ in written] != [[numbers] for numbers in in_force]:
                # What is known of one limit may be taken to be known of another with the same numbers, if stricter.
                for meter, (tails, least) in product(meters, written):
                    if meter.numbers in tails:
                        meter.least, meter.tail = min(meter.least, least), max(meter.tail, tails[meter.numbers])
                        meter.note()
            for meter, declared in zip(meters, self.declared[bucket], strict=True):
                call.append(Drawn(meter, bucket, worth_in(meter.numbers, declared, tokens)))
        return call

    def _meters(self, bucket: str, key: str | None) -> list[Meter]:
        if (bucket, key) not in self.meters:
            self.meters[bucket, key] = [self._unseen(numbers) for numbers in self.in_force(bucket)]
        return self.meters[bucket, key]

    def _unseen(self, numbers: Numbers) -> Meter:
        """Full, unless state was lost: then it was empty, as far as anybody knows."""
        least = most = numbers.capacity
        if self.emptied:
            early, late = self.emptied
            least = Fraction(max(0, self.now - late), numbers.interval)
            most = Fraction(self.now - early, numbers.interval) if self.is_surely_lost else most
        return Meter(numbers, self.now, least, most)

    def _note_numbers(self) -> None:
        for (bucket, _), meters in self.meters.items():
            for meter, numbers in zip(meters, self.in_force(bucket), strict=True):
                if numbers not in meter.tails:
                    meter.wanted(numbers)

    def _all(self) -> list[Meter]:
        return [meter for meters in self.meters.values() for meter in meters]
