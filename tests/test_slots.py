"""Real workers whose pools are full: tokens are taken when there is room, and nobody starves behind those who wait."""

from __future__ import annotations

import queue
from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING

import app as tasks
import pytest
from celery.concurrency.thread import TaskPool
from kombu.asynchronous.semaphore import LaxBoundedSemaphore
from servers import PATIENCE, Site, until

from tb_celery import open_limiter
from tb_celery.grantlog import read_log
from tb_celery.settings import load_settings
from tb_celery.slots import CountedSlots, GuardedSlots

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from celery import Task

    from tb_celery import Limiter

POOLS = ["prefork", "threads", "solo", "gevent", "eventlet"]
PLENTY = {"capacity": 100, "refill_rate": 50}
LONG = 0.3
"""Seconds that a body takes: for longer than the tokens count that were taken before it got to the pool."""


@pytest.fixture
def site(client: str, tmp_path: Path) -> Iterator[Site]:
    """Nodes that hold the task `takes`, and log what they grant."""
    settings: dict[str, object] = {
        "buckets": {**tasks.BUCKETS, "core": PLENTY},
        "routes": {"app.takes": {"bucket": "core", "on_reject": "hold"}},
        "grant_log": str(tmp_path / "grants"),
    }
    site = Site(tmp_path, client, settings=settings)
    try:
        yield site
    finally:
        site.stop()


def send(to: str, count: int, *args: object, task: Task = tasks.takes) -> list[str]:
    return [task.apply_async(args, queue=to).id for _ in range(count)]


def limiter(site: Site) -> Limiter:
    return open_limiter(load_settings({"buckets": {"core": PLENTY}, "state_file": str(site.state_file)}))


def check_grants(site: Site, ids: list[str], places: int) -> None:
    """Each token was taken when a place was free, and paid for a body."""
    until(lambda: site.of(ids, "ended").keys() == set(ids), "all have ended")
    grants = sorted(entry.at for entry in read_log(site.folder / "grants"))
    bodies = {id_: body["granted"] for id_, (body,) in site.of(ids).items()}
    ended = {id_: event["at"] for id_, (event,) in site.of(ids, "ended").items()}
    for at in grants:
        running = [id_ for id_ in ids if bodies[id_] < at < ended[id_]]
        assert len(running) < places, "a token lapses while its task waits for a place"
    assert grants == sorted(bodies.values()), "each is paid for once"


def began(bodies: dict[str, list[dict[str, float]]]) -> list[float]:
    return sorted(body["began"] for each in bodies.values() for body in each)


@pytest.mark.server
@pytest.mark.parametrize("pool", POOLS)
def test_tokens_are_taken_when_there_is_room(site: Site, pool: str) -> None:
    site.start("full", "-P", pool, "-c", "1", "-Q", f"full-{pool}").ready()
    held = send(f"full-{pool}", 8, LONG)
    check_grants(site, held, places=1)
    assert {len(each) for each in site.of(held, "delivery").values()} == {1}, "no second delivery, so no copy"


@pytest.mark.server
def test_a_pool_grows_for_those_whose_tokens_are_there(site: Site) -> None:
    site.start("grows", "--autoscale", "4,1", "-Q", "grows").ready()
    assert limiter(site).acquire("core", cost=PLENTY["capacity"])  # which is there again after some time
    held = send("grows", 24, LONG)
    bodies = site.bodies(held)
    assert len({body["pid"] for each in bodies.values() for body in each}) == 4
    check_grants(site, held, places=4)
    assert {len(each) for each in site.of(held, "delivery").values()} == {1}


@pytest.mark.server
def test_where_tasks_run_in_the_consumers_loop_it_sees_to_others_between_them(site: Site) -> None:
    node = site.start("between", "-P", "solo", "-Q", "between").ready()
    limiter(site).pause("core", 3600)
    held = send("between", 100, 0.1)
    limiter(site).resume("core")
    # From now on there are tokens for the whole line.
    until(lambda: site.of(held), "the first one runs")
    site.bodies(send("between", 3, task=tasks.plain))
    assert tasks.app.control.ping([node.address], timeout=PATIENCE)
    begun = len(site.of(held))
    assert begun < len(held)
    until(lambda: len(site.of(held)) > begun, "those that were held go on")


@pytest.mark.server
@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_plain_tasks_and_held_ones_take_turns(site: Site, pool: str) -> None:
    site.start("turns", "-P", pool, "-c", "1", "-Q", f"turns-{pool}").ready()
    to = f"turns-{pool}"
    before = send(to, 5, 0.1, task=tasks.takes_too)
    held = send(to, 1, 0.1)
    after = send(to, 10, 0.1, task=tasks.takes_too)
    (start,) = began(site.bodies(held))
    assert began(site.bodies(before))[-1] < start < began(site.bodies(after))[-1]


@pytest.mark.server
@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_plain_tasks_beside_a_starved_bucket(site: Site, pool: str) -> None:
    site.settings["routes"] = {"app.takes": {"bucket": "slow", "on_reject": "hold"}}
    site.start("starved", "-P", pool, "-c", "1", "-Q", f"starved-{pool}").ready()
    starved = send(f"starved-{pool}", 100, 0)
    site.bodies(send(f"starved-{pool}", 20, task=tasks.plain))
    assert len(site.of(starved)) <= 1


class Growing:
    """A pool of Celery's, as far as it tells which of its processes can be written to."""

    def __init__(self) -> None:
        self._pool = self
        self._fileno_to_inq = {0: "up"}

    def started(self, number: int) -> None:
        self._fileno_to_inq[number] = "up"


def test_a_new_place_is_there_when_its_process_is_up() -> None:
    semaphore, pool, later = LaxBoundedSemaphore(1), Growing(), queue.Queue[Callable[[], None]]()
    slots = GuardedSlots(semaphore, pool, lambda _, call: later.put(call))
    assert slots.take(Event)
    semaphore.grow(2)
    called = Event()
    assert not slots.take(called.set)
    later.get_nowait()()
    assert not called.is_set()
    pool.started(1)
    later.get_nowait()()
    assert called.is_set()
    assert not slots.take(Event)
    pool.started(2)
    later.get_nowait()()
    assert later.empty(), "all are up"
    assert semaphore.initial_value == 3


def test_after_a_reconnect_no_place_is_waited_for() -> None:
    semaphore, later = LaxBoundedSemaphore(1), queue.Queue[Callable[[], None]]()
    slots = GuardedSlots(semaphore, Growing(), lambda _, call: later.put(call))
    semaphore.grow(1)
    slots.clear()  # and Celery its semaphore, and its timers
    semaphore.clear()
    later.get_nowait()()
    assert later.empty()
    assert semaphore.value == 2


def test_a_place_is_free_again_however_what_had_it_ends() -> None:
    pool = TaskPool(1)
    soon: queue.Queue[object] = queue.Queue()
    slots = CountedSlots(pool, soon.put)

    def ends(go: Event, how: type[BaseException]) -> None:
        go.wait()
        raise how

    for how in (MemoryError, SystemExit, ValueError):
        go = Event()
        pool.apply_async(ends, (go, how), callback=print)
        called = Event()
        assert not slots.take(called.set)
        go.set()
        assert soon.get(timeout=30) == slots.look
        slots.look()
        assert called.is_set()
        slots.give_back(used=False)
    pool.stop()
