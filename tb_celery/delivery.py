"""One delivery of a limited task: ask its buckets, then let the body run or send the message back until its turn."""

from __future__ import annotations

import logging
import math
import time
import zlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from celery._state import get_current_task
from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded
from celery.utils.time import maybe_iso8601, maybe_make_aware

from tb_celery.arithmetic import Place, seconds
from tb_celery.bucket import LONGEST_SPAN, SECOND
from tb_celery.errors import ConfigurationError, RateLimitExceeded, StoreError, shown
from tb_celery.quota import CALL_HEADER, LimitedTask, Quota, quota_of
from tb_celery.reschedule import Grant, Ticket, send_back, take_headers
from tb_celery.rules import DROP, FAIL, HOLD, RETRY, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tb_celery.arithmetic import Decision
    from tb_celery.bucket import Charge

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
MAPS = frozenset({"celery.map", "celery.starmap", "celery.chunks"})
"""Celery's own tasks that call another one many times in one delivery."""
_ASKED = object()
"""Marks a request that was let pass. A header can set any attribute of a request, but not to this object."""


def admit(task: LimitedTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let a delivery pass when its tokens are there; else do what is to be done with the refused.

    Asking twice in one delivery draws once.

    Raises:
        Retry: a copy of the message is under way and will return at the task's turn.
        Ignore: the task is dropped.
        RateLimitExceeded: the task is to fail when refused, or its turn would be later than ``max_wait`` allows.
        ConfigurationError: the bucket is unknown, or the cost could never be met.
        StoreError: the store failed, and the setting ``on_store_error`` says "fail".
    """
    request = task.request
    if getattr(request, "tb_celery_asked", None) is _ASKED:
        return
    request.tb_celery_asked = _ASKED
    ticket, grant, content_type = take_headers(request)
    request.tb_celery = None
    quota = quota_of(task.app)
    rules = quota.rules(task, request.delivery_info or {})
    if not rules:
        return
    call = vars(request).get(CALL_HEADER) or (request.headers or {}).get(CALL_HEADER)
    charges, max_wait = quota.charges(task, rules, call, args, kwargs)
    delivery = _Delivery(task, quota, rules, charges, ticket or Ticket(), max_wait)
    if not charges:
        return
    if request.is_eager:
        # Celery would run a retry at once, inside itself, until the stack is full.
        request.tb_celery = delivery.wait_in_line()
        return
    while not delivery.pass_with(grant) and not delivery.ask():
        try:
            send_back(task, delivery.countdown, delivery.ticket, content_type)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001
            # This process may hold the only copy there is: wait with it, and try again to let it go.
            logger.warning("%s[%s] waits in the worker, no copy could be published: %s", task.name, request.id, error)
            quota.limiter.store.clock.sleep(min(delivery.countdown, PUBLISH_RETRY))
        else:
            raise delivery.retry()
    request.tb_celery = delivery.decision


def admit_inner(task: LimitedTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let one of the many calls pass that ``map``, ``starmap`` and ``chunks`` make in one delivery: each waits in line.

    Any other direct call is no delivery, and is not asked about.

    Raises:
        RateLimitExceeded: the task is to fail or to be dropped when refused, or its turn would be too late.
        ConfigurationError: the bucket is unknown, or the cost could never be met.
        StoreError: the store failed.
    """
    outer = get_current_task()
    if outer is None or outer.name not in MAPS or not task.request.called_directly:
        return
    quota = quota_of(task.app)
    rules = quota.rules(task, outer.request.delivery_info or {})
    charges, max_wait = quota.charges(task, rules, None, args, kwargs)
    if not charges:
        return
    delivery = _Delivery(task, quota, rules, charges, Ticket(), max_wait)
    try:
        delivery.wait_in_line(limited=False)
    except Ignore:
        # The other calls of this delivery are not dropped with this one.
        decision = cast("Decision", delivery.decision)
        raise RateLimitExceeded(decision.bucket, decision.wait) from None


class _Delivery:
    """One delivery's way to its tokens.

    Attributes:
        decision: the last answer; ``None`` before the first, and when the store failed.
        countdown: seconds until the delivery should be back, after a refusal.
        ticket: what its message then carries.
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        task: LimitedTask,
        quota: Quota,
        rules: Sequence[Rule],
        charges: tuple[Charge, ...],
        ticket: Ticket,
        max_wait: float | None,
    ) -> None:
        self.decision: Decision | None = None
        self.countdown = 0.0
        self.ticket = ticket
        self._task = task
        self._request = task.request
        self._settings = quota.settings
        self._store = quota.limiter.store
        self._quota = quota
        self._rules = rules
        self._charges = charges
        self._stays = quota.waits(rules)
        self._max_wait = max_wait
        self._error: StoreError | None = None

    def pass_with(self, grant: Grant | None) -> bool:
        """Whether the tokens were taken already, by the worker that held the request, and a moment ago."""
        clock = self._store.clock
        if grant is None or grant.clock != clock.identity:
            return False
        if not 0 <= clock.now() - grant.decision.now <= max(GRANTED, self._lateness):
            return False
        self.decision = grant.decision
        return True

    def wait_in_line(self, *, limited: bool = True) -> Decision | None:
        """Wait here until the tokens are there; ``None`` when the store failed and that is no reason to stay.

        Args:
            limited: whether no longer than the setting ``max_eager_wait``.
        """
        longest = [self._settings.max_eager_wait] if limited else []
        timeout = min([each for each in (self._max_wait, *longest) if each is not None], default=None)
        try:
            decision = self._at_once(None) or self._quota.limiter.wait_for(self._charges, timeout=timeout)
        except StoreError as error:
            if self._settings.on_store_error != "allow":
                raise
            logger.warning("%s[%s] runs without a token: %s", self._task.name, self._request.id, error)
            return None
        if not decision:
            raise RateLimitExceeded(decision.bucket, decision.wait)
        return decision

    def ask(self) -> bool:
        """Whether the body may run now; waits of a few milliseconds are slept out here."""
        self._error = None
        ticket = self.ticket
        clock = self._store.clock
        turn = None if not ticket.turn else ticket.turn if ticket.clock == clock.identity else 0
        try:
            self.decision = self._at_once(turn)
            if self.decision:
                return True
            patience = IN_PLACE
            if turn is not None and turn - clock.now() <= patience:
                # Its tokens come, too, but for what others were late by: sent away it would lose its place.
                patience = self._lateness
            while True:
                decision = self._store.acquire(self._charges, self._place(turn, patience))
                pause = decision.at - decision.now
                if decision.allowed or pause > patience:
                    break
                clock.sleep(seconds(pause))
                patience -= pause
                if decision.booked:
                    turn = decision.at
        except StoreError as error:
            return self._store_failed(error)
        self.decision = decision
        if not decision.allowed:
            self._refused(decision)
        return decision.allowed

    def _at_once(self, turn: int | None) -> Decision | None:
        """The tokens for a task that may not wait: it is given no turn, for others would have to wait for that.

        Returns:
            ``None`` where it may wait, by its rules or because a function of the user's says so now.

        Raises:
            RateLimitExceeded: it is refused, and is to fail.
            Ignore: it is refused, and is to be dropped.
        """
        if self._stays:
            return None
        decision = self._store.acquire(self._charges, Place(turn, longest=0))
        if decision:
            return decision
        on_reject = self._quota.on_reject(self._rules, decision.bucket)
        choice = on_reject(decision) if callable(on_reject) else on_reject
        if choice == FAIL:
            raise RateLimitExceeded(decision.bucket, decision.wait)
        if choice == DROP:
            logger.info(
                "%s[%s] is dropped: bucket %r is over quota", self._task.name, self._request.id, decision.bucket
            )
            self.decision = decision
            raise Ignore
        if choice not in {RETRY, HOLD}:
            message = (
                f'task {self._task.name!r}: its on_reject function must answer "retry", "fail" or "drop", not'
                f" {shown(choice)}"
            )
            raise ConfigurationError(message)
        return None

    @property
    def _lateness(self) -> int:
        """Nanoseconds that a task on its turn may be late by: a tenth of the time that a token takes, at most 1 s."""
        return max(IN_PLACE, min(max(charge.limit.interval for charge in self._charges) // 10, SECOND))

    def retry(self) -> Retry:
        """What ends this delivery, once its copy is under way."""
        when = self.countdown
        if self._error is not None:
            return Retry(f"{self._error}; asking again in {when:.3f} s", exc=self._error, when=when)
        decision = self.decision
        assert decision is not None  # noqa: S101
        turn = time.time() + decision.wait
        exceeded = RateLimitExceeded(decision.bucket, decision.wait, turn)
        return Retry(
            f"bucket {decision.bucket!r} is over quota: turn in {decision.wait:.3f} s", exc=exceeded, when=when
        )

    def _place(self, turn: int | None, patience: int) -> Place:
        longest = None
        if self._max_wait is not None or self._request.expires:
            left = [each for each in (self._patience_left(), self._life_left()) if each is not None]
            longest = max(0, min(left))
        return Place(turn, math.ceil(self._quota.soonest * SECOND), patience, longest)

    def _patience_left(self) -> int | None:
        """Nanoseconds from now that ``max_wait`` leaves."""
        if self._max_wait is None:
            return None
        waited = self._store.clock.wall() - self.ticket.since if self.ticket.since else 0
        return math.ceil(min(self._max_wait, LONGEST_SPAN / SECOND) * SECOND) - max(0, waited)

    def _life_left(self) -> int | None:
        """Nanoseconds from now until the message expires: a later turn would only be lost."""
        expires = self._request.expires
        if not expires:
            return None
        due = maybe_make_aware(maybe_iso8601(expires), self._task.app.timezone)
        return int((due - datetime.now(UTC)).total_seconds() * SECOND)

    def _refused(self, decision: Decision) -> None:
        left = self._patience_left()
        if not decision.booked and left is not None and decision.at - decision.now > left:
            raise RateLimitExceeded(decision.bucket, decision.wait)
        longest = self._settings.max_countdown
        if decision.wait > longest:
            # Not the whole way at once, and not everybody at the same instant.
            longest *= 0.75 + 0.25 * self._spread()
        self.countdown = max(min(decision.wait, longest), self._quota.soonest)
        self._send(decision.at if decision.booked else 0)

    def _store_failed(self, error: StoreError) -> bool:
        if self._settings.on_store_error == "fail":
            raise error
        if self._settings.on_store_error == "allow":
            logger.warning("%s[%s] runs without a token: %s", self._task.name, self._request.id, error)
            return True
        left = self._patience_left()
        if left is not None and left <= 0:
            raise error
        self._error = error
        logger.warning("%s[%s] is deferred: %s", self._task.name, self._request.id, error)
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
        return zlib.crc32(self._request.id.encode()) / 0xFFFFFFFF
