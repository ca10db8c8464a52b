"""A bucket as it is declared: its limits, and what a call draws from each, in whole nanoseconds of refill."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from tb_celery.errors import ConfigurationError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

SECOND = 1_000_000_000
LONGEST_SPAN = 1 << 61
"""Nanoseconds (73 years) that a limit may take to fill: an instant plus a span always fits 64 bits."""
FOREVER = 1 << 63
"""Nanoseconds: later than any instant, and longer than any span."""
FINEST = 1000
"""Parts of a token that a capacity is counted in."""
MOST_LIMITS = 8
"""Limits that one bucket may have."""


def positive(name: str, number: float | Fraction) -> Fraction:
    """``number`` as written: 0.3 is three tenths, not the binary fraction next to it."""
    if isinstance(number, bool) or not isinstance(number, int | float | Fraction):
        message = f"{name} must be a number, not {shown(number)}"
        raise ConfigurationError(message)
    if number <= 0 or (isinstance(number, float) and not math.isfinite(number)):
        message = f"{name} must be a finite number above 0, not {shown(number)}"
        raise ConfigurationError(message)
    return Fraction(str(number) if isinstance(number, float) else number)


@dataclass(frozen=True, slots=True)
class Limit:
    """One quota: at most ``capacity`` tokens at once, refilled at ``refill_rate`` tokens a second.

    Both are rounded once, on the strict side, to a whole number of nanoseconds a token such that the capacity, too, is
    a whole number of nanoseconds; in every window of ``w`` seconds at most ``capacity + refill_rate * w`` go out.

    Args:
        capacity: most tokens it holds, so the largest burst and the largest cost.
        refill_rate: tokens a second; a ``Fraction`` is taken exactly.

    Raises:
        ConfigurationError: a number is not positive and finite, the capacity has more than three decimals, or filling
            takes less than a nanosecond a token or more than 73 years.
    """

    capacity: float
    refill_rate: float | Fraction
    interval: int = field(init=False, repr=False, compare=False)
    """Nanoseconds that one token takes to refill."""
    span: int = field(init=False, repr=False, compare=False)
    """Nanoseconds from empty to full."""

    def __post_init__(self) -> None:
        capacity = positive("capacity", self.capacity)
        rate = positive("refill_rate", self.refill_rate)
        parts = capacity.denominator
        if parts > FINEST:
            message = f"capacity may have at most three decimals, not {shown(self.capacity)}"
            raise ConfigurationError(message)
        if rate > SECOND:
            message = f"refill_rate must be at most {SECOND} tokens a second, not {shown(self.refill_rate)}"
            raise ConfigurationError(message)
        interval = parts * math.ceil(SECOND / (rate * parts))
        span = int(capacity * interval)
        if max(interval, span) > LONGEST_SPAN:
            message = f"capacity {shown(self.capacity)} at rate {shown(self.refill_rate)} takes over 73 years to fill"
            raise ConfigurationError(message)
        object.__setattr__(self, "interval", interval)
        object.__setattr__(self, "span", span)

    @property
    def numbers(self) -> tuple[int, int]:
        """Nanoseconds that one token takes to refill, and that it takes to fill."""
        return self.interval, self.span

    @classmethod
    def of(cls, interval: int, span: int) -> Limit:
        """The limit that takes so many nanoseconds a token, and to fill.

        Raises:
            ConfigurationError: there is none such.
        """
        capacity = span / positive("interval", interval)
        whole = capacity.denominator == 1
        return cls(int(capacity) if whole else float(capacity), Fraction(SECOND, interval))

    def charge(self, cost: float) -> int:
        """Nanoseconds of refill that ``cost`` tokens are worth, rounded up.

        Raises:
            ConfigurationError: ``cost`` is not a positive number, or is above the capacity and so could never be met.
        """
        if type(cost) is int and cost > 0:
            nanoseconds = cost * self.interval
        else:
            nanoseconds = math.ceil(positive("cost", cost) * self.interval)
        if nanoseconds > self.span:
            message = f"cost {shown(cost)} is above capacity {self.capacity!r} and could never be met"
            raise ConfigurationError(message)
        return nanoseconds

    def tokens(self, full_at: int, now: int) -> float:
        """Tokens at hand at ``now``, from 0 to ``capacity``; for people to read."""
        missing = min(max(full_at - now, 0), self.span)
        return (self.span - missing) / self.interval


@dataclass(frozen=True, slots=True)
class Bucket:
    """A named quota of one or several limits, drawn from all or nothing.

    Args:
        name: what tasks, scripts and people call it.
        limits: at least one. Their order has no meaning: they are kept from the fastest to the slowest refill.
    """

    name: str
    limits: tuple[Limit, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.limits, tuple | list) or not all(isinstance(limit, Limit) for limit in self.limits):
            message = f"bucket {self.name!r} must be made of Limit objects, not {self.limits!r}"
            raise ConfigurationError(message)
        if not self.limits:
            message = f"bucket {self.name!r} needs at least one limit"
            raise ConfigurationError(message)
        if len(self.limits) > MOST_LIMITS:
            message = f"bucket {self.name!r} may have {MOST_LIMITS} limits, not {len(self.limits)}"
            raise ConfigurationError(message)
        # Of equally fast ones the smallest counts as the slowest: after the same calls it has the fewest tokens.
        ordered = sorted(self.limits, key=lambda limit: (limit.interval, -limit.span))
        object.__setattr__(self, "limits", tuple(ordered))

    def charge(self, cost: float) -> tuple[int, ...]:
        """What ``cost`` tokens are worth for each limit, in nanoseconds.

        Raises:
            ConfigurationError: the cost is not a positive number or is above the capacity of one limit.
        """
        try:
            return tuple([limit.charge(cost) for limit in self.limits])
        except ConfigurationError as error:
            message = f"bucket {self.name!r}: {error}"
            raise ConfigurationError(message) from None

    def draw(self, key: str | None, costs: Iterable[int] | None = None) -> tuple[Charge, ...]:
        """What a call draws from each limit.

        Args:
            key: which of the bucket's independent quotas.
            costs: in nanoseconds of refill, as :meth:`charge` tells; ``None`` for nothing.
        """
        # Numbered from the slowest: when a faster limit is added the slower ones go on where they stood, and no long
        # quota is full again. A slower one that is added starts with the tokens that the slowest had.
        last = len(self.limits) - 1
        pairs = zip(self.limits, repeat(0) if costs is None else costs, strict=False)
        return tuple([Charge(self.name, key, last - place, limit, cost) for place, (limit, cost) in enumerate(pairs)])


Name = tuple[str, str | None, int]
"""What state is found by: a bucket's name, a key, and the number of a limit or of what stands beside it."""


class Charge(NamedTuple):
    """What one call draws from one limit of one bucket."""

    bucket: str
    key: str | None
    number: int
    """Which of the bucket's limits, from the slowest refill."""
    limit: Limit
    cost: int
    """In nanoseconds of refill."""

    @property
    def need(self) -> int:
        """How much has to be there; at most all that the limit holds, so a call that costs more then owes the rest."""
        return min(self.cost, self.limit.span)

    @property
    def is_pause(self) -> bool:
        """Whether nothing is drawn, and the bucket is paused instead."""
        return self.number == PAUSED


PAUSED = -1
"""Stands in place of a limit's number where a bucket is paused."""
LONGEST_PAUSE = 31 * 86_400 * SECOND
"""Nanoseconds that a bucket can be paused for."""
PAUSE = Limit(1, Fraction(SECOND, LONGEST_PAUSE))
"""What a pause is to the arithmetic: a limit all of which is asked for, that is full when the pause ends."""


def pause(bucket: str, key: str | None) -> Charge:
    """What everyone who asks a paused bucket is charged besides; nobody's turn comes before the pause ends."""
    return Charge(bucket, key, PAUSED, PAUSE, PAUSE.span)
