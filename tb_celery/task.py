"""The task base class: ask the buckets, then run or go back to the queue until the task's turn."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from celery import Task, signals

from tb_celery.delivery import CALL_HEADER, admit, check_call, quota_of
from tb_celery.errors import ConfigurationError, RateLimitExceeded, StoreError, StoreTimeoutError
from tb_celery.reschedule import LimitedRequest

if TYPE_CHECKING:
    from celery import Celery

    from tb_celery.bucket import Charge

logger = logging.getLogger("tb_celery")

SMALLEST = 0.001
"""A cost that every bucket can meet."""


class RateLimitedTask(Task):
    """A task that draws from buckets before its body runs, each time it is delivered.

    Over quota, it goes back to the queue it came from, under the same id and with its retries untouched, to return at
    its own turn; its state is ``RETRY`` meanwhile. Calling the task directly, ``post(text)``, is no delivery and draws
    nothing. Inside the body ``self.request.tb_celery`` is the :class:`~tb_celery.Decision` that let it run.

    Attributes:
        bucket: a bucket's name, several names, or names with the cost from each (all or nothing); ``None``: no limit.
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
    throws = (RateLimitExceeded,)  # expected where max_wait is set: logged as a line, without a traceback

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if vars(cls).get("_decorated"):
            _refuse_misspelt(vars(cls).get("name") or cls.__name__, cls)
        cls._settle()

    @classmethod
    def annotate(cls) -> None:
        """As Celery's: the setting ``task_annotations`` may change any option, and so is checked as the others are."""
        super().annotate()
        cls._settle()

    @classmethod
    def _settle(cls) -> None:
        own = vars(cls)
        if own.get("_decorated"):
            for option in ("cost", "key"):
                # A plain function on a class would become a method and be given the task as its first argument.
                if inspect.isfunction(own.get(option)):
                    setattr(cls, option, staticmethod(own[option]))
        _check_options(own.get("name") or cls.__name__, cls)
        # A class of the user's, or a mix-in before us.
        hook = inspect.getattr_static(cls, "before_start")
        if hook is not vars(RateLimitedTask)["before_start"] and not hasattr(hook, "tb_celery_checked"):
            cls.before_start = _checked_first(hook)  # type: ignore[method-assign]

    def before_start(self, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Ask the buckets: the only hook that runs once a delivery in every pool, and whose exceptions count."""
        admit(self, args, kwargs)

    def apply_async(self, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any) -> Any:
        """As Celery's, with ``cost``, ``key`` and ``max_wait`` for this call alone.

        Raises:
            ConfigurationError: one of them is not of its kind.
        """
        call: dict[str, Any] = {name: options.pop(name) for name in ("cost", "key", "max_wait") if name in options}
        if call:
            check_call(self.name, call)
            if "cost" in call and isinstance(self.bucket, Mapping):
                message = f"task {self.name!r}: its bucket gives the costs, so a call cannot"
                raise ConfigurationError(message)
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
    names = [bucket] if isinstance(bucket, str) else list(bucket) if isinstance(bucket, Sequence | Mapping) else []
    if bucket is not None and not (names and all(isinstance(each, str) and each for each in names)):
        message = f"task {name!r}: bucket must be a name, a list of names or a dict of costs by name, not {bucket!r}"
        raise ConfigurationError(message)
    if isinstance(bucket, Mapping) and cls.cost != 1:
        message = f"task {name!r}: give the costs in bucket or in cost, not in both"
        raise ConfigurationError(message)
    check_call(name, {"max_wait": cls.max_wait} if callable(cls.cost) else {"cost": cls.cost, "max_wait": cls.max_wait})
    if isinstance(cls.key, str):
        if cls.run is not Task.run and cls.key not in _arguments(cls):
            message = f"task {name!r}: key {cls.key!r} is not the name of one of its arguments"
            raise ConfigurationError(message)
    elif cls.key is not None and not callable(cls.key):
        message = f"task {name!r}: key must be the name of an argument or a function of the arguments, not {cls.key!r}"
        raise ConfigurationError(message)


def _arguments(cls: type[RateLimitedTask]) -> list[str]:
    names = list(inspect.signature(cls.run).parameters)
    return names if isinstance(inspect.getattr_static(cls, "run"), staticmethod) else names[1:]


def _checked_first(own: Callable[..., None]) -> Callable[..., None]:
    """A subclass's ``before_start`` behind the check, whether or not it calls ``super()``."""

    @functools.wraps(own)
    def before_start(self: RateLimitedTask, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        admit(self, args, kwargs)
        own(self, task_id, args, kwargs)

    before_start.tb_celery_checked = True  # type: ignore[attr-defined]
    return before_start


# -- at start


def check_at_start(app: Celery) -> None:
    """Check every declared task against the settings, and that the state can be used.

    Raises:
        ConfigurationError: the settings are wrong, a task names an unknown bucket, or costs more than one can hold.
        StoreError: the state cannot be read or written here.
    """
    limiter = quota_of(app).limiter
    charges: tuple[Charge, ...] = ()
    for name, task in _limited(app):
        # What a function will tell is not known yet, but whether its buckets are.
        cost = SMALLEST if callable(task.cost) else task.cost
        costs = task.bucket if isinstance(task.bucket, Mapping) else dict.fromkeys(_names(task), cost)
        try:
            charges = limiter.charges(costs)
        except ConfigurationError as error:
            message = f"task {name!r}: {error}"
            raise ConfigurationError(message) from None
    if charges:
        with suppress(StoreTimeoutError):
            limiter.store.read(charges)


def _limited(app: Celery) -> list[tuple[str, RateLimitedTask]]:
    return [(name, task) for name, task in app.tasks.items() if isinstance(task, RateLimitedTask) and task.bucket]


def _names(task: RateLimitedTask) -> list[str]:
    return [task.bucket] if isinstance(task.bucket, str) else list(task.bucket or ())


def _on_init(sender: Any, **_: Any) -> None:
    if _limited(sender.app) or sender.app.conf.get("tb_celery"):
        try:
            check_at_start(sender.app)
        except (ConfigurationError, StoreError) as error:
            # Celery swallows what a receiver raises, except for this.
            sys.exit(f"tb_celery: {error}")


def _on_ready(sender: Any, **_: Any) -> None:
    app = sender.app
    limited = _limited(app)
    if not limited:
        return
    quota = quota_of(app)
    logger.info("tb_celery: the quota is per host; state in %r", quota.limiter.store)
    for name, task in limited:
        if getattr(task, "rate_limit", None):
            logger.warning(
                "task %s has a bucket (%s) and Celery's own rate_limit (%s): both apply, the latter in each worker",
                name,
                ", ".join(_names(task)),
                task.rate_limit,
            )
    visible = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    if visible and quota.settings.max_countdown >= visible:
        logger.warning(
            "tb_celery: max_countdown (%g s) is not below the broker's visibility_timeout (%g s): waiting tasks would"
            " run more than once; lower max_countdown (TB_CELERY_MAX_COUNTDOWN)",
            quota.settings.max_countdown,
            visible,
        )


# Strong references: a receiver that only this module names must not be collected.
signals.worker_init.connect(_on_init, weak=False, dispatch_uid="tb_celery.init")
signals.worker_ready.connect(_on_ready, weak=False, dispatch_uid="tb_celery.ready")
