"""Buckets that are paused, and given other numbers, while real processes and worker nodes use them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import uuid
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import app as tasks
import pytest
from line import Line, declare, make_app
from private_redis import redis_store
from servers import PATIENCE, ROOT, Done, Site, answered_by, until

from tb_celery import Bucket, Limit, Limiter, RateLimitExceeded, open_limiter
from tb_celery.bucket import SECOND
from tb_celery.cli import main
from tb_celery.clock import FakeClock
from tb_celery.declaration import parse_duration
from tb_celery.errors import ConfigurationError
from tb_celery.quota import limiter_of
from tb_celery.settings import Settings, load_settings
from tb_celery.steering import change, pause, resume, tell_numbers, tell_pause, unset
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore
from tb_celery.stores.orders import change as order_of
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUCKETS = [Bucket("api", (Limit(5, 0.5),)), Bucket("two", (Limit(10, 1), Limit(20, 0.5)))]
DECIDE = """
import os, sys, time
from tb_celery import open_limiter

limiter = open_limiter()
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
while True:
    decision = limiter.acquire("api")
    rate = float(decision.limit.refill_rate) if decision.limit else 0
    os.write(log, f"{decision.now} {decision.allowed:d} {rate}\\n".encode())
    time.sleep(0.001)  # more would only be more to read
"""


@pytest.fixture
def limiter() -> Limiter:
    return Limiter(BUCKETS, MemoryStore(FakeClock(1000 * SECOND)))


# -- what is done and said


@pytest.mark.parametrize(
    ("form", "seconds"),
    [
        (120, 120),
        (0.5, 0.5),
        ("240", 240),
        (" 90s ", 90),
        ("5m", 300),
        ("1.5h", 5400),
        ("2 hours", 7200),
        ("1d", 86_400),
    ],
)
def test_durations_are_given_as_people_write_them(form: object, seconds: float) -> None:
    assert parse_duration(form) == seconds


@pytest.mark.parametrize(
    "form", [0, -1, "0s", "-5m", "soon", "", "2y", "1h30m", True, None, float("nan"), float("inf")]
)
def test_what_is_no_duration_is_refused(form: object) -> None:
    with pytest.raises(ConfigurationError, match=r'such as "120" \(seconds\), "90s", "2h" or "1d", not'):
        parse_duration(form)


def test_a_pause_is_told_with_its_end(limiter: Limiter) -> None:
    assert re.fullmatch(
        r"bucket 'api' is paused for 120\.000 s \((\S+ )?\d\d:\d\d:\d\d\)", tell_pause(pause(limiter, "api", "2m"))
    )
    assert pause(limiter, "api", 10)["paused_seconds"] == 120, "the longer one stands"
    assert tell_pause(resume(limiter, "api")) == "bucket 'api' is not paused"
    found = pause(limiter, "api", "1d", "alice")
    assert (found["bucket"], found["key"], found["paused_seconds"]) == ("api", "alice", 86_400)
    assert re.search(r"key 'alice' is paused .* \(\d{4}-\d\d-\d\d ", tell_pause(found)), "on another day"
    assert limiter.acquire("api")
    assert tell_pause(resume(limiter, "api", "alice")) == "bucket 'api' of key 'alice' is not paused"


def test_other_numbers_are_told_with_those_declared(limiter: Limiter) -> None:
    told = tell_numbers(change(limiter, "api", refill_rate=2, duration="90s"))
    assert re.fullmatch(
        r"bucket 'api': 2 tokens a second, at most 5 \(set, for 90\.000 s \(.*\); declared: 5 at 0\.5/s\)", told
    )
    told = tell_numbers(change(limiter, "two", capacity=3, limit=1))
    assert told.splitlines() == [
        "bucket 'two': 1 tokens a second, at most 10",
        "bucket 'two': 0.5 tokens a second, at most 3 (set, for good; declared: 20 at 0.5/s)",
    ]
    assert tell_numbers(unset(limiter, "api")) == "bucket 'api': 0.5 tokens a second, at most 5"
    assert unset(limiter, "two", 1)["limits"][1]["set"] is None


def test_what_is_for_good_stays_so(limiter: Limiter) -> None:
    change(limiter, "api", capacity=3)
    clock = limiter.store.clock
    assert isinstance(clock, FakeClock)
    clock.advance(86_400 * SECOND)
    assert "(set, for good;" in tell_numbers(change(limiter, "two", capacity=3, limit=0))
    assert limiter.acquire("api", 5).limit == Limit(3, 0.5)


def test_remote_controls_words_are_numbers(limiter: Limiter) -> None:
    (limit,) = change(limiter, "api", refill_rate="-", capacity="7", duration="-")["limits"]
    assert (limit["refill_rate"], limit["capacity"], limit["set"]["ends_in_seconds"]) == (0.5, 7, None)
    with pytest.raises(ConfigurationError, match="refill_rate must be a number above 0, or - for the one declared"):
        change(limiter, "api", refill_rate="fast")
    with pytest.raises(ConfigurationError, match="bucket 'api': nothing is set: give refill_rate, capacity, or both"):
        change(limiter, "api", refill_rate="-")
    assert change(limiter, "two", capacity="7", limit="0")["limits"][0]["capacity"] == 7
    assert unset(limiter, "two", limit="0")["limits"][0]["set"] is None


@pytest.mark.parametrize("wrong", [{}, [1], True, "x", "-1", "", 1.0, 7])
def test_remote_controls_words_may_be_anything(limiter: Limiter, wrong: object) -> None:
    for asked in ({"refill_rate": wrong}, {"capacity": wrong, "limit": 0}, {"capacity": 3, "duration": wrong}):
        with suppress(ConfigurationError):
            change(limiter, "api", **asked)
    for act in (partial(change, capacity=3), unset):
        with pytest.raises(ConfigurationError, match=r"limit must be the number of one|bucket 'two' has 2 limits; say"):
            act(limiter, "two", limit=wrong)


# -- tb-celery


class Call(Protocol):
    def __call__(self, *args: str) -> Done: ...


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """The command in this process."""
    monkeypatch.setenv("TB_CELERY_STATE_FILE", str(tmp_path / "state"))
    monkeypatch.setenv("TB_CELERY_BUCKETS", '{"api": {"capacity": 5, "refill_rate": 0.5}, "free": null}')

    def call(*args: str) -> Done:
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert isinstance(stop.value.code, int)
        return Done(stop.value.code, *capsys.readouterr())

    return call


def test_the_command_pauses_and_resumes(call: Call) -> None:
    done = call("pause", "api", "2h")
    assert (done.code, done.err) == (0, "")
    assert re.match(r"bucket 'api' is paused for 7199\.9\d\d s \(", done.out)
    assert call("wait", "api", "--timeout", "1").code == 2
    assert "api (paused for 7199." in call("status").out
    assert re.search(r"^ok +paused +bucket 'api' for 7199\.", call("doctor").out, re.MULTILINE)
    found = json.loads(call("pause", "api", "1d", "--key", "alice", "--json").out)
    assert found["paused_seconds"] == pytest.approx(86_400, abs=60)
    assert call("resume", "api") == (0, "bucket 'api' is not paused\n", "")
    assert call("wait", "api").code == 0
    assert call("wait", "api", "--key", "alice", "--timeout", "1").code == 2


def test_the_command_sets_and_unsets(call: Call) -> None:
    done = call("set", "api", "--refill-rate", "20", "--capacity", "3", "--for", "1h")
    assert (done.code, done.err) == (0, "")
    assert re.match(r"bucket 'api': 20 tokens a second, at most 3 \(set, for 3599\.", done.out)
    assert re.search(r"^ok +set +bucket 'api': 20 tokens a second, at most 3 \(set", call("doctor").out, re.MULTILINE)
    done = call("unset", "api", "--json")
    assert json.loads(done.out)["limits"][0] | {"current_tokens": 3} == {
        "capacity": 5,
        "refill_rate": 0.5,
        "current_tokens": 3,
        "wait_time_seconds": 0.0,
        "turns": 0.0,
        "drained_in_seconds": 0.0,
        "set": None,
    }


def test_what_ends_nothing_makes_no_state(call: Call, tmp_path: Path) -> None:
    assert call("resume", "api").code == call("unset", "api").code == 0
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["pause", "api", "soon"], "a duration must be a time above 0 such as"),
        (["pause", "api", "32d"], "bucket 'api' can be paused for 2678400 s at most, not 2764800.0"),
        (["pause", "ap", "2h"], "did you mean 'api'?"),
        (["pause", "free", "2h"], "bucket 'free' is not limited, so there is nothing to pause or change"),
        (["pause", "api"], "Missing argument 'DURATION'"),
        (["set", "api"], "bucket 'api': nothing is set"),
        (["set", "api", "--capacity", "0"], "capacity must be a finite number above 0"),
        (["set", "api", "--capacity", "x"], "it must be a number above 0, not 'x'"),
        (["set", "api", "--capacity", "3", "--limit", "1"], "bucket 'api' has 1 limits; say which: 0: 5 at 0.5/s"),
        (["set", "api", "--capacity", "3", "--for", "ever"], "a duration must be"),
    ],
)
def test_a_slip_is_one_sentence(call: Call, args: list[str], complaint: str) -> None:
    done = call(*args)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    assert complaint in done.err


def test_numbers_that_cannot_be_are_told_with_the_bucket_once(call: Call, tmp_path: Path) -> None:
    impossible = Limit(5, 5)
    object.__setattr__(impossible, "span", 0)  # as another program might write
    FileStore(tmp_path / "state").order(order_of("api", 0, impossible), 3600 * SECOND)
    for args in (["wait", "api"], ["pause", "api", "1h"], ["status", "api"]):
        done = call(*args)
        assert (done.code, done.out) == (1, "")
        assert re.fullmatch(r"tb-celery: bucket 'api' has been given .* with 'tb-celery unset api'\n", done.err)


# -- what a refused task is told


def test_a_task_that_a_pause_refuses_says_so() -> None:
    clock = FakeClock(1000 * SECOND)
    app = make_app(clock)
    limiter_of(app).pause("five", 60)
    outcome = Line(app, clock).send_and_deliver(declare(app, bucket="five"))
    assert outcome.state == "RETRY"
    assert (outcome.exceeded.bucket, outcome.exceeded.wait, outcome.exceeded.paused) == ("five", 60.0, True)
    assert str(outcome.exceeded) == "bucket 'five' is paused; ask again in 60.000 s"
    assert "bucket 'five' is paused: turn in 60.000 s" in str(outcome.retry)


def test_tasks_that_wait_for_the_end_of_a_pause_come_back_once() -> None:
    clock = FakeClock(1000 * SECOND)
    app = make_app(clock)
    limiter_of(app).pause("five", 60)
    task = declare(app, bucket="five")
    for _ in range(20):
        task.delay()
    runs = Line(app, clock).run_all()
    assert [len(run.countdowns) for run in runs] == [1] * 20
    assert max(run.ended for run in runs) - 1000 * SECOND == 75 * SECOND, "five at its end, and one a second"


# -- processes


class Decision(NamedTuple):
    at: int
    allowed: bool
    rate: float


class Deciders:
    """Processes that ask a bucket, one time after the other."""

    def __init__(self, folder: Path, environment: dict[str, str], count: int) -> None:
        self._logs = [folder / f"decisions{number}" for number in range(count)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", DECIDE, str(log)], env={**environment, "PYTHONPATH": str(ROOT)}, cwd=folder
            )
            for log in self._logs
        ]

    def since(self, mark: int, least: int = 30) -> list[Decision]:
        """What all of them have decided since an instant, as soon as each has done so a number of times."""

        def found() -> list[list[Decision]]:
            assert [process.poll() for process in self._processes] == [None] * len(self._processes)
            texts = [log.read_text().rpartition("\n")[0].splitlines() if log.exists() else [] for log in self._logs]
            lines = [[line.split() for line in text] for text in texts]
            return [[Decision(int(at), a == "1", float(r)) for at, a, r in each if int(at) > mark] for each in lines]

        until(lambda: min(map(len, found())) >= least, "all have decided")
        return [decision for each in found() for decision in each]

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()


@contextmanager
def deciding(folder: Path, **settings: str) -> Iterator[tuple[Deciders, Limiter]]:
    """Some processes, and a limiter of ours on the same state."""
    environment = {f"TB_CELERY_{name.upper()}": text for name, text in settings.items()}
    buckets = {"api": {"capacity": 10_000, "refill_rate": 1000}}
    deciders = Deciders(folder, {**environment, "TB_CELERY_BUCKETS": json.dumps(buckets)}, 3)
    try:
        yield deciders, open_limiter(Settings(buckets=buckets, **settings))
    finally:
        deciders.stop()


def deciding_in(
    store: str, folder: Path, request: pytest.FixtureRequest
) -> AbstractContextManager[tuple[Deciders, Limiter]]:
    """:func:`deciding`, in a file or on a server."""
    address = request.getfixturevalue("server") if store == "redis" else "file"
    return deciding(folder, store=address, key_prefix=uuid.uuid4().hex, state_file=str(folder / "state"))


@pytest.mark.server
@pytest.mark.parametrize("store", ["file", "redis"])
def test_every_process_heeds_what_is_ordered_in_its_next_decision(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with deciding_in(store, tmp_path, request) as (deciders, limiter):

        def now() -> int:
            instant, *_ = limiter.store.read(())
            return instant

        assert all(decision.allowed for decision in deciders.since(0)), "each has used the bucket"
        for _ in range(3):
            limiter.pause("api", 3600)
            assert {(each.allowed, each.rate) for each in deciders.since(now())} == {(False, 0)}
            limiter.resume("api")
            assert {each.allowed for each in deciders.since(now())} == {True}
            limiter.set("api", refill_rate=500)
            assert {each.rate for each in deciders.since(now())} == {500}
            limiter.unset("api")
            assert {each.rate for each in deciders.since(now())} == {1000}


@pytest.mark.server
@pytest.mark.parametrize("store", ["file", "redis"])
def test_every_process_heeds_the_slower_rate_that_another_declares(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with deciding_in(store, tmp_path, request) as (deciders, limiter):
        slower = Limiter([Bucket("api", (Limit(10_000, 500),))], limiter.store)
        assert {each.rate for each in deciders.since(0)} == {1000}
        assert limiter.acquire("api", 5000), "on a server nobody is found by a bucket that is full"
        mark = slower.acquire("api").now
        assert {each.rate for each in deciders.since(mark)} == {500}


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_settings_that_differ_are_noticed_once_and_the_stricter_numbers_hold(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """A rolling deploy: some processes have the new settings, others the old ones."""
    clock = FakeClock(1000 * SECOND)
    if kind == "file":
        stores: list[Any] = [FileStore(tmp_path / "state", clock) for _ in range(2)]
    else:
        stores = [redis_store(request.getfixturevalue("server"), clock) for _ in range(2)]
        stores[1].prefix, stores[1].marker = stores[0].prefix, stores[0].marker
    strict, lax = (
        Limiter([Bucket("api", (Limit(capacity, rate),))], store)
        for store, (capacity, rate) in zip(stores, [(5, 2), (50, 3)], strict=True)
    )
    grants: dict[str, list[tuple[int, int]]] = {"strict": [], "lax": []}
    for _ in range(2000):
        for name, limiter in (("strict", strict), ("lax", lax)):
            if decision := limiter.acquire("api"):
                grants[name].append((decision.now, 1))
        clock.advance(SECOND // 100)
    [noticed] = [each.getMessage() for each in caplog.records]
    assert noticed.startswith("bucket 'api': another process uses 5 at 2/s where 50 at 3/s is declared here")
    assert grants["strict"]
    assert grants["lax"]
    total = sorted(grants["strict"] + grants["lax"])
    met = total[0][0] + SECOND // 100
    assert first_violation([grant for grant in total if grant[0] >= met], 5, 2) is None


# -- worker nodes


ROUTES = {
    "queue:held": {"bucket": "quick", "on_reject": "hold"},
    "queue:slow": {"bucket": "slow", "on_reject": "hold"},
}


@pytest.fixture(scope="module")
def site(client: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two nodes."""
    site = Site(tmp_path_factory.mktemp("steering"), client, settings={"routes": ROUTES})
    try:
        for number in (1, 2):
            site.start(f"node{number}", "-c", "2", "-E", "-Q", "celery,held,slow", "--prefetch-multiplier", "32")
        for node in site.nodes:
            node.ready()
        yield site
    finally:
        site.stop()


@pytest.fixture
def quota(site: Site) -> Iterator[Limiter]:
    """The state that the nodes share; after a test nothing is ordered."""
    limiter = open_limiter(load_settings({"buckets": tasks.BUCKETS, "state_file": str(site.state_file)}))
    yield limiter
    for name in tasks.BUCKETS:
        limiter.resume(name)
        limiter.unset(name)


def everybody(site: Site) -> list[str]:
    return answered_by(*(node.address for node in site.nodes))


def send(queue: str, count: int) -> list[str]:
    return [tasks.routed.apply_async((number,), queue=queue).id for number in range(count)]


def came(site: Site, ids: list[str]) -> int:
    """How many of these tasks have come to a node."""
    log = site.log()
    return sum(f"[{each}] received" in log for each in ids)


@pytest.mark.server
def test_tasks_that_are_sent_back_in_a_pause_run_after_it_without_a_storm(site: Site, quota: Limiter) -> None:
    done = site.celery("buckets", "pause", "core", "15s")
    assert (done.code, done.err) == (0, "")
    until_then = time.time() + 15
    assert re.match(r"bucket 'core' is paused for 1[0-5]\.\d{3} s \(", done.out)
    ids = [tasks.core.delay(number).id for number in range(30)]
    until(lambda: len(site.of(ids, "delivery")) == 30, "all are refused")
    info = until(lambda: tasks.app.AsyncResult(ids[0]).info, "the first one's state is there")
    assert isinstance(info, RateLimitExceeded)
    assert (info.bucket, info.paused) == ("core", True)
    bodies = site.bodies(ids)
    assert min(each["began"] for (each,) in bodies.values()) >= until_then - 15
    granted = sorted(each["granted"] for (each,) in bodies.values())
    assert first_violation([(at, 1) for at in granted], 5, 10) is None
    sent_back = sum(len(each) - 1 for each in site.of(ids, "delivery").values())
    # Once each, and again where a host under load brings a task too late to its turn: a storm would be hundreds.
    assert 30 <= sent_back <= 90
    assert quota.status("core").paused == 0


@pytest.mark.server
def test_what_a_node_holds_is_started_when_the_pause_is_ended(site: Site) -> None:
    assert site.celery("control", "bucket_pause", "quick", "1h", *everybody(site)).code == 0
    ids = send("held", 6)
    until(lambda: came(site, ids) >= 2, "some have come, and the rest is left with the broker")
    site.bodies([tasks.plain.delay().id])
    assert not site.of(ids)
    waits = next(each for each in ids if came(site, [each]))
    told = site.celery("buckets", "explain", waits).out
    assert "bucket 'quick' is paused for 3" in told
    assert "what binds is 'quick': 4 tokens a second, at most 1" in told
    assert "\nit is paused for 3" in site.celery("buckets", "explain", "quick").out
    done = site.celery("control", "bucket_resume", "quick", *everybody(site))
    assert done.out.count("bucket 'quick' is not paused") == 2, "each node"
    bodies = site.bodies(ids)
    granted = sorted(each["granted"] for (each,) in bodies.values())
    assert first_violation([(at, 1) for at in granted], 1, 4) is None
    assert {len(each) for each in site.of(ids, "delivery").values()} == {1}, "nothing was sent back"


@pytest.mark.server
def test_other_numbers_count_for_what_is_held(site: Site) -> None:
    ids = send("slow", 5)
    until(lambda: site.of(ids), "one runs")
    until(lambda: came(site, ids) >= 3, "others are held")
    done = site.celery("control", "bucket_set", "slow", "20", "-", "10m", *everybody(site))
    assert done.out.count("bucket 'slow': 20 tokens a second, at most 1 (set, for ") == 2
    site.bodies(ids, patience=20)
    told = site.celery("buckets", "explain", "slow").out
    assert re.search(r"20 tokens a second, at most 1 \(set, for .* declared: 1 at 0\.0333333/s\)", told)
    done = site.celery("buckets", "unset", "slow", "--json")
    assert json.loads(done.out)["limits"][0]["set"] is None
    assert "did you mean 'slow'" in site.celery("control", "bucket_unset", "slo", *everybody(site)).out


@pytest.mark.server
@pytest.mark.usefixtures("quota")
def test_a_pause_and_its_end_are_events_without_the_key(site: Site) -> None:
    seen: list[dict[str, Any]] = []
    handlers = {"bucket-paused": seen.append, "bucket-resumed": seen.append}
    node = site.nodes[0].address
    with tasks.app.connection_for_read() as connection:
        receiver = tasks.app.events.Receiver(connection, handlers=handlers)
        with receiver.consumer_context() as (drained, _, _):

            def capture(count: int) -> bool:
                with suppress(TimeoutError):
                    drained.drain_events(timeout=1)
                return len(seen) >= count

            capture(0)  # kombu subscribes when it first looks
            asked = {"bucket": "other", "duration": 120, "key": "sk-secret"}
            began = time.time()
            (reply,) = tasks.app.control.broadcast("bucket_pause", asked, [node], reply=True, timeout=PATIENCE)
            assert reply[node]["bucket"]["paused_seconds"] == pytest.approx(120, abs=10)
            tasks.app.control.broadcast("bucket_resume", {"bucket": "other"}, [node], reply=True, timeout=PATIENCE)
            until(lambda: capture(2), "the events come")
    paused, resumed = seen
    assert (paused["type"], paused["bucket"], paused["one_key"]) == ("bucket-paused", "other", True)
    assert began + 120 - 0.01 < paused["until"] < time.time() + 120 + 0.01, "by another clock"
    assert (resumed["type"], resumed["bucket"], resumed["one_key"]) == ("bucket-resumed", "other", False)
    assert "sk-secret" not in str(seen)
    assert "sk-secret" not in site.log()


@pytest.mark.server
def test_a_slip_in_celerys_commands_is_one_sentence(site: Site) -> None:
    done = site.celery("buckets", "pause", "cor", "2h")
    assert (done.code, done.out) == (1, "")
    assert "did you mean 'core'" in done.err
    assert "Traceback" not in done.err
    done = site.celery("buckets", "explain", "")
    assert (done.code, done.out) == (1, "")
    assert "bucket '' is not declared in the setting buckets" in done.err
    assert "Traceback" not in done.err
    for command in (
        ["bucket_pause", "core", "soon"],
        ["bucket_set", "core", "fast"],
        ["bucket_set", "core"],
        ["bucket_set", "core", "1", "1", "1s", "first"],
        ["bucket_unset", "core", "first"],
    ):
        done = site.celery("control", *command, *everybody(site))
        assert done.out.count("ERROR\n") == 2, "each node"
        assert "Traceback" not in done.out + done.err


def test_a_store_in_memory_cannot_be_steered_from_outside(tmp_path: Path) -> None:
    site = Site(tmp_path, "memory://", settings={"store": "memory"})
    done = site.celery("buckets", "pause", "core", "2h")
    assert (done.code, done.out) == (1, "")
    assert "setting store must not be 'memory' here" in done.err
