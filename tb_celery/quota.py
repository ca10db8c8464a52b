"""What an application's tasks share: its settings, the limiter made from them, and the rules of each delivery."""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from celery.local import Proxy

from tb_celery.errors import ConfigurationError
from tb_celery.reschedule import shortest_countdown
from tb_celery.rules import HOLD, QUEUE, RETRY, Rule, check_numbers, combined, routed
from tb_celery.settings import Settings, load_settings, open_limiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from celery import Celery

    from tb_celery.bucket import Charge
    from tb_celery.limiter import Limiter

REMEMBERED = 1 << 12
"""Destinations whose routes an application remembers."""
DELAYED = "celery_delayed_"
"""How the exchanges begin by way of which Celery has a broker delay messages."""
DELAY_LABELS = 28
"""Labels that such an exchange's routing keys have before the message's own."""
CALL_HEADER = "tb_celery_call"
CALL_OPTIONS = ("cost", "key", "max_wait")
"""The options of a rule that one call can have for itself."""


class LimitedTask(Protocol):
    """A Celery task that may have a rule of its own."""

    name: str
    app: Any
    request: Any
    run: Callable[..., Any]


class Quota:
    """What ``app``'s tasks share.

    Raises:
        ConfigurationError: the settings are wrong.
    """

    def __init__(self, app: Celery) -> None:
        self.settings: Settings = load_settings(app.conf.get("tb_celery"))
        self.limiter: Limiter = open_limiter(self.settings)
        self._app = weakref.ref(app)
        self._routed: dict[tuple[str, str | None, str | None], list[Rule]] = {}

    @functools.cached_property
    def soonest(self) -> float:
        """Seconds before which no task that is sent back can return."""
        app = self._app()
        return shortest_countdown(app, self.settings.min_countdown) if app else self.settings.min_countdown

    def rules(self, task: LimitedTask, delivered: Mapping[str, Any]) -> list[Rule]:
        """What a delivery of ``task`` is subject to: the task's own rule, then those of the routes.

        Args:
            task: never one of Celery's own, which have no rules.
            delivered: where it came from, as its message tells.
        """
        if not self.settings.enabled or task.name.startswith("celery."):
            return []
        own: Rule | None = getattr(task, "tb_celery_rule", None)
        rules = [own] if own is not None and own.bucket else []
        return rules + self._routes(task.name, delivered) if self.settings.routes else rules

    def charges(
        self,
        task: LimitedTask,
        rules: Sequence[Rule],
        header: object,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[tuple[Charge, ...], float | None]:
        """What a delivery draws, and the seconds after which it gives up.

        Args:
            task: what is to run.
            rules: what it is subject to.
            header: the message's :data:`CALL_HEADER`, where it has one.
            args: of this call.
            kwargs: of this call.

        Raises:
            ConfigurationError: a bucket is unknown, the cost could never be met, there is no key, or the options of the
                call are not of their kind.
        """
        call = call_options(task.name, header)
        # A call's options are for the task's own rule; a route's bucket is nothing the caller knows of.
        drawn = [
            rule.charges(self.limiter, task, {} if number else call, args, kwargs) for number, rule in enumerate(rules)
        ]
        waits = [rule.max_wait for rule in rules if rule.max_wait is not None]
        max_wait = call.get("max_wait", min(waits, default=None))
        # One rule's are the very object that the limiter remembers, which a store finds its record by.
        return (drawn[0] if len(drawn) == 1 else combined(chain.from_iterable(drawn))), max_wait

    def on_reject(self, rules: Sequence[Rule], bucket: str) -> str | Callable[..., str]:
        """What happens when ``bucket`` refuses a task that is subject to ``rules``."""
        for rule in rules:
            if rule.on_reject is not None and bucket in rule.names:
                return rule.on_reject
        common: str | Callable[..., str] | Mapping[str, str] = self.settings.on_reject
        return common.get(bucket, RETRY) if isinstance(common, Mapping) else common

    def waits(self, rules: Sequence[Rule]) -> bool:
        """Whether a task subject to ``rules`` waits for its turn, whichever bucket refuses it."""
        return all(self.on_reject(rules, name) in {RETRY, HOLD} for rule in rules for name in rule.names)

    def holds(self, rules: Sequence[Rule]) -> bool:
        """Whether a task subject to ``rules`` is kept in the worker until its turn."""
        return any(self.on_reject(rules, name) == HOLD for rule in rules for name in rule.names) and self.waits(rules)

    def common_queue(self, delivered: Mapping[str, Any], buckets: set[str]) -> str | None:
        """The queue that a delivery came by, where its own route makes all that comes by it draw from ``buckets``."""
        routes = self.settings.routes
        queues = list(self._queues(delivered.get("exchange"), delivered.get("routing_key")))
        common = {
            name: rule
            for name, rule in routes.items()
            if name.startswith(QUEUE) and not rule.asks_arguments and set(rule.names) == buckets
        }
        return queues[0] if len(queues) == 1 and routed(common, "", queues) else None

    def _routes(self, name: str, delivered: Mapping[str, Any]) -> list[Rule]:
        destination = (name, delivered.get("exchange"), delivered.get("routing_key"))
        rules = self._routed.get(destination)
        if rules is None:
            if len(self._routed) >= REMEMBERED:
                self._routed.clear()
            rules = routed(self.settings.routes, name, set(self._queues(*destination[1:])))
            self._routed[destination] = rules
        return rules

    def _queues(self, exchange: str | None, routing_key: str | None) -> Iterator[str]:
        """The names of the queues that a message may have come by."""
        app = self._app()
        key = routing_key or ""
        if exchange and exchange.startswith(DELAYED):
            exchange, key = None, key.split(".", DELAY_LABELS)[-1]
        elif not exchange:  # the default one, by which a queue gets what is sent to its name
            yield key
            return
        for queue in app.amqp.queues.values() if app else ():
            if exchange in {None, queue.exchange and queue.exchange.name} and _matches(queue.routing_key, key):
                yield queue.name


def _matches(pattern: str | None, key: str) -> bool:
    """Whether a queue bound with ``pattern`` gets what is sent with ``key``: as for topics; others are plain ones."""
    expression = re.escape(pattern or "").replace(r"\*", "[^.]*")
    # AMQP 0-9-1, 3.1.3.3: "#" stands for any number of words, and for none.
    expression = expression.replace(r"\.\#", r"(\..*)?").replace(r"\#\.", r"(.*\.)?").replace(r"\#", ".*")
    return bool(re.fullmatch(expression, key))


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
        return {}
    if not isinstance(header, dict) or not header.keys() <= set(CALL_OPTIONS):
        message = f"task {name!r}: the header {CALL_HEADER} must hold cost, key or max_wait, not {header!r}"
        raise ConfigurationError(message)
    check_call(name, header)
    return header
