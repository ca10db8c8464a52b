"""Names, a store and a clock become decisions: the library's face, for code that is not a task."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from tb_celery.arithmetic import Decision, Place, look, lost, seconds
from tb_celery.bucket import LONGEST_SPAN, SECOND, Bucket, Charge, Limit
from tb_celery.errors import ConfigurationError, shown

if TYPE_CHECKING:
    from tb_celery.stores import Store

REMEMBERED = 1 << 14
"""Calls (bucket, cost, key) whose charges a limiter keeps worked out."""
LONGEST_KEY = 256
"""Characters of a key that is worth remembering."""
LISTED = 20
"""Buckets that are listed to those who name another one."""
LONGEST_TYPO = 200
"""Characters of a name that are compared with those declared: it takes time by the square."""


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """One limit of a bucket, seen without taking anything.

    Attributes:
        limit: its numbers.
        tokens: at hand now.
        wait: seconds until there is one token more for a plain caller; 0.0 when there is one.
        waiting: tokens that tasks in line still have turns for.
    """

    limit: Limit
    tokens: float
    wait: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Status:
    """A bucket, or one key of it, seen without taking anything; ``keys`` counts its keys that are not full."""

    bucket: str
    limits: tuple[LimitStatus, ...]
    keys: int


class Limiter:
    """Asks declared buckets for tokens. Safe for threads, asyncio and forks as far as its store is.

    Args:
        buckets: the declared buckets, by name; ``None`` in place of one means that it is not limited.
        store: where their state lives.
    """

    def __init__(self, buckets: Mapping[str, Bucket | None] | Iterable[Bucket], store: Store) -> None:
        named = buckets.items() if isinstance(buckets, Mapping) else [(getattr(it, "name", None), it) for it in buckets]
        self.buckets: dict[str, Bucket | None] = {}
        for name, bucket in named:
            if not isinstance(name, str) or not isinstance(bucket, Bucket | None):
                message = (
                    f"buckets must be Bucket objects by name (None: not limited), not {shown(name)}: {shown(bucket)}"
                )
                raise ConfigurationError(message)
            if name in self.buckets or (bucket is not None and bucket.name != name):
                message = (
                    f"bucket {bucket.name if bucket else name!r} is declared twice, or under another name: {name!r}"
                )
                raise ConfigurationError(message)
            self.buckets[name] = bucket
        self.store = store
        self._charges: dict[tuple[str, float, str | None], tuple[Charge, ...]] = {}

    def acquire(
        self, bucket: str | Mapping[str, float], cost: float = 1, *, key: str | None = None, place: Place | None = None
    ) -> Decision:
        """Ask for ``cost`` tokens now and answer at once; no one waits, and a refusal changes nothing.

        Args:
            bucket: a name, or names with the cost from each: all or nothing.
            cost: tokens, where ``bucket`` is one name.
            key: which of the bucket's independent quotas; ``None`` for the common one.
            place: the caller's place in line; only for those who come back at their turn.

        Returns:
            A decision that is true when the tokens were taken, and else tells the ``wait``.

        Raises:
            ConfigurationError: the bucket is unknown, or the cost could never be met.
            StoreError: the state cannot be read or written; nothing was taken.
        """
        try:
            charges = self._charges[bucket, cost, key]  # type: ignore[index]
        except (KeyError, TypeError):
            charges = self.charges(bucket, cost, key=key)
        if cost is True:  # which is 1 to a dictionary, and not a number of tokens
            charges = self.charges(bucket, cost, key=key)
        return self.store.acquire(charges, place) if charges else self._unlimited(bucket)

    def peek(self, bucket: str | Mapping[str, float], cost: float = 1, *, key: str | None = None) -> Decision:
        """What :meth:`acquire` would answer now, with nothing taken; ``tokens`` are those before the call."""
        charges = self.charges(bucket, cost, key=key)
        if not charges:
            return self._unlimited(bucket)
        now, states = self.store.read(charges)
        return look(charges, states, now)

    def wait(
        self,
        bucket: str | Mapping[str, float],
        cost: float = 1,
        *,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Decision:
        """Take a turn, sleep until it, and take the tokens.

        Args:
            bucket: as for :meth:`acquire`.
            cost: as for :meth:`acquire`.
            key: as for :meth:`acquire`.
            timeout: seconds that the caller is ready to wait; when its turn would be later, the answer is a refusal, at
                once, and the line stays as it was. ``None`` waits for as long as it takes.

        Returns:
            The decision: true unless the time-out is too short.
        """
        charges = self.charges(bucket, cost, key=key)
        return self.wait_for(charges, timeout=timeout) if charges else self._unlimited(bucket)

    def wait_for(self, charges: tuple[Charge, ...], *, timeout: float | None = None) -> Decision:
        """:meth:`wait` for charges that are worked out already."""
        asking = _Waiting(self.store, charges, timeout)
        while (pause := asking.ask()) is not None:
            self.store.clock.sleep(pause)
        return asking.decision

    async def wait_async(
        self,
        bucket: str | Mapping[str, float],
        cost: float = 1,
        *,
        key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> Decision:
        """:meth:`wait` for coroutines: the event loop goes on meanwhile."""
        charges = self.charges(bucket, cost, key=key)
        if not charges:
            return self._unlimited(bucket)
        asking = _Waiting(self.store, charges, timeout)
        loop = asyncio.get_running_loop()
        while (pause := await loop.run_in_executor(_asker_of(loop), asking.ask)) is not None:
            await self.store.clock.sleep_async(pause)
        return asking.decision

    def status(self, bucket: str, *, key: str | None = None) -> Status:
        """How full a bucket is, without taking a token or making any state."""
        declared = self._declared(bucket)
        if declared is None:
            return Status(bucket, (), 0)
        now, states = self.store.read(declared.draw(key))
        _, known = self.store.survey(declared)
        limits = []
        keys = 0
        for limit, state in zip(declared.limits, states, strict=True):
            one_more = max(state.full_at, now) + limit.charge(min(1, limit.capacity)) - limit.span - now
            ahead = 0 if lost(state, now) else max(0, state.booked_at - max(state.full_at, now))
            waiting = round(ahead / limit.interval, 3)  # costs have three decimals; below them are rounded instants
            limits.append(LimitStatus(limit, limit.tokens(state.full_at, now), seconds(max(0, one_more)), waiting))
            same = [each for each in known if (each.interval, each.span) == (limit.interval, limit.span)]
            keys = max(keys, sum(each.full_at > now for each in same))
        return Status(bucket, tuple(limits), keys)

    def reset(self, bucket: str, *, key: str | None = None) -> int:
        """Make a bucket (every key of it, or one) full again; the number of limits that were not."""
        declared = self._declared(bucket)
        return 0 if declared is None else self.store.reset(declared, key)

    def charges(
        self, bucket: str | Mapping[str, float], cost: float = 1, *, key: str | None = None
    ) -> tuple[Charge, ...]:
        """What a call draws, limit by limit; empty where none of its buckets is limited.

        Raises:
            ConfigurationError: a bucket is unknown, or a cost could never be met.
        """
        if cost is not True:  # which is 1 to a dictionary, and not a number of tokens
            with suppress(KeyError, TypeError):
                return self._charges[bucket, cost, key]  # type: ignore[index]
        if key is not None and not isinstance(key, str):
            message = f"bucket {shown(bucket)}: key must be a string, not {shown(key)}"
            raise ConfigurationError(message)
        costs = bucket.items() if isinstance(bucket, Mapping) else [(bucket, cost)]
        if not costs:
            message = "nothing is asked: name a bucket, or buckets with the cost from each, such as {'twitter_api': 1}"
            raise ConfigurationError(message)
        charges: list[Charge] = []
        for name, tokens in costs:
            declared = self._declared(name)
            if declared is not None:
                charges += declared.draw(key, declared.charge(tokens))
        drawn = tuple(charges)
        if isinstance(bucket, str) and len(key or "") <= LONGEST_KEY:
            if len(self._charges) >= REMEMBERED:
                # Several at once, as finding the oldest takes time.
                for oldest in list(self._charges)[: 1 + REMEMBERED // 64]:
                    self._charges.pop(oldest, None)
            self._charges[bucket, cost, key] = drawn
        return drawn

    def _unlimited(self, bucket: str | Mapping[str, float]) -> Decision:
        now = self.store.clock.now()
        name = bucket if isinstance(bucket, str) else next(iter(bucket))
        return Decision(now, now, Charge(name, None, 0, cast("Limit", None), 0), now)

    def _declared(self, name: str) -> Bucket | None:
        if not isinstance(name, str):
            message = f"bucket must be a name such as 'twitter_api', or a dict of costs by name, not {shown(name)}"
            raise ConfigurationError(message)
        try:
            return self.buckets[name]
        except KeyError:
            close = get_close_matches(name[:LONGEST_TYPO], self.buckets, 1)
            known = (", ".join(islice(self.buckets, LISTED)) or "none") + ", ..." * (len(self.buckets) > LISTED)
            hint = f"did you mean {close[0]!r}?" if close else f"declared are: {known}"
            message = f"bucket {shown(name)} is not declared in the setting buckets; {hint}"
            raise ConfigurationError(message) from None


_askers: WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor] = WeakKeyDictionary()


def _asker_of(loop: asyncio.AbstractEventLoop) -> ThreadPoolExecutor:
    """The thread in which coroutines of ``loop`` ask: others may hold the lock. One, so that order is kept."""
    if loop not in _askers:
        _askers[loop] = ThreadPoolExecutor(1, "tb_celery")
    return _askers[loop]


class _Waiting:
    """The steps of one caller in line, without the sleeping."""

    def __init__(self, store: Store, charges: tuple[Charge, ...], timeout: float | None) -> None:
        self._store = store
        self._charges = charges
        number = isinstance(timeout, int | float | Fraction) and not isinstance(timeout, bool)
        if timeout is not None and (not number or timeout != timeout):  # noqa: PLR0124 - nan differs from itself
            message = f"timeout must be a number of seconds, not {shown(timeout)}"
            raise ConfigurationError(message)
        if timeout is None or timeout >= LONGEST_SPAN / SECOND:
            self._deadline = None
        else:
            self._deadline = store.clock.now() + math.ceil(timeout * SECOND)
        self._turn: int | None = None

    def ask(self) -> float | None:
        """Ask once; the seconds to sleep before the next ask, or ``None`` when :attr:`decision` is final."""
        longest = None if self._deadline is None else max(0, self._deadline - self._store.clock.now())
        # Patience without end: this caller stays here, so its turn may be as soon as the tokens are.
        place = Place(turn=self._turn, patience=LONGEST_SPAN, longest=longest)
        self.decision = self._store.acquire(self._charges, place)
        if self.decision or (longest is not None and self.decision.at - self.decision.now > longest):
            return None
        self._turn = self.decision.at
        return self.decision.wait
