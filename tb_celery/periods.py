"""Which numbers of a limit counted when, as a log of grants tells."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from tb_celery.bucket import LONGEST_SPAN, SECOND, Limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tb_celery.grantlog import Entry

START, END = -(1 << 64), 1 << 64
"""Before and after all instants."""
SLACK = SECOND // 10
"""Nanoseconds that a process may be wrong by about the clock of a server, when numbers end by themselves."""
FOR_GOOD = LONGEST_SPAN // 4
"""Nanoseconds that an order stands for at least that has no end."""


def exact(number: float | Fraction) -> Fraction:
    """The number as written: 0.3 is three tenths, not the binary fraction next to it."""
    return number if isinstance(number, Fraction) else Fraction(str(number))


class Period(NamedTuple):
    """What counted from an instant on, until the next period.

    Attributes:
        begin: the instant, in nanoseconds.
        capacity: of the limit; where several may have counted, the largest.
        refill_rate: in tokens a second; where several may have counted, the highest.
        need: tokens that a call has to find at most, where it may cost more than the limit holds; else ``None``.
        given: tokens that the limit may have got at once when the period began.
    """

    begin: int
    capacity: Fraction
    refill_rate: Fraction
    need: Fraction | None = None
    given: Fraction = Fraction(0)


class _Order(NamedTuple):
    """Other numbers: somewhere between two instants they began to count, and between two others they ended."""

    limit: Limit
    begin: tuple[int, int]
    end: tuple[int, int]


def periods(declared: Limit, number: int, clock: int, entries: Sequence[Entry]) -> list[Period]:
    """What counted for a limit, on one clock.

    Whoever gives a limit other numbers tells when that was to within two instants, between which the old and the new
    ones may have counted. A limit whose capacity is raised may be full by the old one and so by the new one, and get
    the difference. One whose numbers end by themselves may be full: nobody carried over what was forgotten meanwhile.

    Args:
        declared: the limit where nothing else is ordered.
        number: that of the limit, from the slowest refill of its bucket.
        clock: identity of the clock.
        entries: what is logged of the bucket, in the order of the log.
    """
    orders = [_Order(declared, (START, START), (END, END)), *_orders(declared, number, clock, entries)]
    counted, ends = list[tuple[int, int, Limit]](), set[int]()
    for place, order in enumerate(orders):
        # Of two that were given at once nobody knows which took the other's place.
        later = (other.begin[1] for at, other in enumerate(orders) if (other.begin[0], at) > (order.begin[1], place))
        latest = min(later, default=END)
        counted.append((order.begin[0], min(order.end[1], latest), order.limit))
        if order.end[0] <= latest:
            counted.append((order.end[0], latest, declared))
            ends.add(order.end[0])
    instants = sorted({instant for first, last, _ in counted for instant in (first, min(last + 1, END))})
    found = list[Period]()
    for first, after in pairwise(instants):
        those = [limit for begin, last, limit in counted if begin < after and last >= first]
        capacity = max(exact(limit.capacity) for limit in those)
        rate = max(exact(limit.refill_rate) for limit in those)
        need = None if those == [declared] else min(exact(limit.capacity) for limit in those)
        more = max(Fraction(0), capacity - found[-1].capacity) if found else Fraction(0)
        found.append(Period(first, capacity, rate, need, capacity if first in ends else more))
    return found


def _orders(declared: Limit, number: int, clock: int, entries: Sequence[Entry]) -> list[_Order]:
    first = next(place for place, entry in enumerate(entries) if entry.clock == clock)
    orders = list[_Order]()
    for place, entry in enumerate(entries):
        if entry.limit != number or entry.stands is None or entry.interval is None or entry.span is None:
            continue
        limit = Limit.of(entry.interval, entry.span) if entry.stands else declared
        is_endless = not entry.stands or entry.stands >= FOR_GOOD
        if entry.clock == clock:
            soonest, latest = entry.since or 0, entry.at
            end = (soonest + entry.stands - SLACK, latest + entry.stands + SLACK)
        elif place < first:
            # From before a reboot: nobody knows what is left of it, but no more than all.
            soonest = latest = START
            end = (START, entries[first].at + entry.stands + SLACK)
        else:
            continue
        orders.append(_Order(limit, (soonest, latest), (END, END) if is_endless else end))
    return orders
