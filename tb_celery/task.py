"""The task base class: ask the buckets, then run or go back to the queue until the task's turn."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from celery import Task, signals
from celery.exceptions import Retry, SoftTimeLimitExceeded
from celery.local import Proxy
from celery.utils.time import maybe_iso8601, maybe_make_aware

from tb_celery.bucket import SECOND, Place, positive, seconds
from tb_celery.errors import ConfigurationError, RateLimitExceeded, StoreError
from tb_celery.reschedule import LimitedRequest, Ticket, send_back, shortest_countdown, take_ticket
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


def quota_of(app: Celery) -> Quota:
    """The quota of ``app``, made on first use from the environment, ``app.conf.tb_celery`` and the settings file.

    Raises:
        ConfigurationError: the settings are wrong.
    """
    app = app._get_current_object() if isinstance(app, Proxy) else app
    quota = _quotas.get(app)
    if quota is None:
        quota = _quotas[app] = Quota(app)
    return quota


class RateLimitedTask(Task):  # type: ignore[type-arg]
    """A task that draws from buckets before its body runs, each time it is delivered.

    Over quota, it goes back to the queue it came from, under the same id and with its retries untouched, to return at its
    own turn; its state is ``RETRY`` meanwhile. Calling the task directly, ``post(text)``, is no delivery and draws nothing.
    Inside the body ``self.request.tb_celery`` is the :class:`~tb_celery.Decision` that let it run.

    Attributes:
        bucket: a bucket's name, several names, or names with the cost from each (all or nothing); ``None``: not limited.
        cost: tokens a run takes, or a function of the task's arguments that tells (in a class body: a method).
        key: name of the argument that splits the bucket into independent ones, or a function of the task's arguments.
        max_wait: seconds after its first refusal beyond which the task fails with
            :class:`~tb_celery.RateLimitExceeded` rather than wait on; ``None``: it waits for as long as it takes.

    Raises:
        ConfigurationError: at declaration, for a wrong or misspelt option.
    """

    abstract = True
    Request = LimitedRequest
    bucket: str | Sequence[str] | Mapping[str, float] | None = None
    cost: float | Callable[..., float] = 1
    key: str | Callable[..., object] | None = None
    max_wait: float | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        name = own.get("name") or cls.__name__
        if own.get("_decorated"):
            _refuse_misspelt(name, cls)
            for option in ("cost", "key"):
                # A plain function on a class would become a method and be given the task as its first argument.
                if inspect.isfunction(own.get(option)):
                    setattr(cls, option, staticmethod(own[option]))
        _check_options(name, cls)
        if "before_start" in own:
            cls.before_start = _checked_first(own["before_start"])  # type: ignore[method-assign]

    def before_start(self, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Ask the buckets. The only hook that runs once a delivery in every pool, where an exception can end the run."""
        admit(self, args, kwargs)

    def apply_async(
        self, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any
    ) -> Any:
        """As Celery's, with ``cost``, ``key`` and ``max_wait`` for this call alone.

        Raises:
            ConfigurationError: one of them is not of its kind.
        """
        call = {option: options.pop(option) for option in ("cost", "key", "max_wait") if option in options}
        if call:
            _check_call(self.name, call)
            options["headers"] = {**(options.get("headers") or {}), CALL_HEADER: call}
        return super().apply_async(args, kwargs, *positional, **options)


_OPTIONS = ("bucket", "cost", "key", "max_wait")


def _refuse_misspelt(name: str, cls: type) -> None:
    for option in vars(cls):
        if option not in _OPTIONS and not any(option in vars(base) for base in cls.__mro__[1:]):
            close = get_close_matches(option.lower(), _OPTIONS, 1, 0.8)
            if close:
                message = f"task {name!r} has no option {option!r}; did you mean {close[0]!r}?"
                raise ConfigurationError(message)


def _check_options(name: str, cls: type[RateLimitedTask]) -> None:
    bucket = cls.bucket
    names = [bucket] if isinstance(bucket, str) else list(bucket or ())
    if not isinstance(bucket, str | Sequence | Mapping | None) or not all(isinstance(each, str) for each in names):
        message = f"task {name!r}: bucket must be a name, a list of names or a dict of costs by name, not {bucket!r}"
        raise ConfigurationError(message)
    if isinstance(bucket, Mapping) and cls.cost != 1:
        message = f"task {name!r}: give the costs in bucket or in cost, not in both"
        raise ConfigurationError(message)
    _check_call(name, {"cost": cls.cost, "max_wait": cls.max_wait})
    if isinstance(cls.key, str):
        if cls.key not in inspect.signature(cls.run).parameters and "run" in vars(cls):
            message = f"task {name!r}: key {cls.key!r} is not the name of one of its arguments"
            raise ConfigurationError(message)
    elif cls.key is not None and not callable(cls.key):
        message = f"task {name!r}: key must be the name of an argument or a function of the arguments, not {cls.key!r}"
        raise ConfigurationError(message)


def _check_call(name: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if option == "key":
            if not isinstance(value, str):
                message = f"task {name!r}: key must be a string, not {value!r}"
                raise ConfigurationError(message)
        elif not (value is None and option == "max_wait") and not (callable(value) and option == "cost"):
            try:
                positive(option, value)
            except ConfigurationError as error:
                message = f"task {name!r}: {error}"
                raise ConfigurationError(message) from None


def _checked_first(own: Callable[..., None]) -> Callable[..., None]:
    """A subclass's ``before_start`` behind the check, whether or not it calls ``super()``."""

    @functools.wraps(own)
    def before_start(self: RateLimitedTask, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        admit(self, args, kwargs)
        own(self, task_id, args, kwargs)

    return before_start


# -- one delivery


def admit(task: RateLimitedTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let a delivery pass when its tokens are there; else send it back. Asking twice in one delivery draws once.

    Raises:
        Retry: a copy of the message is under way and will return at the task's turn.
        RateLimitExceeded: that turn would be later than ``max_wait`` allows.
        ConfigurationError: the bucket is unknown, or the cost could never be met.
        StoreError: the store failed, and the setting ``on_store_error`` says "fail".
    """
    request = task.request
    if hasattr(request, "tb_celery") and not isinstance(request.tb_celery, list):
        return
    ticket, content_type = take_ticket(request)
    call = _call_options(task)
    quota = quota_of(task.app)
    charges = _charges(task, quota.limiter, call, args, kwargs)
    max_wait = call.get("max_wait", task.max_wait)
    if request.is_eager:
        # Celery would run a retry at once, inside itself, until the stack is full.
        request.tb_celery = _wait_in_line(quota.limiter, charges, max_wait) if charges else None
        return
    request.tb_celery = None
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
        task: RateLimitedTask,
        quota: Quota,
        charges: tuple[Charge, ...],
        ticket: Ticket,
        max_wait: float | None,
    ) -> None:
        self.decision: Decision | None = None
        self.countdown = 0.0
        self.ticket = ticket
        self._task = task
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
        return Retry(f"bucket {decision.bucket!r} is over quota: turn in {decision.wait:.3f} s", exc=exceeded, when=when)

    def _place(self, turn: int | None, patience: int) -> Place:
        longest = min((left for left in (self._patience_left(), self._life_left()) if left is not None), default=None)
        soonest = math.ceil(self._quota.soonest * SECOND)
        return Place(turn, soonest, patience, None if longest is None else max(0, longest))

    def _patience_left(self) -> int | None:
        """Nanoseconds from now that ``max_wait`` leaves."""
        if self._max_wait is None:
            return None
        waited = self._store.clock.wall() - self.ticket.since if self.ticket.since else 0
        return math.ceil(self._max_wait * SECOND) - max(0, waited)

    def _life_left(self) -> int | None:
        """Nanoseconds from now until the message expires: a later turn would only be lost."""
        expires = self._task.request.expires
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
        self.countdown = min(max(decision.wait, self._quota.soonest), longest)
        self._send(decision.at if decision.booked else 0)

    def _store_failed(self, error: StoreError) -> bool:
        if self._settings.on_store_error == "fail":
            raise error
        if self._settings.on_store_error == "allow":
            logger.warning("%s[%s] runs without a token: %s", self._task.name, self._task.request.id, error)
            return True
        self._error = error
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
        return zlib.crc32(self._task.request.id.encode()) / 0xFFFFFFFF


def _wait_in_line(limiter: Limiter, charges: tuple[Charge, ...], max_wait: float | None) -> Decision:
    decision = limiter.wait_for(charges, timeout=max_wait)
    if not decision:
        raise RateLimitExceeded(decision.bucket, decision.wait)
    return decision


def _call_options(task: RateLimitedTask) -> dict[str, Any]:
    request = task.request
    call = vars(request).get(CALL_HEADER) or (request.headers or {}).get(CALL_HEADER)
    if call is None:
        return {}
    if not isinstance(call, dict) or not call.keys() <= {"cost", "key", "max_wait"}:
        message = f"task {task.name!r}: the header {CALL_HEADER} must hold cost, key or max_wait, not {call!r}"
        raise ConfigurationError(message)
    _check_call(task.name, call)
    return call


def _charges(
    task: RateLimitedTask, limiter: Limiter, call: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
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


def _key(
    task: RateLimitedTask, key: str | Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
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


# -- at start


def check_at_start(app: Celery) -> None:
    """Check every declared task against the settings.

    Raises:
        ConfigurationError: the settings are wrong, a task names an unknown bucket, or costs more than one can hold.
    """
    quota = quota_of(app)
    for name, task in app.tasks.items():
        if isinstance(task, RateLimitedTask) and task.bucket:
            try:
                bucket = task.bucket
                if isinstance(bucket, Mapping):
                    costs: Mapping[str, float] = bucket
                else:
                    cost = 0.001 if callable(task.cost) else task.cost
                    costs = dict.fromkeys([bucket] if isinstance(bucket, str) else bucket, cost)
                quota.limiter.charges(costs)
            except ConfigurationError as error:
                message = f"task {name!r}: {error}"
                raise ConfigurationError(message) from None
            if getattr(task, "rate_limit", None):
                logger.warning(
                    "task %s has a bucket (%s) and Celery's own rate_limit (%s): both apply, the latter in each worker",
                    name,
                    ", ".join(costs),
                    task.rate_limit,
                )


def _at_start(sender: Any, **_: Any) -> None:
    app = sender.app
    if not any(isinstance(task, RateLimitedTask) and task.bucket for task in app.tasks.values()):
        return
    try:
        check_at_start(app)
    except ConfigurationError as error:
        # Celery swallows what a receiver raises, except for this.
        sys.exit(f"tb_celery: {error}")
    logger.info("quota is per host; state in %r", quota_of(app).limiter.store)


signals.worker_init.connect(_at_start, weak=False, dispatch_uid="tb_celery.task")
