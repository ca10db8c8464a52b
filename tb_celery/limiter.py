"""Names, a store and a clock become decisions: the library's face, for code that is not a task."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from tb_celery.arithmetic import Decision, Place
from tb_celery.bucket import LONGEST_PAUSE, LONGEST_SPAN, SECOND, Bucket, Charge, Limit, pause, positive
from tb_celery.errors import ConfigurationError, hint, shown
from tb_celery.following import Drift, drift, follow, read
from tb_celery.shadow import enforced_by, peek
from tb_celery.status import Status, look
from tb_celery.stores.orders import change
from tb_celery.waiting import Waiting, asker_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from fractions import Fraction

    from tb_celery.feedback import Feedback
    from tb_celery.stores import Store

logger = logging.getLogger("tb_celery")

REMEMBERED = 1 << 14
"""Calls (bucket, cost, key) whose charges a limiter keeps worked out."""
LONGEST_KEY = 256
"""Characters of a key that is worth remembering."""
FOR_GOOD = LONGEST_SPAN // 2
"""Nanoseconds (36 years) that an order without an end stands for."""


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
        self._charges: dict[tuple[object, float, str | None], tuple[Charge, ...]] = {}
        self._told: set[Drift] = set()

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
            charges = self._charges[bucket, cost, key]
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
        now, heard, states = self.store.read(charges)
        return peek(enforced_by(self.store), heard, states, now)

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
            A decision that is true unless the time-out is too short.
        """
        charges = self.charges(bucket, cost, key=key)
        return self.wait_for(charges, timeout=timeout) if charges else self._unlimited(bucket)

    def wait_for(self, charges: tuple[Charge, ...], *, timeout: float | None = None, lot: float = 100.0) -> Decision:
        """:meth:`wait` for charges that are worked out already; ``lot`` is as in a :class:`Place`."""
        asking = Waiting(self.store, charges, timeout, lot)
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
        asking = Waiting(self.store, charges, timeout)
        loop = asyncio.get_running_loop()
        while (pause := await loop.run_in_executor(asker_of(loop), asking.ask)) is not None:
            await self.store.clock.sleep_async(pause)
        return asking.decision

    def status(self, bucket: str, *, key: str | None = None) -> Status:
        """How full a bucket is, without taking a token or making any state."""
        [status] = self.statuses([bucket], key=key)
        return status

    def statuses(self, buckets: Iterable[str], *, key: str | None = None) -> list[Status]:
        """:meth:`status` of several buckets, from one look at all that the store remembers."""
        declared = {name: self._declared(name, key) for name in buckets}
        found = look(self.store, [bucket for bucket in declared.values() if bucket is not None], key)
        return [found.get(name) or Status(name, (), 0) for name in declared]

    def reset(self, bucket: str, *, key: str | None = None) -> int:
        """Make a bucket (every key of it, or one) full again; the number of limits that were not."""
        declared = self._declared(bucket, key)
        return 0 if declared is None else self.store.reset(declared, key)

    # -- what is ordered while it runs: everybody heeds it from their next decision on

    def pause(self, bucket: str, duration: float, *, key: str | None = None) -> None:
        """Give nobody tokens of a bucket (of all its keys, or one) for so many seconds. A longer pause stands.

        Raises:
            ConfigurationError: the bucket is unknown or not limited, or the duration is no number above 0, or over
                :data:`~tb_celery.bucket.LONGEST_PAUSE`.
        """
        self._limited(bucket, key)
        span = math.ceil(positive("duration", duration) * SECOND)
        if span > LONGEST_PAUSE:
            message = f"bucket {bucket!r} can be paused for {LONGEST_PAUSE // SECOND} s at most, not {shown(duration)}"
            raise ConfigurationError(message)
        self.store.order(pause(bucket, key), span)

    def resume(self, bucket: str, *, key: str | None = None) -> None:
        """End a pause. One of a single key ends with that key, and that of all keys without one.

        Raises:
            ConfigurationError: the bucket is unknown or not limited.
        """
        self._limited(bucket, key)
        self.store.order(pause(bucket, key), 0)

    def set(
        self,
        bucket: str,
        *,
        refill_rate: float | None = None,
        capacity: float | None = None,
        limit: int | None = None,
        duration: float | None = None,
    ) -> Limit:
        """Have a bucket fill at another rate, or hold more or fewer tokens, than its settings declare.

        The tokens that are there stay what they are, and the new rate counts from now. A call that costs more than the
        bucket then holds needs a full one, and owes the rest.

        Args:
            bucket: its name.
            refill_rate: tokens a second; as declared unless given.
            capacity: tokens; as declared unless given.
            limit: which, where the bucket has several: 0 is the one with the fastest refill, as :meth:`status` has it.
            duration: seconds after which the declared numbers count again; ``None`` for good.

        Returns:
            The limit that counts now.

        Raises:
            ConfigurationError: the bucket is unknown or not limited, it has several limits and none was named, or a
                number is wrong.
        """
        place, declared = self._one_limit(bucket, limit)
        try:
            changed = Limit(
                declared.capacity if capacity is None else capacity,
                declared.refill_rate if refill_rate is None else refill_rate,
            )
            span = FOR_GOOD if duration is None else math.ceil(positive("duration", duration) * SECOND)
        except ConfigurationError as error:
            message = f"bucket {bucket!r}: {error}"
            raise ConfigurationError(message) from None
        self.store.order(change(bucket, place, changed), min(span, FOR_GOOD), declared)
        return changed

    def unset(self, bucket: str, *, limit: int | None = None) -> None:
        """Have the declared numbers count again.

        Raises:
            ConfigurationError: as for :meth:`set`.
        """
        place, declared = self._one_limit(bucket, limit)
        self.store.order(change(bucket, place, declared), 0, declared)

    def settle(self, bucket: str, taken: float, actual: float, *, key: str | None = None) -> None:
        """Tell what a call cost after all, once that is known: the difference is drawn, or given back.

        A bucket can owe more than it holds, and later calls wait until that is paid; it is never more than full.

        Args:
            bucket: its name.
            taken: tokens that were taken for the call.
            actual: tokens that it cost; 0 where it never left the host.
            key: which of the bucket's quotas they were taken from.

        Raises:
            ConfigurationError: the bucket is unknown, or a cost is not a number.
            StoreError: the state cannot be read or written; nothing was settled.
        """
        declared = self._declared(bucket, key)
        if declared is None:
            return
        more = (positive("actual", actual) if actual else 0) - positive("taken", taken)
        self.settle_by(declared.draw(key), more)

    def settle_by(self, charges: Sequence[Charge], more: Fraction) -> None:
        """Draw so many tokens more from each limit that was charged, or give back where that is below 0."""
        self.store.settle([charge._replace(cost=math.ceil(more * charge.limit.interval)) for charge in charges])

    def observe(  # noqa: PLR0913
        self,
        bucket: str,
        response: object,
        status: int | None = None,
        *,
        cost: float = 1,
        key: str | None = None,
        rejected: Callable[[Mapping[str, str], int | None], bool | None] | None = None,
    ) -> Feedback:
        """Heed what the other side says of its limits in a response, for everybody who draws from the bucket.

        It is paused when the call was turned down for coming too soon, or when no call is left. When fewer calls are
        left than there are tokens for, the tokens beyond are taken away; none are added.

        Args:
            bucket: its name.
            response: of requests, httpx, aiohttp, urllib or boto3, an error that has one, or headers by themselves.
            status: of HTTP; where it is ``None``, that of the response.
            cost: tokens that a call takes.
            key: which of the bucket's quotas the call was made for.
            rejected: as for :func:`tb_celery.feedback.observe`.

        Returns:
            What it says.

        Raises:
            ConfigurationError: the bucket is unknown, or the cost could never be met.
            StoreError: the state cannot be read or written.
        """
        charges = self.charges(bucket, cost, key=key)
        feedback = read(response, status, rejected, now=self.store.clock.wall() / SECOND)
        self.follow(charges, feedback)
        return feedback

    def follow(self, charges: Sequence[Charge], feedback: Feedback) -> float:
        """:meth:`observe` for what is read already: the seconds for which a bucket was paused, or 0.

        Args:
            charges: what one call draws, limit by limit.
            feedback: what the other side said.
        """
        for bucket, cost in {charge.bucket: charge.cost / charge.limit.interval for charge in charges}.items():
            told = drift(self._limited(bucket), cost, feedback)
            if told and told not in self._told and len(self._told) < REMEMBERED:
                self._told.add(told)
                logger.log(told.level, "%s", told.sentence)
        return follow(self.store, charges, feedback) if charges else 0.0

    def _limited(self, name: str, key: str | None = None) -> Bucket:
        bucket = self._declared(name, key)
        if bucket is None:
            message = f"bucket {name!r} is not limited, so there is nothing to pause or change"
            raise ConfigurationError(message)
        return bucket

    def _one_limit(self, name: str, place: int | None) -> tuple[int, Limit]:
        """The number of one of a bucket's limits, and the limit."""
        limits = self._limited(name).limits
        is_one = len(limits) == 1 if place is None else isinstance(place, int) and place in range(len(limits))
        if not is_one:
            those = ", ".join(
                f"{i}: {limit.capacity} at {float(limit.refill_rate):g}/s" for i, limit in enumerate(limits)
            )
            message = f"bucket {name!r} has {len(limits)} limits; say which: {those}"
            raise ConfigurationError(message)
        place = place or 0
        return len(limits) - 1 - place, limits[place]

    # -- what a call draws

    def charges(
        self, bucket: str | Mapping[str, float], cost: float = 1, *, key: str | None = None
    ) -> tuple[Charge, ...]:
        """What a call draws, limit by limit; empty where none of its buckets is limited.

        Raises:
            ConfigurationError: a bucket is unknown, or a cost could never be met.
        """
        costs = tuple(bucket.items()) if not isinstance(bucket, str) and isinstance(bucket, Mapping) else None
        called = (bucket if costs is None else costs), cost, key
        # True is 1 to a dictionary, and not a number of tokens.
        if cost is not True and bool not in [type(tokens) for _, tokens in costs or ()]:
            try:
                known = self._charges.get(called)
            except TypeError:
                known = None
            if known is not None:
                return known
        drawn = self._draw([(cast("str", bucket), cost)] if costs is None else costs, key)
        if len(key or "") <= LONGEST_KEY:
            if len(self._charges) >= REMEMBERED:
                # Several at once, as finding the oldest takes time.
                for oldest in list(self._charges)[: 1 + REMEMBERED // 64]:
                    self._charges.pop(oldest, None)
            self._charges[called] = drawn
        return drawn

    def _draw(self, costs: Sequence[tuple[str, float]], key: str | None) -> tuple[Charge, ...]:
        if not costs:
            message = "nothing is asked: name a bucket, or buckets with the cost from each, such as {'twitter_api': 1}"
            raise ConfigurationError(message)
        charges: list[Charge] = []
        for name, tokens in costs:
            declared = self._declared(name, key)
            if declared is not None:
                charges += declared.draw(key, declared.charge(tokens))
        return tuple(charges)

    def _unlimited(self, bucket: str | Mapping[str, float]) -> Decision:
        now = self.store.clock.now()
        name = bucket if isinstance(bucket, str) else next(iter(bucket))
        return Decision(now, now, Charge(name, None, 0, cast("Limit", None), 0), now)

    def _declared(self, name: str, key: str | None = None) -> Bucket | None:
        if not isinstance(name, str):
            message = f"bucket must be a name such as 'twitter_api', or a dict of costs by name, not {shown(name)}"
            raise ConfigurationError(message)
        if key is not None and not isinstance(key, str):
            message = f"bucket {shown(name)}: key must be a string, not {shown(key)}"
            raise ConfigurationError(message)
        try:
            return self.buckets[name]
        except KeyError:
            message = f"bucket {shown(name)} is not declared in the setting buckets; {hint(name, self.buckets)}"
            raise ConfigurationError(message) from None
