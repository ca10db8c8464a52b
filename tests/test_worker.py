"""Real worker nodes on a real server: what reaches the bodies, the clients and the logs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import app as tasks
import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError
from kombu import Connection, Exchange
from servers import PATIENCE, Site, until
from valkey_server import valkey_server

from tb_celery import RateLimitExceeded, StoreError, open_limiter
from tb_celery.bucket import SECOND
from tb_celery.reschedule import HEADER, Ticket
from tb_celery.settings import load_settings
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from celery.result import AsyncResult

    from tb_celery import Limiter


pytestmark = pytest.mark.server
CORE = 40
TROUBLE = re.compile(r"ERROR|CRITICAL|Traceback")


@pytest.fixture(scope="module")
def pair(client: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two nodes of four processes each. Tests keep out of each other's way by bucket or key."""
    site = Site(tmp_path_factory.mktemp("pair"), client)
    try:
        for number in (1, 2):
            site.start(f"node{number}", "-c", "4", "-Q", f"celery,q2,node{number}")
        for node in site.nodes:
            node.ready()
        # Each process connects to the broker when it sends its first task back, which takes it a moment.
        site.bodies(ids([tasks.core.apply_async((number,), key="warm") for number in range(20)]))
        yield site
    finally:
        site.stop()


@pytest.fixture(scope="module")
def odd(client: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One node with unusual settings: a wall clock in Tokyo, hops of a third of a second, a failed store asked soon."""
    site = Site(
        tmp_path_factory.mktemp("odd"),
        client,
        conf={"timezone": "Asia/Tokyo", "enable_utc": False},
        settings={"max_countdown": 0.3},
        environment={"TEST_STORE_RETRY": "0.3"},
    )
    try:
        site.start("odd", "-c", "2", "-Q", "odd").ready()
        yield site
    finally:
        site.stop()


def limiter(site: Site) -> Limiter:
    """A process beside the workers that draws from the same buckets."""
    return open_limiter(load_settings({"buckets": tasks.BUCKETS, "state_file": str(site.state_file)}))


def ids(results: Iterable[AsyncResult]) -> list[str]:
    return [result.id for result in results]


def grants(bodies: dict[str, list[dict[str, Any]]]) -> list[int]:
    return sorted(body["granted"] for each in bodies.values() for body in each)


def lost(granted: Sequence[int], capacity: int, rate: int) -> Fraction:
    """Tokens that came to a full bucket, from the first grant to the last: what the quota had and nobody used."""
    tokens, before, overflow = Fraction(capacity), granted[0], Fraction(0)
    for now in granted:
        tokens += Fraction(rate * (now - before), SECOND)
        overflow += max(Fraction(0), tokens - capacity)
        tokens, before = min(tokens, Fraction(capacity)) - 1, now
    return overflow


def check_core(site: Site, results: Sequence[AsyncResult]) -> None:
    """Every window within the bound, the quota used, every body once, and no storm of messages.

    On a machine that stands still for half a second tokens are lost and turns are missed: exact figures are shown on a
    fake clock, in tests/test_turns.py, and measured by the benchmarks.
    """
    bodies = site.bodies(ids(results))
    assert [len(each) for each in bodies.values()] == [1] * len(results)
    assert {body["retries"] for each in bodies.values() for body in each} == {0}
    granted = grants(bodies)
    assert first_violation([(now, 1) for now in granted], 5, 10) is None
    assert len(granted) / (len(granted) + lost(granted, 5, 10)) >= 0.5
    deliveries = [len(each) for each in site.of(bodies, "delivery").values()]
    assert sum(deliveries) <= 4 * len(results)


# -- the main job


def test_two_nodes_share_one_exact_quota(pair: Site) -> None:
    before = [len(node.read()) for node in pair.nodes]
    # Half to each: from one queue, a node may fetch all that is there before the other one looks.
    results = [tasks.core.apply_async((number,), queue=f"node{number % 2 + 1}") for number in range(CORE)]
    check_core(pair, results)
    assert [result.get(timeout=PATIENCE) for result in results] == list(range(CORE))

    def logged() -> str:
        return "".join(node.read()[start:] for node, start in zip(pair.nodes, before, strict=True))

    until(lambda: logged().count("succeeded") >= CORE, "the logs are complete")
    log = logged()
    refusals = sum(len(each) for each in pair.of(ids(results), "delivery").values()) - CORE
    lines = [line for line in log.splitlines() if " retry: " in line]
    assert len(lines) == refusals > 0
    pattern = re.compile(
        r"\[[^]]+: INFO/\S+\] Task app\.core\[[0-9a-f-]+\] retry: bucket 'core' is over quota: turn in \d+\.\d{3} s"
    )
    assert [line for line in lines if not pattern.fullmatch(line)] == []
    assert not TROUBLE.search(log)


def test_the_start_says_where_the_state_is_and_warns_of_a_second_limit(pair: Site) -> None:
    for node in pair.nodes:
        assert f"the quota is per host; state in FileStore('{pair.state_file}')" in node.read()
        warnings = [line for line in node.read().splitlines() if "rate_limit" in line]
        assert len(warnings) == 1
        assert "task app.slow has a bucket (slow) and Celery's own rate_limit (1000/s): both apply" in warnings[0]


class Quiet(Site):
    def command(self, *options: str) -> list[str]:
        python, *celery = super().command(*options)
        return [python, *celery[:2], "--quiet", *celery[2:]]


def test_the_banner_says_who_draws_from_what_and_a_quiet_worker_nothing(server: str, tmp_path: Path) -> None:
    settings: dict[str, object] = {"routes": {"app.plain": ["api", "core"], "queue:mail": "quick"}}
    site, quiet = Site(tmp_path, server, settings=settings), Quiet(tmp_path, server, settings=settings)
    try:
        silent = quiet.start("silent", "-c", "1", "-Q", "silent")
        laconic = site.start("laconic", "-c", "1", "-Q", "laconic", "-l", "WARNING")
        until(lambda: laconic.logs("  . queue:mail: quick\n"), "the banner is printed")
        assert f"[buckets] the quota is per host; state in FileStore('{site.state_file}')\n" in laconic.read()
        assert "  . app.plain: api, core\n" in laconic.read()
        assert "[buckets]" not in silent.ready().read()
    finally:
        quiet.stop()
        site.stop()


def test_dropped_tasks_are_counted_by_their_node(client: str, tmp_path: Path) -> None:
    site = Site(tmp_path, client, settings={"routes": {"app.routed": {"bucket": "five", "on_reject": "drop"}}})
    try:
        node = site.start("drops", "-c", "2", "-Q", "drops").ready()
        for _ in range(8):
            tasks.routed.apply_async(queue="drops")

        def dropped() -> dict[str, int]:
            (answer,) = tasks.app.control.broadcast("buckets", reply=True, timeout=PATIENCE, destination=[node.address])
            return {name: bucket["dropped"] for name, bucket in next(iter(answer.values())).items()}

        until(lambda: dropped()["five"] == 3, "three of eight are dropped")
        assert sum(dropped().values()) == 3
    finally:
        site.stop()


@pytest.mark.parametrize("broker", ["server", "rabbitmq"])
def test_what_is_published_to_all_runs_once_in_each_queue(
    request: pytest.FixtureRequest, tmp_path: Path, broker: str
) -> None:
    """Each node has a queue of its own that is bound to one fanout exchange, as for Celery's broadcasts."""
    address = request.getfixturevalue(broker)
    exchange, *queues = "to-all", "one", "another"
    site = Site(tmp_path, address, settings={"routes": {"queue:one": "quick", "queue:another": "quick"}})
    options: dict[str, Any] = {"exchange": exchange, "exchange_type": "fanout", "routing_key": "all"}
    try:
        for queue in queues:
            site.conf = {"task_queues": {queue: options}, "worker_prefetch_multiplier": 8, "result_backend": None}
            site.start(queue, "-c", "2", "-Q", queue)
        for node in site.nodes:
            node.ready()
        with Connection(address) as connection:
            sent = [
                tasks.routed.apply_async(
                    (number,),
                    connection=connection,
                    declare=[Exchange(exchange, "fanout")],
                    ignore_result=True,
                    **options,
                )
                for number in range(4)
            ]
        until(lambda: sum(map(len, site.of(ids(sent)).values())) >= 8, "each task runs in each queue")
        bodies = site.of(ids(sent))
        assert {len(each) for each in bodies.values()} == {2}
        deliveries = [each for found in site.of(bodies, "delivery").values() for each in found]
        published_to_all = [
            each for each in deliveries if each["request"]["delivery_info"]["exchange"] in {exchange, f"{exchange}/"}
        ]
        assert len(published_to_all) == 2 * len(sent)
        assert (len(deliveries) > len(published_to_all)) == (broker == "rabbitmq")
        assert first_violation([(now, 1) for now in grants(bodies)], 1, 4) is None
    finally:
        site.stop()


def test_a_waiting_task_shows_its_bucket_wait_and_turn(pair: Site) -> None:
    asked = time.time()
    assert limiter(pair).acquire("slow", key="shown")
    result = tasks.slow.apply_async(key="shown")
    until(lambda: result.state == "RETRY", "the task waits")
    info = result.info
    assert isinstance(info, RateLimitExceeded)
    assert info.bucket == "slow"
    assert 0 < info.wait <= 30
    assert info.turn is not None
    assert asked + info.wait <= info.turn <= time.time() + 30
    result.revoke()


def test_a_task_that_may_not_wait_so_long_fails(pair: Site) -> None:
    assert limiter(pair).acquire("slow", key="short")
    result = tasks.slow.apply_async(key="short", max_wait=2)
    with pytest.raises(RateLimitExceeded) as refused:
        result.get(timeout=PATIENCE)
    assert (refused.value.bucket, result.state) == ("slow", "FAILURE")
    assert pair.of([result.id]) == {}


@pytest.mark.usefixtures("pair")
def test_tasks_of_one_bucket_share_it_and_others_are_not_touched() -> None:
    results = [task.apply_async() for _ in range(3) for task in (tasks.one_of_five, tasks.another_of_five)]
    other = tasks.tenant.delay("shared")
    other.get(timeout=PATIENCE)
    until(lambda: Counter(result.state for result in results) == {"SUCCESS": 5, "RETRY": 1}, "five of six run")
    for result in results:
        result.revoke()


def test_each_tenant_has_a_quota_of_its_own_and_no_secret_is_stored(pair: Site) -> None:
    users = ["sk-secret-a", "sk-secret-b"] * 5
    results = [tasks.tenant.delay(user) for user in users]
    assert [result.get(timeout=PATIENCE) for result in results] == users
    sixth = tasks.tenant.delay(users[0])
    until(lambda: sixth.state == "RETRY", "the sixth of the first tenant waits")
    sixth.revoke()
    assert tasks.tenant.apply_async(("sk-secret-a",), key="third").get(timeout=PATIENCE)
    costly = tasks.tenant.apply_async(("d",), cost=5)
    assert costly.get(timeout=PATIENCE) == "d"
    assert limiter(pair).status("other", key="d").limits[0].tokens < 1
    stored = b"".join(path.read_bytes() for path in pair.folder.glob("buckets.state*"))
    assert stored
    assert b"secret" not in stored


def test_several_buckets_are_drawn_from_all_or_nothing(pair: Site) -> None:
    beside = limiter(pair)
    assert beside.acquire("empty")
    result = tasks.both.delay()
    until(lambda: result.state == "RETRY", "the task waits for the empty bucket")
    assert beside.status("full").limits[0].tokens == 5
    assert result.info.bucket == "empty"
    result.get(timeout=PATIENCE)
    assert 4 <= beside.status("full").limits[0].tokens < 5


def test_a_command_that_has_used_up_the_quota_is_seen_by_the_workers(pair: Site) -> None:
    config = pair.folder / "services.json"
    config.write_text(json.dumps({"cli": {**tasks.BUCKETS["cli"], "requested": 5}}), "utf-8")
    check = [sys.executable, "-m", "tb_celery", "check", "--config", str(config), "--state-file", str(pair.state_file)]
    codes = [
        subprocess.run(check, env=pair.variables(), capture_output=True, check=False, timeout=PATIENCE).returncode
        for _ in range(2)
    ]
    assert codes == [0, 2]
    result = tasks.after_cli.delay()
    until(lambda: result.state == "RETRY", "the worker knows that the quota is used up")
    result.revoke()
    assert not limiter(pair).acquire("cli")


# -- the copy


FORMS: list[dict[str, Any]] = [
    {"priority": 7, "queue": "q2"},
    {"serializer": "pickle", "args": ({1, 2}, b"\xff")},
    {"serializer": "pickle", "compression": "bzip2", "args": ("x" * 500,)},
    {"compression": "gzip", "headers": {"trace": "abc", "nested": {"a": [1, None]}}},
    {"argsrepr": "<redacted>", "kwargsrepr": "{password=<redacted>}", "kwargs": {"password": "s3cret"}},
    {"expires": 600, "time_limit": 1, "soft_time_limit": 1},  # less than it waits: waiting is not running
    {"expires": datetime.now(UTC) + timedelta(hours=1)},
    {"shadow": "another.name", "ignore_result": True},
    {"stamped_headers": ["tenant"], "tenant": ["a"]},
    {"root_id": "root", "parent_id": "parent", "group_id": "g", "group_index": 3},
    {"link": tasks.plain.si("copied"), "link_error": [tasks.plain.si("broken")], "reply_to": "me", "max_wait": 60},
]


def test_the_copy_is_the_same_message(pair: Site) -> None:
    """All forms at once, each with a key of its own: seen by the worker before the buckets are asked."""
    beside = limiter(pair)
    results = []
    for number, form in enumerate(FORMS):
        assert beside.acquire("api", key=f"copy{number}")
        results.append(tasks.api.apply_async(**form, key=f"copy{number}"))
    pair.bodies(ids(results))
    for form, result in zip(FORMS, results, strict=True):
        first, *more = (each["request"] for each in pair.of([result.id], "delivery")[result.id])
        assert more, f"{form} was not refused"
        for again in more:
            ticket = Ticket.of(again.pop(HEADER))
            assert ticket is not None
            assert ticket.deferrals >= 1
            again["headers"].pop(HEADER)
            assert again.pop("eta") is not None
            assert {**first, "eta": None, **again} == first | again
            differing = {name for name in first.keys() | again.keys() if first.get(name) != again.get(name)}
            assert differing <= {"eta", "hostname", "properties"}, form
            # The transport's own number, and the time to live that is left.
            moving = {"delivery_tag", "expiration"}
            fixed = [
                {name: text for name, text in each["properties"].items() if name not in moving}
                for each in (first, again)
            ]
            assert fixed[0] == fixed[1] | {name: fixed[0][name] for name in fixed[0].keys() - fixed[1].keys()}
        (body,) = pair.of([result.id])[result.id]
        assert HEADER not in (body["headers"] or {})
        assert (body["retries"], body["children"]) == (0, [])
        if "ignore_result" in form:
            assert tasks.app.AsyncResult(result.id).state == "PENDING"
        else:
            assert result.get(timeout=PATIENCE) is None
    until(lambda: calls(pair).count(["copied"]), "the link is called")
    assert (calls(pair).count(["copied"]), calls(pair).count(["broken"])) == (1, 0)


def calls(site: Site) -> list[list[object]]:
    """The arguments of all calls of the plain task."""
    return [event["request"]["args"] for event in site.events("delivery") if event["name"] == "app.plain"]


def test_links_chains_groups_and_chords_wait_for_deferred_members(pair: Site) -> None:
    error = tasks.plain.si("error")
    linked = tasks.plain.si("linked")
    parts = {"key": "chord"}
    summed = chord(
        [tasks.quick.s(number).set(**parts, link_error=error) for number in range(4)], tasks.total.s()
    ).apply_async()
    chained = chain(
        tasks.quick.s(1).set(key="chain"), tasks.quick.si(2).set(key="chain"), tasks.plain.si("after")
    ).apply_async()
    grouped = group(tasks.quick.si(number).set(key="group") for number in range(3)).apply_async()
    single = tasks.quick.apply_async((1,), key="group", link=linked, link_error=error)
    assert summed.get(timeout=PATIENCE) == 6
    assert grouped.get(timeout=PATIENCE) == [0, 1, 2]
    assert chained.get(timeout=PATIENCE) is None
    assert single.get(timeout=PATIENCE) == 1
    assert (chained.parent.result, chained.parent.parent.result) == (2, 1)
    everything = [
        *summed.parent.results,
        *grouped.results,
        single,
        chained,
        chained.parent,
        chained.parent.parent,
        summed,
    ]
    assert [len(each) for each in pair.bodies(ids(everything)).values()] == [1] * len(everything)
    deferred = pair.of(ids([*summed.parent.results, *grouped.results]), "delivery")
    assert sum(len(each) for each in deferred.values()) > len(deferred)
    until(lambda: calls(pair).count(["linked"]), "the link is called")
    assert (calls(pair).count(["linked"]), calls(pair).count(["error"])) == (1, 0)


def test_ones_own_retries_count_as_ever(pair: Site) -> None:
    first = tasks.retries_itself.apply_async(key="retries", headers={"trace": "abc"})
    second = tasks.fails_once.apply_async(key="retries")
    assert first.get(timeout=PATIENCE) == 2
    assert second.get(timeout=PATIENCE) == "done"
    bodies = pair.of(ids([first, second]))
    assert [body["retries"] for body in bodies[first.id]] == [0, 1, 2]
    assert [body["retries"] for body in bodies[second.id]] == [0, 1]
    assert all(body["headers"]["trace"] == "abc" for body in bodies[first.id])
    assert all(HEADER not in (body["headers"] or {}) for each in bodies.values() for body in each)


def test_an_expired_or_revoked_task_never_runs_and_holds_up_nobody(pair: Site) -> None:
    beside = limiter(pair)
    assert beside.acquire("api", key="gone")
    expired = tasks.api.apply_async(key="gone", expires=0.4)
    revoked = tasks.api.apply_async(key="gone")
    until(lambda: revoked.state == "RETRY", "the task waits")
    revoked.revoke()
    until(lambda: expired.state == "REVOKED", "the task expires")
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=PATIENCE)
    after = tasks.api.apply_async(key="gone")
    pair.bodies([after.id])
    assert pair.of(ids([expired, revoked])) == {}


def test_a_process_killed_after_the_admission_costs_its_token_and_nothing_more(pair: Site) -> None:
    # Case 28.
    markers = [str(pair.folder / f"killed{number}") for number in range(20)]
    results = [tasks.dies_once.delay(marker) for marker in markers]
    for result in results:
        until(lambda result=result: len(pair.of([result.id])[result.id]) >= 2, "the task runs again")  # type: ignore[misc]
    granted = grants(pair.of(ids(results)))
    assert first_violation([(now, 1) for now in granted], 3, 10) is None
    beside = limiter(pair)
    until(lambda: beside.status("kill").limits[0].tokens == 3, "no token is missing in the end")


# -- a node with unusual settings


def test_a_timezone_does_not_shift_the_turn(odd: Site) -> None:
    beside = limiter(odd)
    assert beside.acquire("api", key="tokyo")
    began = beside.store.clock.now()
    result = tasks.api.apply_async(key="tokyo", queue="odd")
    (granted,) = grants(odd.bodies([result.id]))
    assert granted - began < 3600 * SECOND  # its turn is in two
    assert len(odd.of([result.id], "delivery")[result.id]) > 1


def test_many_refusals_leave_retries_alone_and_do_not_add_to_the_message(odd: Site) -> None:
    """Hops of 0.3 s on the way to turns in up to 2.5 s, for a task that may be retried once, and is for every error."""
    beside = limiter(odd)
    assert beside.acquire("quick", key="hops")
    results = [tasks.fails_once.apply_async(key="hops", queue="odd") for _ in range(5)]
    bodies = odd.bodies(ids(results))
    assert [result.get(timeout=PATIENCE) for result in results] == ["done"] * 5
    for each in odd.of(bodies).values():
        assert [body["retries"] for body in each] == [0, 1]
    deliveries = odd.of(bodies, "delivery")
    most = 0
    for each in deliveries.values():
        for retries in (0, 1):
            sizes = [
                len(json.dumps(delivery["request"]))
                for delivery in each
                if delivery["request"]["retries"] == retries and HEADER in delivery["request"]
            ]
            if sizes:
                assert max(sizes) - min(sizes) <= 10
                most = max(most, len(sizes))
    assert most > 3
    assert not TROUBLE.search(
        "".join(line for line in odd.log().splitlines() if "fails_once" in line and " retry: " in line)
    )


def test_a_store_that_fails_defers_tasks_until_it_is_mended(odd: Site) -> None:
    assert limiter(odd).acquire("other", key="mended")
    sound = odd.state_file.read_bytes()
    with odd.state_file.open("r+b") as file:
        file.write(b"this is somebody's letter, and no state file" * 10)
    try:
        results = [tasks.tenant.apply_async(("mended",), queue="odd") for _ in range(3)]
        until(lambda: all(result.state == "RETRY" for result in results), "all tasks are deferred")
        assert all(isinstance(result.info, StoreError) for result in results)
        assert str(odd.state_file) in str(results[0].info)
        until(lambda: max(map(len, odd.of(ids(results), "delivery").values())) > 2, "a task asks again and again")
        assert odd.of(ids(results)) == {}
    finally:
        with odd.state_file.open("r+b") as file:
            file.write(sound)
    assert [result.get(timeout=PATIENCE) for result in results] == ["mended"] * 3
    assert [len(each) for each in odd.of(ids(results)).values()] == [1] * 3
    assert limiter(odd).status("other", key="mended").limits[0].tokens < 2  # the token drawn before is not forgotten


# -- nodes of their own


@pytest.mark.slow
def test_limited_tasks_hold_up_no_others_and_outlive_their_worker(client: str, tmp_path: Path) -> None:
    """One process, little prefetch, and waits of half a minute; then the node is stopped and another one starts."""
    site = Site(tmp_path, client, conf={"worker_prefetch_multiplier": 4})
    queue = "small"
    try:
        first = site.start("first", "-c", "1", "-Q", queue).ready()
        beside = limiter(site)
        assert beside.acquire("slow")
        waiting = [tasks.slow.apply_async(queue=queue) for _ in range(200)]
        # Behind 200 limited tasks that would wait an hour and more: each is asked once, and gone.
        site.bodies(ids([tasks.plain.apply_async(queue=queue) for _ in range(20)]))
        assert site.of(ids(waiting)) == {}
        # Nothing starts while it stops: what Celery has just handed to its pool by then may run twice.
        beside.pause("quick", 20, key="stop")
        due = [tasks.quick.apply_async((number,), key="stop", queue=queue) for number in range(16)]
        until(lambda: all(task.state == "RETRY" for task in due), "all are sent back")
        assert first.stop() == 0
        site.start("second", "-c", "2", "-Q", queue).ready()
        bodies = site.bodies(ids(due), 2 * PATIENCE)
        assert [len(each) for each in bodies.values()] == [1] * len(due)
        assert first_violation([(now, 1) for now in grants(bodies)], 1, 4) is None
    finally:
        site.stop()


def test_what_waits_in_a_node_that_is_ended_at_once_is_not_lost(client: str, tmp_path: Path) -> None:
    # Case 106: a cold stop, with late acknowledgement.
    site = Site(tmp_path, client, conf={"task_acks_late": True})
    queue, processes = "cold", 2
    try:
        first = site.start("first", "-c", str(processes), "-Q", queue).ready()
        # From its signal handler Celery waits for ever for the rest of a pool's answer that it was reading just then.
        limiter(site).pause("core", 15, key="cold")
        waiting = [tasks.core.apply_async((number,), key="cold", queue=queue) for number in range(50)]
        until(lambda: first.read().count("] received") == 2 * len(waiting), "all were sent back, and wait in the node")
        asked = tasks.app.control.inspect([first.address], timeout=PATIENCE)
        until(lambda: not asked.active()[first.address], "the pool has answered for all of them")
        assert site.of(ids(waiting)) == {}
        first.process.send_signal(signal.SIGQUIT)
        first.process.wait(PATIENCE)
        site.start("second", "-c", str(processes), "-Q", queue).ready()
        bodies = site.bodies(ids(waiting))
        # Once each, but for those that were running.
        assert sum(map(len, bodies.values())) <= len(waiting) + processes
        assert first_violation([(now, 1) for now in grants(bodies)], 5, 10) is None
    finally:
        site.stop()


@pytest.mark.slow
def test_processes_that_autoscale_adds_and_replaces_share_the_quota(client: str, tmp_path: Path) -> None:
    routes = {"app.routed": {"bucket": "core"}}
    site = Site(tmp_path, client, settings={"routes": routes}, conf={"worker_max_tasks_per_child": 4})
    try:
        site.start("scaled", "--autoscale", "4,1", "-Q", "scaled").ready()
        sent: list[AsyncResult] = []

        def processes() -> int:
            """Those that have run a body so far; the pool grows when more is there than it has room for."""
            sent.extend([tasks.routed.apply_async((number,), queue="scaled") for number in range(10)])
            return len({body["pid"] for each in site.bodies(ids(sent)).values() for body in each})

        until(lambda: processes() > 4, "more processes than the pool has at a time have run tasks", 2 * PATIENCE)
        bodies = site.bodies(ids(sent))
        assert {len(each) for each in bodies.values()} == {1}
        assert first_violation([(now, 1) for now in grants(bodies)], 5, 10) is None
        assert not TROUBLE.search(site.log())
    finally:
        site.stop()


@pytest.mark.slow
def test_a_schedule_faster_than_its_bucket_does_not_pile_up_when_its_entries_expire(
    client: str, tmp_path: Path
) -> None:
    entry = {"task": "app.quick", "schedule": 0.05, "args": [1], "options": {"expires": 1.5, "queue": "beat"}}
    site = Site(tmp_path, client, conf={"beat_schedule": {"often": entry}})
    try:
        site.start("beats", "-c", "2", "-Q", "beat", "-B", "-s", str(tmp_path / "schedule"))

        def ran() -> set[str]:
            return {each["id"] for each in site.events("body")}

        until(lambda: len(ran()) >= 20, "twenty have run, in five seconds", 2 * PATIENCE)
        bodies = site.of(ran())
        assert {len(each) for each in bodies.values()} == {1}
        assert first_violation([(now, 1) for now in grants(bodies)], 1, 4) is None
        # Who expires before its turn has none: the line is as long as one of them lives, however many there were.
        assert limiter(site).status("quick").limits[0].waiting <= 1.5 * 4 + 1
        assert len({each["id"] for each in site.events("delivery")}) > 2 * len(bodies)
        until(lambda: "expired" in site.log(), "some expire")
    finally:
        site.stop()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bucket": "coer"}, "bucket 'coer' is not declared in the setting buckets; did you mean 'core'?"),
        ({"bucket": ["core", "api"], "cost": 2}, "bucket 'api': cost 2 is above capacity 1 and could never be met"),
    ],
)
def test_a_task_that_can_never_run_stops_the_worker_at_start(
    server: str, tmp_path: Path, options: dict[str, object], sentence: str
) -> None:
    site = Site(tmp_path, server, environment={"TEST_DECLARE": json.dumps(options)})
    ended = subprocess.run(
        site.command("-c", "1", "-Q", "never"), env=site.variables(), capture_output=True, check=False, timeout=PATIENCE
    )
    assert ended.returncode == 1
    assert ended.stderr.decode().splitlines()[-1] == f"tb_celery: task 'proj.wrong': {sentence}"
    assert b"Traceback" not in ended.stderr + ended.stdout


def test_a_task_whose_broker_is_gone_waits_in_its_process_and_runs(tmp_path: Path) -> None:
    """The broker ends while the delivery is on its way to the buckets: the key that it asks for comes late."""
    told = tmp_path / "told"
    with ExitStack() as broker:
        url = broker.enter_context(valkey_server())
        # The broker is what fails here; results would go to the same server.
        site = Site(tmp_path, url, conf={"result_backend": None, "broker_transport_options": {"max_retries": 1}})
        try:
            site.start("lonely", "-c", "1").ready()
            beside = limiter(site)
            with Connection(url) as connection:
                result = tasks.held_up.apply_async((str(told),), connection=connection)
            until(told.with_suffix(".waits").exists, "the delivery has begun")
            broker.close()
            assert beside.acquire("api", key="told")
            told.touch()
            (body,) = site.bodies([result.id])[result.id]
            assert body["retries"] == 0
            assert "waits in the worker, no copy could be published" in site.log()
        finally:
            for node in site.nodes:
                node.kill()  # it waits for its broker


@pytest.mark.slow
def test_the_main_job_on_rabbitmq(rabbitmq: str, tmp_path: Path) -> None:
    site = Site(tmp_path, rabbitmq)
    try:
        for number in (1, 2):
            site.start(f"rabbit{number}", "-c", "2")
        for node in site.nodes:
            node.ready()
        with Connection(rabbitmq) as connection:
            options = {"connection": connection, "ignore_result": True}
            site.bodies(ids([tasks.core.apply_async((number,), key="warm", **options) for number in range(12)]))
            results = [tasks.core.apply_async((number,), **options) for number in range(CORE)]
        check_core(site, results)
        assert not TROUBLE.search(site.log())
    finally:
        site.stop()
