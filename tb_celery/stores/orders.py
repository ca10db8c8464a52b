"""What is said about a bucket while it runs: that it is paused, or has other numbers than those declared.

An order stands beside the records of limits, under a number of its own, until an instant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tb_celery.bucket import MOST_LIMITS, PAUSED, Charge, Limit, pause
from tb_celery.errors import ConfigurationError, StoreError
from tb_celery.state import State, fit, moved, strictest
from tb_celery.stores.claims import narrowed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tb_celery.bucket import Name
    from tb_celery.stores.claims import Claims

    Find = Callable[[Name], State | None]
    """Tells what stands under a name, or stood until its ``full_at``."""
    Step = Callable[[int, State, int], State]
    """From where the limit of some number stands at an instant to where it stands when an order counts from then on."""


class Orders(NamedTuple):
    """What stands about a bucket, or one key of it, each with the instant at which it ends.

    Attributes:
        paused: the keys that are paused, or were and are still known to have been; ``None`` for all of them.
        limits: those that take the place of declared ones, by number.
        wrong: the numbers of limits about which another program has ordered what cannot be.
    """

    paused: dict[str | None, int]
    limits: dict[int, tuple[Limit, int]]
    wrong: frozenset[int] = frozenset()

    def with_pause(self, key: str, pause: State | None) -> Orders:
        """These, and the pause of a key if there is one."""
        return self if pause is None else self._replace(paused=self.paused | {key: pause.full_at})

    def at(self, now: int) -> Orders:
        """Those of them that have not ended."""
        paused = {key: until for key, until in self.paused.items() if until > now}
        limits = {number: order for number, order in self.limits.items() if order[1] > now}
        return self._replace(paused=paused, limits=limits)


NONE = Orders({}, {})


def change(bucket: str, number: int, limit: Limit) -> Charge:
    """The order that has ``limit`` take the place of that of some number."""
    return Charge(bucket, None, PAUSED - 1 - number, limit, 0)


def changed(order: Charge) -> int:
    """The number of the limit whose place another takes by that."""
    return PAUSED - 1 - order.number


def collect(bucket: str, find: Find, now: int) -> Orders:
    """What is in force about a bucket at ``now``, of all its keys, and a pause that has ended.

    Args:
        bucket: its name.
        find: finds what stands.
        now: the instant of the look.
    """
    limits, wrong = {}, set()
    for number in range(MOST_LIMITS):
        if (state := find((bucket, None, PAUSED - 1 - number))) and state.full_at > now:
            try:
                limits[number] = Limit.of(*state.numbers), state.full_at
            except ConfigurationError:
                wrong.add(number)
    paused = find((bucket, None, PAUSED))
    return Orders({None: paused.full_at} if paused else {}, limits, frozenset(wrong))


def rated(charge: Charge, limit: Limit) -> Charge:
    """``charge`` as many tokens of another limit."""
    return Charge(*charge[:3], limit, -(-charge.cost * limit.interval // charge.limit.interval))


def heeded(
    charges: Sequence[Charge],
    orders: Callable[[str, str | None], Orders],
    claims: Callable[[str, int], Claims],
    now: int,
    *,
    asks: bool = True,
) -> Sequence[Charge]:
    """``charges`` by the numbers that count, and those of pauses behind them; the same object where all is as declared.

    Args:
        charges: by the numbers that are declared.
        orders: what stands about a bucket and key.
        claims: what is claimed of a bucket by those who declare so many limits; where numbers are ordered, these count.
        now: the instant of the look.
        asks: whether it is asked for tokens, rather than settled what was taken.

    Raises:
        StoreError: the numbers that are ordered cannot be; another program has written them.
    """
    changed: list[Charge] = []
    pauses: dict[tuple[str, str | None], Charge] = {}
    claimed: dict[str, Claims] = {}
    for charge in charges:
        bucket, key, number, declared, cost = charge
        if bucket not in claimed:
            claimed[bucket] = claims(bucket, number + 1)  # the first is the fastest, which has the last number
        standing = orders(bucket, key)
        if number in standing.wrong:
            message = (
                f"bucket {bucket!r} has been given numbers that cannot be, by another program; have the declared ones"
                f" count again with 'tb-celery unset {bucket}'"
            )
            raise StoreError(message)
        limit, until = standing.limits.get(number, (declared, 0))
        if until <= now:
            claim = claimed[bucket].get(number)
            limit = narrowed(declared, claim, now, cost) if claim else declared
        changed.append(charge if limit is declared else rated(charge, limit))
        pauses |= {(bucket, each): pause(bucket, each) for each, until in standing.paused.items() if until > now}
    if not (asks and pauses) and all(new is old for new, old in zip(changed, charges, strict=True)):
        return charges
    return (*changed, *pauses.values()) if asks else tuple(changed)


def last_pause(charges: Sequence[Charge], orders: Callable[[str, str | None], Orders]) -> int:
    """The instant at which the last pause of those who are charged has ended, or will; 0 where none is known."""
    return max((until for charge in charges for until in orders(*charge[:2]).paused.values()), default=0)


# -- what an order means for the records that are there already


def consequence(charge: Charge, span: int, find: Find, declared: Limit | None, now: int) -> Step | None:
    """What an order does to each record of its bucket, or of its key; ``None`` where it leaves them as they are.

    Args:
        charge: the order.
        span: nanoseconds that it stands for; 0 ends it.
        find: finds what stood until then.
        declared: the limit that counts where nothing is ordered.
        now: the instant at which it is given; by that of the look everybody heeds it.
    """
    if not charge.is_pause:
        after = charge.limit if span else declared
        return _renumbered(changed(charge), find(charge[:3]), declared, after, now) if declared and after else None
    known = None if span else find(charge[:3])
    common = find((charge.bucket, None, PAUSED)) if known and charge.key is not None else None
    until, again = known.full_at if known else 0, max(now, common.full_at if common else 0)
    return (lambda _number, state, _look: resumed(state, until, again, now)) if until > again else None


def overtaken(charge: Charge, find: Find, declared: Limit | None, now: int) -> tuple[Charge, Step | None]:
    """What counts by now in place of an order that records were carried to, and what that does to them.

    Somebody else has ordered otherwise meanwhile, and may have gone over the records sooner; or the order has ended.

    Args:
        charge: the order.
        find: finds what stands by now.
        declared: the limit that counts where nothing is ordered.
        now: the instant of the look.
    """
    if charge.is_pause or declared is None:
        return charge, None
    known, before = find(charge[:3]), charge.limit.numbers
    after, _ = collect(charge.bucket, find, now).limits.get(changed(charge), (declared, now))
    if known is None or known.numbers != before:
        known = State(now + 1, now + 1, *before)
    return charge._replace(limit=after), _renumbered(changed(charge), known, declared, after, now)


def _renumbered(place: int, known: State | None, declared: Limit, after: Limit, now: int) -> Step | None:
    """Other numbers take the place of those that were ordered before, or ``declared``, for the limit of one number."""
    over = known if known and known.full_at <= now and known.numbers != declared.numbers else None
    before = declared.numbers if known is None or over else known.numbers
    if before == after.numbers and not over:
        return None  # what was written by others still is carried over when it is looked at

    def step(number: int, state: State, look: int) -> State:
        if number != place:
            return state  # its numbers may be the same
        known = late(state, [(over, declared)], look)
        is_full = max(known.full_at, known.booked_at) <= now
        known = known if is_full or known.numbers == after.numbers else since(now, known, after, look)
        # With those numbers it is left from an order like this one, or somebody heeds this one already.
        return strictest(state, after, [known], look) if state.numbers == after.numbers else known

    return step


def resumed(state: State, until: int, again: int, now: int) -> State:
    """``state`` when a pause ends ``now``, sooner than it was to: new turns are those of a pause that was no longer.

    Those who were sent away meanwhile have turns from its end on, or from when the limit is full: a line as long as
    theirs begins now. What was taken stays taken, so nobody gets a token before it is there.

    Args:
        state: where a limit stands.
        until: the instant at which the pause was to end.
        again: that from which on there are turns: ``now``, or the end of another pause.
        now: the instant at which it ends.
    """
    begin, end = max(state.full_at, again), max(state.full_at, until)
    if state.booked_at <= end:
        return state  # its turns are from before the pause
    # Full from now on, or the turns would count as lost: nobody could claim one.
    return moved(state, max(state.full_at, now), state.booked_at - (end - begin))


def since(instant: int, state: State, limit: Limit, now: int) -> State:
    """``state`` at ``now``, where the numbers of ``limit`` count since some instant, or since it was empty after that.

    A call that was granted after the instant by the old numbers counts as if it had been by the new ones.
    """
    if not state.interval:  # another program has written it: so empty
        return State(now + limit.span, now + limit.span, *limit.numbers)
    carried = instant if state.in_debt else max(instant, state.full_at - state.span)
    return fit(fit(state, limit, min(carried, now)), limit, now)


def outlived(state: State, order: State | None, limit: Limit, now: int) -> State:
    """``state`` as ``limit`` sees it at ``now``; where an order has ended by itself, since then and not from now on."""
    return fit(late(state, [(order, limit)], now), limit, now)


def late(state: State, orders: Iterable[tuple[State | None, Limit]], now: int) -> State:
    """``state`` by the numbers of the limit that counts again, where it has those of an order that has ended.

    Args:
        state: where one of a bucket's limits stands, and nobody need know which.
        orders: those about its limits, which are declared.
        now: the instant of the look.
    """
    for order, limit in orders:
        if order and order.full_at < now and state.numbers == order.numbers:
            return since(order.full_at, state, limit, now)
    return state
