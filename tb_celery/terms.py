"""On what terms a task's deliveries run that come one way: what each draws, and what happens when that is refused."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from tb_celery.errors import ConfigurationError
from tb_celery.rules import HOLD, RETRY, check_numbers, combined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tb_celery.bucket import Charge
    from tb_celery.limiter import Limiter
    from tb_celery.rules import Rule

WAIT = (RETRY, HOLD)  # no set: a function need not be hashable
CALL_HEADER = "tb_celery_call"
CALL_OPTIONS = ("cost", "key", "max_wait")
"""The options of a rule that one call can have for itself."""
_NO_OPTIONS: Mapping[str, Any] = {}

OnReject = str | Mapping[str, str]
"""The setting ``on_reject``."""


class Terms:
    """The rules that some deliveries are subject to, and what follows from them, worked out once where it can be.

    Args:
        rules: the task's own, then those of the routes; none where the deliveries draw nothing.
        own: the task's own rule, or ``None``.
        on_reject: the setting.
        limiter: what the rules' buckets are in.

    Attributes:
        is_fixed: whether they stay what they are for as long as the rules do.
        waits: whether a task waits for its turn, whichever bucket refuses it.
        holds: whether it is kept in the worker until then.
    """

    __slots__ = ("_drawn", "_limiter", "_on_reject", "holds", "is_fixed", "own", "rules", "waits")

    def __init__(self, rules: Sequence[Rule], own: Rule | None, on_reject: OnReject, limiter: Limiter) -> None:
        self.rules = rules
        self.own = own
        # Somebody may change a list or a dict of buckets at any time.
        self.is_fixed = all(isinstance(rule.bucket, str) for rule in rules)
        self._on_reject = on_reject
        self._limiter = limiter
        self._drawn: tuple[tuple[Charge, ...], float | None] | None = None
        answers = [self.on_reject(name) for rule in self.rules for name in rule.names]
        self.waits = all(answer in WAIT for answer in answers)
        self.holds = self.waits and HOLD in answers

    def on_reject(self, bucket: str) -> str | Callable[..., str]:
        """What happens when ``bucket`` refuses."""
        for rule in self.rules:
            if rule.on_reject is not None and bucket in rule.names:
                return rule.on_reject
        common = self._on_reject
        return common.get(bucket, RETRY) if isinstance(common, Mapping) else common

    def charges(
        self,
        task: Any,  # noqa: ANN401
        header: object,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[tuple[Charge, ...], float | None]:
        """What a delivery draws, and the seconds after which it gives up.

        Args:
            task: what is to run.
            header: the message's :data:`CALL_HEADER`, where it has one.
            args: of this call.
            kwargs: of this call.

        Raises:
            ConfigurationError: a bucket is unknown, the cost could never be met, there is no key, or the options of the
                call are not of their kind.
        """
        if header is None and self._drawn is not None:
            return self._drawn
        call = call_options(task.name, header)
        # A call's options are for the task's own rule; a route's bucket is nothing the caller knows of.
        charges = [
            rule.charges(self._limiter, task, _NO_OPTIONS if number else call, args, kwargs)
            for number, rule in enumerate(self.rules)
        ]
        waits = [rule.max_wait for rule in self.rules if rule.max_wait is not None]
        # One rule's are the very object that the limiter remembers, which a store finds its record by.
        drawn = charges[0] if len(charges) == 1 else combined(chain.from_iterable(charges))
        max_wait = call.get("max_wait", min(waits, default=None))
        if header is None and self.is_fixed and not any(rule.asks_arguments for rule in self.rules):
            self._drawn = drawn, max_wait
        return drawn, max_wait


def check_call(name: str, options: Mapping[str, Any]) -> None:
    """Check ``cost``, ``key`` and ``max_wait`` as a call gives them: they have to fit into its message.

    Raises:
        ConfigurationError: one of them is not of its kind.
    """
    key = options.get("key", "")
    if not isinstance(key, str):
        message = f"task {name!r}: key must be a string, not {key!r}"
        raise ConfigurationError(message)
    costs = {"cost": options["cost"]} if "cost" in options else {}
    check_numbers(f"task {name!r}", costs, options.get("max_wait"))


def call_options(name: str, header: object) -> Mapping[str, Any]:
    """The options that one call of task ``name`` has for itself, from its message's header.

    Raises:
        ConfigurationError: they are not of their kind; anybody may have written them.
    """
    if header is None:
        return _NO_OPTIONS
    if not isinstance(header, dict) or not header.keys() <= set(CALL_OPTIONS):
        message = f"task {name!r}: the header {CALL_HEADER} must hold cost, key or max_wait, not {header!r}"
        raise ConfigurationError(message)
    check_call(name, header)
    return header
