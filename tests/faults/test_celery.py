"""Celery's processes that are killed, and the servers that their tasks go through."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import app as tasks
import pytest
from faults.means import HOUR, WallClock
from faults.report import LONG, fault
from fleet import CAPACITY, RATE, Fleet
from kombu import Connection
from private_rabbitmq import PrivateRabbitMQ, missing
from private_redis import PrivateServer, private_server
from servers import PATIENCE, Site, until

from tb_celery import Bucket, Limit
from tb_celery.grantlog import Entry, read_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from celery.result import AsyncResult
    from faults.conftest import Measured
    from fleet import Verdict

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("client"), *LONG]

MODES = ("retry", "hold")
CORE = Bucket("core", (Limit(5, 20),))
LATE = {"task_acks_late": True, "task_reject_on_worker_lost": True, "task_ignore_result": True}
SOON: dict[str, Any] = {
    "visibility_timeout": 12,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 2,
}
"""Options of a Redis broker by which it soon delivers again what a lost node had, also one that was killed while it
looked for such messages: by default that keeps the others from it for five minutes."""
COUNT = 150
KILLS = 4


def ids(results: Iterable[AsyncResult]) -> list[str]:
    return [each.id for each in results]


def site(folder: Path, broker: str, mode: str, conf: dict[str, Any], **settings: Any) -> Site:
    """A folder with the log of its grants, in which tasks over quota are sent back, or held."""
    limits = {CORE.name: {"capacity": 5, "refill_rate": 20}}
    log = {"grant_log": str(folder / "grants"), "on_reject": mode}
    return Site(folder, broker, conf=conf, settings={"buckets": {**tasks.BUCKETS, **limits}, **log, **settings})


def ran(site: Site, wanted: Sequence[str], number: int, patience: float = PATIENCE) -> int:
    """Wait until so many of these tasks have run; how many have."""
    until(lambda: len(site.of(wanted)) >= number, f"{number} of {len(wanted)} tasks run", patience)
    return len(site.of(wanted))


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


@pytest.fixture(scope="module")
def broker() -> Iterator[PrivateServer]:
    """A server that keeps what it has on disk."""
    with private_server("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


def send(url: str, queue: str, number: int = COUNT) -> list[str]:
    with Connection(url) as connection:
        options = {"connection": connection, "queue": queue, "ignore_result": True}
        return ids(tasks.core.apply_async((each,), **options) for each in range(number))


@fault(
    "Celery: pool processes are killed",
    "What waits is not touched. With late acknowledgement and reject_on_worker_lost what was running runs again, and"
    " draws again.",
)
@pytest.mark.parametrize("mode", MODES)
def test_pool_processes_killed(broker: PrivateServer, tmp_path: Path, measured: Measured, mode: str) -> None:
    """Two nodes of two processes run a backlog of 150 tasks, sent back or held until their turns; four times one of the
    processes is killed. tried: tasks."""
    dice, queue = random.Random(mode), f"child-{mode}"
    made = site(tmp_path, broker.url, mode, LATE)
    try:
        for number in range(2):
            made.start(f"{queue}-{number}", "-c", "2", "-Q", queue)
        for node in made.nodes:
            node.ready()
        wanted = send(broker.url, queue)
        for number in range(1, KILLS + 1):
            ran(made, wanted, number * COUNT // (KILLS + 2))
            os.kill(dice.choice(children_of(dice.choice(made.nodes).process.pid)), signal.SIGKILL)
        survived = ran(made, wanted, COUNT)
    finally:
        made.stop()
    entries = list(read_log(tmp_path / "grants"))
    measured(entries, {CORE.name: CORE}, tried=COUNT, survived=survived, lost=COUNT - survived)


def nothing_on_its_way(made: Site, number: int) -> bool:
    """Whether the nodes have all of so many messages, and the copies of those that they have sent back."""
    log = made.log()
    return log.count("] received") == number + log.count(" retry: bucket")


@fault(
    "Celery: a whole node is killed",
    "What it had, waiting or, with late acknowledgement, running, runs in another node: on Redis after"
    " visibility_timeout. A message that it was just fetching from Redis is lost with it, as in plain Celery: kombu"
    " takes it off the queue before it notes it as unacknowledged.",
)
@pytest.mark.parametrize("mode", MODES)
def test_node_killed(broker: PrivateServer, tmp_path: Path, measured: Measured, mode: str) -> None:
    """Two nodes have a backlog of 150 tasks, sent back or held until their turns, from a Redis broker; one of them is
    killed with its pool, and another one started. tried: tasks."""
    queue = f"node-{mode}"
    conf = {**LATE, "broker_transport_options": SOON}
    made = site(tmp_path, broker.url, mode, conf, max_countdown=SOON["visibility_timeout"] / 2)
    try:
        for number in range(2):
            made.start(f"{queue}-{number}", "-c", "2", "-Q", queue)
        for node in made.nodes:
            node.ready()
        wanted = send(broker.url, queue)
        until(lambda: nothing_on_its_way(made, COUNT), "the nodes have all messages")
        assert len(made.of(wanted)) < COUNT * 3 // 4
        made.nodes.pop().kill()
        made.start(f"{queue}-another", "-c", "2", "-Q", queue).ready()
        survived = ran(made, wanted, COUNT, 2 * PATIENCE)
    finally:
        made.stop()
    entries = list(read_log(tmp_path / "grants"))
    measured(entries, {CORE.name: CORE}, tried=COUNT, survived=survived, lost=COUNT - survived)


SLOW = {"capacity": 1, "refill_rate": 0.5}
BOTH = {name: Bucket(name, (Limit(1, 0.5),)) for name in ("api", "other")}


def both_kinds(folder: Path, broker: str, conf: dict[str, Any], **settings: Any) -> Site:
    """A folder whose tasks ``api`` are sent back, and ``routed`` held."""
    routes = {"app.routed": {"bucket": "other", "on_reject": "hold"}}
    return site(
        folder,
        broker,
        "retry",
        conf,
        routes=routes,
        **settings | {"buckets": {**tasks.BUCKETS, "api": SLOW, "other": SLOW}},
    )


def waiting(made: Site, broker: str, queue: str, each: int = 4) -> list[str]:
    """So many tasks of either kind, of which one runs at once and the others wait."""
    with Connection(broker) as connection:
        options = {"connection": connection, "queue": queue, "ignore_result": True}
        sent = ids(task.apply_async(**options) for task in (tasks.api, tasks.routed) for _ in range(each))
    ran(made, sent, 2)
    for name, number in (("api", 2 * each - 1), ("routed", each)):
        sentence = rf"app\.{name}\[\S+\] received"
        until(lambda: len(re.findall(sentence, made.log())) >= number, f"all of {name} are there, or back")  # noqa: B023
    return sent


@fault(
    "the broker is restarted: RabbitMQ",
    "What waits, sent back or held, is delivered again and runs once.",
)
def test_rabbitmq_restarted(tmp_path: Path, measured: Measured) -> None:
    """A RabbitMQ node ends and starts again while a worker has three tasks waiting that were sent back, and three that
    it holds. tried: tasks."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    server = PrivateRabbitMQ(tmp_path)
    made = both_kinds(tmp_path, server.address, {})
    try:
        server.start()
        made.start("over", "-c", "2", "-Q", "over").ready()
        sent = waiting(made, server.address, "over")
        server.stop()
        until(lambda: "Connection to broker lost" in made.log(), "the worker has lost the broker")
        server.start()
        bodies = made.bodies(sent, 3 * PATIENCE)
    finally:
        made.stop()
        server.stop()
    survived = sum(len(each) == 1 for each in bodies.values())
    entries = list(read_log(tmp_path / "grants"))
    measured(entries, BOTH, tried=len(sent), survived=survived, lost=len(sent) - len(bodies))


@fault(
    "the broker is restarted: Redis or Valkey",
    "With an append-only file what waits is delivered again after visibility_timeout, and runs. A worker may have to be"
    " started again (kombu).",
)
def test_redis_restarted(broker: PrivateServer, tmp_path: Path, measured: Measured) -> None:
    """The server is killed and starts again while a worker has three tasks waiting that were sent back, and three that
    it holds; the worker is then killed and another one started. tried: tasks."""
    conf = {"broker_transport_options": SOON}
    made = both_kinds(tmp_path, broker.url, conf, max_countdown=SOON["visibility_timeout"] / 2)
    try:
        made.start("before", "-c", "2", "-Q", "again").ready()
        sent = waiting(made, broker.url, "again")
        broker.stop()
        broker.start()
        made.nodes.pop().kill()
        made.start("after", "-c", "2", "-Q", "again").ready()
        bodies = made.bodies(sent, 2 * PATIENCE)
    finally:
        made.stop()
    survived = sum(len(each) == 1 for each in bodies.values())
    entries = list(read_log(tmp_path / "grants"))
    measured(entries, BOTH, tried=len(sent), survived=survived, lost=len(sent) - len(bodies))


@fault(
    "Celery: the wall clock is stepped",
    "What a node has waits on a clock that nobody can set, and goes on. A message that is on its way just then starts"
    " at once, and asks again, or as much later as the clock was set back: a countdown of Celery's is a wall time.",
)
def test_wall_clock_stepped_under_nodes(broker: PrivateServer, tmp_path: Path, measured: Measured) -> None:
    """A worker has four tasks waiting that were sent back, and four that it holds; an hour ahead, back, an hour behind,
    back, and after each step tasks run. tried: tasks."""
    clock = WallClock(tmp_path)
    made = both_kinds(tmp_path, broker.url, {})
    made.environment = clock.environment
    try:
        made.start("stepped", "-c", "2", "-Q", "stepped").ready()
        sent = waiting(made, broker.url, "stepped", each=5)
        for step in (HOUR, 0, -HOUR, 0):
            clock.step(step)
            ran(made, sent, min(len(sent), len(made.of(sent)) + 1))
        bodies = made.bodies(sent)
    finally:
        made.stop()
    survived = sum(len(each) == 1 for each in bodies.values())
    entries = list(read_log(tmp_path / "grants"))
    measured(entries, BOTH, tried=len(sent), survived=survived, lost=len(sent) - len(bodies))


# -- the server that has the state

SHARED = {"core": Bucket("core", (Limit(CAPACITY, RATE),))}


@pytest.fixture(scope="module")
def quota() -> Iterator[PrivateServer]:
    """The server that the quota is on."""
    with private_server() as server:
        yield server


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, broker: PrivateServer, quota: PrivateServer) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with Fleet(folder, broker.url, quota.url, 1, lock_timeout=0.5).running() as running:
        yield running


def noticed(fleet: Fleet, sentence: str) -> None:
    until(lambda: any(sentence in made.log() for made in fleet.sites), "somebody notices")


def shared(verdict: Verdict) -> list[Entry]:
    return [Entry("core", None, 0, now, 1) for now in verdict.grants]


@fault(
    "the server with the state stands still",
    "A time-out, never a token: tasks wait and ask again. Each runs once.",
)
def test_state_server_stands_still(fleet: Fleet, quota: PrivateServer, measured: Measured) -> None:
    """Four nodes on two hosts share a quota on a Redis or Valkey server, which is stopped in the middle of 40 tasks
    until somebody notices. tried: tasks."""
    sent = fleet.send(40)
    fleet.until_granted(sent, 10)
    quota.pause()
    try:
        noticed(fleet, "did not answer within 0.5 s")
    finally:
        quota.resume()
    verdict = fleet.finish(sent)
    measured(shared(verdict), SHARED, tried=40, survived=verdict.runs.count(1), lost=40 - len(verdict.runs))


@fault(
    "the server with the state is killed and comes back empty",
    "Whoever knew it notices: its buckets start empty. Tasks wait meanwhile, and each runs once.",
)
def test_state_server_loses_everything(fleet: Fleet, quota: PrivateServer, measured: Measured) -> None:
    """The same, with a server that is killed until somebody notices, and keeps nothing. tried: tasks."""
    sent = fleet.send(40)
    fleet.until_granted(sent, 10)
    quota.stop()
    try:
        noticed(fleet, "cannot be reached")
    finally:
        quota.start()
    verdict = fleet.finish(sent)
    noticed(fleet, "has lost its state: buckets start empty")
    measured(shared(verdict), SHARED, tried=40, survived=verdict.runs.count(1), lost=40 - len(verdict.runs))
