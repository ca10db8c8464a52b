"""One delivery of a limited task: ask its buckets, then let the body run or send the message back until its turn."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from celery import states
from celery.exceptions import Retry, SoftTimeLimitExceeded
from celery.utils.time import maybe_iso8601, maybe_make_aware

from tb_celery.arithmetic import Place, seconds
from tb_celery.bucket import LONGEST_SPAN, SECOND
from tb_celery.errors import ConfigurationError, RateLimitExceeded, StoreError, shown
from tb_celery.reschedule import Dropped, Ticket, delivered_of, send_back, store_state
from tb_celery.rules import DROP, FAIL
from tb_celery.shadow import ALL, lot_of
from tb_celery.terms import WAIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery.app.task import Context

    from tb_celery.arithmetic import Decision
    from tb_celery.bucket import Charge
    from tb_celery.quota import LimitedTask, Quota
    from tb_celery.reschedule import Grant
    from tb_celery.terms import Terms

logger = logging.getLogger("tb_celery")

IN_PLACE = 50_000_000
"""Nanoseconds that a delivery may wait for its turn in the pool: going back to the queue costs more."""
GRANTED = 100_000_000
"""Nanoseconds for which tokens count that were taken before the delivery got to the pool; later it asks anew. For slow
limits it is a tenth of the time that a token takes, up to a second."""
STORE_RETRY = 5.0
"""Seconds after which a task asks again when the store failed; up to half as much is added, by task id."""
PUBLISH_RETRY = 10.0
"""Seconds after which a task that waits in place, because the broker took no copy, tries to publish again."""
place_of = functools.lru_cache(maxsize=16)(Place)
"""Most tasks ask for one and the same, of which making another one takes longer."""


class Delivery:
    """One delivery's way to its tokens, or that of one of many calls in one.

    Args:
        task: what is to run.
        request: the delivery's.
        quota: what the tasks of its application share.
        terms: those that the delivery runs on.
        charges: what is drawn.
        max_wait: seconds from the first refusal after which it gives up.
        ticket: what the message carries.
        is_inner: whether this is one of many calls in the delivery.

    Attributes:
        quota: what the tasks of its application share.
        charges: what it draws.
        settled: what it has drawn after all, where that was told; else ``None``.
        decision: the last answer; ``None`` before the first, and when the store failed.
        countdown: seconds until the delivery should be back, after a refusal.
        ticket: what its message then carries.
        lot: as in a :class:`Place`.
    """

    settled: Sequence[Charge] | None = None
    decision: Decision | None = None
    countdown = 0.0
    _error: StoreError | RateLimitExceeded | None = None
    _since = 0

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        task: LimitedTask,
        request: Context,
        quota: Quota,
        terms: Terms,
        charges: tuple[Charge, ...],
        max_wait: float | None,
        ticket: Ticket,
        *,
        is_inner: bool = False,
    ) -> None:
        self.quota = quota
        self.charges = charges
        self.ticket = ticket
        self.lot = quota.lot(request.id)
        self._task = task
        # Not the request itself, which holds this.
        self._id = request.id
        self._expires = request.expires
        self._is_here = is_inner or request.is_eager
        self._is_inner = is_inner
        self._store = quota.limiter.store
        self._terms = terms
        self._max_wait = max_wait
        if quota.metrics is not None or self._is_here:
            self._since = ticket.since or self._store.clock.wall()

    @property
    def settling(self) -> threading.Lock:
        """Held by who tells what was drawn after all; few do."""
        lock: threading.Lock = vars(self).setdefault("_settling", threading.Lock())
        return lock

    def come_by_tokens(self) -> None:
        """Wait for the turn here where the call cannot be sent back, or else send it back until then.

        Raises:
            Retry: a copy of the message is under way and will return at the task's turn.
            Dropped: the task is dropped.
            RateLimitExceeded: the task is to fail when refused, or its turn would be later than it may wait.
            StoreError: the store failed, and that is a reason to fail.
        """
        if self._is_here:
            # Celery would run a retry at once, inside itself, until the stack is full.
            self._wait_in_line()
            return
        while not self.ask():
            self.leave()

    def leave(self) -> None:
        """Send the message back until it is due; where no copy can be published, wait for that here.

        Raises:
            Retry: a copy is under way.
        """
        task = self._task
        delivered = delivered_of(task.request)
        if delivered.get("subscribed"):
            # Sent where it came from, it would come to all who listen there.
            self._store.clock.sleep(self.countdown)
            return
        retry = self._retry()
        try:
            straight_to = self.quota.straight_to(delivered)
            store_state(task, states.RETRY, retry.exc)
            send_back(task, self.countdown, self.ticket, straight_to)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001
            # This process may hold the only copy there is: wait with it, and try again to let it go.
            logger.warning("%s[%s] waits in the worker, no copy could be published: %s", task.name, self._id, error)
            self._store.clock.sleep(min(self.countdown, PUBLISH_RETRY))
        else:
            if self.quota.metrics:
                bucket = self.decision.bucket if self.decision is not None else self.charges[0].bucket
                self.quota.metrics.deferred(bucket)
            raise retry

    def put_off(self, duration: float, error: StoreError | RateLimitExceeded) -> None:
        """:meth:`leave` for so many seconds, without a turn, because of ``error``; wait here if it cannot be sent back.

        Raises:
            Retry: a copy is under way.
            StoreError: that is the error, and the call may not wait here for so long.
            RateLimitExceeded: likewise.
        """
        if self._is_here:
            timeout = self._patience_here()
            if timeout is not None and duration > timeout:
                raise error
            self._store.clock.sleep(duration)
            return
        self._error = error
        self.countdown = max(min(duration, self.quota.settings.max_countdown), self.quota.soonest)
        self._send(0)
        self.leave()

    def pass_with(self, grant: Grant) -> bool:
        """Whether the tokens were taken already, by the worker that held the request, and a moment ago."""
        clock = self._store.clock
        if grant.clock != clock.identity:
            return False
        # A process knows a server's clock only as well as its answers were quick: it may seem not to be so late yet.
        if abs(clock.now() - grant.decision.now) > max(GRANTED, self._lateness):
            return False
        self.decision = grant.decision
        self._since -= 0 if self.ticket.since else int(grant.held * SECOND)
        return True

    def _patience_here(self) -> float | None:
        """Seconds from now that a call may wait which cannot be sent back."""
        longest = None if self._is_inner else self.quota.settings.max_eager_wait
        timeout = min([each for each in (self._max_wait, longest) if each is not None], default=None)
        return None if timeout is None else max(0.0, timeout - (self._store.clock.wall() - self._since) / SECOND)

    def _wait_in_line(self) -> None:
        timeout = self._patience_here()
        try:
            decision = None if self._terms.waits else self._at_once(None)
            decision = decision or self.quota.limiter.wait_for(self.charges, timeout=timeout, lot=self.lot)
        except StoreError as error:
            if self.quota.settings.on_store_error != "allow":
                raise
            logger.warning("%s[%s] runs without a token: %s", self._task.name, self._id, error)
            self.decision = None
            return
        except Dropped:
            refused = self.decision
            if not self._is_inner or refused is None:
                raise
            # The other calls of this delivery are not dropped with this one.
            raise RateLimitExceeded(refused.bucket, refused.wait, paused=refused.paused) from None
        if not decision:
            raise RateLimitExceeded(decision.bucket, decision.wait, paused=decision.paused)
        self.decision = decision

    def ask(self) -> bool:
        """Whether the body may run now; waits of a few milliseconds are slept out here."""
        self._error = None
        ticket, clock = self.ticket, self._store.clock
        turn = None if not ticket.turn else ticket.turn if ticket.clock == clock.identity else 0
        try:
            if not self._terms.waits:
                self.decision = self._at_once(turn)
                if self.decision:
                    return True
            patience = IN_PLACE
            if turn is not None and turn - clock.now() <= patience:
                # Its tokens come, too, but for what others were late by: sent away it would lose its place.
                patience = self._lateness
            while True:
                decision = self._store.acquire(self.charges, self._place(turn, patience))
                pause = decision.at - decision.now
                if pause <= 0:
                    self.decision = decision
                    return True
                if pause > patience:
                    break
                clock.sleep(seconds(pause))
                patience -= pause
                if decision.booked:
                    turn = decision.at
        except StoreError as error:
            return self._store_failed(error)
        self.decision = decision
        self._refused(decision)
        return False

    def _at_once(self, turn: int | None) -> Decision | None:
        """The tokens for a task that may not wait: it is given no turn, for others would have to wait for that.

        Returns:
            ``None`` where it may wait, because a function of the user's says so now, or is on its way to a turn that
            was booked for it.

        Raises:
            RateLimitExceeded: it is refused, and is to fail.
            Dropped: it is refused, and is to be dropped.
        """
        if turn is not None and turn > self._store.clock.now():
            return None
        decision = self._store.acquire(self.charges, Place(turn, longest=0, lot=self.lot))
        if decision:
            return decision
        on_reject = self._terms.on_reject(decision.bucket)
        choice = on_reject(decision) if callable(on_reject) else on_reject
        if choice == FAIL:
            raise RateLimitExceeded(decision.bucket, decision.wait, paused=decision.paused)
        if choice == DROP:
            logger.info("%s[%s] is dropped: bucket %r is over quota", self._task.name, self._id, decision.bucket)
            self.decision = decision
            if self.ticket.deferrals:
                store_state(
                    self._task, states.PENDING
                )  # as of one that is dropped at once: nothing will change it any more
            raise Dropped(decision.bucket)
        if choice not in WAIT:
            message = (
                f'task {self._task.name!r}: its on_reject function must answer "retry", "fail" or "drop", not'
                f" {shown(choice)}"
            )
            raise ConfigurationError(message)
        return None

    @property
    def _lateness(self) -> int:
        """Nanoseconds that a task on its turn may be late by: a tenth of the time that a token takes, at most 1 s."""
        return max(IN_PLACE, min(max(charge.limit.interval for charge in self.charges) // 10, SECOND))

    def passed(self) -> Decision | None:
        """What lets the body run; how long it took is counted."""
        self.settled = None
        metrics = self.quota.metrics
        if metrics is not None and self.decision:
            waited = self._store.clock.wall() - self._since
            metrics.waited(self.decision.bucket, max(0, waited) / SECOND)
        return self.decision

    def _retry(self) -> Retry:
        """What ends this delivery, once its copy is under way."""
        when = self.countdown
        if self._error is not None:
            return Retry(f"{self._error}; asking again in {when:.3f} s", exc=self._error, when=when)
        decision = self.decision
        assert decision is not None  # noqa: S101
        turn = time.time() + decision.wait
        exceeded = RateLimitExceeded(decision.bucket, decision.wait, turn, decision.paused)
        why = "paused" if decision.paused else "over quota"
        return Retry(f"bucket {decision.bucket!r} is {why}: turn in {decision.wait:.3f} s", exc=exceeded, when=when)

    def _place(self, turn: int | None, patience: int) -> Place:
        longest = None
        if self._max_wait is not None or self._expires:
            left = [each for each in (self._patience_left(), self._life_left()) if each is not None]
            longest = max(0, min(left))
        return place_of(turn, math.ceil(self.quota.soonest * SECOND), patience, longest, 0, self.lot)

    def _patience_left(self) -> int | None:
        """Nanoseconds from now that ``max_wait`` leaves."""
        if self._max_wait is None:
            return None
        waited = self._store.clock.wall() - self.ticket.since if self.ticket.since else 0
        return math.ceil(min(self._max_wait, LONGEST_SPAN / SECOND) * SECOND) - max(0, waited)

    def _life_left(self) -> int | None:
        """Nanoseconds from now until the message expires: a later turn would only be lost."""
        expires = self._expires
        if not expires:
            return None
        due = maybe_make_aware(maybe_iso8601(expires), self._task.app.timezone)
        return int((due - datetime.now(UTC)).total_seconds() * SECOND)

    def _refused(self, decision: Decision) -> None:
        left = self._patience_left()
        if not decision.booked and left is not None and decision.at - decision.now > left:
            raise RateLimitExceeded(decision.bucket, decision.wait, paused=decision.paused)
        longest = self.quota.settings.max_countdown
        if decision.wait > longest:
            # Not the whole way at once, and not everybody at the same instant.
            longest *= 0.75 + 0.25 * self._spread()
        self.countdown = max(min(decision.wait, longest), self.quota.soonest)
        self._send(decision.at if decision.booked else 0)

    def _store_failed(self, error: StoreError) -> bool:
        if self.quota.settings.on_store_error == "fail":
            raise error
        if self.quota.settings.on_store_error == "allow":
            logger.warning("%s[%s] runs without a token: %s", self._task.name, self._id, error)
            return True
        left = self._patience_left()
        if left is not None and left <= 0:
            raise error
        self._error = error
        logger.warning("%s[%s] is deferred: %s", self._task.name, self._id, error)
        self.countdown = STORE_RETRY * (1 + self._spread() / 2)
        # The place in line, if it has one, stays its own.
        self._send(self.ticket.turn)
        return False

    def _send(self, turn: int) -> None:
        clock = self._store.clock
        ticket = self.ticket
        self.ticket = Ticket(turn, clock.identity, ticket.deferrals + 1, ticket.since or clock.wall())

    def _spread(self) -> float:
        """From 0 to 1, by task: the same for one task each time."""
        return lot_of(self._id) / ALL
