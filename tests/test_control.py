"""Operating through Celery's own tools, with real worker nodes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import app as tasks
import pytest
from servers import PATIENCE, Site, answered_by, until

from tb_celery import RateLimitExceeded, open_limiter
from tb_celery.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.server
PER_TOKEN = 300
"""Seconds in which a token comes to the slow bucket: longer than a test may take, so that nothing moves meanwhile."""
SETTINGS: dict[str, object] = {
    "max_countdown": 1700,  # so that one node can hold all that are held
    "buckets": {**tasks.BUCKETS, "slow": {"capacity": 1, "refill_rate": 1 / PER_TOKEN}},
    # With a key, a node takes as many of them as there are.
    "routes": {"queue:held": {"bucket": "slow", "key": "user", "on_reject": "hold"}},
}
HELD = 6
SOON = ["--timeout", "0.5"]
"""For a command that waits so long for whoever may answer, and is asked again until all do."""
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


def answer(site: Site, *arguments: str) -> Any:  # noqa: ANN401 - JSON
    done = site.celery(*arguments)
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out.splitlines()[0])


def start(site: Site, *options: str, count: int = 1) -> list[str]:
    """Start nodes, and wait until they can be asked; their names."""
    started = [site.start(uuid.uuid4().hex[:8], "-c", "1", *options) for _ in range(count)]
    for node in started:
        node.ready()
    return [node.address for node in started]


def explained(site: Site, count: int, *arguments: str) -> Any:  # noqa: ANN401 - JSON
    """What is explained, once so many nodes know of it and answer in time."""

    def explain() -> Any:  # noqa: ANN401
        found = answer(site, "buckets", "explain", *arguments, *SOON, "--json")
        return found if len(found["held" if "held" in found else "nodes"]) == count else None

    return until(explain, f"{count} nodes explain {arguments}")


def says(site: Site, pattern: str, *arguments: str) -> str:
    """The same in words, once ``pattern`` is among them."""

    def explain() -> str:
        told = site.celery("buckets", "explain", *arguments, *SOON).out
        return told if re.search(pattern, told) else ""

    return until(explain, f"{arguments} are explained by {pattern}")


@pytest.fixture(scope="module")
def site(client: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("control"), client, settings=SETTINGS)
    try:
        yield site
    finally:
        site.stop()


@pytest.fixture(scope="module")
def nodes(site: Site) -> list[str]:
    """Two nodes at the site."""
    return start(site, "-Q", "celery,held", "--prefetch-multiplier", "32", count=2)


@pytest.fixture(scope="module")
def held(site: Site, nodes: list[str]) -> list[str]:
    """The ids of tasks that these nodes hold, of a bucket that is empty."""
    limiter = open_limiter(load_settings({**SETTINGS, "state_file": str(site.state_file)}))
    assert limiter.acquire("slow", key="alice")
    ids = [tasks.routed.apply_async((), {"user": "alice"}, queue="held").id for _ in range(HELD)]
    until(lambda: all(f"[{each}] received" in site.log() for each in ids), f"all have come to {nodes}")
    return ids


@pytest.fixture
def alone(client: str, tmp_path: Path) -> Iterator[Site]:
    """A site for a node of the test's own, with a queue of its own."""
    site = Site(tmp_path, client, settings={**SETTINGS})
    try:
        yield site
    finally:
        site.stop()


@pytest.mark.usefixtures("held")
def test_nodes_tell_how_the_buckets_stand_and_what_they_hold(site: Site, nodes: list[str]) -> None:
    found = answer(site, "inspect", "buckets", "--json", *answered_by(*nodes))
    assert found.keys() == set(nodes)
    for node in nodes:
        assert {"core", "slow"} <= found[node].keys()
        assert found[node]["core"]["held"] == {"tasks": 0, "lines": 0, "behind": 0.0, "most": 0.0}
        assert found[node]["slow"]["keys"] == 1
        assert found[node]["slow"]["held"]["behind"] == 0, "without a key"
        assert found[node]["slow"]["held"]["lines"] == (found[node]["slow"]["held"]["tasks"] > 0)
    assert sum(found[node]["slow"]["held"]["tasks"] for node in nodes) == HELD
    assert answer(site, "inspect", "buckets", "core", "-j", *answered_by(nodes[0])) == {
        nodes[0]: {"core": found[nodes[0]]["core"]}
    }
    inspect = tasks.app.control.inspect(nodes, timeout=PATIENCE)
    by_api = inspect._request("buckets", bucket="core")  # noqa: SLF001 - Celery has no other way
    assert by_api[nodes[1]]["core"] == found[nodes[1]]["core"]
    held = inspect._request("buckets", standing=False)[nodes[0]]  # noqa: SLF001
    assert held.keys() == found[nodes[0]].keys()
    assert held["slow"] == {name: found[nodes[0]]["slow"][name] for name in ("held", "sent_back", "dropped")}
    assert "did you mean 'core'" in site.celery("inspect", "buckets", "cor", *answered_by(*nodes)).out


def test_the_command_shows_what_waits_and_for_how_long(site: Site, held: list[str]) -> None:
    done = site.celery("buckets", "status")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0].split() == [
        "BUCKET",
        "CAPACITY",
        "PER",
        "SECOND",
        "TOKENS",
        "NEXT",
        "IN",
        "TURNS",
        "DONE",
        "IN",
        "KEYS",
    ]
    assert answer(site, "buckets", "status", "slow", "--json")["buckets"].keys() == {"slow"}

    began = time.time()
    found = explained(site, 2, "slow", "--key", "alice")
    lines = sum(each["lines"] for each in found["held"].values())
    assert found["binds"]["turns"] >= lines, "the heads'"
    assert found["behind"] == HELD - lines
    assert (HELD - 1) * PER_TOKEN <= found["drained_in"] <= HELD * PER_TOKEN
    told = says(site, r"all of that is done in 1[5-8]\d\d\.\d{3} s \((\S+ )?\d\d:\d\d:\d\d\)", "slow", "--key", "alice")
    assert "bucket 'slow' of key 'alice': 0.00333333 tokens a second, at most 1" in told
    assert f"\nslow (without a key; with one {lines} turns) " in done.out
    every = explained(site, 2, "slow")
    assert (every["binds"]["turns"], every["behind"]) == (0, 0), "without a key"
    assert every["all_keys"]["waiting"] == found["binds"]["turns"] + found["behind"]
    assert -1 < found["drained_in"] - every["all_keys"]["drained_in"] < time.time() - began + 1
    says(site, rf"all its keys together: {HELD} tokens are waited for, and that is done in \d+\.", "slow")

    def top() -> str:
        done = site.celery("buckets", "top", "--once", "-n", "0.2", *SOON)
        assert (done.code, done.err) == (0, "")
        return done.out if "nodes that answer: 2" in done.out else ""

    shown = until(top, "both nodes answer in time")
    (line,) = [line for line in shown.splitlines() if line.startswith("slow ")]
    waiting, *drained = re.search(r" (\d+)  +(\d+)m (\d\d)s$", line).groups()  # type: ignore[union-attr]
    assert int(waiting) == found["binds"]["turns"] + HELD - lines
    assert -1 < found["drained_in"] - int(drained[0]) * 60 - int(drained[1]) < time.time() - began + 1

    with ThreadPoolExecutor() as threads:
        places = list(threads.map(lambda each: explained(site, 1, each), held))
    for place in places:
        (node,) = place["nodes"].values()
        assert node["task"] == "app.routed"
        assert node["draws"] == {"slow": 1.0}
        assert node["binds"]["bucket"] == "slow"
        assert not node["running"]
        assert 0 <= node.get("turn", node.get("earliest")) <= HELD * PER_TOKEN
        assert ("turn" in node) == (node["place"] == 1)
    last = max(places, key=lambda place: max(each["place"] for each in place["nodes"].values()))
    told = says(site, rf"task {last['id']}: PENDING\n\S+ holds it, number \d of \d; sent back \d times\n", last["id"])
    assert "it draws 1 from 'slow'; what binds is 'slow': 0.00333333 tokens a second, at most 1\n" in told
    assert re.search(r"its turn is in .* at the earliest\n", told)


def test_a_task_that_was_sent_back_tells_bucket_wait_and_turn(alone: Site) -> None:
    (node,) = start(alone, "-Q", "sent-back")
    ids = [tasks.slow.apply_async(queue="sent-back").id for _ in range(2)]
    waits = until(lambda: [each for each in ids if tasks.app.AsyncResult(each).state == "RETRY"], "one is refused")
    info = tasks.app.AsyncResult(waits[0]).info
    assert isinstance(info, RateLimitExceeded)
    assert info.bucket == "slow"
    assert 0 < info.wait <= PER_TOKEN
    assert info.turn is not None
    assert info.turn - time.time() <= info.wait

    # Its copy is there.
    until(lambda: alone.log().count(f"[{waits[0]}] received") == 2, "its copy is there")
    asked = time.time()
    found = explained(alone, 1, waits[0])
    seen = found["nodes"][node]
    assert (found["state"], found["refused"]["bucket"], seen["sent_back"]) == ("RETRY", "slow", 1)
    assert asked - 0.01 < info.turn - seen["turn"] < time.time() + 0.01, "two clocks tell the same instant"
    says(alone, "sent back 1 times", waits[0])
    alone.stop()
    told = alone.celery("buckets", "explain", waits[0]).out
    assert "bucket 'slow' has refused it; its turn is in " in told


def test_tasks_that_are_sent_back_are_counted(alone: Site) -> None:
    (node,) = start(alone, "-Q", "many")
    for _ in range(105):
        tasks.one_of_five.apply_async(queue="many")

    def seen() -> dict[str, Any]:
        found: dict[str, Any] = answer(alone, "inspect", "buckets", "five", "--json", *answered_by(node))[node]["five"]
        return found

    until(lambda: seen()["sent_back"] == 100, "all but five are sent back")
    assert alone.log().count("is over quota: turn in") == 100
    (limit,) = seen()["limits"]
    assert limit["turns"] == 100
    assert 99_000 < limit["drained_in_seconds"] <= 100_000, "at a token in 1000 s"
    (told,) = re.findall(r"^five .*", alone.celery("buckets", "status").out, re.MULTILINE)
    assert re.search(r"  100  99\d{3}\.\d{3} s     1$", told)


@pytest.mark.usefixtures("nodes")
def test_what_nobody_knows_is_said(site: Site) -> None:
    done = site.celery("buckets", "explain", "cor")
    assert (done.code, done.out) == (1, "")
    assert "no node has a task 'cor'" in done.err
    assert "bucket 'cor' is not declared in the setting buckets; did you mean 'core'?" in done.err
    done = site.celery("buckets", "explain", "nothing", "--json")
    assert (done.code, json.loads(done.out)["nodes"]) == (1, {})
    done = site.celery("buckets", "status", "cor")
    assert (done.code, done.out) == (1, "")
    assert "bucket 'cor' is not declared in the setting buckets; did you mean 'core'?" in done.err


def test_a_result_backend_that_is_away_is_named(alone: Site) -> None:
    alone.conf["result_backend"] = "redis://127.0.0.1:1/0"
    done = alone.celery("buckets", "explain", "nothing")
    assert (done.code, done.out) == (1, "")
    assert "its state cannot be read from the result backend (ConnectionError: " in done.err
    assert "Traceback" not in done.err


def test_a_bucket_is_made_full_again(site: Site, nodes: list[str]) -> None:
    def tokens() -> float:
        (limit,) = answer(site, "buckets", "status", "five", "--json")["buckets"]["five"]["limits"]
        found = limit["current_tokens"]
        assert isinstance(found, float)
        return found

    site.bodies([tasks.one_of_five.delay().id])
    assert tokens() < 4.5
    done = site.celery("control", "bucket_reset", "five", *answered_by(nodes[0]))
    assert "bucket 'five' is full again; records cleared: 1" in done.out
    assert tokens() == 5
    site.bodies([tasks.one_of_five.delay().id])
    assert site.celery("buckets", "reset", "five").out == "bucket 'five' is full again; records cleared: 1\n"
    assert tokens() == 5
    (reply,) = tasks.app.control.broadcast("bucket_reset", {"bucket": "fiv"}, nodes[:1], reply=True, timeout=PATIENCE)
    assert "did you mean 'five'" in reply[nodes[0]]["error"]


def test_a_node_without_us_breaks_nothing(site: Site, nodes: list[str]) -> None:
    log = site.folder / "stranger.log"
    with log.open("wb") as output:
        stranger = subprocess.Popen([sys.executable, "-c", STRANGER, site.broker], stdout=output, stderr=output)
    try:
        until(lambda: b" ready." in log.read_bytes(), "the stranger is ready")
        found = answer(site, "inspect", "buckets", "core", "--json", *answered_by(*nodes, "stranger@host"))
        assert found.keys() == {*nodes, "stranger@host"}
        assert "error" in found["stranger@host"]
        assert explained(site, len(nodes), "core")["held"].keys() == set(nodes)
        assert tasks.app.control.ping(["stranger@host"], timeout=PATIENCE)
    finally:
        stranger.terminate()
        stranger.wait()


@pytest.mark.parametrize("events", [True, False], ids=["with events", "without"])
def test_a_refusal_is_an_event_where_the_worker_sends_events(alone: Site, *, events: bool) -> None:
    queue = f"events-{events}"
    start(alone, "-Q", queue, *(["-E"] if events else []))
    seen: dict[str, list[dict[str, Any]]] = {}
    retried: set[str] = set()
    shown = tasks.app.events.State()  # what Flower and others make of events

    def see(event: dict[str, Any]) -> None:
        shown.event(event)
        # Here and not later: the copy's arrival may come in the same message.
        if event["type"] == "task-retried" and shown.tasks[event["uuid"]].state == "RETRY":
            retried.add(event["uuid"])
        if event["type"] == "task-rate-limited":
            seen.setdefault(event["uuid"], []).append(event)

    with tasks.app.connection_for_read() as connection:
        receiver = tasks.app.events.Receiver(connection, handlers={"*": see})
        with receiver.consumer_context() as (drained, _, _):

            def capture() -> bool:
                with suppress(TimeoutError):
                    drained.drain_events(timeout=1)
                return bool(seen) == events

            capture()  # kombu subscribes when it first looks
            ids = [tasks.slow.apply_async(queue=queue).id for _ in range(2)]
            until(lambda: len(alone.of(ids, "delivery")) == 2, "both are delivered")
            (ran,) = until(lambda: alone.of(ids), "one runs")
            (waits,) = set(ids) - {ran}
            until(lambda: tasks.app.AsyncResult(waits).state == "RETRY", "one is refused")
            # Its event, if there is one, was sent before the node takes the next task and says so.
            alone.bodies([tasks.plain.apply_async(queue=queue).id])
            until(capture, "the event comes" if events else "no event comes")
            if events:
                until(
                    lambda: capture() and waits in retried,
                    "the refused task is shown as Celery's own",
                )
    if events:
        (event,) = seen[waits]
        assert event["bucket"] == "slow"
        assert 0 < event["wait"] <= PER_TOKEN
        assert event["turn"] - time.time() < event["wait"]
    assert seen.keys() == ({waits} if events else set())


def test_a_pause_that_the_other_side_has_called_for_is_an_event(alone: Site) -> None:
    start(alone, "-Q", "turned-down", "-E")
    seen: list[dict[str, Any]] = []
    with tasks.app.connection_for_read() as connection:
        receiver = tasks.app.events.Receiver(connection, handlers={"bucket-paused": seen.append})
        with receiver.consumer_context() as (drained, _, _):

            def capture() -> bool:
                with suppress(TimeoutError):
                    drained.drain_events(timeout=1)
                return bool(seen)

            capture()  # kombu subscribes when it first looks
            sent = tasks.turned_down.apply_async((120,), queue="turned-down").id
            until(capture, "the event comes")
    (event,) = seen
    assert (event["uuid"], event["bucket"], event["one_key"]) == (sent, "quick", False)
    assert 60 < event["until"] - time.time() <= 120


def test_held_tasks_are_shown_as_received(alone: Site) -> None:
    alone.settings["routes"] = {"app.routed": {"bucket": "quick", "on_reject": "hold"}}
    start(alone, "-Q", "shown", "-E", "--prefetch-multiplier", "32")
    shown = tasks.app.events.State()
    states: dict[str, list[str]] = {}

    def see(event: dict[str, Any]) -> None:
        shown.event(event)
        if event["type"].startswith("task-"):
            states.setdefault(event["uuid"], []).append(shown.tasks[event["uuid"]].state)

    with tasks.app.connection_for_read() as connection:
        receiver = tasks.app.events.Receiver(connection, handlers={"*": see})
        with receiver.consumer_context() as (drained, _, _):

            def all_have_ended(ids: list[str]) -> bool:
                with suppress(TimeoutError):
                    drained.drain_events(timeout=0.1)
                return bool(ids) and all("SUCCESS" in states.get(each, ()) for each in ids)

            all_have_ended([])  # kombu subscribes when it first looks
            ids = [tasks.routed.apply_async((number,), queue="shown").id for number in range(4)]
            until(lambda: all_have_ended(ids), "all run")
    assert {tuple(states[each]) for each in ids} == {("RECEIVED", "STARTED", "SUCCESS")}


def test_plain_tasks_are_asked_about_where_the_application_does_not_know_us(alone: Site) -> None:
    buckets = {"api": {"capacity": 2, "refill_rate": 4}}
    settings = {
        "broker_url": alone.broker,
        "result_backend": alone.broker,
        "task_default_queue": "plain",
        "broker_connection_retry_on_startup": True,
        "tb_celery": {"buckets": buckets, "routes": {"plain.*": "api"}, "state_file": str(alone.state_file)},
    }
    (alone.folder / "plain.py").write_text(PLAIN.replace("SETTINGS", repr(settings)))
    alone.app = "plain"
    node = alone.start("node", "-c", "2").ready()
    results = [tasks.app.send_task("plain.post", queue="plain") for _ in range(6)]
    granted = sorted(result.get(timeout=30) for result in results)
    assert granted[-1] - granted[0] >= 1_000_000_000
    assert "[buckets] the quota is per host" in node.read()


def test_explain_says_that_no_node_answers(alone: Site) -> None:
    alone.broker = alone.broker.removesuffix("0") + "1"
    told = alone.celery("buckets", "explain", "slow", *SOON).out
    assert told.endswith("\nno node answers, so what nodes hold is not counted\n")


def test_top_says_that_no_node_answers(alone: Site) -> None:
    alone.broker = alone.broker.removesuffix("0") + "1"
    done = alone.celery("buckets", "top", "--once", "-n", "0.1", "-t", "0.1")
    assert (done.code, done.err) == (0, "")
    assert "no node answers" in done.out
