"""One delivery of a limited task: ask its buckets, then let the body run or send the message back until its turn."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from celery.exceptions import Retry, SoftTimeLimitExceeded
from celery.local import Proxy
from celery.utils.time import maybe_iso8601, maybe_make_aware

from tb_celery.bucket import SECOND, Place, positive, seconds
from tb_celery.errors import ConfigurationError, RateLimitExceeded, StoreError
from tb_celery.reschedule import Ticket, send_back, shortest_countdown, take_ticket
from tb_celery.settings import Settings, load_settings, open_limiter

if TYPE_CHECKING:
    from celery import Celery

    from tb_celery.bucket import Charge, Decision
    from tb_celery.limiter import Limiter

logger = logging.getLogger("tb_celery")

IN_PLACE = 50_000_000
"""Nanoseconds that a delivery may wait for its turn in the pool: going back to the queue costs more."""
STORE_RETRY = 5.0
"""Seconds after which a task asks again when the store failed; up to half as much is added, by task id."""
PUBLISH_RETRY = 10.0
"""Seconds after which a task that waits in place, because the broker took no copy, tries to publish again."""
CALL_HEADER = "tb_celery_call"
_ASKED = object()
"""Marks a request that was let pass. A header can set any attribute of a request, but not to this object."""


class Quota:
    """What an application's tasks share: its settings, and the limiter made from them."""

    def __init__(self, app: Celery) -> None:
        self.settings: Settings = load_settings(app.conf.get("tb_celery"))
        self.limiter: Limiter = open_limiter(self.settings)
        self._app = weakref.ref(app)

    @functools.cached_property
    def soonest(self) -> float:
        """Seconds before which no task that is sent back can return."""
        app = self._app()
        return shortest_countdown(app, self.settings.min_countdown) if app else self.settings.min_countdown


_quotas: weakref.WeakKeyDictionary[Celery, Quota] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def quota_of(app: Celery) -> Quota:
    """The quota of ``app``, made on first use from the environment, ``app.conf.tb_celery`` and the settings file.

    Raises:
        ConfigurationError: the settings are wrong.
    """
    app = app._get_current_object() if isinstance(app, Proxy) else app  # noqa: SLF001
    quota = _quotas.get(app)
    if quota is None:
        # Threads of one process must not each get a store in memory of their own.
        with _making:
            quota = _quotas.get(app)
            if quota is None:
                quota = _quotas[app] = Quota(app)
    return quota


def limiter_of(app: Celery) -> Limiter:
    """The limiter that ``app``'s tasks share, for code that asks by itself, such as a task that is called directly.

    Raises:
        ConfigurationError: the settings are wrong.
    """
    return quota_of(app).limiter


class LimitedTask(Protocol):
    """A Celery task with the options that say what it draws."""

    name: str
    app: Any
    request: Any
    run: Callable[..., Any]
    bucket: str | Sequence[str] | Mapping[str, float] | None
    cost: float | Callable[..., float]
    key: str | Callable[..., object] | None
    max_wait: float | None


def admit(task: LimitedTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let a delivery pass when its tokens are there; else send it back. Asking twice in one delivery draws once.

    Raises:
        Retry: a copy of the message is under way and will return at the task's turn.
        RateLimitExceeded: that turn would be later than ``max_wait`` allows.
        ConfigurationError: the bucket is unknown, or the cost could never be met.
        StoreError: the store failed, and the setting ``on_store_error`` says "fail".
    """
    request = task.request
    if getattr(request, "tb_celery_asked", None) is _ASKED:
        return
    request.tb_celery_asked = _ASKED
    ticket, content_type = take_ticket(request)
    request.tb_celery = None
    if not task.bucket:
        return
    call = _call_options(task)
    quota = quota_of(task.app)
    charges = _charges(task, quota.limiter, call, args, kwargs)
    max_wait = call.get("max_wait", task.max_wait)
    if request.is_eager:
        # Celery would run a retry at once, inside itself, until the stack is full.
        request.tb_celery = _wait_in_line(task, quota, charges, max_wait) if charges else None
        return
    delivery = _Delivery(task, quota, charges, ticket or Ticket(), max_wait)
    while charges and not delivery.ask():
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


class _Delivery:
    """One delivery's way to its tokens.

    Attributes:
        decision: the last answer; ``None`` before the first, and when the store failed.
        countdown: seconds until the delivery should be back, after a refusal.
        ticket: what its message then carries.
    """

    def __init__(
        self,
        task: LimitedTask,
        quota: Quota,
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
        self._charges = charges
        self._max_wait = max_wait
        self._error: StoreError | None = None

    def ask(self) -> bool:
        """Whether the body may run now; waits of a few milliseconds are slept out here."""
        self._error = None
        ticket = self.ticket
        clock = self._store.clock
        turn = None if not ticket.turn else ticket.turn if ticket.clock == clock.identity else 0
        try:
            patience = IN_PLACE
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
        return math.ceil(self._max_wait * SECOND) - max(0, waited)

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


def _wait_in_line(
    task: LimitedTask, quota: Quota, charges: tuple[Charge, ...], max_wait: float | None
) -> Decision | None:
    try:
        decision = quota.limiter.wait_for(charges, timeout=max_wait)
    except StoreError as error:
        if quota.settings.on_store_error != "allow":
            raise
        logger.warning("%s[%s] runs without a token: %s", task.name, task.request.id, error)
        return None
    if not decision:
        raise RateLimitExceeded(decision.bucket, decision.wait)
    return decision


def check_call(name: str, options: Mapping[str, Any]) -> None:
    """Check ``cost``, ``key`` and ``max_wait`` as a call gives them: they have to fit into its message.

    Raises:
        ConfigurationError: one of them is not of its kind.
    """
    for option, value in options.items():
        if option == "key":
            if not isinstance(value, str):
                message = f"task {name!r}: key must be a string, not {value!r}"
                raise ConfigurationError(message)
        elif value is not None or option != "max_wait":
            try:
                positive(option, value)
            except ConfigurationError as error:
                message = f"task {name!r}: {error}"
                raise ConfigurationError(message) from None


def _call_options(task: LimitedTask) -> dict[str, Any]:
    request = task.request
    call = vars(request).get(CALL_HEADER) or (request.headers or {}).get(CALL_HEADER)
    if call is None:
        return {}
    if not isinstance(call, dict) or not call.keys() <= {"cost", "key", "max_wait"}:
        message = f"task {task.name!r}: the header {CALL_HEADER} must hold cost, key or max_wait, not {call!r}"
        raise ConfigurationError(message)
    check_call(task.name, call)
    return call


def _charges(
    task: LimitedTask, limiter: Limiter, call: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Charge, ...]:
    """What this delivery draws, by the task's options, the call's and the arguments."""
    bucket = task.bucket
    if not bucket:
        return ()
    cost = call.get("cost", task.cost)
    if callable(cost):
        cost = cost(*args, **kwargs)
    key = call.get("key", task.key)
    if "key" not in call and key is not None:
        key = _key(task, key, args, kwargs)
    if isinstance(bucket, str):
        return limiter.charges(bucket, cost, key=key)
    return limiter.charges(bucket if isinstance(bucket, Mapping) else dict.fromkeys(bucket, cost), key=key)


def _key(task: LimitedTask, key: str | Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if callable(key):
        value = key(*args, **kwargs)
    else:
        bound = inspect.signature(task.run).bind(*args, **kwargs)
        bound.apply_defaults()
        value = bound.arguments[key]
    if value is None:
        message = f"task {task.name!r}: its key {key!r} is None in this call; give it a value, or the task no key"
        raise ConfigurationError(message)
    return str(value)
