"""The promise, checked exactly: in every window of ``w`` seconds, granted <= capacity + refill_rate * w."""

from __future__ import annotations

from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

SECOND = 1_000_000_000


class Violation(NamedTuple):
    """A window, both ends included, in which more was granted than was allowed."""

    begin: int
    end: int
    granted: Fraction
    allowed: Fraction


def exact(number: float | Fraction) -> Fraction:
    """The number as written: 0.3 is three tenths, not the binary fraction next to it."""
    return number if isinstance(number, Fraction) else Fraction(str(number))


def first_violation(
    grants: Sequence[tuple[int, float | Fraction]], capacity: float | Fraction, refill_rate: float | Fraction
) -> Violation | None:
    """The window that breaks the promise and ends first (of those, the worst one), or ``None``.

    Only a window that begins and ends at a grant can be the fullest, and it is too full exactly if ``debt`` (all
    granted so far less all refilled) rises across it by more than the capacity. So each grant's debt is compared with
    the least debt that there was just before a grant. Everything is counted in a unit that divides all the numbers:
    nothing is rounded.

    Args:
        grants: instant in nanoseconds and cost of each grant, in any order: processes log as they come to it.
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
