"""The exact copy of a delivered message, sent back with an ETA.

``Task.retry`` and ``signature_from_request`` will not do: they spend a retry, recompute redacted representations of the
arguments, make the task its own parent, lose serializer and compression, and follow ``task_routes`` to another queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery.app.trace import get_actual_ignore_result
from celery.utils.quorum_queues import detect_quorum_queues
from celery.worker.request import Request
from kombu.serialization import registry

from tb_celery.errors import RateLimitExceeded

if TYPE_CHECKING:
    from celery import Celery, Task
    from celery.app.task import Context

    from tb_celery.arithmetic import Decision

HEADER = "tb_celery"
"""The header of a waiting task's message; it never reaches the task's body."""
CONTENT_TYPE = "tb_celery_content_type"
GRANT = "tb_celery_grant"


class Ticket(NamedTuple):
    """What a message that was sent back carries. Nothing in it grants a token: it can only make its task wait or ask.

    Attributes:
        turn: nanoseconds on the store's clock; 0 where no turn was booked.
        clock: identity of that clock; on any other, the turn means "now".
        deferrals: how often the task was sent back.
        since: nanoseconds since 1970 of the first refusal.
    """

    turn: int = 0
    clock: int = 0
    deferrals: int = 0
    since: int = 0

    @classmethod
    def of(cls, header: object) -> Ticket | None:
        """The ticket in a header that anybody may have written; ``None`` where it is not one."""
        if not isinstance(header, list | tuple) or len(header) != len(cls._fields):
            return None
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in header):
            return None
        return cls(*header)


class Grant(NamedTuple):
    """What the worker was told when it took the tokens for a request, before it handed that to the pool.

    A message cannot bring one, whatever its headers are called: they hold plain data.

    Attributes:
        clock: identity of the store's clock.
        decision: the store's answer.
    """

    clock: int
    decision: Decision


class LimitedRequest(Request):
    """A delivery that tells the pool process how its message was encoded, which not every transport does."""

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        self.request_dict[CONTENT_TYPE] = message.content_type

    def grant(self, grant: Grant) -> None:
        """Tell the pool process that the tokens were taken."""
        self.request_dict[GRANT] = grant

    def on_retry(self, exc_info: Any) -> None:
        """As Celery's; besides, an event of a refusal where the worker sends events."""
        super().on_retry(exc_info)
        exceeded = exc_info.exception.exc
        if isinstance(exceeded, RateLimitExceeded):
            self.send_event("task-rate-limited", bucket=exceeded.bucket, wait=exceeded.wait, turn=exceeded.turn)


def take_headers(request: Context) -> tuple[Ticket | None, Grant | None, str | None]:
    """A delivery's ticket, grant and content type, out of ``request``: the task's own retries must not have them."""
    fields = vars(request)
    ticket = Ticket.of(fields.pop(HEADER, None))
    grant = fields.pop(GRANT, None)
    content_type = fields.pop(CONTENT_TYPE, None)
    if request.headers:
        for name in (HEADER, GRANT, CONTENT_TYPE):
            request.headers.pop(name, None)
        # As it is where there are none.
        request.headers = request.headers or None
    return ticket, grant if isinstance(grant, Grant) else None, content_type


class _AsDelivered:
    """A router that keeps the delivered destination, whatever ``task_routes`` says by now."""

    def __init__(self, router: Any) -> None:
        self._router = router

    def route(self, options: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        expanded: dict[str, Any] = self._router.expand_destination(options)
        if "queue" not in expanded:
            # Celery asks for it where there are quorum queues: only by way of a topic exchange can the broker delay.
            name = expanded["exchange"]
            exchanges = {
                queue.exchange.name: queue.exchange for queue in self._router.queues.values() if queue.exchange
            }
            delayed = "topic" if str(name).startswith("celery_delayed_") else "direct"
            expanded["exchange_type"] = exchanges[name].type if name in exchanges else delayed
            if name in exchanges:
                # kombu's own transports take an exchange that was not declared in this process for a direct one.
                expanded["declare"] = [exchanges[name]]
        return expanded


def send_back(task: Task[Any, Any], countdown: float, ticket: Ticket, content_type: str | None) -> None:
    """Publish a copy of the message that ``task`` is running for, differing in nothing but ETA and ticket.

    Args:
        task: the task, inside its delivery.
        countdown: seconds until it is due.
        ticket: what it carries.
        content_type: how the message was encoded, where known.

    Raises:
        Exception: whatever the broker's client raises when it cannot publish.
    """
    app, request = task.app, task.request
    options = request.as_execution_options()
    headers = dict(options.pop("headers", None) or {})
    # Headers of these names win over those that would be made anew: from the arguments, whatever was redacted, and with
    # the running task, that is, the task itself, for a parent. As options they would go into the properties, too.
    shown = {name: text for name in ("argsrepr", "kwargsrepr") if (text := getattr(request, name, None)) is not None}
    headers |= {**shown, "origin": options.pop("origin"), "parent_id": request.parent_id}
    if app.conf.task_send_sent_event:
        options |= shown  # the event shows what the options say
    headers[HEADER] = list(ticket)
    properties = request.properties or {}
    options["serializer"] = (
        registry.type_to_name.get(content_type or properties.get("content_type", "")) or task.serializer
    )
    if compression := getattr(request, "compression", None):
        options["compression"] = compression
    if delivery_mode := properties.get("delivery_mode"):
        options["delivery_mode"] = delivery_mode
    delivered = request.delivery_info or {}
    if delivered.get("priority") is not None:
        options["priority"] = delivered["priority"]
    if delivered.get("exchange") or not delivered.get("routing_key"):
        options.update(exchange=delivered.get("exchange"), routing_key=delivered.get("routing_key"))
    else:
        options["queue"] = delivered["routing_key"]
    app.send_task(
        task.name,
        request.args,
        request.kwargs,
        countdown=countdown,
        headers=headers,
        ignore_result=get_actual_ignore_result(task, request),
        router=_AsDelivered(app.amqp.router),
        add_to_parent=False,
        task_type=task,
        **options,
    )


def shortest_countdown(app: Celery, wished: float) -> float:
    """``wished`` seconds, or the least that the broker can delay: with quorum queues that is a second."""
    transport = app.producer_pool.connections.connection.transport
    return max(wished, 1.0) if detect_quorum_queues(app, transport.driver_type)[0] else wished
