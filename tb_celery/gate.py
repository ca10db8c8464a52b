"""The line that holds messages: a worker keeps them, unacknowledged, and starts each at its turn.

Nothing is published, so nothing can get lost on the way, and a task is started as soon as its tokens are there. Per
bucket and key there is one line, with one turn and one timer, its head's: whoever else is in it costs nothing.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.concurrency import solo
from celery.worker import state

from tb_celery.arithmetic import Place, look
from tb_celery.bucket import LONGEST_SPAN, SECOND
from tb_celery.errors import StoreError, StoreTimeoutError
from tb_celery.hasty import HastyStore
from tb_celery.line import Held, Line
from tb_celery.quota import Quota, quota_of
from tb_celery.reschedule import HEADER, Grant, LimitedRequest, Ticket
from tb_celery.slots import CountedSlots, GuardedSlots
from tb_celery.terms import CALL_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from tb_celery.bucket import Charge
    from tb_celery.slots import Slots

logger = logging.getLogger("tb_celery")

ENOUGH = 2
"""Requests in a line that keep it going while more are fetched."""
LONG = 1.0
"""Seconds that a bucket has to be empty for before its queue is left alone meanwhile."""
BREATH = 0.001
"""Seconds in which the loop sees to everything else, after it ran a task itself or before it sizes the pool."""
HELD = 0.95
"""Longest countdowns for which a request is held: together with one before that RabbitMQ bears two by default."""
AGAIN = 1.0
"""Seconds after which to look again, however far off a head's turn is: a pause may have been ended."""
SHARE = 0.01
"""That many seconds for each line at least: a node looks a hundred times a second at most."""


class Gate(bootsteps.StartStopStep):
    """Stands between the consumer and the pool."""

    label = "Gate"

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._consumer = consumer
        self._controller = consumer.controller
        self._quota: Quota = quota_of(consumer.app)
        self._hand_over = consumer.on_task_request
        self._slots = self._slots_of(consumer.pool)
        self._lines: dict[tuple[object, ...], Line] = {}
        self._held = 0
        # Without an event loop the timer is a thread of its own.
        self._mutex = threading.RLock()
        self._longest = self._quota.settings.max_countdown
        self._has_warned = False
        self._store = HastyStore(self._quota)
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
        self._slots.clear()

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
            self._slots.in_turn(self._hand_over, request)
            return
        key = tuple(charge[:3] for charge in charges)
        with self._mutex:
            line = self._lines.get(key)
            now = time.monotonic()
            # The broker bears two of the longest countdowns, of which an ETA of its own may have used up some.
            until = min(now, request.received + self._longest) + HELD * self._longest
            has_room = self._has_room(line, until)
            if has_room:
                line = self._lines.setdefault(key, Line(key))
                self._hold(line, Held(request, charges, now, until))
                self._come_back(line, request)
                self._pause(line, request)
        if has_room and line is not None:
            self._move_on(line)
        else:
            # The pool will ask for it, and send it back to the queue.
            self._slots.in_turn(self._hand_over, request)

    def _has_room(self, line: Line | None, until: float) -> bool:
        """Whether one more can be held: without starving others, filling the memory, or outlasting the broker.

        Args:
            line: that it would be in; ``None``: there is none yet.
            until: when it has to go (monotonic).
        """
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
        if self._held >= most or line is None or not line.waiting:
            return self._held < most
        # Only a line's head is looked at, so nobody behind it may have to go before it.
        return line.worth <= HELD * self._longest * SECOND and line.waiting[-1].until <= until

    def _come_back(self, line: Line, request: LimitedRequest) -> None:
        """A request that was sent back once, or spread, brings a turn: it is the line's from now on."""
        ticket = Ticket.of(request.request_dict.get(HEADER))
        if ticket is None or not ticket.turn or ticket.clock != self._store.clock.identity:
            return
        bisect.insort(line.turns, ticket.turn)
        if line.turns[0] == ticket.turn and line.timer is not None:
            self._consumer.timer.cancel(line.timer)
            line.timer = None

    def _charges(self, request: Any) -> tuple[Charge, ...]:
        """What ``request`` draws; nothing where it is not for this gate, or only the pool can say what is wrong."""
        if not isinstance(request, LimitedRequest):
            return ()
        terms = self._quota.terms(request.task, request.delivery_info)
        if not terms.holds:
            return ()
        try:
            header = request.request_dict.get(CALL_HEADER)
            charges, max_wait = terms.charges(request.task, header, request.args, request.kwargs)
        except Exception:  # noqa: BLE001
            return ()
        # Who has little patience wants to know at once whether it will do.
        return charges if max_wait is None and self._quota.held_to(charges, request.id) else ()

    # -- the line

    def _move_on(self, line: Line) -> None:
        """See to ``line``'s head, as soon as the pool has room."""
        for request in self._let_go(line):
            self._hand_over(request)
        while self._begin(line):
            if not self._slots.take(self._on_slot, line):
                self._grow()
                return
            if not self._start(line):
                return

    def _on_slot(self, line: Line) -> None:
        """There is room in the pool again."""
        if self._start(line):
            self._move_on(line)

    def _start(self, line: Line) -> bool:
        """Start the head, in a place in the pool that is kept for it; whether to see to the next one at once."""
        started = False
        try:
            started = self._ask(line)
        finally:
            self._slots.give_back(used=started)
        if started and self._runs_here:
            # It has run by now. A line of many must not keep the loop from heartbeats, control and other queues.
            self._consumer.timer.call_after(BREATH, self._move_on, (line,), priority=6)
            return False
        return started

    def _begin(self, line: Line) -> bool:
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
            # It waits for nothing but the pool, whose autoscaler counts those.
            state.task_reserved(line.waiting[0].request)
            return True

    def _let_go(self, line: Line) -> list[LimitedRequest]:
        """Those who have been held for so long that the broker may soon give them to somebody else."""
        gone = []
        with self._mutex:
            while line.waiting and line.waiting[0].until <= time.monotonic():
                gone.append(self._release(line))
        for request in gone:
            state.task_reserved(request)
        return gone

    def _ask(self, line: Line) -> bool:
        """Ask for the head's tokens; whether it was handed over to the pool."""
        with self._mutex:
            line.asking = False
            if not line.waiting:
                return False
            request = line.waiting[0].request
            wait = self._wait_of(line)
            if wait is not None:
                line.due = time.monotonic() + wait
                self._sleep(line)
                self._schedule(request)
                self._pause(line, request)
                return False
            self._release(line)
            state.task_reserved(request)
        # The mutex is free again: in some pools the task now runs right here.
        self._controller._process_task(request)  # noqa: SLF001
        return True

    def _on_turn(self, _request: LimitedRequest, line: Line) -> None:
        """The timer's call; the request is there for ``celery inspect scheduled`` to see."""
        with self._mutex:
            line.timer = None
            if line.waiting and line.left > 0 and not self._is_worth_asking(line):
                self._sleep(line)
                return
        self._move_on(line)

    def _sleep(self, line: Line) -> None:
        wait = max(0.0, min(line.left, max(AGAIN, SHARE * len(self._lines))))
        line.timer = self._consumer.timer.call_after(wait, self._on_turn, (line.waiting[0].request, line), priority=6)

    def _is_worth_asking(self, line: Line) -> bool:
        """Whether the head's tokens are there before its turn, or other orders stand than at the last look."""
        charges = line.waiting[0].charges
        try:
            now, heard, states = self._store.read(charges)
        except StoreError:
            return False
        before = line.limits or [charge.limit for charge in charges]
        line.limits = [charge.limit for charge in heard]
        return line.limits != before or bool(look(heard, states, now))

    def _wait_of(self, line: Line) -> float | None:
        """Seconds until to ask again for the head; ``None`` when it is to be handed over."""
        request, charges, since, _ = line.waiting[0]
        turn = line.turns[0] if line.turns else None
        try:
            lot = self._quota.lot(request.id)
            decision = self._store.acquire(charges, Place(turn=turn, patience=LONGEST_SPAN, lot=lot))
        except StoreTimeoutError:
            if not self._store.has_failed:
                return self._store.pause
        except StoreError:
            pass
        else:
            if not decision:
                if turn is None and self._quota.metrics:
                    self._quota.metrics.deferred(decision.bucket)
                if turn != decision.at:
                    # No event of that: who listens would take a held task to be rate-limited still when it runs.
                    line.turns = sorted([decision.at, *line.turns[1:]])
                return decision.wait
            request.grant(Grant(self._store.clock.identity, decision, time.monotonic() - since))
        # The pool deals with a store that fails as the setting on_store_error says.
        del line.turns[:1]
        return None

    # -- what a held request means to the worker

    def _hold(self, line: Line, held: Held) -> None:
        request = held.request
        line.waiting.append(held)
        line.worth += held.worth
        self._held += 1
        self._consumer.qos.increment_eventually()
        self._schedule(request)

    @staticmethod
    def _schedule(request: LimitedRequest) -> None:
        state.reserved_requests.discard(request)
        state.task_scheduled(request)

    def _release(self, line: Line) -> LimitedRequest:
        """Take the head out of ``line``."""
        held = line.waiting.popleft()
        line.worth -= held.worth
        # Of turns there are no more than requests: who was revoked, or goes to the pool, needs none.
        del line.turns[len(line.waiting) :]
        request = held.request
        self._held -= 1
        if not self._has_enough(line):
            self._resume(line)
        state.scheduled_requests.discard(request)
        self._consumer.qos.decrement_eventually()
        return request

    # -- the pool

    def _slots_of(self, pool: Any) -> Slots:
        controller = self._controller
        self._runs_here = isinstance(pool, solo.TaskPool)
        if controller.process_task == controller._process_task_sem:  # noqa: SLF001
            return GuardedSlots(controller.semaphore, pool, self._consumer.timer.call_after)
        return CountedSlots(pool, self._soon)

    def _soon(self, call: Callable[[], None]) -> None:
        """Call in the consumer's loop, or in its timer where it has none that could be woken."""
        if self._consumer.hub:
            self._consumer.call_soon(call)
        else:
            self._consumer.timer.call_after(0, call, priority=6)

    def _grow(self) -> None:
        """A head waits for the pool: where that is autoscaled, have it looked at now and not at the next message."""
        scaler = getattr(self._controller, "autoscaler", None)
        if scaler is not None and scaler.processes < scaler.max_concurrency:
            self._consumer.timer.call_after(BREATH, self._scale, (scaler,), priority=6)

    def _scale(self, scaler: Any) -> None:
        with scaler.mutex:
            scaler.maybe_scale()
        self._slots.look()

    # -- queues that have a bucket of their own

    def _pause(self, line: Line, request: LimitedRequest) -> None:
        """Leave the rest of such a queue with the broker: here it would take up memory, and time when this ends."""
        if line.timer is None or not self._has_enough(line) or line.due - time.monotonic() < LONG:
            return
        queue = self._quota.common_queue(request.delivery_info, {name for name, *_ in line.key})
        if queue is not None and queue not in line.paused:
            line.paused.add(queue)
            logger.info("tb_celery: queue %s is left alone until its bucket's next turn", queue)
            # Only the consumer's own thread may use its channel.
            self._consumer.call_soon(self._consumer.task_consumer.cancel_by_queue, queue)

    def _has_enough(self, line: Line) -> bool:
        """Whether a line goes on with those who are in it until more are fetched, or has no room for more."""
        return len(line.waiting) >= ENOUGH or line.worth > HELD * self._longest * SECOND

    def _resume(self, line: Line) -> None:
        while line.paused:
            self._consumer.call_soon(self._consume, line.paused.pop())

    def _consume(self, name: str) -> None:
        queue = self._consumer.app.amqp.queues.consume_from.get(name)
        consumer = self._consumer.task_consumer
        # Somebody may have told the worker meanwhile not to consume from it at all.
        if queue is not None and not consumer.consuming_from(name):
            consumer.add_queue(queue)
            consumer.consume()
