"""The application of the tests' worker nodes: ``celery -A app worker``, told by the environment what it is to be.

The tests import it, too, to send its tasks.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery import Celery, signals

import tb_celery.delivery
from tb_celery import RateLimited, RateLimitedTask

if TYPE_CHECKING:
    from celery import Task

BUCKETS: dict[str, dict[str, float]] = {
    "core": {"capacity": 5, "refill_rate": 10},
    "api": {"capacity": 1, "refill_rate": 0.5},
    "quick": {"capacity": 1, "refill_rate": 4},
    "slow": {"capacity": 1, "refill_rate": 1 / 30},
    "five": {"capacity": 5, "refill_rate": 0.001},
    "other": {"capacity": 5, "refill_rate": 0.001},
    "cli": {"capacity": 5, "refill_rate": 0.001},
    "full": {"capacity": 5, "refill_rate": 0.001},
    "empty": {"capacity": 1, "refill_rate": 0.5},
    "kill": {"capacity": 3, "refill_rate": 10},
}

app = Celery("app", set_as_current=False)
broker = os.environ.get("TEST_BROKER", "memory://")
app.conf.update(
    broker_url=broker,
    result_backend=broker if broker.startswith("redis") else None,
    accept_content=["json", "pickle"],
    broker_connection_retry_on_startup=True,
    tb_celery={"buckets": BUCKETS, **json.loads(os.environ.get("TEST_SETTINGS", "{}"))},
)
app.conf.update(json.loads(os.environ.get("TEST_CONF", "{}")))
# How long a task waits when the store has failed is nothing that users set.
tb_celery.delivery.STORE_RETRY = float(os.environ.get("TEST_STORE_RETRY", "5"))
if "TEST_EVENTS" in os.environ:
    # In a node: a busy machine may take longer to get a held task to its process, which would then ask anew. What comes
    # of that is shown by hand, in tests/test_hook.py.
    tb_celery.delivery.GRANTED = 30_000_000_000


# Not for every other app of the process as well, as is Celery's default: the tests have more of them.
unlimited = functools.partial(app.task, bind=True, shared=False)
limited = functools.partial(unlimited, base=RateLimitedTask)


def now() -> int:
    """Nanoseconds, on the clock of the state file."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def note(event: str, task: Task, **fields: object) -> None:
    """Write a line that no other process's can fall into."""
    line = json.dumps({"event": event, "id": task.request.id, **fields}, default=repr)
    log = os.open(os.environ["TEST_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(log, f"{line}\n".encode())
    os.close(log)


def body(task: Task) -> None:
    request = task.request
    decision = request.tb_celery
    note(
        "body",
        task,
        granted=decision and decision.now,
        began=time.time(),
        retries=request.retries,
        headers=request.headers,
        children=[child.id for child in request.children],
        pid=os.getpid(),
    )


@signals.task_prerun.connect
def note_delivery(task: Task, **_: object) -> None:
    """All that a message has brought; comes before the buckets are asked."""
    if "TEST_EVENTS" in os.environ:
        note("delivery", task, name=task.name, at=time.time(), request=dict(vars(task.request)))


@limited(bucket="core", max_retries=3, autoretry_for=(Exception,))
def core(self: Task, number: int) -> int:
    body(self)
    return number


@limited(bucket="api")
def api(self: Task, *_: object, **__: object) -> None:
    body(self)


@limited(bucket="quick")
def quick(self: Task, number: int) -> int:
    body(self)
    return number


@limited(bucket="slow", rate_limit="1000/s")
def slow(self: Task) -> None:
    body(self)


@limited(bucket="five")
def one_of_five(self: Task) -> None:
    body(self)


@limited(bucket="five")
def another_of_five(self: Task) -> None:
    body(self)


@limited(bucket="other", key="user")
def tenant(self: Task, user: str, **_: object) -> str:
    body(self)
    return user


@limited(bucket="cli")
def after_cli(self: Task) -> None:
    body(self)


@limited(bucket=["full", "empty"])
def both(self: Task) -> None:
    body(self)


@limited(bucket="quick", max_retries=2)
def retries_itself(self: Task) -> int:
    body(self)
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    retries: int = self.request.retries
    return retries


@limited(
    bucket="quick",
    max_retries=1,
    autoretry_for=(Exception,),
    retry_backoff=False,
    default_retry_delay=0,
)
def fails_once(self: Task) -> str:
    body(self)
    if not self.request.retries:
        message = "service is down"
        raise ConnectionError(message)
    return "done"


@limited(bucket="quick")
def turned_down(self: Task, seconds: float) -> None:
    body(self)
    raise RateLimited(retry_after=seconds)


@limited(bucket="kill", acks_late=True, reject_on_worker_lost=True)
def dies_once(self: Task, marker: str) -> None:
    """Its process is killed straight after the admission, the first time."""
    body(self)
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def when_told(path: str) -> str:
    """A key that is only known once a file is there: it holds up the delivery before the buckets are asked."""
    Path(path).with_suffix(".waits").touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return "told"


@limited(bucket="api", key=when_told, ignore_result=True)
def held_up(self: Task, _path: str) -> None:
    body(self)


@unlimited()
def plain(self: Task, *_: object) -> None:
    note("body", self, began=time.time())


@unlimited()
def routed(self: Task, *_: object, **__: object) -> None:
    """Limited, where the settings have a route for it."""
    body(self)


@unlimited()
def slow_too(self: Task, *_: object) -> None:
    """The same, with another name."""
    body(self)


@unlimited()
def takes(self: Task, seconds: float) -> None:
    """Limited, where the settings have a route for it."""
    body(self)
    time.sleep(seconds)
    note("ended", self, at=now())


@unlimited()
def takes_too(self: Task, seconds: float) -> None:
    """The same, with another name."""
    body(self)
    time.sleep(seconds)


@unlimited()
def total(self: Task, numbers: list[int]) -> int:
    note("body", self, began=time.time())
    return sum(numbers)


if "TEST_DECLARE" in os.environ:

    @limited(name="proj.wrong", **json.loads(os.environ["TEST_DECLARE"]))
    def wrong(**_: Any) -> None:
        """A declaration that no worker may start with."""
