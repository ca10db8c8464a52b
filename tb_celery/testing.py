"""For the tests of those who use us. pytest finds the fixture by itself wherever this package is installed."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tb_celery.arithmetic import look
from tb_celery.bucket import SECOND
from tb_celery.clock import FakeClock
from tb_celery.state import State
from tb_celery.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from fractions import Fraction

    from celery import Celery
    from celery.app.amqp import task_message
    from kombu import Producer

    from tb_celery.arithmetic import Decision, Place
    from tb_celery.bucket import Bucket, Charge
    from tb_celery.stores import Store

HOUR = 3600 * SECOND


@pytest.fixture
def bucket_clock() -> Iterator[Callable[[Celery], FakeClock]]:
    """Put an app's buckets, and what it sends with a countdown, on a clock that moves only when told to.

    ``clock = bucket_clock(app)``: for the rest of the test the buckets are full, and in memory. Whoever waits, such as
    a task run eagerly, moves the clock on instead; ``clock.advance(nanoseconds)`` does so by hand. What is sent with a
    countdown or ETA in this process, such as a task that a worker in a thread of it sends back until its turn, is
    published when the clock has moved so far, and not at all if the test ends before that.
    """
    with ExitStack() as stack:

        def put(app: Celery) -> FakeClock:
            clock = _Calendar()
            stack.enter_context(_kept_in(MemoryStore(clock), app))
            stack.enter_context(_sent_by(clock, app))
            return clock

        yield put


@contextmanager
def unlimited(app: Celery) -> Iterator[None]:
    """Let the buckets of ``app`` have all the tokens that they are asked for."""
    with _kept_in(_Fixed(FakeClock()), app):
        yield


@contextmanager
def always_refuse(app: Celery) -> Iterator[None]:
    """Let the buckets of ``app`` have no token for an hour, whenever they are asked; waiting for one fails the test."""
    with _kept_in(_Fixed(_Impatient(), HOUR), app):
        yield


def assert_within(grants: str | os.PathLike[str] | Iterable[tuple[int, float | Fraction]], bucket: Bucket) -> None:
    """Check that every window of every length is within each limit of ``bucket``.

    Args:
        grants: the path of a log, as the setting ``grant_log`` has it, or the instant, in nanoseconds, and the cost of
            each grant; a cost below 0 where tokens were given back.
        bucket: such as ``limiter_of(app).buckets["twitter_api"]``.

    Raises:
        AssertionError: in a window there was more; it says in which.
    """
    from tb_celery.grantlog import Entry, read_log  # noqa: PLC0415 - every run of pytest imports this module
    from tb_celery.periods import exact  # noqa: PLC0415
    from tb_celery.verify import verify  # noqa: PLC0415

    if isinstance(grants, str | os.PathLike):
        entries = read_log(Path(grants))
    else:
        entries = (Entry(bucket.name, None, 0, at, exact(cost)) for at, cost in grants)
    over = [str(verdict) for verdict in verify(entries, {bucket.name: bucket}) if verdict.violation]
    if over:
        raise AssertionError("\n".join(over))


@contextmanager
def _kept_in(store: Store, app: Celery) -> Iterator[None]:
    """Have the state of ``app``'s buckets in ``store`` for a while."""
    from tb_celery.quota import quota_of  # noqa: PLC0415 - takes its time, and every run of pytest imports this module

    quota = quota_of(app)
    before = quota.settings, quota.limiter.store
    # Those who open a store of their own, such as a worker that holds tasks, go by the setting.
    quota.settings, quota.limiter.store = quota.settings.model_copy(update={"store": "memory"}), store
    try:
        yield
    finally:
        quota.settings, quota.limiter.store = before


class _Calendar(FakeClock):
    """A clock that makes calls when it has moved so far."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[int, int, Callable[[], object]]] = []
        self._number = itertools.count()
        self._mutex = threading.RLock()

    def call_at(self, due: int, call: Callable[[], object]) -> None:
        with self._mutex:
            heapq.heappush(self._calls, (due, next(self._number), call))
        self.advance(0)

    def advance(self, nanoseconds: int) -> None:
        due = []
        with self._mutex:
            super().advance(nanoseconds)
            while self._calls and self._calls[0][0] <= self.now():
                due.append(heapq.heappop(self._calls))
        for *_, call in due:
            call()


@contextmanager
def _sent_by(clock: _Calendar, app: Celery) -> Iterator[None]:
    """Have what ``app`` sends with a countdown or ETA wait for ``clock``, instead of in a worker."""
    from celery.utils.time import maybe_iso8601, maybe_make_aware  # noqa: PLC0415 - as above

    from tb_celery.reschedule import HEADER, Ticket  # noqa: PLC0415 - as above

    amqp: Any = app.amqp
    publish = amqp.send_task_message

    def send(producer: Producer, name: str, message: task_message, **options: Any) -> object:
        eta = maybe_iso8601(message.headers.get("eta"))
        if eta is None:
            return publish(producer, name, message, **options)
        left = (maybe_make_aware(eta, app.timezone) - datetime.now(UTC)).total_seconds()
        due = clock.now() + int(left * SECOND)
        ticket = Ticket.of((options.get("headers") or {}).get(HEADER)) or Ticket()
        if ticket.deferrals and 0 < ticket.turn < due + SECOND:
            # The clock may have been moved since the task was refused, and the ETA is by another one.
            due = ticket.turn
        at_once = message._replace(headers={**message.headers, "eta": None})
        clock.call_at(due, partial(send_later, name, at_once, options))
        return None

    def send_later(name: str, message: task_message, options: dict[str, object]) -> None:
        with app.producer_or_acquire() as producer:
            publish(producer, name, message, **options)

    amqp.send_task_message = send
    try:
        yield
    finally:
        amqp.send_task_message = publish


class _Fixed(MemoryStore):
    """Every limit is full, or has no token before ``wait`` nanoseconds have passed: at any time, whatever is taken."""

    def __init__(self, clock: FakeClock, wait: int = 0) -> None:
        super().__init__(clock)
        self._wait = wait

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:  # noqa: ARG002
        now, charges, states = self.read(charges)
        return look(charges, states, now)

    def read(self, charges: Sequence[Charge]) -> tuple[int, Sequence[Charge], list[State]]:
        now = self.clock.now()
        fulls = [now + self._wait + charge.limit.span * bool(self._wait) for charge in charges]
        pairs = zip(fulls, charges, strict=True)
        return now, charges, [State(full, full, charge.limit.interval, charge.limit.span) for full, charge in pairs]


class _Impatient(FakeClock):
    def sleep(self, seconds: float) -> None:
        pytest.fail(f"somebody waits {seconds:.3f} s for a bucket that always refuses: give a timeout, or max_wait")
