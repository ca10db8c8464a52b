"""How a bucket stands, seen without taking anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tb_celery.arithmetic import seconds, waiting
from tb_celery.periods import FOR_GOOD
from tb_celery.shadow import enforced_by, percent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from tb_celery.bucket import Bucket, Charge, Limit
    from tb_celery.state import State
    from tb_celery.stores import Store
    from tb_celery.stores.orders import Orders


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """One limit of a bucket.

    Attributes:
        limit: its numbers.
        tokens: at hand now.
        wait: seconds until there is one token more for a plain caller; 0.0 when there is one.
        waiting: tokens that tasks in line still have turns for.
        declared: the limit in whose place ``limit`` counts; ``None`` as a rule.
        ends: seconds until that is the one again; ``None`` if another was set for good, or is declared elsewhere.
        elsewhere: whether nobody has set ``limit``, but a process that asks declares less than this one.
    """

    limit: Limit
    tokens: float
    wait: float
    waiting: float
    declared: Limit | None = None
    ends: float | None = None
    elsewhere: bool = False

    @classmethod
    def of(
        cls,
        limit: Limit,
        state: State,
        now: int,
        paused: int = 0,
        changed: tuple[Limit, float | None, bool] | None = None,
    ) -> LimitStatus:
        """What ``state`` tells at ``now``; it was written with the numbers of ``limit``.

        Args:
            limit: the one that counts.
            state: where it stands.
            now: the instant of the look.
            paused: the instant until which its bucket is paused, before which there are no turns.
            changed: the limit that is declared, seconds until it counts again, and whether another is declared
                elsewhere, where it is another.
        """
        one_more = max(state.full_at, now) + limit.charge(min(1, limit.capacity)) - limit.span - now
        in_line = round(waiting(state, now, paused) / limit.interval, 3)  # costs have three decimals
        tokens = limit.tokens(state.full_at, now)
        return cls(limit, tokens, seconds(max(0, one_more)), in_line, *(changed or ()))

    def drained_in(self, behind: float = 0, paused: float = 0) -> float:
        """Seconds until the tokens are there for everyone in line, and for those who want ``behind`` tokens more.

        Args:
            behind: tokens.
            paused: seconds for which nobody gets any.
        """
        rate = float(self.limit.refill_rate)
        tokens = min(self.tokens + paused * rate, float(self.limit.capacity)) if paused else self.tokens
        return paused + max(0.0, (self.waiting + behind - tokens) / rate)


def in_line(limit: Limit, states: Iterable[State], now: int, paused: int = 0) -> list[LimitStatus]:
    """How those of a limit's keys stand that turns are booked for; there may be many keys, most of them without."""
    return [LimitStatus.of(limit, each, now, paused) for each in states if each.booked_at > max(each.full_at, now)]


@dataclass(frozen=True, slots=True)
class Status:
    """A bucket, or one key of it.

    Attributes:
        bucket: its name.
        limits: those of the key that was asked for, or of the common quota, from the fastest refill to the slowest;
            none where the bucket is not limited.
        keys: how many of its keys, this one among them, are not full.
        paused: seconds that it is paused for; 0.0 when it is not.
        enforced: the percentage of tasks for which it is; where that is 0, the rest tells of its copy.
        waiting: tokens that tasks in line have turns for, of all its keys together.
    """

    bucket: str
    limits: tuple[LimitStatus, ...]
    keys: int
    paused: float = 0.0
    enforced: float = 100.0
    waiting: float = 0.0


def look(store: Store, buckets: Collection[Bucket], key: str | None = None) -> dict[str, Status]:
    """How some buckets stand, or one key of each, with one look at all that the store remembers.

    Raises:
        StoreError: the state cannot be read.
    """
    if not buckets:
        return {}
    _, known = store.survey(buckets)  # first: what is in use must not look full by a draw in between
    asked = {each.name: (*store.read(each.draw(key)), store.orders(each, key)[1]) for each in buckets}
    enforce = enforced_by(store)
    return {
        each.name: _status(each, *asked[each.name], known[each.name], percent(enforce, each.name)) for each in buckets
    }


def _status(  # noqa: PLR0913, PLR0917
    bucket: Bucket,
    now: int,
    heard: Iterable[Charge],
    states: Iterable[State],
    orders: Orders,
    known: Iterable[State],
    enforced: float,
) -> Status:
    paused = max(orders.paused.values(), default=0)
    limits, keys, waiting = [], 0, 0.0
    for written, (*_, number, limit, _), state in zip(bucket.limits, heard, states, strict=False):
        _, until = orders.limits.get(number, (limit, 0))
        ends = seconds(until - now) if until - now < FOR_GOOD else None
        elsewhere = until <= now and limit.numbers != written.numbers
        changed = (written, None if elsewhere else ends, elsewhere) if until > now or elsewhere else None
        limits.append(LimitStatus.of(limit, state, now, paused, changed))
        same = [each for each in known if (each.interval, each.span) == (limit.interval, limit.span)]
        keys = max(keys, sum(each.full_at > now for each in same))
        waiting = max(waiting, sum(each.waiting for each in in_line(limit, same, now, paused)))
    return Status(bucket.name, tuple(limits), keys, seconds(max(0, paused - now)), enforced, waiting)
