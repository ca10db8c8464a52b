"""Names, a store and a clock become decisions: the library's face, for code that is not a task."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from tb_celery.bucket import LONGEST_SPAN, SECOND, Bucket, Charge, Decision, Limit, Place, look, lost, seconds
from tb_celery.errors import ConfigurationError

if TYPE_CHECKING:
    from tb_celery.stores import Store

REMEMBERED = 1 << 14
"""Calls (bucket, cost, key) whose charges a limiter keeps worked out."""


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
        named = buckets.items() if isinstance(buckets, Mapping) else [(bucket.name, bucket) for bucket in buckets]
        self.buckets: dict[str, Bucket | None] = {}
        for name, bucket in named:
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
            limits.append(
                LimitStatus(limit, limit.tokens(state.full_at, now), seconds(max(0, one_more)), ahead / limit.interval)
            )
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
        if type(bucket) is str and cost is not True:
            # True is 1 to a dictionary, and not a number of tokens.
            try:
                return self._charges[bucket, cost, key]
            except (KeyError, TypeError):
                pass
        if key is not None and not isinstance(key, str):
            message = f"bucket {bucket!r}: key must be a string, not {key!r}"
            raise ConfigurationError(message)
        costs = bucket if isinstance(bucket, Mapping) else {bucket: cost}
        charges: list[Charge] = []
        for name, tokens in costs.items():
            declared = self._declared(name)
            if declared is not None:
                charges += declared.draw(key, declared.charge(tokens))
        if isinstance(bucket, str):
            if len(self._charges) >= REMEMBERED:
                self._charges.clear()
            self._charges[bucket, cost, key] = tuple(charges)
        return tuple(charges)

    def _unlimited(self, bucket: str | Mapping[str, float]) -> Decision:
        now = self.store.clock.now()
        name = bucket if isinstance(bucket, str) else next(iter(bucket), "")
        return Decision(now, now, Charge(name, None, 0, cast("Limit", None), 0), now)

    def _declared(self, name: str) -> Bucket | None:
        try:
            return self.buckets[name]
        except KeyError:
            close = get_close_matches(name, self.buckets, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"declared are: {', '.join(self.buckets) or 'none'}"
            message = f"bucket {name!r} is not declared in the setting buckets; {hint}"
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
        if timeout is not None and timeout != timeout:  # noqa: PLR0124 - not a number
            message = "timeout must be a number of seconds, not nan"
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
