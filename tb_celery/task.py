"""The task base class: ask the buckets, then run or go back to the queue until the task's turn."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from celery import Task
from celery._state import get_current_task

from tb_celery.admission import admit
from tb_celery.errors import ConfigurationError, RateLimitExceeded
from tb_celery.reaction import is_elsewhere, settle, told_apart, watch
from tb_celery.reschedule import STRATEGY, LimitedRequest
from tb_celery.rules import OPTIONS, Rule, meant
from tb_celery.terms import CALL_HEADER, CALL_OPTIONS, check_call

_CELERYS = {"celery.app.task", "celery.app.trace"}
"""Where the ``__call__`` is from of tasks that have none of their own; the latter in workers."""
_options_of = operator.attrgetter(*OPTIONS)


class RateLimitedTask(Task):
    """A task that draws from buckets before its body runs, each time it is delivered.

    Over quota, it goes back to the queue it came from, under the same id and with its retries untouched, to return at
    its own turn; its state is ``RETRY`` meanwhile. Calling the task directly, ``post(text)``, is no delivery and draws
    nothing; the calls that ``map``, ``starmap`` and ``chunks`` make wait in line, one by one. Inside the body
    ``self.request.tb_celery`` is the :class:`~tb_celery.Decision` that let it run.

    Its attributes ``bucket``, ``cost``, ``key``, ``max_wait`` and ``on_reject`` are those of a
    :class:`~tb_celery.rules.Rule`; ``cost`` and ``key`` may be methods, in a class body.

    Raises:
        ConfigurationError: at declaration, for a wrong or misspelt option.
    """

    abstract = True
    Request = LimitedRequest
    Strategy = STRATEGY
    bucket: str | Sequence[str] | Mapping[str, float] | None = None
    cost: float | Callable[..., float] = 1
    key: str | Callable[..., object] | None = None
    max_wait: float | None = None
    on_reject: str | Callable[..., str] | None = None
    throws = (RateLimitExceeded,)  # expected where max_wait is set: logged as a line, without a traceback

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_misspelt(cls)
        cls._take_options()

    @classmethod
    def annotate(cls) -> None:
        """As Celery's: the setting ``task_annotations`` may change any option, and so is checked as the others are."""
        super().annotate()
        cls._take_options()

    @classmethod
    def _take_options(cls) -> None:
        unbind_functions(cls)
        rule_of(cls).check(f"task {vars(cls).get('name') or cls.__name__!r}", arguments_of(cls))
        check_first(cls)

    @property
    def tb_celery_rule(self) -> Rule:
        """What each run draws; made anew when an option was given another value."""
        values = _options_of(self)
        made: tuple[object, Rule] | None = vars(self).get("_tb_celery_rule")
        if made is None or made[0] != values:
            made = self._tb_celery_rule = (values, rule_of(self))
        return made[1]

    def before_start(self, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        """Ask the buckets: the only hook that runs once a delivery in every pool, and whose exceptions count."""
        if (request := admit(self, args, kwargs)) is not None:
            watch(self, request)

    def settle(self, actual: float | Mapping[str, float]) -> None:
        """Tell in the body what this delivery cost after all; see :func:`tb_celery.settle`."""
        if self.request.id or get_current_task() is not None or is_elsewhere(self):
            settle(actual)  # else it is a function that somebody calls

    def apply_async(self, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any) -> Any:
        """As Celery's, with ``cost``, ``key`` and ``max_wait`` for this call alone.

        Raises:
            ConfigurationError: one of them is not of its kind, or misspelt.
        """
        return super().apply_async(args, kwargs, *positional, **self._with_call(options))

    def apply(self, args: Any = None, kwargs: Any = None, *positional: Any, **options: Any) -> Any:
        """As :meth:`apply_async`, and as Celery's: the task runs here and now."""
        return super().apply(args, kwargs, *positional, **self._with_call(options))

    def _with_call(self, options: dict[str, Any]) -> dict[str, Any]:
        """``options`` of a call with those that are ours in a header, which comes with its message."""
        for option in options.keys() - set(CALL_OPTIONS):
            if (right := meant(option)) is not None:
                hint = f"did you mean {right!r}?" if right in CALL_OPTIONS else f"only its task has a {right}"
                message = f"task {self.name!r}: a call has no option {option!r}; {hint}"
                raise ConfigurationError(message)
        call = {name: options.pop(name) for name in CALL_OPTIONS if name in options}
        if call:
            check_call(self.name, call)
            if "cost" in call and isinstance(self.bucket, Mapping):
                message = f"task {self.name!r}: its bucket gives the costs, so a call cannot"
                raise ConfigurationError(message)
            options["headers"] = {**(options.get("headers") or {}), CALL_HEADER: call}
        return options


def rule_of(task: Any) -> Rule:
    """The rule that a task's, or task class's, attributes make."""
    return Rule(**{option: getattr(task, option) for option in OPTIONS if hasattr(task, option)})


def unbind_functions(cls: type[Task[Any, Any]]) -> None:
    """Have functions that the decorator was given as options called with the task's arguments alone."""
    own = vars(cls)
    for option in ("cost", "key", "on_reject") if own.get("_decorated") else ():
        # On a class they would become methods and be given the task as their first argument.
        if inspect.isfunction(own.get(option)):
            setattr(cls, option, staticmethod(own[option]))


def _refuse_misspelt(cls: type) -> None:
    own = vars(cls)
    for option, value in own.items():
        if option.startswith("_") or any(option in vars(base) for base in cls.__mro__[1:]):
            continue
        right = meant(option)
        if right is None or right == option or (right in own and not own.get("_decorated")):
            continue
        # What a class of the user's holds for itself may be called alike, but hardly has the form of an option.
        if own.get("_decorated") or _is_right(right, value):
            message = f"task {own.get('name') or cls.__name__!r} has no option {option!r}; did you mean {right!r}?"
            raise ConfigurationError(message)


def _is_right(option: str, value: Any) -> bool:
    if isinstance(value, property | classmethod | staticmethod) or callable(value):
        return False
    with suppress(ConfigurationError):
        Rule(**{option: value}).check("")
        return True
    return False


def arguments_of(cls: type[Task[Any, Any]]) -> list[str] | None:
    """The names of a task's arguments, or ``None`` where it has no body yet."""
    if cls.run is Task.run:
        return None
    names = list(inspect.signature(cls.run).parameters)
    return names if isinstance(inspect.getattr_static(cls, "run"), staticmethod) else names[1:]


def check_first(cls: type[Task[Any, Any]]) -> None:
    """Put the check before ``cls``'s own ``before_start``, and tell the calls of its tasks apart, once."""
    # A class of the user's, or a mix-in before us.
    hook = inspect.getattr_static(cls, "before_start")
    if hook is not vars(RateLimitedTask)["before_start"] and not hasattr(hook, "tb_celery_checked"):
        cls.before_start = _checked_first(hook)
    if not hasattr(cls.__call__, "tb_celery_runs"):
        cls.__call__ = told_apart(cls.__call__, runs=cls.__call__.__module__ in _CELERYS)


def _checked_first(own: Callable[..., None]) -> Callable[..., None]:
    """A subclass's ``before_start`` behind the check, whether or not it calls ``super()``."""

    @functools.wraps(own)
    def before_start(self: RateLimitedTask, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        request = admit(self, args, kwargs)
        own(self, task_id, args, kwargs)
        if request is not None:
            watch(self, request)

    before_start.tb_celery_checked = True  # type: ignore[attr-defined]
    return before_start
