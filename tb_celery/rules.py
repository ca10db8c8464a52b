"""Rules: which buckets a task draws from, at what cost and for which key, and what happens when they refuse."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tb_celery.bucket import positive
from tb_celery.errors import ConfigurationError, shown

if TYPE_CHECKING:
    from tb_celery.bucket import Charge
    from tb_celery.limiter import Limiter

RETRY, HOLD, FAIL, DROP = ON_REJECT = ("retry", "hold", "fail", "drop")
QUEUE = "queue:"
"""What a route's pattern begins with when it is about queues and not about tasks."""
SMALLEST = 0.001
"""A cost that every bucket can meet."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What each run of a task draws, and what happens when it cannot.

    Args:
        bucket: a bucket's name, several names, or names with the cost from each (all or nothing); ``None``: no limit.
        cost: tokens a run takes, or a function of the task's arguments that tells.
        key: name of the argument that splits the bucket into independent ones, or a function of the task's arguments.
        max_wait: seconds after its first refusal beyond which the task fails with
            :class:`~tb_celery.RateLimitExceeded` rather than wait on; ``None``: it waits for as long as it takes.
        on_reject: what happens to a task that is refused: ``"retry"`` (back to the queue, until its turn), ``"hold"``
            (kept in the worker until its turn), ``"fail"`` (with :class:`~tb_celery.RateLimitExceeded`), ``"drop"``
            (ignored), or a function that is given the decision and answers one of them but ``"hold"``; ``None``: what
            the setting ``on_reject`` says. Where several rules of a task name the bucket that refuses, for whichever
            key, the first decides that says something: the task's own, then the routes in the order of the setting.
    """

    bucket: str | Sequence[str] | Mapping[str, float] | None = None
    cost: float | Callable[..., float] = 1
    key: str | Callable[..., object] | None = None
    max_wait: float | None = None
    on_reject: str | Callable[..., str] | None = None

    @property
    def names(self) -> list[str]:
        """The buckets' names."""
        return [self.bucket] if isinstance(self.bucket, str) else list(self.bucket or ())

    @property
    def asks_arguments(self) -> bool:
        """Whether what a run draws depends on its arguments."""
        return self.key is not None or callable(self.cost)

    def check(self, owner: str, arguments: Sequence[str] | None = None) -> None:
        """Check each option.

        Args:
            owner: whose rule it is, as the sentences begin.
            arguments: names of the task's arguments, where they are known.

        Raises:
            ConfigurationError: an option is not of its kind.
        """
        bucket = self.bucket
        is_several = isinstance(bucket, Sequence | Mapping)
        if bucket is not None and not (
            is_several and self.names and all(isinstance(each, str) and each for each in self.names)
        ):
            message = f"{owner}: bucket must be a name, a list of names or a dict of costs by name, not {bucket!r}"
            raise ConfigurationError(message)
        if isinstance(bucket, Mapping) and self.cost != 1:
            message = f"{owner}: give the costs in bucket or in cost, not in both"
            raise ConfigurationError(message)
        check_numbers(owner, {} if callable(self.cost) else {"cost": self.cost}, self.max_wait)
        if isinstance(self.key, str):
            if arguments is not None and self.key not in arguments:
                message = f"{owner}: key {self.key!r} is not the name of one of its arguments"
                raise ConfigurationError(message)
        elif self.key is not None and not callable(self.key):
            message = f"{owner}: key must be the name of an argument or a function of the arguments, not {self.key!r}"
            raise ConfigurationError(message)
        check_on_reject(owner, self.on_reject)

    def check_buckets(self, owner: str, limiter: Limiter) -> tuple[Charge, ...]:
        """Check that the buckets exist and can meet the costs, as far as those are known; what a run draws at least.

        Raises:
            ConfigurationError: a bucket is unknown, or the cost is above what it can hold.
        """
        # What a function will tell is not known yet, but whether its buckets are.
        cost = SMALLEST if callable(self.cost) else self.cost
        try:
            return limiter.charges(self._costs(cost)) if self.bucket else ()
        except ConfigurationError as error:
            message = f"{owner}: {error}"
            raise ConfigurationError(message) from None

    def charges(
        self,
        limiter: Limiter,
        task: Any,  # noqa: ANN401
        call: Mapping[str, Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[Charge, ...]:
        """What one delivery draws, by this rule, the options of its call, and its arguments.

        Raises:
            ConfigurationError: a bucket is unknown, the cost could never be met, or there is no key.
        """
        if not call and self.key is None and isinstance(self.bucket, str) and not callable(self.cost):
            return limiter.charges(self.bucket, self.cost)
        cost = call.get("cost", self.cost)
        if callable(cost):
            cost = cost(*args, **kwargs)
        key = call["key"] if "key" in call else self._key(task, args, kwargs)
        if isinstance(self.bucket, str):
            return limiter.charges(self.bucket, cost, key=key)
        return limiter.charges(self._costs(cost), key=key)

    def _costs(self, cost: float) -> Mapping[str, float]:
        return self.bucket if isinstance(self.bucket, Mapping) else dict.fromkeys(self.names, cost)

    def _key(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:  # noqa: ANN401
        if self.key is None:
            return None
        if callable(self.key):
            value = self.key(*args, **kwargs)
        elif self.key in kwargs:
            value = kwargs[self.key]
        else:
            bound = inspect.signature(task.run).bind(*args, **kwargs)
            bound.apply_defaults()
            # A queue's route may meet tasks that have no such argument.
            value = bound.arguments.get(self.key)
        if value is None:
            message = (
                f"task {task.name!r}: its key {self.key!r} is None in this call; give it a value, or the task no key"
            )
            raise ConfigurationError(message)
        return str(value)


OPTIONS = tuple(field.name for field in fields(Rule))
"""The names of a rule's options, which are those of a task and of a route."""


def combined(charges: Iterable[Charge]) -> tuple[Charge, ...]:
    """The charges of several rules as one call's: what two draw from one limit is drawn once, at the higher cost."""
    ordered = sorted(charges, key=lambda charge: (charge.bucket, charge.key or "", charge.key is None, -charge.number))
    return tuple(max(same, key=lambda charge: charge.cost) for _, same in groupby(ordered, lambda charge: charge[:3]))


def routed(routes: Mapping[str, Rule], task: str, queues: Iterable[str]) -> list[Rule]:
    """The rules of those ``routes`` that name ``task`` or one of ``queues``."""
    return [
        rule
        for pattern, rule in routes.items()
        if (
            any(fnmatchcase(queue, pattern.removeprefix(QUEUE)) for queue in queues)
            if pattern.startswith(QUEUE)
            else fnmatchcase(task, pattern)
        )
    ]


def check_on_reject(owner: str, on_reject: object) -> None:
    """Check what is to happen to a refused task.

    Raises:
        ConfigurationError: it is none of the four, and no function.
    """
    if on_reject is not None and on_reject not in ON_REJECT and not callable(on_reject):
        message = f'{owner}: on_reject must be "retry", "hold", "fail", "drop" or a function, not {shown(on_reject)}'
        raise ConfigurationError(message)


def check_numbers(owner: str, costs: Mapping[str, Any], max_wait: object) -> None:
    """Check what has to be a number above 0.

    Raises:
        ConfigurationError: one of them is not.
    """
    for option, value in {**costs, "max_wait": max_wait}.items():
        if value is not None or option != "max_wait":
            try:
                positive(option, value)
            except ConfigurationError as error:
                message = f"{owner}: {error}"
                raise ConfigurationError(message) from None


def meant(option: str) -> str | None:
    """The option that somebody who wrote ``option`` probably meant."""
    # Of short words with two letters swapped too little is alike.
    swapped = [each for each in OPTIONS if sorted(each) == sorted(option.lower())]
    close = swapped or get_close_matches(option.lower(), OPTIONS, 1, 0.8)
    return close[0] if close else None
