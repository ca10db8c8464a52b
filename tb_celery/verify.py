"""The promise, checked exactly: in every window of ``w`` seconds, granted <= capacity + refill_rate * w."""

from __future__ import annotations

from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

from tb_celery.bucket import SECOND
from tb_celery.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tb_celery.bucket import Bucket, Limit
    from tb_celery.grantlog import Entry


class Violation(NamedTuple):
    """A window, both ends included, in which more was granted than was allowed.

    Attributes:
        begin: the instant of its first grant, in nanoseconds.
        end: the instant of its last grant, in nanoseconds.
        granted: tokens.
        allowed: tokens.
    """

    begin: int
    end: int
    granted: Fraction
    allowed: Fraction

    def __str__(self) -> str:
        window = f"the {(self.end - self.begin) / SECOND:.9f} s from {self.begin} ns to {self.end} ns"
        return f"{float(self.granted):.9g} tokens in {window}, where {float(self.allowed):.9g} may be"


def exact(number: float | Fraction) -> Fraction:
    """The number as written: 0.3 is three tenths, not the binary fraction next to it."""
    return number if isinstance(number, Fraction) else Fraction(str(number))


def first_violation(
    grants: Iterable[tuple[int, float | Fraction]], capacity: float | Fraction, refill_rate: float | Fraction
) -> Violation | None:
    """The window that breaks the promise and ends first (of those, the worst one), or ``None``.

    Only a window that begins and ends at a grant can be the fullest, and it is too full exactly if ``debt`` (all
    granted so far less all refilled) rises across it by more than the capacity. So each grant's debt is compared with
    the least debt that there was just before a grant. Everything is counted in a unit that divides all the numbers:
    nothing is rounded.

    Args:
        grants: instant in nanoseconds and cost of each grant, in any order: processes log as they come to it. A cost
            below 0 gives tokens back.
        capacity: of the limit.
        refill_rate: of the limit, in tokens a second.
    """
    ordered = sorted((at, exact(cost)) for at, cost in grants)
    full, rate = exact(capacity), exact(refill_rate) / SECOND
    unit = lcm(full.denominator, rate.denominator, *{cost.denominator for _, cost in ordered})
    most, refill = int(full * unit), int(rate * unit)
    granted = 0
    begin, before, least = 0, 0, None
    for at, cost in ordered:
        refilled = refill * at
        if least is None or granted - refilled < least:
            begin, before, least = at, granted, granted - refilled
        granted += int(cost * unit)
        if granted - refilled - least > most:
            return Violation(begin, at, Fraction(granted - before, unit), full + rate * (at - begin))
    return None


class Verdict(NamedTuple):
    """What a log says of one limit of a bucket.

    Attributes:
        bucket: its name.
        limit: the limit.
        keys: independent quotas that were drawn from, the common one included.
        grants: how often.
        tokens: how many.
        key: hash of the key that was granted too much; ``None`` for the common quota, or where all is well.
        violation: the first window with too much.
    """

    bucket: str
    limit: Limit
    keys: int
    grants: int
    tokens: Fraction
    key: str | None
    violation: Violation | None

    def __str__(self) -> str:
        limit = f"{self.bucket}: {self.limit.capacity:.6g} and {float(self.limit.refill_rate):.6g} a second"
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
            "violation": over,
        }


def verify(entries: Iterable[Entry], buckets: Mapping[str, Bucket | None]) -> list[Verdict]:
    """Check every window of what a log holds of ``buckets``, limit by limit and key by key.

    A bucket that was made full again was given its capacity. Instants of different clocks, such as before and
    after a reboot, cannot be compared, so they are checked apart. What the log holds of other buckets is left out.

    Raises:
        ConfigurationError: the log holds no grant of one of the buckets, or of none that is limited: nothing would be
            shown.
    """
    known = list(entries)
    verdicts = []
    for name, bucket in buckets.items():
        if bucket is None:
            continue
        resets = [entry for entry in known if entry.bucket == name and entry.cost is None]
        quotas: dict[tuple[int, str | None], list[tuple[int, Fraction | int]]] = {}
        for entry in known:
            if entry.bucket == name and entry.cost is not None:
                quotas.setdefault((entry.clock, entry.key), []).append((entry.at, entry.cost))
        if not quotas:
            message = f"the grant log holds no grant of bucket {name!r}"
            raise ConfigurationError(message)
        costs = [cost for grants in quotas.values() for _, cost in grants]
        keys = len({key for _, key in quotas})
        for limit in bucket.limits:
            key, violation = _first(quotas, resets, limit)
            verdicts.append(Verdict(name, limit, keys, len(costs), Fraction(sum(costs)), key, violation))
    if not verdicts:
        message = "the grant log holds no grant of a bucket that is limited"
        raise ConfigurationError(message)
    return verdicts


def _first(
    quotas: Mapping[tuple[int, str | None], Sequence[tuple[int, Fraction | int]]],
    resets: Sequence[Entry],
    limit: Limit,
) -> tuple[str | None, Violation | None]:
    """The first of the ``quotas``, by clock and key, that was granted too much, and its window."""
    for (clock, key), grants in quotas.items():
        own = [reset for reset in resets if reset.clock == clock and reset.key in {None, key}]
        # Nobody can tell whether a grant just then came before or after it.
        sure = [grant for grant in grants if not any((reset.since or 0) <= grant[0] <= reset.at for reset in own)]
        given = [(reset.at, -exact(limit.capacity)) for reset in own]
        if violation := first_violation([*sure, *given], limit.capacity, limit.refill_rate):
            return key, violation
    return None, None
