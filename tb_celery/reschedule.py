"""The exact copy of a delivered message, sent back with an ETA.

``Task.retry`` and ``signature_from_request`` will not do: they spend a retry, recompute redacted representations of the
arguments, make the task its own parent, lose serializer and compression, and follow ``task_routes`` to another queue.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from celery.app.task import Context
from celery.app.trace import get_actual_ignore_result
from celery.exceptions import Ignore, InvalidTaskError, SoftTimeLimitExceeded
from celery.utils.quorum_queues import detect_quorum_queues
from celery.worker.request import Request
from celery.worker.strategy import default as default_strategy
from kombu import Exchange, Queue
from kombu.exceptions import KombuError
from kombu.serialization import registry
from kombu.utils.uuid import uuid

from tb_celery.errors import RateLimitExceeded, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from celery import Celery, Task

    from tb_celery.arithmetic import Decision

logger = logging.getLogger("tb_celery")

HEADER = "tb_celery"
"""The header of a waiting task's message; it never reaches the task's body."""
GRANT = "tb_celery_grant"
SOURCE = "tb_celery_source"
DELIVERED = "tb_celery_delivered"
"""Where a request that runs has what its worker told of its delivery."""
TOLD = frozenset({"queues", "content_type", "subscribed"})
"""What a :class:`LimitedRequest` tells."""
STRATEGY = f"{__name__}:strategy"
"""For a task's attribute of that name: a function would become its method."""
EMBEDDED = frozenset({"callbacks", "errbacks", "chain", "chord"})
"""What Celery puts into a message's body next to the arguments; in the pool it wins over the headers of its name."""
LISTS = (list, tuple)
NUMBERS = frozenset({int, float, NoneType})
"""What a time limit can be."""
PERSISTENCE = (1, 2)
"""What AMQP knows as a message's delivery mode."""
FANOUT = ("amqp", "memory", "filesystem")
"""The kinds of transport whose queues can be sent to by name also when they are bound to a fanout exchange."""

dropped: Counter[str] = Counter()
"""How many tasks this node has dropped since its start, by the bucket that refused them."""
sent_back: Counter[str] = Counter()
"""How often this node has sent tasks back since its start, by the bucket that refused them."""


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
        held: seconds for which the worker had held the request.
    """

    clock: int
    decision: Decision
    held: float = 0.0


class Source(NamedTuple):
    """The queue that a worker has a delivery from, which the message itself does not tell.

    Attributes:
        names: the queue's name, and its alias where it has one.
        can_be_sent_to: whether a message can be put into it by name: what Redis publishes to subscribers is in no list.
    """

    names: tuple[str, ...]
    can_be_sent_to: bool


class Dropped(Ignore):
    """Ends the delivery of a task that is dropped.

    Args:
        bucket: that refused it.
    """

    def __init__(self, bucket: str) -> None:
        super().__init__(bucket)
        self.bucket = bucket


def names_of(queue: Queue) -> tuple[str, ...]:
    """A queue's name, and its alias where it has one, as those have whose names are made up at each start."""
    alias: str | None = getattr(queue, "alias", None)
    return (queue.name, alias) if alias else (queue.name,)


def telling(consumer: type) -> type:
    """``consumer``, a subclass of kombu's, so that it tells of each message which queue it came by."""

    class TellingConsumer(consumer):
        tb_celery_telling = True

        def _basic_consume(self, queue: Queue, *args: Any, **kwargs: Any) -> Any:
            fanout = queue.exchange is not None and queue.exchange.type == "fanout"
            source = Source(names_of(queue), not fanout or self.connection.transport.driver_type in FANOUT)
            # What kombu's own has the broker call for this queue's messages.
            self._receive_callback = partial(self._receive_from, source)
            return super()._basic_consume(queue, *args, **kwargs)

        def _receive_from(self, source: Source, message: Any) -> Any:
            # A dict of its own: the message's goes back to the broker with it, where it is to be delivered again.
            message.delivery_info = {**(message.delivery_info or {}), SOURCE: source}
            return super()._receive_callback(message)

    return consumer if hasattr(consumer, "tb_celery_telling") else TellingConsumer


class LimitedRequest(Request):
    """A delivery that tells the pool process what not every transport does: its queue, and its message's encoding.

    Its ``delivery_info`` has them: under ``queues`` the queue's names, under ``content_type`` the encoding, and a
    ``subscribed`` that is true where no message can be put into the queue by name. A message cannot bring them: Celery
    makes that dict anew.

    Attributes:
        received: when its message came (monotonic), which is before an ETA that it waits for here.

    Raises:
        InvalidTaskError: the message is not as Celery takes it to be; the worker says so, and goes on without it.
    """

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(message, *args, **kwargs)
            self._check()
        except (InvalidTaskError, KombuError):
            raise
        except Exception as error:
            # Where Celery meets such a thing it would end the worker, or the loop that all other messages come by.
            sentence = f"{type(error).__name__}: {error}"
            raise InvalidTaskError(sentence) from error
        self.received = time.monotonic()
        delivered = self.request_dict["delivery_info"]
        for name in ("exchange", "routing_key"):
            if delivered[name] is not None:  # on Redis the publisher tells these, too
                delivered[name] = str(delivered[name])
        delivered["content_type"] = message.content_type
        source = (message.delivery_info or {}).get(SOURCE)
        if isinstance(source, Source):
            delivered["queues"] = source.names
            delivered["subscribed"] = not source.can_be_sent_to

    def _check(self) -> None:
        """Look at all that is taken for granted from here on: anybody may have written the message.

        Raises:
            InvalidTaskError: something is not of its kind.
        """
        told, limits = self._request_dict, self.time_limits
        hash(self.name)
        task_id = told["id"]
        if not task_id or not isinstance(task_id, str) or not task_id.isascii():
            # Under another one no result could be stored, which ends a worker that runs tasks in its own loop.
            self.id = told["id"] = str(task_id or uuid()).encode("utf-8", "replace").decode()
        args, kwargs, embedded = self._body if self._decoded else self._message.payload
        stamped, stamps, headers = told.get("stamped_headers"), told.get("stamps"), told.get("headers")
        right = isinstance(args, LISTS) and isinstance(kwargs, dict) and isinstance(limits, LISTS)
        if stamped or stamps or headers or not right:
            _refuse({"args": args, "timelimit": limits}, LISTS)
            _refuse({"stamped_headers": stamped or ()}, (*LISTS, set))
            _refuse({"kwargs": kwargs, "headers": headers or {}, "stamps": stamps or {}}, dict)
            set(stamped or ())
        if len(limits) != len(Request.time_limits) or not NUMBERS.issuperset(map(type, limits)):
            message = f"timelimit must hold two numbers of seconds, or null, not {shown(limits)}"
            raise InvalidTaskError(message)
        if embedded and not (isinstance(embedded, dict) and EMBEDDED.issuperset(embedded)):
            _refuse({"embed": embedded}, dict)
            for name in embedded.keys() - EMBEDDED:
                if name.startswith(HEADER) or hasattr(Context, name):
                    # In the pool it would stand in the place of what the worker says.
                    message = f"embed must not hold {shown(name)}"
                    raise InvalidTaskError(message)

    def grant(self, grant: Grant) -> None:
        """Tell the pool process that the tokens were taken."""
        self.request_dict[GRANT] = grant

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """As Celery's, which is told of dropped tasks, too; those are counted."""
        if isinstance(exc_info.exception, Dropped):
            dropped[exc_info.exception.bucket] += 1
        return super().on_failure(exc_info, *args, **kwargs)

    def on_retry(self, exc_info: Any) -> None:
        """As Celery's; besides, a refusal is counted, and it and a pause are events where the worker sends events."""
        exceeded = exc_info.exception.exc
        if isinstance(exceeded, RateLimitExceeded):
            sent_back[exceeded.bucket] += 1
            # First: it makes a state of its own, RATE-LIMITED, over which only a retry, and the end, have precedence.
            self.send_event("task-rate-limited", bucket=exceeded.bucket, wait=exceeded.wait, turn=exceeded.turn)
            for bucket, one_key, until in exceeded.pauses:
                self.send_event("bucket-paused", bucket=bucket, one_key=one_key, until=until)
        super().on_retry(exc_info)


def _refuse(values: dict[str, object], kind: type | tuple[type, ...]) -> None:
    for name, value in values.items():
        if not isinstance(value, kind):
            message = f"{name} must be a {'dict' if kind is dict else 'list'}, not {shown(value)}"
            raise InvalidTaskError(message)


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Celery's own, for a body that is none as well: it takes it for a list or an object, and would end the worker."""
    handle: Callable[..., Any] = default_strategy(task, app, consumer, **options)

    def handle_body(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any) -> Any:
        try:
            return handle(message, body, ack, reject, callbacks)
        except Exception as error:
            if body is None and not isinstance(message.payload, list | tuple | dict):
                sentence = f"the body must be a list, not {shown(message.payload)}"
                raise InvalidTaskError(sentence) from error
            raise

    return handle_body


def take_delivered(request: Context) -> Mapping[str, Any]:
    """What the worker told of a delivery, out of ``request``: a retry of the task's own publishes all that is there."""
    delivered: Mapping[str, Any] = request.delivery_info or {}
    if "content_type" in delivered:
        request.delivery_info = {name: delivered[name] for name in delivered if name not in TOLD}
    vars(request)[DELIVERED] = delivered
    return delivered


def delivered_of(request: Context) -> Mapping[str, Any]:
    """What :func:`take_delivered` took out of ``request``."""
    return vars(request).get(DELIVERED) or request.delivery_info or {}


def take_headers(request: Context) -> tuple[Ticket, Grant | None]:
    """What a delivery has brought for us, out of ``request``: the task's own retries must not have it."""
    fields, headers = vars(request), request.headers or {}
    ticket, grant = Ticket.of(fields.pop(HEADER, None)), fields.pop(GRANT, None)
    for name in (HEADER, GRANT):
        headers.pop(name, None)
    # As it is where there are none.
    request.headers = headers or None
    return ticket or Ticket(), grant if isinstance(grant, Grant) else None


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


def store_state(task: Task[Any, Any], state: str, reason: Exception | None = None) -> None:
    """Store where ``task`` stands, and why, where its results are stored at all; call it before :func:`send_back`.

    Celery stores ``RETRY`` when the delivery ends. By then the copy may have run, and its result would be lost.
    """
    request = task.request
    if get_actual_ignore_result(task, request) and not task.store_errors_even_if_ignored:
        return
    try:
        task.backend.store_result(request.id, reason, state, request=request)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001
        # A state that is missing is no reason to lose the task.
        logger.warning("%s[%s] is %s, which could not be stored: %s", task.name, request.id, state, error)


def send_back(task: Task[Any, Any], countdown: float, ticket: Ticket, straight_to: str | None = None) -> None:
    """Publish a copy of the message that ``task`` is running for, differing in nothing but ETA and ticket.

    From then on the task's state is the copy's to store, and Celery stores none for this delivery.

    Args:
        task: the task, inside its delivery.
        countdown: seconds until it is due.
        ticket: what it carries.
        straight_to: the queue to put it into by name; ``None``: it takes the way that the message has come.

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
    delivered = delivered_of(request)
    content_type = delivered.get("content_type") or properties.get("content_type", "")
    options["serializer"] = registry.type_to_name.get(content_type) or task.serializer
    if compression := getattr(request, "compression", None):
        options["compression"] = compression
    if (delivery_mode := properties.get("delivery_mode")) in PERSISTENCE:
        options["delivery_mode"] = delivery_mode
    if delivered.get("priority") is not None:
        options["priority"] = delivered["priority"]
    if straight_to is not None:
        # By the exchange without a name. It is declared: the message came by it.
        options |= {"queue": Queue(straight_to, Exchange("", "direct"), straight_to), "declare": []}
    elif delivered.get("exchange") or not delivered.get("routing_key"):
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
    for each in task.request_stack.stack:
        # Also that of a task's own ``__call__``, which is another one than the tracer's.
        if each.id == request.id:
            each.ignore_result = True


def shortest_countdown(app: Celery, wished: float) -> float:
    """``wished`` seconds, or the least that the broker can delay: with quorum queues that is a second."""
    transport = app.producer_pool.connections.connection.transport
    return max(wished, 1.0) if detect_quorum_queues(app, transport.driver_type)[0] else wished
