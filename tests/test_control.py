"""Operating through Celery's own tools, with real worker nodes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import app as tasks
import pytest
from servers import Site, until

from tb_celery import RateLimitExceeded
from tb_celery.explain import ask_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.server
# With a key, a node takes as many of them as there are.
ROUTES = {"queue:held": {"bucket": "slow", "key": "user", "on_reject": "hold"}}
ROOMY = ["--prefetch-multiplier", "32"]
# None of its modules knows of us.
PLAIN = """
from celery import Celery

app = Celery("plain")
app.conf.update(SETTINGS)

@app.task(bind=True)
def post(self):
    return self.request.tb_celery.now
"""
# As `celery worker` does, but for the plugins of Celery's command.
STRANGER = """
import sys
from celery import Celery

app = Celery("stranger", broker=sys.argv[1])
app.conf.update(broker_connection_retry_on_startup=True, worker_enable_remote_control=True)
assert "tb_celery" not in sys.modules
app.Worker(hostname="stranger@host", pool="solo", queues=["stranger"], loglevel="INFO").start()
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


def celery(site: Site, *arguments: str) -> Result:
    """What Celery's command says at a site."""
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", site.app, "--no-color", *arguments],
        cwd=site.folder,
        env=site.variables(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def answer(site: Site, *arguments: str) -> Any:  # noqa: ANN401 - JSON
    done = celery(site, *arguments)
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out.splitlines()[0])


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[None]:
    """The tests' own end of the application."""
    tasks.app.conf.update(broker_url=server, result_backend=server)
    yield
    tasks.app.backend.result_consumer.stop()
    tasks.app.backend.client.close()
    tasks.app.close()


@pytest.fixture
def site(client: None, server: str, tmp_path: Path) -> Iterator[Site]:  # noqa: ARG001
    tasks.app.backend.client.flushall()  # what other tests have left in the queues
    site = Site(tmp_path, server, settings={"routes": ROUTES})
    try:
        yield site
    finally:
        site.stop()


def start(site: Site, *options: str, count: int = 2) -> list[str]:
    """Start nodes, and wait until they can be asked."""
    own = ["-c", "1", "-Q", "celery,held", *ROOMY, *options]
    started = [site.start(uuid.uuid4().hex[:8], *own) for _ in range(count)]
    for node in started:
        node.ready()
    return [name for node in started for name in re.findall(r"(\S+@\S+) ready\.", node.read())]


def hold(site: Site, nodes: list[str], count: int = 6) -> list[str]:
    """Empty the bucket and have so many tasks held; their ids."""
    ids = [tasks.routed.apply_async((), {"user": "alice"}, queue="held").id for _ in range(count + 1)]
    # Under load its token may be too old when it gets to the pool: then it waits for another.
    until(lambda: len(site.of(ids)) == 1, "the first runs", 90)
    (ran,) = site.of(ids)

    def held() -> int:
        return sum(each["slow"]["held"]["tasks"] for each in ask_nodes(tasks.app, "buckets", 1).values())

    until(lambda: held() == count, f"{count} tasks are held by {nodes}")
    return [each for each in ids if each != ran]


def test_nodes_tell_how_the_buckets_stand_and_what_they_hold(site: Site) -> None:
    nodes = start(site)
    hold(site, nodes)
    found = answer(site, "inspect", "buckets", "--json")
    assert found.keys() == set(nodes)
    for node in nodes:
        assert {"core", "slow"} <= found[node].keys()
        assert found[node]["core"]["held"] == {"tasks": 0, "lines": 0, "behind": 0.0}
        assert found[node]["slow"]["keys"] == 1
        assert found[node]["slow"]["held"]["lines"] == (found[node]["slow"]["held"]["tasks"] > 0)
    assert sum(found[node]["slow"]["held"]["tasks"] for node in nodes) == 6
    assert answer(site, "inspect", "buckets", "core", "-j", "-d", nodes[0]) == {
        nodes[0]: {"core": found[nodes[0]]["core"]}
    }
    by_api = tasks.app.control.inspect(nodes)._request("buckets", bucket="core")  # noqa: SLF001 - Celery has no other way
    assert by_api[nodes[1]]["core"] == found[nodes[1]]["core"]
    assert "did you mean 'core'" in celery(site, "inspect", "buckets", "cor").out


def test_the_command_shows_what_waits_and_for_how_long(site: Site) -> None:
    nodes = start(site)
    ids = hold(site, nodes)

    shown = celery(site, "buckets", "status")
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.splitlines()[0].split() == [
        "BUCKET",
        "CAPACITY",
        "PER",
        "SECOND",
        "TOKENS",
        "NEXT",
        "IN",
        "TURNS",
        "KEYS",
    ]
    assert answer(site, "buckets", "status", "slow", "--json")["buckets"].keys() == {"slow"}

    found = answer(site, "buckets", "explain", "slow", "--key", "alice", "--json")
    lines = sum(held["lines"] for held in found["held"].values())
    assert found["binds"]["turns"] >= lines, "the heads'"
    assert found["behind"] == 6 - lines
    assert 4 * 30 <= found["drained_in"] <= 7 * 30, "some six tokens at one in 30 s"
    told = celery(site, "buckets", "explain", "slow", "--key", "alice").out
    assert "bucket 'slow' of key 'alice': 0.0333333 tokens a second, at most 1" in told
    assert re.search(r"all of that is done in 1\d\d\.\d{3} s \(\d\d:\d\d:\d\d\)", told)

    places = [answer(site, "buckets", "explain", each, "--json") for each in ids]
    for place in places:
        (node,) = place["nodes"].values()
        assert node["task"] == "app.routed"
        assert node["draws"] == {"slow": 1.0}
        assert node["binds"]["bucket"] == "slow"
        assert not node["running"]
        assert 0 <= node.get("turn", node.get("earliest")) <= 6 * 30
        assert ("turn" in node) == (node["place"] == 1)
    last = max(places, key=lambda place: max(each["place"] for each in place["nodes"].values()))
    told = celery(site, "buckets", "explain", last["id"]).out
    assert re.search(rf"task {last['id']}: PENDING\n\S+ holds it, number \d of \d; sent back \d times\n", told)
    assert "it draws 1 from 'slow'; what binds is 'slow': 0.0333333 tokens a second, at most 1\n" in told
    assert re.search(r"its turn is in .* at the earliest\n", told)


def test_a_task_that_was_sent_back_tells_bucket_wait_and_turn(site: Site) -> None:
    nodes = start(site, count=1)
    ids = [tasks.slow.delay().id for _ in range(2)]
    waits = until(lambda: [each for each in ids if tasks.app.AsyncResult(each).state == "RETRY"], "one is refused")
    info = tasks.app.AsyncResult(waits[0]).info
    assert isinstance(info, RateLimitExceeded)
    assert info.bucket == "slow"
    assert 25 < info.wait <= 30
    assert info.turn is not None
    assert info.turn - time.time() <= info.wait

    until(lambda: "turn" in str(ask_nodes(tasks.app, "bucket_task", 1, task_id=waits[0])), "its copy is there")
    found = answer(site, "buckets", "explain", waits[0], "--json")
    seen = found["nodes"][nodes[0]]
    assert (found["state"], found["refused"]["bucket"], seen["sent_back"]) == ("RETRY", "slow", 1)
    assert abs(seen["turn"] + time.time() - info.turn) < 2
    assert "sent back 1 times" in celery(site, "buckets", "explain", waits[0]).out
    site.stop()
    told = celery(site, "buckets", "explain", waits[0]).out
    assert "bucket 'slow' has refused it; its turn is in " in told


def test_what_nobody_knows_is_said(site: Site) -> None:
    start(site, count=1)
    assert "no node has it" in celery(site, "buckets", "explain", "nothing").out
    done = celery(site, "buckets", "status", "cor")
    assert (done.code, done.out) == (1, "")
    assert "bucket 'cor' is not declared in the setting buckets; did you mean 'core'?" in done.err


def test_a_bucket_is_made_full_again(site: Site) -> None:
    nodes = start(site, count=1)

    def tokens() -> float:
        (limit,) = answer(site, "buckets", "status", "five", "--json")["buckets"]["five"]["limits"]
        found = limit["current_tokens"]
        assert isinstance(found, float)
        return found

    site.bodies([tasks.one_of_five.delay().id])
    assert tokens() < 4.5
    done = celery(site, "control", "bucket_reset", "five", "-d", nodes[0])
    assert "bucket 'five' is full again; records cleared: 1" in done.out
    assert tokens() == 5
    site.bodies([tasks.one_of_five.delay().id])
    assert celery(site, "buckets", "reset", "five").out == "bucket 'five' is full again; records cleared: 1\n"
    assert tokens() == 5
    (reply,) = tasks.app.control.broadcast("bucket_reset", {"bucket": "fiv"}, nodes, reply=True)
    assert "did you mean 'five'" in reply[nodes[0]]["error"]


def test_a_node_without_us_breaks_nothing(site: Site, server: str) -> None:
    nodes = start(site, count=1)
    log = site.folder / "stranger.log"
    with log.open("wb") as output:
        stranger = subprocess.Popen([sys.executable, "-c", STRANGER, server], stdout=output, stderr=output)
    try:
        until(lambda: tasks.app.control.ping(["stranger@host"]), "the stranger answers")
        found = answer(site, "inspect", "buckets", "core", "--json")
        assert found.keys() == {*nodes, "stranger@host"}
        assert "error" in found["stranger@host"]
        assert set(answer(site, "buckets", "explain", "core", "--json")["held"]) == set(nodes)
        assert tasks.app.control.ping(["stranger@host"])
    finally:
        stranger.terminate()
        stranger.wait()


@pytest.mark.parametrize("events", [True, False], ids=["with events", "without"])
def test_a_refusal_is_an_event_where_the_worker_sends_events(site: Site, *, events: bool) -> None:
    start(site, *(["-E"] if events else []), count=1)
    seen: dict[str, list[dict[str, Any]]] = {}

    def see(event: dict[str, Any]) -> None:
        seen.setdefault(event["uuid"], []).append(event)

    with tasks.app.connection_for_read() as connection:
        receiver = tasks.app.events.Receiver(connection, handlers={"task-rate-limited": see})
        with receiver.consumer_context() as (drained, _, _):

            def capture() -> bool:
                with suppress(TimeoutError):
                    drained.drain_events(timeout=1)
                return bool(seen) == events

            capture()  # kombu subscribes when it first looks
            ids = [tasks.slow.delay().id for _ in range(2)]
            until(lambda: len(site.of(ids, "delivery")) == 2, "both are delivered")
            (ran,) = until(lambda: site.of(ids), "one runs")
            (waits,) = set(ids) - {ran}
            until(lambda: tasks.app.AsyncResult(waits).state == "RETRY", "one is refused")
            # Its event, if there is one, was sent before the node takes the next task and says so.
            site.bodies([tasks.plain.delay().id])
            until(capture, "the event comes" if events else "no event comes")
    if events:
        (event,) = seen[waits]
        assert event["bucket"] == "slow"
        assert 25 < event["wait"] <= 30
        assert 0 < event["turn"] - time.time() < 30
    assert seen.keys() == ({waits} if events else set())


def test_plain_tasks_are_asked_about_where_the_application_does_not_know_us(site: Site) -> None:
    buckets = {"api": {"capacity": 2, "refill_rate": 4}}
    settings = {
        "broker_url": site.broker,
        "result_backend": site.broker,
        "task_default_queue": "plain",
        "broker_connection_retry_on_startup": True,
        "tb_celery": {"buckets": buckets, "routes": {"plain.*": "api"}, "state_file": str(site.state_file)},
    }
    (site.folder / "plain.py").write_text(PLAIN.replace("SETTINGS", repr(settings)))
    site.app = "plain"
    node = site.start("node", "-c", "2").ready()
    results = [tasks.app.send_task("plain.post", queue="plain") for _ in range(6)]
    granted = sorted(result.get(timeout=30) for result in results)
    assert granted[-1] - granted[0] >= 1_000_000_000
    assert "tb_celery: the quota is per host" in node.read()
