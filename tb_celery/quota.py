"""What an application's tasks share: its settings, the limiter made from them, and the terms of each delivery."""

from __future__ import annotations

import functools
import re
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from celery.local import Proxy

from tb_celery.reschedule import names_of, shortest_countdown
from tb_celery.rules import QUEUE, Rule, routed
from tb_celery.settings import Settings, load_settings, open_limiter
from tb_celery.shadow import ALL, lot_of, percent
from tb_celery.terms import Terms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from celery import Celery
    from kombu import Exchange, Queue

    from tb_celery.bucket import Charge
    from tb_celery.limiter import Limiter
    from tb_celery.metrics import Metrics

REMEMBERED = 1 << 12
"""Destinations whose routes an application remembers."""
DELAYED = "celery_delayed_"
"""How the exchanges begin by way of which Celery has a broker delay messages."""
DELAY_LABELS = 28
"""Labels that such an exchange's routing keys have before the message's own."""


class LimitedTask(Protocol):
    """A Celery task that may have a rule of its own."""

    name: str
    app: Any
    request: Any

    def _get_app(self) -> Any: ...  # noqa: ANN401


class Quota:
    """What ``app``'s tasks share.

    Attributes:
        metrics: the counts, in the processes of a worker node that has a page for them.

    Raises:
        ConfigurationError: the settings are wrong.
    """

    def __init__(self, app: Celery) -> None:
        self.settings: Settings = load_settings(app.conf.get("tb_celery"))
        self.limiter: Limiter = open_limiter(self.settings)
        self.metrics: Metrics | None = None
        self._app = weakref.ref(app)
        self._terms: dict[object, Terms] = {}

    def hasty_limiter(self, patience: float) -> Limiter:
        """A limiter of the same state for those who look and cannot wait for more than ``patience`` seconds."""
        if self.settings.store == "memory":
            return self.limiter
        timeout = min(patience, self.settings.lock_timeout)
        return open_limiter(self.settings.model_copy(update={"lock_timeout": timeout}))

    @functools.cached_property
    def soonest(self) -> float:
        """Seconds before which no task that is sent back can return."""
        app = self._app()
        return shortest_countdown(app, self.settings.min_countdown) if app else self.settings.min_countdown

    def terms(self, task: LimitedTask, delivered: Mapping[str, Any]) -> Terms:
        """On what terms a delivery of ``task`` runs.

        Args:
            task: never one of Celery's own, which have no rules.
            delivered: where it came from, as its message tells, and under ``queues`` the names of its queue where the
                worker has told that.
        """
        own: Rule | None = getattr(task, "tb_celery_rule", None)
        source: object = task.name
        if self.settings.routes:
            queues = delivered.get("queues")
            by = (queues,) if queues else (delivered.get("exchange"), delivered.get("routing_key"))
            source = task.name, *by
        terms = self._terms.get(source)
        if terms is None or terms.own is not own:
            if len(self._terms) >= REMEMBERED:
                self._terms.clear()
            terms = self._terms[source] = self.terms_of(self.rules(task, delivered), own)
        return terms if terms.is_fixed else self.terms_of(terms.rules, own)

    def terms_of(self, rules: Sequence[Rule], own: Rule | None = None) -> Terms:
        """The terms that these rules make, of which one may be the task's own."""
        return Terms(rules, own, self.settings.on_reject, self.limiter)

    def rules(self, task: LimitedTask, delivered: Mapping[str, Any]) -> list[Rule]:
        """The task's own rule, then those of the routes; arguments as for :meth:`terms`."""
        if not self.settings.enabled or task.name.startswith("celery."):
            return []
        own: Rule | None = getattr(task, "tb_celery_rule", None)
        rules = [own] if own is not None and own.bucket else []
        if self.settings.routes:
            queues = delivered.get("queues") or self._queues(delivered.get("exchange"), delivered.get("routing_key"))
            rules += routed(self.settings.routes, task.name, set(queues))
        return rules

    def lot(self, task_id: object) -> float:
        """Which percentages hold a task, as in a :class:`~tb_celery.arithmetic.Place`."""
        return 0.0 if self.settings.enforce is True else lot_of(task_id)

    def held_to(self, charges: tuple[Charge, ...], task_id: object) -> tuple[Charge, ...]:
        """Those of ``charges`` that a task can be refused for; the other buckets are not enforced for it."""
        enforce, lot = self.settings.enforce, self.lot(task_id)
        return charges if enforce is True else tuple(each for each in charges if lot < percent(enforce, each.bucket))

    def common_queue(self, delivered: Mapping[str, Any], buckets: set[str]) -> str | None:
        """The queue that a delivery came by, where all that comes by it is held for as long as ``buckets`` refuse it.

        That is so when a route of the queue's own makes everybody draw from ``buckets``, which are enforced for all,
        and no registered task, for any could come by it, fails, is dropped or has a ``max_wait`` then. Only the message
        of a call that brings a ``max_wait`` of its own, and Celery's own tasks, can still be kept waiting in such a
        queue.
        """
        routes = self.settings.routes
        came_by = delivered.get("queues", ())
        queues = list(came_by[:1] or self._queues(delivered.get("exchange"), delivered.get("routing_key")))
        common = {
            name: rule
            for name, rule in routes.items()
            if name.startswith(QUEUE) and not rule.asks_arguments and set(rule.names) == buckets
        }
        app = self._app()
        is_enforced = all(percent(self.settings.enforce, name) == ALL for name in buckets)
        if app is None or len(queues) != 1 or not is_enforced or not routed(common, "", came_by or queues):
            return None
        own = (task for name, task in app.tasks.items() if not name.startswith("celery."))
        terms = [self.terms(task, delivered) for task in own]
        keep = all(each.holds and all(rule.max_wait is None for rule in each.rules) for each in terms)
        return queues[0] if keep else None

    def straight_to(self, delivered: Mapping[str, Any]) -> str | None:
        """The queue that a delivery's copy has to be put into by name, because its exchange may give it to others, too.

        Args:
            delivered: as for :meth:`rules`.

        Returns:
            ``None`` where the way that the message has come leads to its queue alone, or the queue is not known.
        """
        app = self._app()
        if app is None or "queues" not in delivered:
            return None
        name = delivered["queues"][0]
        queue = app.amqp.queues.get(name)
        exchange, key = delivered.get("exchange"), delivered.get("routing_key")
        if queue is not None and not exchange:
            if queue.exchange.type == "direct":
                # What the publisher tells of it need not be so.
                return None if key == name else name
            # Celery sends by the exchange of such a queue, so that the broker can delay.
            exchange, key = queue.exchange.name, queue.routing_key
        reached = self._bound(exchange, key)
        return None if [each.name for each in reached] == [name] and _is_told_by_key(reached[0], exchange) else name

    def _queues(self, exchange: str | None, routing_key: str | None) -> Iterator[str]:
        """The names of the queues that a message may have come by, where the worker has not told by which."""
        app = self._app()
        if not exchange:  # the default one, by which a queue gets what is sent to its name
            yield routing_key or ""
        elif app:
            # By way of other exchanges it may have come to any of them.
            for queue in self._bound(exchange, routing_key) or list(app.amqp.queues.values()):
                yield from names_of(queue)

    def _bound(self, exchange: str | None, routing_key: str | None) -> list[Queue]:
        """The queues that ``exchange`` may give a message to."""
        app = self._app()
        key = routing_key or ""
        if exchange and exchange.startswith(DELAYED):
            exchange, key = None, key.split(".", DELAY_LABELS)[-1]
        return [
            queue
            for queue in list(app.amqp.queues.values() if app else ())
            if any(
                exchange in {None, bound and bound.name} and (not _is_keyed(bound) or _matches(pattern, key))
                for bound, pattern in _bindings(queue)
            )
        ]


def _bindings(queue: Queue) -> Iterator[tuple[Exchange | None, str | None]]:
    yield queue.exchange, queue.routing_key
    for each in queue.bindings:
        yield each.exchange, each.routing_key


def _is_keyed(exchange: Exchange | None) -> bool:
    """Whether its kind looks at the routing key and nothing else, as those of fanout and headers do not."""
    return exchange is None or exchange.type in {"direct", "topic"}


def _is_told_by_key(queue: Queue, exchange: str | None) -> bool:
    """Whether what ``exchange`` gives to ``queue`` is told by the routing key."""
    is_delayed = (exchange or "").startswith(DELAYED)
    return all(_is_keyed(bound) for bound, _ in _bindings(queue) if is_delayed or (bound and bound.name == exchange))


def _matches(pattern: str | None, key: str) -> bool:
    """Whether a queue bound with ``pattern`` gets what is sent with ``key``: as for topics; others are plain ones."""
    expression = re.escape(pattern or "").replace(r"\*", "[^.]*")
    # AMQP 0-9-1, 3.1.3.3: "#" stands for any number of words, and for none.
    expression = expression.replace(r"\.\#", r"(\..*)?").replace(r"\#\.", r"(.*\.)?").replace(r"\#", ".*")
    return bool(re.fullmatch(expression, key))


_making = threading.Lock()


def quota_of(app: Celery) -> Quota:
    """The quota of ``app``, made on first use from the environment, ``app.conf.tb_celery`` and the settings file.

    Raises:
        ConfigurationError: the settings are wrong.
    """
    quota: Quota | None = getattr(app, "tb_celery_quota", None)
    if quota is None:
        app = app._get_current_object() if isinstance(app, Proxy) else app  # noqa: SLF001
        # Threads of one process must not each get a store in memory of their own.
        with _making:
            quota = getattr(app, "tb_celery_quota", None)
            if quota is None:
                quota = app.tb_celery_quota = Quota(app)
    return quota


def limiter_of(app: Celery) -> Limiter:
    """The limiter that ``app``'s tasks share, for code that asks by itself, such as a task that is called directly.

    Raises:
        ConfigurationError: the settings are wrong.
    """
    return quota_of(app).limiter
