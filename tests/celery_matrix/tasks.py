"""The application of the matrix's nodes, and of the process that sends them its tasks."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from app import body, note
from celery import Celery, Task, shared_task, signals
from kombu import Exchange, Queue
from pydantic import BaseModel

from tb_celery import RateLimitedTask, limiter_of

if TYPE_CHECKING:
    from tb_celery import Decision

BUCKETS: dict[str, dict[str, float]] = {
    "burst": {"capacity": 3, "refill_rate": 20},
    "quick": {"capacity": 1, "refill_rate": 4},
    "second": {"capacity": 1, "refill_rate": 1},
    "slow": {"capacity": 1, "refill_rate": 0.5},
    "starved": {"capacity": 1, "refill_rate": 0.001},
    "globbed": {"capacity": 1, "refill_rate": 4},
    "queued": {"capacity": 1, "refill_rate": 4},
}
NAME = "celery_matrix.tasks"
PREFIX = os.environ.get("TEST_QUEUE", "matrix")
LIMITED = f"{PREFIX}.limited"
CUSTOM = f"{PREFIX}.custom"
TOPIC = f"{PREFIX}.topic"
OWN = [f"{PREFIX}.own{number}" for number in range(12)]
"""For nodes that a scenario has for itself."""


def queues(kind: str) -> list[Queue]:
    """The usual one, one with a bucket, and one with an exchange of another name and an odd routing key.

    Args:
        kind: of RabbitMQ's queues; "" where the server knows no kinds.
    """
    arguments = {"classic": {"x-max-priority": 10}, "quorum": {"x-queue-type": "quorum"}, "": {}}[kind]
    # Only by way of a topic exchange can a broker delay messages for Celery.
    usual = "topic" if kind == "quorum" else "direct"
    return [
        *(Queue(name, Exchange(name, usual), name, queue_arguments=arguments) for name in (PREFIX, LIMITED, *OWN)),
        Queue(CUSTOM, Exchange(TOPIC, "topic"), "special.#", queue_arguments=arguments),
    ]


app = Celery(NAME, set_as_current=False)
app.conf.update(
    broker_url=os.environ.get("TEST_BROKER", "memory://"),
    broker_connection_retry_on_startup=True,
    task_queues=queues(os.environ.get("TEST_KIND", "")),
    task_default_queue=PREFIX,
    task_default_exchange=PREFIX,
    task_default_routing_key=PREFIX,
    result_extended=True,
    task_annotations={f"{NAME}.annotated": {"bucket": "quick", "key": "key"}},
    tb_celery={
        "buckets": BUCKETS,
        "routes": {
            f"{NAME}.globbed*": "globbed",
            f"{NAME}.declared_late_*": {"bucket": "quick", "key": "key"},
            f"queue:{LIMITED}": "queued",
        },
        **json.loads(os.environ.get("TEST_SETTINGS", "{}")),
    },
)
app.conf.update(json.loads(os.environ.get("TEST_CONF", "{}")))

plainly = functools.partial(app.task, bind=True, shared=False)
limited = functools.partial(plainly, base=RateLimitedTask)


@plainly()
def plain(self: Task, number: int = 0, *_: object) -> int:
    body(self)
    return number


@plainly()
def total(self: Task, numbers: list[int]) -> int:
    body(self)
    return sum(numbers)


@plainly()
def failed(self: Task, *_: object) -> None:
    body(self)


@limited(bucket="burst")
def burst(self: Task, number: int) -> int:
    body(self)
    return number


@limited(bucket="quick")
def quick(self: Task, number: int = 0) -> int:
    body(self)
    return number


@limited(bucket="second", acks_late=True, reject_on_worker_lost=True)
def late_acked(self: Task) -> None:
    body(self)


@limited(bucket="second")
def early_acked(self: Task) -> None:
    body(self)


@limited(bucket="slow")
def slow(self: Task, number: int = 0) -> int:
    body(self)
    return number


@limited(bucket="starved")
def starved(self: Task) -> None:
    body(self)


@limited(bucket="quick")
def inner(self: Task, number: int) -> int:
    """Called by map, starmap and chunks: of each of its calls it is known when it ran, at the latest."""
    note("inner", self, number=number, at=limiter_of(app).peek("quick").now)
    return number


@limited(bucket="quick")
def fails(self: Task) -> None:
    body(self)
    raise ValueError


@limited(bucket="quick")
def replaces_itself(self: Task, number: int) -> None:
    body(self)
    raise self.replace(quick.s(number).set(key="replace"))


@limited(bucket="quick", max_retries=2)
def retries_itself(self: Task) -> int:
    body(self)
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    retries: int = self.request.retries
    return retries


@limited(bucket="quick", max_retries=1, autoretry_for=(ValueError,), retry_backoff=False, default_retry_delay=0)
def fails_once(self: Task) -> str:
    body(self)
    if not self.request.retries:
        raise ValueError
    return "done"


@limited(bucket="quick", acks_late=True)
def acked_late(self: Task) -> None:
    body(self)


@limited(bucket="quick", ignore_result=True)
def ignored(self: Task) -> None:
    body(self)


class Order(BaseModel):
    number: int


@limited(bucket="quick", pydantic=True)
def typed(self: Task, order: Order) -> int:
    body(self)
    return order.number


class OfClass(RateLimitedTask):
    name = f"{NAME}.of_class"
    bucket = "quick"

    def run(self, number: int) -> int:
        body(self)
        return number


of_class = app.register_task(OfClass())


@plainly()
def globbed(self: Task) -> None:
    body(self)


@plainly()
def annotated(self: Task, key: str) -> None:  # noqa: ARG001 - names the bucket's key
    body(self)


@limited(bucket="starved", on_reject="fail")
def fails_when_refused(self: Task) -> None:
    body(self)


@limited(bucket="starved", on_reject="drop")
def dropped_when_refused(self: Task) -> None:
    body(self)


def choose(decision: Decision) -> str:
    return "drop" if decision.wait > 10 else "retry"


@limited(bucket="starved", on_reject=choose)
def chosen_to_drop(self: Task) -> None:
    body(self)


@limited(bucket="quick", on_reject=choose)
def chosen_to_wait(self: Task) -> None:
    body(self)


def die(task: Task, marker: str) -> None:
    """Killed, as its process is, straight after the start; the first time."""
    body(task)
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


@limited(bucket="second", acks_late=True, reject_on_worker_lost=True)
def dies_once(self: Task, marker: str) -> None:
    die(self, marker)


@plainly(acks_late=True, reject_on_worker_lost=True)
def dies_once_in_plain_celery(self: Task, marker: str) -> None:
    die(self, marker)


def when_told(path: str) -> str:
    """A key that is only known once a file is there: it holds up the delivery before the buckets are asked."""
    Path(path).with_suffix(".waits").touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return path


@limited(bucket="second", key=when_told, on_reject="retry")
def held_up(self: Task, _path: str) -> None:
    body(self)


@limited(bucket="second", key=when_told, on_reject="retry", acks_late=True)
def held_up_late(self: Task, _path: str) -> None:
    body(self)


if "TEST_EVENTS" in os.environ:
    # A shared task belongs to all applications, those of other tests as well.
    shared = shared_task(name=f"{NAME}.shared", base=RateLimitedTask, bucket="quick", bind=True)(quick.run.__func__)


@signals.worker_init.connect
def declare_late(sender: object, **_: object) -> None:
    """Receivers of this come after tb_celery's own, which was connected when it was imported."""
    if getattr(sender, "app", None) is app:
        plainly(name=f"{NAME}.declared_late_plain")(late)
        limited(name=f"{NAME}.declared_late_limited", bucket="quick", key="key")(late)


def late(self: Task, key: str) -> None:  # noqa: ARG001 - names the bucket's key
    body(self)
