"""What others who ask declare of a limit, where not all declare the same: then the stricter of their numbers count.

Whoever finds that others have used a limit by laxer numbers than it declares itself claims its own, for a minute: for
everybody who declares more and as many limits, since those are known by their numbers from the slowest one. While it
goes on asking it claims them anew. A claim stands beside the records, as an order does.
"""

from __future__ import annotations

import logging
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tb_celery.bucket import FINEST, LONGEST_SPAN, MOST_LIMITS, PAUSED, SECOND, Limit
from tb_celery.errors import ConfigurationError
from tb_celery.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from tb_celery.bucket import Charge, Name
    from tb_celery.stores.orders import Find, Orders

    Claims = Mapping[int, "Claim"]
    """What is claimed of a bucket by those who declare as many limits, by number."""

logger = logging.getLogger("tb_celery")

LASTS = 60 * SECOND
"""Nanoseconds for which a claim stands: so long after its last ask a process counts as one that may ask again."""
RENEWED = LASTS // 2
"""Nanoseconds before its end from which on it is claimed anew."""


class Claim(NamedTuple):
    """The strictest numbers of a limit that anybody declares who has asked of late, each until it is over.

    Attributes:
        interval: nanoseconds that one token takes to refill, at the slowest rate.
        slow_until: the instant until which that counts.
        parts: the smallest capacity, in thousandths of a token.
        small_until: the instant until which that counts.
    """

    interval: int
    slow_until: int
    parts: int
    small_until: int

    @classmethod
    def of(cls, state: State, now: int) -> Claim:
        """What a record says, but for what is over, or would stand for longer than a claim does: by a wrong clock."""
        slow_until, small_until = (
            until if now < until <= now + 2 * LASTS else 0 for until in (state.full_at, state.booked_at)
        )
        return cls(state.interval, slow_until, state.span, small_until)

    def state(self) -> State:
        """What :meth:`of` takes."""
        return State(self.slow_until, self.small_until, self.interval, self.parts)

    @property
    def stands(self) -> bool:
        """Whether any of it counted at the instant of the look."""
        return max(self.slow_until, self.small_until) > 0


def name_of(bucket: str, count: int, number: int) -> Name:
    """What the claim of one of so many limits is found by; of none, that is the order of other numbers."""
    return bucket, None, PAUSED - 1 - MOST_LIMITS * count - number


def claims_of(bucket: str, count: int, find: Find, now: int) -> dict[int, Claim]:
    """What stands at ``now``."""
    known = {number: find(name_of(bucket, count, number)) for number in range(count)}
    found = {number: Claim.of(state, now) for number, state in known.items() if state}
    return {number: claim for number, claim in found.items() if claim.stands}


def look_again(claims: Iterable[Claim], now: int) -> list[int]:
    """The instants at which something is over, or is to be claimed anew."""
    ends = [end for claim in claims for end in (claim.slow_until, claim.small_until) if end > now]
    return [end if end - RENEWED <= now else end - RENEWED for end in ends]


def narrowed(declared: Limit, claim: Claim, now: int, cost: int = 0) -> Limit:
    """The limit that counts for whoever declares one; the same object where nobody declares less.

    A smaller capacity does not count for a call whose cost, in nanoseconds of what is declared, is more than that: such
    a call has to find all that it takes, or more would be granted than anybody declares.
    """
    interval = claim.interval if claim.slow_until > now else 0
    fits = claim.small_until > now and cost * FINEST <= claim.parts * declared.interval
    parts = claim.parts if fits else LONGEST_SPAN
    if interval <= declared.interval and parts >= _parts(*declared.numbers):
        return declared
    return _limit(max(interval, declared.interval), min(parts, _parts(*declared.numbers))) or declared


def claimed(claim: Claim | None, declared: Limit, now: int) -> Claim | None:
    """What is to stand once somebody asks who declares a limit; ``None`` where that stands, for long enough yet."""
    until, parts = now + LASTS, _parts(*declared.numbers)
    if claim is None:
        return Claim(declared.interval, until, parts, until)
    new = claim
    slow_left, small_left = claim.slow_until - now, claim.small_until - now
    if slow_left <= 0 or declared.interval >= claim.interval + (slow_left > RENEWED):
        new = new._replace(interval=declared.interval, slow_until=until)
    if small_left <= 0 or parts <= claim.parts - (small_left > RENEWED):
        new = new._replace(parts=parts, small_until=until)
    return None if new == claim else new


class Others:
    """How others declare the buckets of a store, as far as one process has met them; it tells once that they differ.

    Args:
        opened_at: the instant at which it opened the store: what is older may be from before a restart.
    """

    def __init__(self, opened_at: int) -> None:
        self.opened_at = opened_at
        self._told: set[str] = set()

    def meet(
        self, asked: Sequence[Charge], heard: Sequence[Charge], written: Iterable[State | None], find: Find, now: int
    ) -> set[Name]:
        """The names of limits that others have used by laxer numbers than are declared here, which nobody ordered.

        Args:
            asked: what is asked, by the numbers that are declared.
            heard: the same, by those that count.
            written: where each record stands, if there is one.
            find: finds what stands.
            now: the instant of the ask.
        """
        met = set()
        for (charge, count), other, known in zip(counted(asked), heard, written, strict=False):
            if known is None or known.numbers == other.limit.numbers:
                continue
            order = find(name_of(charge.bucket, 0, charge.number))
            if order and _explains(order, known, other.limit, now):
                continue
            is_laxer = known.interval < other.limit.interval or _parts(*known.numbers) > _parts(*other.limit.numbers)
            if is_laxer:
                met.add(charge[:3])
            # It was not written before, or it would be full; with what was claimed meanwhile also by this process.
            is_recent = not known.in_debt and known.full_at - known.span > self.opened_at
            if is_recent and (is_laxer or not find(name_of(charge.bucket, count, charge.number))):
                self._tell(charge, known.numbers)
        return met

    def due(
        self,
        asked: Sequence[Charge],
        met: Collection[Name],
        orders: Callable[[str, str | None], Orders],
        claims: Callable[[str, int], Claims],
        now: int,
    ) -> Iterator[tuple[Name, Claim | None, Claim]]:
        """What is to be claimed by whoever asks: under which name, what stands there, and what is to.

        Args:
            asked: what is asked, by the numbers that are declared.
            met: as :meth:`meet` has it.
            orders: what stands about a bucket and key; while somebody has set its numbers, nobody claims others.
            claims: what is claimed of a bucket by those who declare so many limits.
            now: the instant of the ask.
        """
        for charge, count in counted(asked):
            bucket, key, number, declared, _ = charge
            claim = claims(bucket, count).get(number)
            _, until = orders(bucket, key).limits.get(number, (declared, 0))
            if until > now or not (claim or charge[:3] in met):
                continue
            if claim and _made_at(claim, declared) > self.opened_at:
                self._tell(charge, narrowed(declared, claim, now).numbers)
            new = claimed(claim, declared, now)
            if new:
                yield name_of(bucket, count, number), claim, new

    def _tell(self, charge: Charge, theirs: tuple[int, int]) -> None:
        if charge.bucket not in self._told:
            self._told.add(charge.bucket)
            both = theirs, charge.limit.numbers
            numbers = [f"{span / interval:.6g} at {SECOND / interval:.6g}/s" for interval, span in both]
            logger.warning(
                "bucket %r: another process uses %s where %s is declared here; declare the same everywhere, and restart"
                " what has old settings",
                charge.bucket,
                *numbers,
            )


def counted(charges: Iterable[Charge]) -> Iterator[tuple[Charge, int]]:
    """Each charge, with the number of limits that its bucket is declared with: the first is that of the fastest."""
    counts: dict[str, int] = {}
    for charge in charges:
        yield charge, counts.setdefault(charge.bucket, charge.number + 1)


def is_news(old: Claim | None, new: Claim) -> bool:
    """Whether others have to heed other numbers by now, and not only for longer."""
    return old is None or (old.interval, old.parts) != (new.interval, new.parts) or not old.slow_until * old.small_until


def _explains(order: State, known: State, limit: Limit, now: int) -> bool:
    """Whether a record was written by numbers that somebody had set, or may have been before ``limit`` was back."""
    is_older = order.numbers == limit.numbers and known.full_at - known.span <= order.full_at
    return order.full_at > now or order.numbers == known.numbers or is_older


def _made_at(claim: Claim, declared: Limit) -> int:
    """When somebody last claimed the numbers by which less counts than is declared."""
    ends = [claim.slow_until] * (claim.interval > declared.interval) + [claim.small_until] * (
        claim.parts < _parts(*declared.numbers)
    )
    return max(ends, default=0) - LASTS


def _parts(interval: int, span: int) -> int:
    """The capacity of a limit with these numbers in thousandths of a token, or more than any claim can be of."""
    return min(span * FINEST // interval, LONGEST_SPAN)


@lru_cache(1024)
def _limit(interval: int, parts: int) -> Limit | None:
    """The limit of so slow a rate, and so small a capacity; ``None`` where there can be none."""
    capacity = Fraction(parts, FINEST)
    whole = capacity.denominator == 1
    try:
        return Limit(int(capacity) if whole else float(capacity), Fraction(SECOND, interval))
    except ConfigurationError:
        return None
