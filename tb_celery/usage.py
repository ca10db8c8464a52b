"""What a series of looks at the buckets tells: how much is used, what waits, and when that is done. It takes nothing.

Nobody counts grants for it. Each one moves the instant at which its limit will be full again by what it costs, so two
looks at the state tell what was taken between them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tb_celery.arithmetic import seconds
from tb_celery.bucket import SECOND
from tb_celery.report import onlooker, seconds_up, told_enforced
from tb_celery.shadow import enforced_by, percent
from tb_celery.status import LimitStatus, in_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tb_celery.bucket import Bucket, Charge, Limit
    from tb_celery.limiter import Limiter
    from tb_celery.state import State
    from tb_celery.stores import Store
    from tb_celery.stores.orders import Orders

LOOKS = 600
"""Looks that are remembered: ten minutes, where there is one a second."""


class Use(NamedTuple):
    """Tokens taken of a bucket, all its keys together, between two instants (nanoseconds of the store's clock)."""

    since: int
    until: int
    tokens: float
    """At least."""
    most: float
    """At most: the bucket was full for a part of the time, if that is more."""


def used(limit: Limit, before: Iterable[int], after: Iterable[int], since: int, until: int) -> Use:
    """What was taken of one limit between two looks, from the instants at which its keys are full again.

    Which instant was which key's before, nobody can tell, and a sum need not know. It is exact for keys that were never
    full in between. Where one was, its instant has moved by idle time as well. What it lacks in the end was taken, and
    a token at least: that is a lower bound where calls cost a token or more.
    """
    had, have = (Counter(at for at in instants if at > since) for instants in (before, after))
    moved, gone = list((have - had).elements()), list((had - have).elements())
    never_full = [at for at in gone if at > until]
    if len(never_full) == len(moved):
        least = sum(moved) - sum(never_full)
    else:
        least = sum(max(at - until, min(at - since, limit.interval)) for at in moved)
        least -= sum(at - until for at in never_full)
    # Those that were full meanwhile may be forgotten, and new ones may have come.
    from_instants = gone if len(gone) == len(moved) else never_full
    most = sum(at - since for at in moved) - sum(at - since for at in from_instants)
    least = max(0, least)
    return Use(since, until, least / limit.interval, max(least, most) / limit.interval)


def rates(uses: Sequence[Use], mark: int, now: int, number: int) -> list[float | None]:
    """Tokens a second in ``number`` spans of ``mark`` nanoseconds; ``None`` where nobody looked.

    The last one ends now, the others at multiples of ``mark``, so that a figure stays what it is while time goes on.
    """
    ends = [*((now // mark - number + place) * mark for place in range(2, number + 1)), now]
    first = ends[0] // mark - 1
    tokens = [0.0] * number
    seen = [0] * number
    for use in reversed(uses):
        if use.until <= min(ends[0], now) - mark:
            break
        aligned = range(max(use.since // mark - first, 0), min(use.until // mark - first + 1, number - 1))
        for place in (*aligned, number - 1):
            shared = min(use.until, ends[place]) - max(use.since, ends[place] - mark)
            if shared > 0:
                tokens[place] += use.tokens * shared / (use.until - use.since)
                seen[place] += shared
    return [taken * SECOND / time if time else None for taken, time in zip(tokens, seen, strict=True)]


@dataclass(frozen=True, slots=True)
class Row:
    """A bucket as it stands, over all its keys.

    Attributes:
        bucket: its name.
        limits: the status of each limit, where several keys are in use that of the emptiest; none if it is unlimited.
        keys: how many keys are not full.
        waiting: tokens that waiting tasks have turns for, and tasks that nodes hold behind those.
        drained_in: seconds until all of these have their tokens; 0.0 when nothing waits.
        now: the instant of the look.
        uses: what was taken between earlier looks, the last one at the end.
        state: what is out of the ordinary: that it is paused, that other numbers were set than those declared, or that
            another process declares others.
    """

    bucket: str
    limits: tuple[LimitStatus, ...] = ()
    keys: int = 0
    waiting: float = 0
    drained_in: float = 0
    now: int = 0
    uses: Sequence[Use] = ()
    state: str = ""

    @property
    def binds(self) -> LimitStatus:
        """The limit that is the nearest to being empty."""
        return min(self.limits, key=lambda seen: seen.tokens / seen.limit.capacity)

    def mean(self, span: float) -> Use | None:
        """What was taken in about so many seconds, the last ones; ``None`` before the second look."""
        uses = [use for use in self.uses if use.until > self.now - span * SECOND]
        if not uses:
            return None
        tokens, most = (sum(figures) for figures in zip(*(use[2:] for use in uses), strict=True))
        return Use(uses[0].since, uses[-1].until, tokens, most)


class Watch:
    """Looks at all the buckets of a limiter, again and again, and remembers what was used between the looks."""

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self._before: dict[tuple[str, Limit], tuple[int, list[int] | None]] = {}
        self._uses: dict[str, deque[Use]] = {name: deque(maxlen=LOOKS) for name in limiter.buckets}

    def look(self, nodes: Mapping[str, Mapping[str, Any]]) -> list[Row]:
        """How every bucket stands now.

        Args:
            nodes: what :func:`tb_celery.explain.node` has told, by node: the tasks they hold.

        Raises:
            StoreError: the state cannot be read.
        """
        return self.rows(self.limiter.buckets, nodes)

    def rows(self, names: Iterable[str], nodes: Mapping[str, Mapping[str, Any]]) -> list[Row]:
        """How some buckets stand now; as :meth:`look`."""
        limiter = onlooker(self.limiter)  # there may be a state file by now
        store = limiter.store
        buckets = {name: limiter.buckets[name] for name in names}
        limited = [bucket for bucket in buckets.values() if bucket is not None]
        looks = {each.name: (*store.read(each.draw(None))[1:], store.orders(each)[1]) for each in limited}
        now, known = store.survey(limited)
        rows = []
        for name, bucket in buckets.items():
            held = [node[name]["held"] for node in nodes.values() if name in node]
            row = Row(name) if bucket is None else self._row(store, bucket, held, *looks[name], known[name], now)
            rows.append(row)
        return rows

    def _row(  # noqa: PLR0913, PLR0917
        self,
        store: Store,
        bucket: Bucket,
        held: Sequence[Mapping[str, float]],
        heard: Sequence[Charge],
        common: Sequence[State],
        orders: Orders,
        known: Sequence[State],
        now: int,
    ) -> Row:
        # The head of a line has a turn, or it takes the next token.
        behind = sum(each["tasks"] - each["lines"] for each in held)
        most = sum(each["most"] for each in held)
        paused = max(orders.paused.values(), default=0)
        left = seconds(max(0, paused - now))
        limits, waiting, drained, keys, uses = [], 0.0, 0.0, 0, []
        for (*_, limit, _), state in zip(heard[: len(bucket.limits)], common, strict=False):
            states = [each for each in known if (each.interval, each.span) == (limit.interval, limit.span)]
            # Where there is none it was used with other numbers alone, or never.
            seen = states or [state]
            emptiest = LimitStatus.of(limit, max(seen, key=lambda each: each.full_at), now, paused)
            limits.append(emptiest)
            line = in_line(limit, seen, now, paused)
            waiting = max(waiting, sum(each.waiting for each in line))
            drained = max(
                drained, *(each.drained_in(most, left) for each in (emptiest, *line) if each.waiting or most), 0.0
            )
            keys = max(keys, sum(each.full_at > now for each in seen))
            # What was written with other numbers moves when the first call is made with these.
            after = None if state.full_at > now and not states else [each.full_at for each in states]
            since, before = self._before.get((bucket.name, limit), (now, None))
            self._before[bucket.name, limit] = now, after
            if before is not None and after is not None and since < now:
                uses.append(used(limit, before, after, since, now))
        if uses:
            # Each call took the same of every limit, and those that fill up slowly are seldom full.
            tokens = max(use.tokens for use in uses)
            most = max(tokens, min(use.most for use in uses))
            self._uses[bucket.name].append(uses[0]._replace(tokens=tokens, most=most))
        differs = any(own != each.limit for own, each in zip(bucket.limits, heard, strict=False))
        word = f"paused {seconds_up(left)}" if left else "set" if orders.limits else "differs" * differs
        word = word or told_enforced(percent(enforced_by(store), bucket.name)).strip(" ()")
        drained = max(drained, left) if waiting or behind else drained
        return Row(bucket.name, tuple(limits), keys, waiting + behind, drained, now, self._uses[bucket.name], word)
