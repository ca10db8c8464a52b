"""Real workers that keep refused tasks until their turn."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import TYPE_CHECKING

import app as tasks
import pytest
from celery.exceptions import TaskRevokedError
from filelock import lock_descriptor, unlock_descriptor
from private_redis import private_server
from servers import Site, until

from tb_celery import open_limiter
from tb_celery.arithmetic import Place
from tb_celery.reschedule import HEADER, Ticket
from tb_celery.settings import load_settings
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from celery import Task
    from celery.result import AsyncResult

    from tb_celery import Limiter

pytestmark = pytest.mark.server
ROUTES = {
    "queue:held": {"bucket": "core", "on_reject": "hold"},
    "queue:slow": {"bucket": "slow", "on_reject": "hold"},
    "queue:tenants*": {"bucket": "api", "key": "user", "on_reject": "hold"},
}


@pytest.fixture(scope="module")
def site(client: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two nodes of two processes each."""
    site = Site(tmp_path_factory.mktemp("hold"), client, settings={"routes": ROUTES, "max_held": 100})
    try:
        for number in (1, 2):
            site.start(f"node{number}", "-c", "2", "-Q", f"celery,held,tenants,tenants-{number}")
        for node in site.nodes:
            node.ready()
        yield site
    finally:
        site.stop()


@pytest.fixture
def alone(client: str, tmp_path: Path) -> Iterator[Site]:
    """A site for nodes of the test's own."""
    site = Site(tmp_path, client, settings={"routes": ROUTES})
    try:
        yield site
    finally:
        site.stop()


def send(queue: str, count: int, task: Task = tasks.routed, **kwargs: object) -> list[AsyncResult]:
    return [task.apply_async((number,), kwargs, queue=queue) for number in range(count)]


def ids(results: Iterable[AsyncResult]) -> list[str]:
    return [result.id for result in results]


def site_limiter(site: Site) -> Limiter:
    return open_limiter(load_settings({"buckets": tasks.BUCKETS, "state_file": str(site.state_file)}))


def test_held_tasks_start_at_their_turns_over_all_nodes_and_nothing_is_published(site: Site) -> None:
    site_limiter(site).pause("core", 5)  # long enough for the plain ones on a busy machine
    held = ids(send("held", 30))
    plain = ids(send("celery", 10, tasks.plain))
    site.bodies(plain)
    assert len(site.of(held)) < 30, "the plain ones overtook those that wait"
    bodies = site.bodies(held)
    granted = sorted(body["granted"] for each in bodies.values() for body in each)
    assert len(granted) == 30, "each body ran once"
    assert first_violation([(at, 1) for at in granted], 5, 10) is None
    assert {(body["retries"], body["headers"]) for each in bodies.values() for body in each} == {(0, None)}
    assert {len(each) for each in site.of(held, "delivery").values()} == {1}, "no second delivery, so no copy"


def test_each_key_has_a_line_of_its_own(site: Site) -> None:
    tenants = [ids(send("tenants", 2, user=f"user{number}")) for number in range(5)]
    bodies = site.bodies([each for tenant in tenants for each in tenant])
    granted = [sorted(bodies[each][0]["granted"] for each in tenant) for tenant in tenants]
    assert max(first for first, _ in granted) < min(second for _, second in granted)
    assert all(second - first >= 2_000_000_000 for first, second in granted)


def test_a_revoked_task_in_a_line_costs_nothing(site: Site) -> None:
    assert site_limiter(site).acquire("api", key="revoked")
    results = send("tenants-1", 3, user="revoked")
    results[1].revoke()
    with pytest.raises(TaskRevokedError):
        results[1].get(timeout=30)
    bodies = site.bodies([results[0].id, results[2].id])
    first, last = sorted(body["granted"] for (body,) in bodies.values())
    assert last - first < 4_000_000_000, "its token went to the other"
    assert not site.of([results[1].id])


def test_an_expired_task_in_a_line_costs_nothing(site: Site) -> None:
    (first,) = send("tenants-1", 1, user="expires")
    site.bodies([first.id])
    late = tasks.routed.apply_async((), {"user": "expires"}, queue="tenants-1", expires=0.5)
    last = tasks.routed.apply_async((), {"user": "expires"}, queue="tenants-1")
    bodies = site.bodies([first.id, last.id])
    assert bodies[last.id][0]["granted"] - bodies[first.id][0]["granted"] < 4_000_000_000
    assert until(lambda: late.state == "REVOKED", "the expired task is reported")


def test_the_lock_in_other_hands_does_not_hold_up_the_consumer(site: Site) -> None:
    with site.state_file.open("r+b") as file:
        lock_descriptor(file.fileno())
        try:
            held = ids(send("tenants", 1, user="l"))
            site.bodies(ids(send("celery", 10, tasks.plain)))
            assert not site.of(held)
        finally:
            unlock_descriptor(file.fileno())
    site.bodies(held)


def test_a_server_that_stands_still_holds_up_none_but_those_who_are_held(alone: Site) -> None:
    """A node that asked for each of them would do nothing else; one that let them go would have its pool ask."""
    with private_server() as server:
        alone.settings |= {"store": server.url, "lock_timeout": 1}
        node = alone.start("still", "-c", "2", "-Q", "tenants-still,beside").ready()
        tenants = [f"user{number}" for number in range(40)]
        first = [*chain.from_iterable(ids(send("tenants-still", 1, user=user)) for user in tenants)]
        alone.bodies(first)
        server.pause()
        held = [*chain.from_iterable(ids(send("tenants-still", 1, user=user)) for user in tenants)]
        until(lambda: node.logs("held tasks wait"), "the log tells of it")
        alone.bodies(ids(send("beside", 20, tasks.plain)))
        assert not alone.of(held)
        server.resume()
        bodies = alone.bodies(held)
    assert {len(each) for each in bodies.values()} == {1}
    assert {len(each) for each in alone.of(held, "delivery").values()} == {1}, "none was sent back"
    assert node.read().count("held tasks wait") == 1


def test_a_queue_with_a_bucket_of_its_own_is_left_alone_while_that_is_empty(alone: Site) -> None:
    alone.settings["buckets"] = {**tasks.BUCKETS, "slow": {"capacity": 1, "refill_rate": 0.5}}
    node = alone.start("pauses", "-c", "2", "-Q", "slow,beside").ready()
    held = ids(send("slow", 40))
    plain = alone.bodies(ids(send("beside", 20, tasks.plain)))
    assert len(plain) == 20
    until(lambda: len(alone.of(held)) >= 2, "the second one's turn has come")
    queued = until(lambda: length("slow"), "most are left with the broker")
    assert queued >= 20
    assert len(alone.of(held)) < 10
    assert node.stop() == 0
    assert len(alone.of(held, "delivery")) < 10
    tasks.app.control.purge()
    with tasks.app.connection_for_write() as connection:
        connection.default_channel.queue_purge("slow")


def test_a_queue_whose_tokens_take_longer_than_a_countdown_is_left_alone_with_one_task_held(alone: Site) -> None:
    alone.settings["max_countdown"] = 10
    assert site_limiter(alone).acquire("slow")
    alone.start("very-slow", "-c", "1", "-Q", "slow,beside", "--prefetch-multiplier", "4").ready()
    held = ids(send("slow", 60))
    alone.bodies(ids(send("beside", 20, tasks.plain)))
    until(lambda: length("slow") >= 50, "most are left with the broker")
    assert len(alone.of(held, "delivery")) <= 9, "what was prefetched, at most, was sent back"
    with tasks.app.connection_for_write() as connection:
        connection.default_channel.queue_purge("slow")


def test_a_queue_is_not_left_alone_for_a_bucket_that_only_some_of_it_draw_from(alone: Site) -> None:
    alone.settings["routes"] = {"queue:mixed": {"bucket": "quick", "on_reject": "hold"}, "app.slow_too": "slow"}
    alone.settings["on_reject"] = "hold"
    alone.settings["buckets"] = {**tasks.BUCKETS, "quick": {"capacity": 5, "refill_rate": 100}}
    alone.start("mixed", "-c", "2", "-Q", "mixed").ready()
    starved = ids(send("mixed", 4, tasks.slow_too))
    bodies = alone.bodies(ids(send("mixed", 20)))
    assert len(bodies) == 20
    assert len(alone.of(starved)) <= 1


def length(queue: str) -> int:
    with tasks.app.connection_for_read() as connection:
        size: int = connection.default_channel.client.llen(queue)
        return size


def test_beyond_its_bound_a_node_sends_back_to_the_queue(alone: Site) -> None:
    alone.settings["max_held"] = 5
    alone.settings["buckets"] = {**tasks.BUCKETS, "api": {"capacity": 1, "refill_rate": 8}}
    alone.settings["routes"] = {"app.routed": {"bucket": "api", "on_reject": "hold"}}
    node = alone.start("bounded", "-c", "1", "-Q", "bounded").ready()
    results = ids(send("bounded", 30))
    bodies = alone.bodies(results)
    assert all(len(each) == 1 for each in bodies.values())
    granted = sorted(body["granted"] for each in bodies.values() for body in each)
    assert first_violation([(at, 1) for at in granted], 1, 8) is None
    sent_back = sum(len(each) - 1 for each in alone.of(results, "delivery").values())
    assert sent_back > 0
    assert node.stop() == 0


def test_all_turns_that_requests_bring_are_used(alone: Site) -> None:
    alone.settings["routes"] = {"app.routed": {"bucket": "quick", "on_reject": "hold"}}
    alone.start("turns", "-c", "2", "-Q", "turns").ready()
    limiter = site_limiter(alone)
    store, charges = limiter.store, limiter.charges("quick")
    assert store.acquire(charges)
    turns = [store.acquire(charges, Place()).at for _ in range(12)]
    booked = store.read(charges)[2][0].booked_at
    headers = [{HEADER: list(Ticket(turn, store.clock.identity, 1))} for turn in turns]
    held = ids(tasks.routed.apply_async(queue="turns", headers=each) for each in headers)
    bodies = alone.bodies(held)
    assert {len(each) for each in bodies.values()} == {1}
    more = store.read(charges)[2][0].booked_at - booked
    assert more <= 6 * charges[0].limit.interval, "new ones would be behind everybody else's"


def test_what_has_waited_long_for_an_eta_of_its_own_is_not_held_as_well(alone: Site) -> None:
    """The broker would take it for lost, and give it to somebody else, too."""
    alone.settings |= {"max_countdown": 3, "routes": {"app.routed": {"bucket": "slow", "on_reject": "hold"}}}
    alone.start("eta", "-c", "1", "-Q", "eta").ready()
    assert site_limiter(alone).acquire("slow")
    eta = datetime.now(UTC) + timedelta(seconds=7)
    (held,) = ids([tasks.routed.apply_async(queue="eta", eta=eta)])
    (later,) = ids([tasks.plain.apply_async(queue="eta", eta=eta + timedelta(seconds=1.5))])
    until(lambda: len(alone.of([held, later], "delivery")) == 2, "it is sent back")
    first = alone.events("delivery")[0]["id"]
    assert first == held, "at once, and not after another max_countdown"


def test_so_it_is_behind_others_who_can_be_held_for_longer(alone: Site) -> None:
    alone.settings |= {"max_countdown": 4, "routes": {"app.routed": {"bucket": "api", "on_reject": "hold"}}}
    alone.start("behind", "-c", "1", "-Q", "behind").ready()
    site_limiter(alone).pause("api", 60)
    started = time.time()
    eta = datetime.fromtimestamp(started + 9, UTC)
    (held,) = ids([tasks.routed.apply_async(queue="behind", eta=eta)])
    (later,) = ids([tasks.plain.apply_async(queue="behind", eta=eta + timedelta(seconds=1))])
    until(lambda: time.time() > started + 8, "the other's ETA has nearly come")
    (head,) = ids(send("behind", 1))
    until(lambda: alone.of([later], "delivery"), "the plain task runs")
    assert [each["id"] for each in alone.events("delivery")] == [held, later], "not after another max_countdown"
    assert not alone.of([head])


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent", "eventlet"])
def test_every_pool_holds(alone: Site, pool: str) -> None:
    concurrency = [] if pool == "solo" else ["-c", "2"]
    alone.settings["routes"] = {"app.routed": {"bucket": "core", "on_reject": "hold"}}
    alone.start("pool", "-P", pool, *concurrency, "-Q", f"of-{pool}").ready()
    held = ids(send(f"of-{pool}", 12))
    bodies = alone.bodies(held)
    granted = sorted(body["granted"] for each in bodies.values() for body in each)
    assert len(granted) == 12
    assert first_violation([(at, 1) for at in granted], 5, 10) is None


def test_a_node_that_stops_gives_what_it_holds_back_to_the_broker(alone: Site) -> None:
    alone.settings["routes"] = {"app.routed": {"bucket": "api", "on_reject": "hold"}}
    first = alone.start("first", "-c", "1", "-Q", "handed").ready()
    # Nothing starts while it stops: what Celery has just handed to its pool by then may run twice.
    site_limiter(alone).pause("api", 15)
    results = ids(send("handed", 3))
    until(lambda: all(f"[{each}] received" in first.read() for each in results), "it holds them")
    assert first.stop() == 0
    alone.start("second", "-c", "1", "-Q", "handed").ready()
    bodies = alone.bodies(results)
    assert all(len(each) == 1 for each in bodies.values())
