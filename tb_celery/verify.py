"""The promise, checked exactly: in every window of ``w`` seconds, granted <= capacity + refill_rate * w.

Where calls turn out to cost more or less than was taken for them, what they were granted counts less what was given
back, and with what was drawn besides, in every window that ends with a grant.
"""

from __future__ import annotations

from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from tb_celery.bucket import SECOND
from tb_celery.errors import ConfigurationError
from tb_celery.periods import END, START, Period, exact, periods

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tb_celery.bucket import Bucket, Limit
    from tb_celery.grantlog import Entry


_GIVEN, _BACK, _GRANTED, _DRAWN = range(4)
"""What happened to a limit, in the order in which it counts at one instant."""


class Violation(NamedTuple):
    """A window, both ends included, in which more was granted than was allowed.

    Attributes:
        begin: the instant of its first grant, in nanoseconds.
        end: the instant of its last grant, in nanoseconds.
        granted: tokens; less those given back, and with those drawn after all.
        allowed: tokens.
    """

    begin: int
    end: int
    granted: Fraction
    allowed: Fraction

    def __str__(self) -> str:
        window = f"the {(self.end - self.begin) / SECOND:.9f} s from {self.begin} ns to {self.end} ns"
        return f"{float(self.granted):.9g} tokens in {window}, where {float(self.allowed):.9g} may be"


def first_violation(
    grants: Iterable[tuple[int, float | Fraction]],
    capacity: float | Fraction,
    refill_rate: float | Fraction,
    settled: Iterable[tuple[int, float | Fraction]] = (),
) -> Violation | None:
    """The window that breaks the promise and ends first (of those, the worst one), or ``None``.

    Args:
        grants: instant in nanoseconds and cost of each grant, in any order: processes log as they come to it. A cost
            below 0 gives tokens back.
        capacity: of the limit.
        refill_rate: of the limit, in tokens a second.
        settled: as the grants, what calls have cost more than they were granted, or less.
    """
    return first_over(grants, [Period(START, exact(capacity), exact(refill_rate))], settled)


def first_over(
    grants: Iterable[tuple[int, float | Fraction]],
    counted: Sequence[Period],
    settled: Iterable[tuple[int, float | Fraction]] = (),
) -> Violation | None:
    """:func:`first_violation` of a limit whose numbers have changed.

    A window may hold the capacity that counted when it began, what was refilled at the rates that counted while it
    lasted, and what was given at the beginnings of periods in it. Of a last call that cost more than the limit then
    held, no more than that had to be there.

    What a call gives back in a window may be granted again in it, whenever the call itself was: a limit that was full
    at first may have that besides. What is drawn for a call may be owed, so no window is too full by it. But it is paid
    before the next call is granted, and so counts in windows that end after it. Of what was done at one instant nobody
    knows the order: it counts in the one in which the most may be granted.

    Only a window that ends at a grant can be the fullest, and it is too full exactly if ``debt`` (all granted and drawn
    so far less all refilled and given back) rises across it by more than the capacity. So each grant's debt is compared
    with the least that there was just before an instant, with the capacity then. Everything is counted in a unit that
    divides all the numbers: nothing is rounded.

    Args:
        grants: as there.
        counted: the periods from the first, which begins before all grants, to the last.
        settled: as there.
    """
    given = [(period.begin, _GIVEN, -period.given) for period in counted if period.given]
    costs = [(at, kind, exact(cost)) for kind, told in ((_GRANTED, grants), (_DRAWN, settled)) for at, cost in told]
    ordered = sorted([*given, *((at, kind if cost > 0 else _BACK, cost) for at, kind, cost in costs)])
    numbers = [(each.capacity, each.refill_rate / SECOND, each.need or Fraction(0)) for each in counted]
    parts = {number.denominator for those in numbers for number in those} | {cost.denominator for *_, cost in ordered}
    unit = lcm(*parts)
    scaled = [[int(number * unit) for number in those] for those in numbers]
    place, now = 0, ordered[0][0] if ordered else 0
    granted = refilled = 0
    begin, before, least, latest = 0, 0, None, None
    for at, kind, cost in ordered:
        while place + 1 < len(counted) and counted[place + 1].begin <= at:
            begins = max(now, counted[place + 1].begin)
            refilled += scaled[place][1] * (begins - now)
            now = begins
            place += 1
        most, refill, need = scaled[place]
        refilled += refill * (at - now)
        now = at
        if kind != _GIVEN and at != latest:
            latest = at
            if least is None or granted - refilled + most < least:
                begin, before, least = at, granted, granted - refilled + most
        tokens = int(cost * unit)
        granted += tokens
        found = granted - (0 if counted[place].need is None else max(0, tokens - need))
        if kind == _GRANTED and least is not None and found - refilled > least:
            over = found - refilled - least
            return Violation(begin, at, Fraction(found - before, unit), Fraction(found - before - over, unit))
    return None


class Verdict(NamedTuple):
    """What a log says of one limit of a bucket.

    Attributes:
        bucket: its name.
        limit: the limit.
        keys: independent quotas that were drawn from, the common one included.
        grants: how often.
        tokens: how many; less those given back, and with those drawn after all.
        orders: how often other numbers were ordered, or ended.
        key: hash of the key that was granted too much; ``None`` for the common quota, or where all is well.
        violation: the first window with too much.
    """

    bucket: str
    limit: Limit
    keys: int
    grants: int
    tokens: Fraction
    orders: int
    key: str | None
    violation: Violation | None

    def __str__(self) -> str:
        limit = f"{self.bucket}: {self.limit.capacity:.6g} and {float(self.limit.refill_rate):.6g} a second"
        if self.orders:
            limit += f" (other numbers ordered: {self.orders})"
        counted = f"{float(self.tokens):.9g} tokens in {self.grants} grants, keys: {self.keys}"
        if self.violation is None:
            return f"ok    {limit}: {counted}; every window is within it"
        key = f" of key {self.key}" if self.key else ""
        return f"OVER  {limit}: {counted}; {self.violation}{key}"

    def as_json(self) -> dict[str, Any]:
        """The same for programs to read."""
        over = self.violation and {
            "begin": self.violation.begin,
            "end": self.violation.end,
            "granted": float(self.violation.granted),
            "allowed": float(self.violation.allowed),
            "key": self.key,
        }
        return {
            "bucket": self.bucket,
            "capacity": self.limit.capacity,
            "refill_rate": float(self.limit.refill_rate),
            "keys": self.keys,
            "grants": self.grants,
            "tokens": float(self.tokens),
            "orders": self.orders,
            "violation": over,
        }


def verify(entries: Iterable[Entry], buckets: Mapping[str, Bucket | None]) -> list[Verdict]:
    """Check every window of what a log holds of ``buckets``, limit by limit and key by key.

    No window that spans an instant at which the bucket was made full again can be fuller than one that begins there, so
    those before and after it are checked apart. In a pause nothing may be granted. Other numbers count from when they
    were ordered (see :func:`first_over` for windows that span that). Instants of different
    clocks, such as before and after a reboot, cannot be compared, so they are checked apart. What the log holds of
    other buckets is left out.

    Raises:
        ConfigurationError: the log holds no grant of one of the buckets, or of none that is limited: nothing would be
            shown.
    """
    known = list(entries)
    verdicts = []
    for name, bucket in buckets.items():
        if bucket is None:
            continue
        own = [entry for entry in known if entry.bucket == name]
        quotas: dict[tuple[int, str | None], list[Entry]] = {}
        for entry in own:
            if entry.cost is not None:
                quotas.setdefault((entry.clock, entry.key), []).append(entry)
        grants = sum(entry.is_grant for entry in own)
        if not grants:
            message = f"the grant log holds no grant of bucket {name!r}"
            raise ConfigurationError(message)
        told = [entry for entry in own if entry.cost is None]
        keys = len({key for _, key in quotas})
        for charge in bucket.draw(None):
            drawn = {
                quota: [entry for entry in those if entry.limit in {None, charge.number}]
                for quota, those in quotas.items()
            }
            tokens = Fraction(sum(entry.cost or 0 for those in drawn.values() for entry in those))
            counted = {clock: periods(charge.limit, charge.number, clock, own) for clock, _ in quotas}
            orders = sum(entry.limit == charge.number for entry in told)
            key, violation = _first(drawn, told, counted)
            verdicts.append(Verdict(name, charge.limit, keys, grants, tokens, orders, key, violation))
    if not verdicts:
        message = "the grant log holds no grant of a bucket that is limited"
        raise ConfigurationError(message)
    return verdicts


def _first(
    quotas: Mapping[tuple[int, str | None], Sequence[Entry]],
    told: Sequence[Entry],
    counted: Mapping[int, Sequence[Period]],
) -> tuple[str | None, Violation | None]:
    """The first of the ``quotas``, by clock and key, that was granted too much, and its window."""
    for (clock, key), drawn in quotas.items():
        own = [entry for entry in told if entry.clock == clock and entry.key in {None, key}]
        found = [_in_pause(_costs(entry for entry in drawn if entry.is_grant), own)]
        for those in _between(drawn, [entry for entry in own if entry.stands is None]):
            grants, settled = (_costs(entry for entry in those if entry.is_grant is kind) for kind in (True, False))
            found.append(first_over(grants, counted[clock], settled))
        if violations := [each for each in found if each]:
            return key, min(violations, key=lambda violation: violation.end)
    return None, None


def _costs(drawn: Iterable[Entry]) -> list[tuple[int, Fraction | int]]:
    return [(entry.at, entry.cost or 0) for entry in drawn]


def _between(drawn: Sequence[Entry], resets: Iterable[Entry]) -> Iterator[list[Entry]]:
    """What was drawn before, between, and after the times at which a bucket was made full again.

    What was drawn just then is left out: nobody can tell whether it was before or after.
    """
    begin = START
    for since, at in [*sorted((reset.since or 0, reset.at) for reset in resets), (END, END)]:
        yield [entry for entry in drawn if begin < entry.at < since]
        begin = max(begin, at)


def _in_pause(grants: Iterable[tuple[int, Fraction | int]], told: Sequence[Entry]) -> Violation | None:
    """The first of the ``grants`` that was given in a pause."""
    pauses = list[tuple[int, int]]()
    for entry in told:
        if entry.stands and entry.limit is None:
            since = entry.since or 0
            # Also one that may have come first: it was given at the same time.
            ends = [
                other.since or 0
                for other in told
                if (other.key, other.limit, other.stands) == (entry.key, None, 0) and other.at >= since
            ]
            pauses.append((entry.at, min([since + entry.stands, *ends])))
    for at, cost in sorted(grants):
        if any(begin < at < end for begin, end in pauses):
            return Violation(at, at, Fraction(cost), Fraction(0))
    return None
