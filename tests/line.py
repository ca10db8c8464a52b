"""Deliveries made by hand: a broker in memory, no worker, and a clock that moves only when told to."""

from __future__ import annotations

import heapq
import itertools
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from celery import Celery, signals
from celery.utils.imports import symbol_by_name

from tb_celery import RateLimitedTask, RateLimitExceeded
from tb_celery.bucket import SECOND
from tb_celery.quota import quota_of
from tb_celery.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from celery import Task
    from celery.exceptions import Retry
    from kombu import Message

    from tb_celery.clock import FakeClock

START = 1000 * SECOND
BUCKETS = {
    "five": {"capacity": 5, "refill_rate": 1},
    "one": {"capacity": 1, "refill_rate": 0.5},
    "other": {"capacity": 1, "refill_rate": 0.5},
    "fast": {"capacity": 1, "refill_rate": 50},
    "burst": {"capacity": 5, "refill_rate": 50},
    "week": {"capacity": 1, "refill_rate": 1 / 604800},
    "off": None,
}


def make_app(clock: FakeClock | None = None, **settings: object) -> Celery:
    """An application with a queue of its own; its buckets are on ``clock``, where there is one."""
    app = Celery(f"app{uuid.uuid4().hex}", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.task_default_queue = app.main
    app.conf.accept_content = ["json", "pickle"]
    app.conf.worker_eta_task_limit = 1000
    app.conf.tb_celery = {"store": "memory", "buckets": BUCKETS, **settings}
    if clock is not None:
        quota_of(app).limiter.store = MemoryStore(clock)
    return app


def declare(app: Celery, function: Callable[..., object] | None = None, **options: object) -> Task:
    """``@app.task(base=RateLimitedTask, ...)`` that is carried out at once and stays in its app.

    Celery's own decorator waits for the app to be finalized, and puts the task into every other app of the process too.
    """
    function = function or (lambda *_args, **_kwargs: "ran")
    if function.__name__ == "<lambda>":
        function.__name__ = "body"  # Celery builds source text with it
    options = {"base": RateLimitedTask, "shared": False, "lazy": False, **options}
    return app.task(**options)(function)


class Outcome(NamedTuple):
    """What one delivery led to: the state and result as clients see them, and the retry where there was one."""

    state: str
    info: object
    retry: Retry | None

    @property
    def countdown(self) -> float:
        assert self.retry is not None
        assert isinstance(self.retry.when, float)
        return self.retry.when

    @property
    def exceeded(self) -> RateLimitExceeded:
        assert isinstance(self.info, RateLimitExceeded)
        return self.info


@dataclass
class Line:
    """The broker's end and the worker's, without either."""

    app: Celery
    clock: FakeClock

    def pop(self, queue: str = "") -> Message | None:
        with self.app.connection_for_read() as connection:
            name = queue or self.app.conf.task_default_queue
            bound = self.app.amqp.queues[name](connection.default_channel)
            message: Message | None = bound.get(no_ack=True, accept=["json", "pickle"])
            return message

    def take(self, queue: str = "") -> Message:
        message = self.pop(queue)
        assert message is not None, "nothing was published"
        return message

    def deliver(self, message: Message | None = None) -> Outcome:
        """Hand a message (the next one) to its task as a worker does when the ETA has come."""
        message = message or self.take()
        task = self.app.tasks[message.headers["task"]]
        retries: list[Retry] = []

        def note(reason: Retry, **_: object) -> None:
            retries.append(reason)

        signals.task_retry.connect(note)
        try:
            symbol_by_name(task.Request)(message, app=self.app, task=task).execute()
        finally:
            signals.task_retry.disconnect(note)
        result = self.app.AsyncResult(message.headers["id"])
        return Outcome(result.state, result.info, retries[0] if retries else None)

    def send_and_deliver(self, task: Task, *args: object, **options: object) -> Outcome:
        task.apply_async(args, **options)
        return self.deliver()

    def run_all(self) -> list[Run]:
        """Deliver everything in the queue, and what is sent back when it is due, until all is done."""
        runs: dict[str, Run] = {}
        due: list[tuple[int, int, Message]] = []
        numbers = itertools.count()
        while message := self.pop():
            heapq.heappush(due, (self.clock.now(), next(numbers), message))
        while due:
            at, _, message = heapq.heappop(due)
            self.clock.advance(max(0, at - self.clock.now()))
            run = runs.setdefault(message.headers["id"], Run())
            outcome = self.deliver(message)
            if outcome.retry is None:
                run.state, run.ended = outcome.state, self.clock.now()
            else:
                run.countdowns.append(outcome.countdown)
                copy = self.take()
                heapq.heappush(due, (self.clock.now() + round(outcome.countdown * SECOND), next(numbers), copy))
        return list(runs.values())


@dataclass
class Run:
    """A task's way through the line."""

    countdowns: list[float] = field(default_factory=list)
    state: str = ""
    ended: int = 0


@dataclass(eq=False)
class Worker:
    """What the signals hand over."""

    app: Celery
    pool: object = None

    def start(self) -> None:
        signals.worker_init.send(sender=self)
        signals.worker_ready.send(sender=self)


def draw(app: Celery, bucket: str, cost: float = 1, key: str | None = None) -> None:
    assert quota_of(app).limiter.acquire(bucket, cost, key=key)


def tokens(app: Celery, bucket: str, key: str | None = None) -> float:
    (limit,) = quota_of(app).limiter.status(bucket, key=key).limits
    return limit.tokens


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(each.levelname, each.getMessage()) for each in caplog.records]
