"""The line that holds messages: a worker keeps them, unacknowledged, and starts each at its turn.

Nothing is published, so nothing can get lost on the way, and a task is started as soon as its tokens are there. Per
bucket and key there is one line, with one turn and one timer, its head's: whoever else is in it costs nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import bootsteps
from celery.worker import state

from tb_celery.arithmetic import Place
from tb_celery.bucket import LONGEST_SPAN, SECOND
from tb_celery.errors import StoreError, StoreTimeoutError
from tb_celery.quota import CALL_HEADER, Quota, quota_of
from tb_celery.reschedule import HEADER, Grant, LimitedRequest, Ticket
from tb_celery.settings import open_store

if TYPE_CHECKING:
    from tb_celery.bucket import Charge
    from tb_celery.stores import Store

logger = logging.getLogger("tb_celery")

ENOUGH = 2
"""Requests in a line that keep it going while more are fetched."""
LONG = 1.0
"""Seconds that a bucket has to be empty for before its queue is left alone meanwhile."""
BUSY = 0.005
"""Seconds after which to ask again when others hold the store's lock: the consumer's loop must not wait for it."""
ANSWER = 0.25
"""Seconds for which the loop waits for a server's answer; then it goes on for four times as long and asks again."""


class _Held(NamedTuple):
    """A request in a line, what it draws, and when (monotonic) it has been held for as long as the broker bears it."""

    request: LimitedRequest
    charges: tuple[Charge, ...]
    until: float

    @property
    def worth(self) -> int:
        """Nanoseconds that its tokens take to refill."""
        return max(charge.cost for charge in self.charges)


class _Line:
    """Requests that wait for the same buckets and keys, in the order in which they came."""

    def __init__(self, key: tuple[tuple[str, str | None, int], ...]) -> None:
        self.key = key
        self.waiting: deque[_Held] = deque()
        self.worth = 0
        """Nanoseconds that the tokens of all who wait take to refill."""
        self.turn: int | None = None
        self.timer: Any = None
        self.due = 0.0
        self.asking = False
        self.busy = 0.0
        self.paused: set[str] = set()
        """Queues that are not consumed from for as long as there are enough of theirs here."""


class Gate(bootsteps.StartStopStep):
    """Stands between the consumer and the pool."""

    label = "Gate"

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._consumer = consumer
        self._controller = consumer.controller
        self._quota: Quota = quota_of(consumer.app)
        self._hand_over = consumer.on_task_request
        self._lines: dict[tuple[object, ...], _Line] = {}
        self._held = 0
        # Without an event loop the timer is a thread of its own.
        self._mutex = threading.RLock()
        settings = self._quota.settings
        self._longest = settings.max_countdown
        self._has_warned = False
        self._store: Store = self._quota.limiter.store
        self._busy = BUSY
        if settings.store != "memory":
            # A descriptor or connection of its own, and no patience: nothing may hold up the consumer's loop.
            patience = 1e-9 if settings.store == "file" else min(ANSWER, settings.lock_timeout)
            self._store = open_store(settings.model_copy(update={"lock_timeout": patience}))
            self._busy = max(BUSY, 4 * patience)
        # Here and not in start(): the strategies, made when another step starts, keep what they find.
        consumer.on_task_request = self.take

    def start(self, consumer: Any) -> None:
        """Nothing to do before a request comes."""

    def stop(self, consumer: Any) -> None:
        """Let go of everything, at shutdown or before a reconnect: the broker gives it to somebody again."""
        with self._mutex:
            for line in self._lines.values():
                if line.timer is not None:
                    consumer.timer.cancel(line.timer)
                line.waiting.clear()
            self._lines.clear()
            self._held = 0

    def held(self) -> list[tuple[float, list[tuple[str, tuple[Charge, ...]]]]]:
        """Of each line the seconds until its head's turn, and its requests, first to last: their ids and draws."""
        with self._mutex:
            return [
                (max(0.0, line.due - time.monotonic()), [(each.request.id, each.charges) for each in line.waiting])
                for line in self._lines.values()
                if line.waiting
            ]

    def take(self, request: LimitedRequest) -> None:
        """Hand ``request`` over to the pool, or keep it until its turn."""
        charges = self._charges(request)
        if not charges:
            self._hand_over(request)
            return
        key = tuple(charge[:3] for charge in charges)
        with self._mutex:
            line = self._lines.get(key)
            has_room = self._has_room(line)
            if has_room:
                line = self._lines.setdefault(key, _Line(key))
                self._hold(line, _Held(request, charges, time.monotonic() + self._longest))
                self._come_back(line, request)
                self._pause(line, request)
        if has_room and line is not None:
            self._move_on(line)
        else:
            # The pool will ask for it, and send it back to the queue.
            self._hand_over(request)

    def _has_room(self, line: _Line | None) -> bool:
        """Whether one more can be held: without starving others, filling the memory, or outlasting the broker."""
        conf, consumer = self._consumer.app.conf, self._consumer
        most = self._quota.settings.max_held
        if conf.worker_eta_task_limit:
            most = min(most, conf.worker_eta_task_limit // 2)
        fixed = getattr(consumer, "qos_global", None) is False and not consumer.connection.qos_semantics_matches_spec
        if fixed and consumer.initial_prefetch_count:
            # With quorum queues the prefetch count is fixed: what is held takes the place of others.
            most = min(most, consumer.initial_prefetch_count // 2)
        if self._held >= most and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "tb_celery: this node holds %d tasks, which is the most it can; further ones go back to the queue", most
            )
        return self._held < most and (line is None or line.worth <= self._longest * SECOND)

    def _come_back(self, line: _Line, request: LimitedRequest) -> None:
        """A request that was sent back once brings a turn: whoever is first in the line takes that."""
        ticket = Ticket.of(request.request_dict.get(HEADER))
        if ticket is None or not ticket.turn or ticket.clock != self._store.clock.identity:
            return
        if line.turn is None or ticket.turn < line.turn:
            line.turn = ticket.turn
            if line.timer is not None:
                self._consumer.timer.cancel(line.timer)
                line.timer = None

    def _charges(self, request: Any) -> tuple[Charge, ...]:
        """What ``request`` draws; nothing where it is not for this gate, or only the pool can say what is wrong."""
        task, quota = request.task, self._quota
        if not isinstance(request, LimitedRequest):
            return ()
        rules = quota.rules(task, request.delivery_info)
        if not rules or not quota.holds(rules):
            return ()
        try:
            args, kwargs = (request.args, request.kwargs) if any(rule.asks_arguments for rule in rules) else ((), {})
            charges, max_wait = quota.charges(task, rules, request.request_dict.get(CALL_HEADER), args, kwargs)
        except Exception:  # noqa: BLE001
            return ()
        # Who has little patience wants to know at once whether it will do.
        return charges if max_wait is None else ()

    # -- the line

    def _move_on(self, line: _Line) -> None:
        """See to ``line``'s head, as soon as the pool has room."""
        for request in self._let_go(line):
            self._hand_over(request)
        while self._begin(line):
            if self._has_slots:
                self._controller.semaphore.acquire(self._on_slot, line)
                return
            if not self._ask(line):
                return

    def _begin(self, line: _Line) -> bool:
        """Whether there is a head to ask for, and nobody is at it."""
        with self._mutex:
            if line.asking or line.timer is not None:
                return False
            while line.waiting and line.waiting[0].request.revoked():
                # It, or its expiry, has been dealt with and reported.
                self._release(line)
            if not line.waiting:
                self._lines.pop(line.key, None)
                return False
            line.asking = True
            return True

    def _let_go(self, line: _Line) -> list[LimitedRequest]:
        """Those who have been held for so long that the broker may soon give them to somebody else."""
        gone = []
        with self._mutex:
            while line.waiting and line.waiting[0].until <= time.monotonic():
                gone.append(self._release(line))
        for request in gone:
            state.task_reserved(request)
        return gone

    @property
    def _has_slots(self) -> bool:
        """Whether requests wait in line for a free pool process before they are handed over."""
        return bool(self._controller.process_task == self._controller._process_task_sem)  # noqa: SLF001

    def _on_slot(self, line: _Line) -> None:
        """The semaphore's call: a pool process is free, and kept for us."""
        if self._ask(line):
            self._move_on(line)
        else:
            self._controller.semaphore.release()

    def _ask(self, line: _Line) -> bool:
        """Ask for the head's tokens; whether it was handed over to the pool."""
        with self._mutex:
            line.asking = False
            if not line.waiting:
                return False
            request, _, until = line.waiting[0]
            wait = self._wait_of(line)
            if wait is not None:
                line.due = time.monotonic() + wait
                wait = max(0.0, min(line.due, until) - time.monotonic())
                line.timer = self._consumer.timer.call_after(wait, self._on_turn, (request, line), priority=6)
                self._pause(line, request)
                return False
            self._release(line)
        # The mutex is free again: in some pools the task now runs right here.
        state.task_reserved(request)
        if self._has_slots:
            self._controller._process_task(request)  # noqa: SLF001
        else:
            self._hand_over(request)
        return True

    def _on_turn(self, _request: LimitedRequest, line: _Line) -> None:
        """The timer's call; the request is there for ``celery inspect scheduled`` to see."""
        line.timer = None
        self._move_on(line)

    def _wait_of(self, line: _Line) -> float | None:
        """Seconds until to ask again for the head; ``None`` when it is to be handed over."""
        request, charges, _ = line.waiting[0]
        try:
            decision = self._store.acquire(charges, Place(turn=line.turn, patience=LONGEST_SPAN))
        except StoreTimeoutError:
            line.busy += self._busy
            if line.busy < self._quota.settings.lock_timeout:
                return self._busy
        except StoreError:
            pass
        else:
            line.busy = 0.0
            if not decision:
                line.turn = decision.at
                turn = time.time() + decision.wait
                request.send_event("task-rate-limited", bucket=decision.bucket, wait=decision.wait, turn=turn)
                return decision.wait
            request.grant(Grant(self._store.clock.identity, decision))
        # The pool deals with a store that fails as the setting on_store_error says.
        line.turn, line.busy = None, 0.0
        return None

    # -- what a held request means to the worker

    def _hold(self, line: _Line, held: _Held) -> None:
        request = held.request
        line.waiting.append(held)
        line.worth += held.worth
        self._held += 1
        self._consumer.qos.increment_eventually()
        state.reserved_requests.discard(request)
        state.task_scheduled(request)

    def _release(self, line: _Line) -> LimitedRequest:
        """Take the head out of ``line``."""
        held = line.waiting.popleft()
        line.worth -= held.worth
        request = held.request
        self._held -= 1
        if len(line.waiting) < ENOUGH:
            self._resume(line)
        state.scheduled_requests.discard(request)
        self._consumer.qos.decrement_eventually()
        return request

    # -- queues that have a bucket of their own

    def _pause(self, line: _Line, request: LimitedRequest) -> None:
        """Leave the rest of such a queue with the broker: here it would take up memory, and time when this ends."""
        if line.timer is None or len(line.waiting) < ENOUGH or line.due - time.monotonic() < LONG:
            return
        queue = self._quota.common_queue(request.delivery_info, {name for name, *_ in line.key})
        if queue is not None and queue not in line.paused:
            line.paused.add(queue)
            logger.info("tb_celery: queue %s is left alone until its bucket's next turn", queue)
            # Only the consumer's own thread may use its channel.
            self._consumer.call_soon(self._consumer.task_consumer.cancel_by_queue, queue)

    def _resume(self, line: _Line) -> None:
        while line.paused:
            self._consumer.call_soon(self._consume, line.paused.pop())

    def _consume(self, name: str) -> None:
        queue = self._consumer.app.amqp.queues.consume_from.get(name)
        consumer = self._consumer.task_consumer
        # Somebody may have told the worker meanwhile not to consume from it at all.
        if queue is not None and not consumer.consuming_from(name):
            consumer.add_queue(queue)
            consumer.consume()
