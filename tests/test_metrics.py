"""Metrics: what is counted, and the page of real worker nodes, as Prometheus would read it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple
from urllib.request import urlopen

import app as tasks
import pytest
from celery.app.defaults import SETTING_KEYS
from filelock import lock_descriptor, unlock_descriptor
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from servers import ROOT, Site, until
from valkey_server import free_port

from tb_celery import Bucket, Limit, Limiter, StoreError, StoreTimeoutError
from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND
from tb_celery.clock import FakeClock
from tb_celery.grantlog import LoggedStore
from tb_celery.metrics import (
    DIRECTORY,
    REMEMBERED,
    TIMED,
    MeteredStore,
    Metrics,
    measure,
    measure_node,
    measure_process,
)
from tb_celery.page import _Standing
from tb_celery.stores import file as file_module
from tb_celery.stores.file import RECHECK, FileStore
from tb_celery.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tb_celery.arithmetic import Decision
    from tb_celery.bucket import Charge
    from tb_celery.state import State
    from tb_celery.stores import Store

DASHBOARD = ROOT / "deploy" / "grafana" / "tb_celery.json"
BUCKETS = [Bucket("api", (Limit(5, 0.5),)), Bucket("two", (Limit(10, 1), Limit(20, 0.5)))]
API = {"bucket": "api"}
SETTINGS: dict[str, object] = {"routes": {"app.routed": {"bucket": "quick", "on_reject": "hold"}}}


class Page(NamedTuple):
    """What Prometheus reads."""

    types: dict[str, str]
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def of(cls, text: str) -> Page:
        families = list(text_string_to_metric_families(text))
        samples = {(each.name, frozenset(each.labels.items())): each.value for one in families for each in one.samples}
        return cls({one.name: one.type for one in families}, samples)

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[f"tb_celery_{name}", frozenset(labels.items())]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.samples}


def scrape(port: int) -> Page:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return Page.of(answer.read().decode())


# -- counting, in one process


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(7 * SECOND)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture(params=["memory", "file"])
def limiter(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock, registry: CollectorRegistry) -> Limiter:
    store: Store = MemoryStore(clock) if request.param == "memory" else FileStore(tmp_path / "state", clock)
    limiter = Limiter(BUCKETS, LoggedStore(store, tmp_path / "grants") if request.param == "logged file" else store)
    measure(limiter, registry)
    return limiter


def page(registry: CollectorRegistry) -> Page:
    return Page.of(generate_latest(registry).decode())


def test_everything_is_0_before_anything_happens(limiter: Limiter, registry: CollectorRegistry) -> None:
    shown = page(registry)
    for name in ("granted", "granted_tokens", "refused", "deferred", "store_errors"):
        assert [shown(f"{name}_total", bucket=bucket) for bucket in limiter.buckets] == [0, 0]
    assert shown("store_seconds_count") == 0
    assert shown("wait_seconds_count", bucket="two") == 0


def test_answers_are_counted_by_bucket(limiter: Limiter, registry: CollectorRegistry) -> None:
    assert limiter.acquire("api", 2.5)
    assert limiter.acquire({"api": 2, "two": 0.5})
    assert not limiter.acquire({"api": 1, "two": 1})
    shown = page(registry)
    assert shown("granted_total", **API) == 2
    assert shown("granted_tokens_total", **API) == 4.5
    assert shown("refused_total", **API) == 1
    assert shown("granted_total", bucket="two") == 1, "once, though it has two limits"
    assert shown("granted_tokens_total", bucket="two") == 0.5
    assert shown("refused_total", bucket="two") == 0, "it would have had the token"


def test_what_is_asked_again_and_again_is_counted_each_time(limiter: Limiter, registry: CollectorRegistry) -> None:
    for _ in range(2):
        assert [bool(limiter.acquire("api", 1.5)) for _ in range(4)] == [True, True, True, False]
        limiter.reset("api")
    shown = page(registry)
    assert shown("granted_total", **API) == 6
    assert shown("granted_tokens_total", **API) == 9
    assert shown("refused_total", **API) == 2


def test_more_draws_than_are_remembered_are_counted_all_the_same(limiter: Limiter, registry: CollectorRegistry) -> None:
    for _ in range(2):
        for number in range(REMEMBERED + 1):
            limiter.acquire("two", 0.001 * (1 + number % 3), key=str(number))
    assert page(registry)("granted_total", bucket="two") == 2 * (REMEMBERED + 1)


@pytest.mark.parametrize("limiter", ["memory", "logged file"], indirect=True)
def test_one_call_in_some_is_timed(limiter: Limiter, registry: CollectorRegistry) -> None:
    limiter.acquire("api")
    assert page(registry)("store_seconds_count") == 1, "the first, so that there is something to see"
    for _ in range(TIMED):
        limiter.acquire("api")
    shown = page(registry)
    assert shown("store_seconds_count") == shown("store_seconds_bucket", le="+Inf") == 2
    assert shown("store_seconds_sum") > 0


@pytest.mark.parametrize("limiter", ["file"], indirect=True)
def test_calls_that_found_the_file_free_took_no_time(limiter: Limiter, registry: CollectorRegistry) -> None:
    for _ in range(7):
        limiter.acquire("api")
    shown = page(registry)
    assert shown("store_seconds_count") == shown("store_seconds_bucket", le="2e-05") == 7
    assert shown("store_seconds_sum") == 0


@pytest.mark.parametrize("waits_for", ["lock", "thread"])
@pytest.mark.parametrize("hasty", [False, True])
def test_waits_for_the_file_are_timed(tmp_path: Path, registry: CollectorRegistry, waits_for: str, hasty: bool) -> None:  # noqa: FBT001
    limiter = Limiter(BUCKETS, FileStore(tmp_path / "state", lock_timeout=0.01))
    store = limiter.store = measure(limiter, registry).of(limiter.store, hasty=hasty)
    assert isinstance(store, FileStore)
    assert limiter.acquire("two")
    with ExitStack() as stack:
        if waits_for == "lock":
            file = stack.enter_context((tmp_path / "state").open("r+b"))
            assert lock_descriptor(file.fileno(), blocking=False)
        else:
            del store._baton[0]  # noqa: SLF001
        with pytest.raises(StoreTimeoutError):
            limiter.acquire({"api": 1, "two": 1})
        with pytest.raises(StoreTimeoutError):
            limiter.peek("two")
    store._baton[0] = None  # noqa: SLF001
    assert limiter.acquire("two")
    shown = page(registry)
    assert [shown("store_errors_total", bucket=bucket) for bucket in ("api", "two")] == [not hasty] * 2
    assert shown("store_seconds_count") == 3
    free = shown("store_seconds_bucket", le="2e-05")
    assert free == shown("store_seconds_bucket", le="0.002") == 2, "looking is not counted"
    assert 0.01 <= shown("store_seconds_sum") < 1


def test_who_waits_for_a_thread_and_then_for_the_file_has_waited_once(
    tmp_path: Path, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = Limiter(BUCKETS, FileStore(tmp_path / "state"))
    measure(limiter, registry)
    store = limiter.store
    assert isinstance(store, FileStore)
    assert limiter.acquire("two")
    pauses: list[float] = []
    with (tmp_path / "state").open("r+b") as file:
        assert lock_descriptor(file.fileno(), blocking=False)
        del store._baton[0]  # noqa: SLF001

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                store._baton[0] = None  # noqa: SLF001
            elif len(pauses) == 6:
                unlock_descriptor(file.fileno())

        monkeypatch.setattr(file_module, "rest", pause)
        assert limiter.acquire("two")
    assert len(pauses) == 6
    shown = page(registry)
    assert shown("granted_total", bucket="two") == shown("store_seconds_count") == 2
    assert shown("store_seconds_bucket", le="10.0") == 2


def test_a_file_that_fails_is_counted(tmp_path: Path, registry: CollectorRegistry) -> None:
    limiter = Limiter(BUCKETS, FileStore(tmp_path))
    measure(limiter, registry)
    with pytest.raises(StoreError):
        limiter.acquire("api")
    with pytest.raises(StoreError):
        limiter.peek("api")
    shown = page(registry)
    assert shown("store_errors_total", **API) == shown("store_seconds_count") == 1, "looking is not counted"


def test_waits_are_counted_by_length(registry: CollectorRegistry) -> None:
    metrics = Metrics({bucket.name: bucket for bucket in BUCKETS})
    registry.register(metrics)
    for wait in (0, 0.01, 0.011, 900, 14401):
        metrics.waited("api", wait)
    shown = page(registry)
    found = {
        le: shown("wait_seconds_bucket", le=le, **API) for le in ("0.01", "0.1", "60.0", "900.0", "14400.0", "+Inf")
    }
    assert found == {"0.01": 2, "0.1": 3, "60.0": 3, "900.0": 4, "14400.0": 4, "+Inf": 5}
    assert shown("wait_seconds_count", **API) == 5
    assert shown("wait_seconds_sum", **API) == pytest.approx(15301.021)


def test_of_a_limiter_with_other_buckets_that_shares_the_store_only_these_are_counted(
    limiter: Limiter, registry: CollectorRegistry
) -> None:
    other = Limiter([BUCKETS[0], Bucket("other", (Limit(2, 0.5),))], limiter.store)
    for _ in range(2):
        assert other.acquire({"api": 1, "other": 0.5})
        assert other.acquire("other", 0.5)
    assert not other.acquire("other")
    assert other.acquire("api")
    metrics = measure(limiter, None)  # as a task's part of it would be told
    metrics.deferred("other")
    metrics.waited("other", 1)
    shown = page(registry)
    assert (shown("granted_total", **API), shown("granted_tokens_total", **API)) == (3, 3)
    assert shown("granted_total", bucket="two") == 0
    assert {dict(labels).get("bucket") for _, labels in shown.samples} == {"api", "two", None}
    if isinstance(limiter.store, FileStore):
        assert shown("store_seconds_count") == 6


def test_turns_that_are_only_booked_are_no_refusal(limiter: Limiter, registry: CollectorRegistry) -> None:
    limiter.store.acquire(limiter.charges("api", 4), Place(ahead=4))
    assert page(registry)("refused_total", **API) == 0


def test_looking_is_not_counted(limiter: Limiter, registry: CollectorRegistry) -> None:
    limiter.peek("api")
    limiter.status("api")
    limiter.reset("api")
    assert page(registry)("store_seconds_count") == 0


class _Failing(MemoryStore):
    def __init__(self, error: StoreError) -> None:
        super().__init__()
        self._error = error

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:  # noqa: ARG002
        raise self._error

    def read(self, charges: Sequence[Charge]) -> tuple[int, Sequence[Charge], list[State]]:  # noqa: ARG002
        raise self._error


@pytest.mark.parametrize(
    ("error", "hasty", "errors"),
    [
        (StoreError("gone"), False, 1),
        (StoreError("gone"), True, 1),
        (StoreTimeoutError("busy"), False, 1),
        (StoreTimeoutError("busy"), True, 0),
    ],
)
def test_failures_are_counted(error: StoreError, hasty: bool, errors: int, registry: CollectorRegistry) -> None:  # noqa: FBT001
    limiter = Limiter(BUCKETS, _Failing(error))
    limiter.store = measure(limiter, registry).of(limiter.store, hasty=hasty)
    with pytest.raises(StoreError, match=str(error)):
        limiter.acquire({"api": 1, "two": 1})
    shown = page(registry)
    assert [shown("store_errors_total", bucket=bucket) for bucket in ("api", "two")] == [errors, errors]
    assert shown("store_seconds_count") == 1


def test_measuring_again_counts_once(limiter: Limiter, registry: CollectorRegistry) -> None:
    again = CollectorRegistry()
    measure(limiter, again)
    assert limiter.acquire("api")
    assert page(again)("granted_total", **API) == 1
    assert page(registry)("granted_total", **API) == 0
    if isinstance(limiter.store, MeteredStore):
        assert isinstance(limiter.store.wrapped, MemoryStore)


def test_how_buckets_stand(limiter: Limiter) -> None:
    assert limiter.acquire("api", 3)
    assert limiter.acquire("api", 5, key="alice")
    for _ in range(2):
        assert not limiter.store.acquire(limiter.charges("api", key="alice"), Place())
    registry = CollectorRegistry()
    registry.register(_Standing(limiter, lambda: {"api": 3}))
    shown = page(registry)
    first = {"bucket": "api", "limit": "1"}
    assert shown("tokens", **first) == 0, "alice's"
    assert shown("turns", **first) == 2
    assert shown("capacity", **first) == 5
    assert shown("refill_rate", **first) == 0.5
    assert shown("keys", **API) == 2
    assert shown("held_tasks", **API) == 3
    assert [shown("capacity", bucket="two", limit=limit) for limit in "12"] == [20, 10], "the slowest first"
    assert shown("tokens", bucket="two", limit="2") == 10
    assert shown("store_up") == 1


class _Damaged(MemoryStore):
    """What is ordered about one bucket cannot be."""

    def read(self, charges: Sequence[Charge]) -> tuple[int, Sequence[Charge], list[State]]:
        if any(charge.bucket == "api" for charge in charges):
            message = "bucket 'api' has been given numbers that cannot be"
            raise StoreError(message)
        return super().read(charges)


def test_a_bucket_that_cannot_be_read_leaves_the_others(clock: FakeClock) -> None:
    registry = CollectorRegistry()
    registry.register(_Standing(Limiter(BUCKETS, _Damaged(clock)), dict))
    shown = page(registry)
    assert shown("store_up") == 0
    assert shown("capacity", bucket="two", limit="1") == 20


def test_what_is_ordered_is_shown(limiter: Limiter, clock: FakeClock) -> None:
    registry = CollectorRegistry()
    registry.register(_Standing(limiter, dict))
    assert page(registry)("paused_seconds", **API) == 0
    limiter.pause("api", 60)
    limiter.pause("two", 60, key="alice")
    limiter.set("two", limit=0, capacity=3, refill_rate=2)
    clock.advance(20 * SECOND)
    shown = page(registry)
    assert shown("paused_seconds", **API) == pytest.approx(40, abs=0.1), "whoever orders waits a little"
    assert shown("paused_seconds", bucket="two") == 0, "only one key of it"
    fastest = {"bucket": "two", "limit": "2"}
    assert (shown("capacity", **fastest), shown("refill_rate", **fastest)) == (3, 2)
    limiter.resume("api")
    assert page(registry)("paused_seconds", **API) == 0


def test_a_store_that_fails_is_told_of() -> None:
    registry = CollectorRegistry()
    registry.register(_Standing(Limiter(BUCKETS, _Failing(StoreError("gone"))), lambda: {"api": 3}))
    shown = page(registry)
    assert shown("store_up") == 0
    assert shown("held_tasks", **API) == 3
    assert "tb_celery_tokens" not in shown.names


def test_an_unlimited_bucket_is_not_on_the_page() -> None:
    limiter = Limiter({"free": None, "api": BUCKETS[0]}, MemoryStore())
    registry = CollectorRegistry()
    measure(limiter, registry)
    registry.register(_Standing(limiter, dict))
    assert limiter.acquire("free")
    assert {dict(labels).get("bucket") for _, labels in page(registry).samples} == {"api", None}


# -- threads and processes

MANY = Bucket("many", (Limit(1_000_000, 1),))


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_threads_lose_no_count(
    tmp_path: Path,
    clock: FakeClock,
    registry: CollectorRegistry,
    kind: str,
    in_file: bool,  # noqa: FBT001
) -> None:
    limiter = Limiter([MANY, BUCKETS[0]], MemoryStore(clock) if kind == "memory" else FileStore(tmp_path / "s", clock))
    metrics = measure(limiter, registry)
    if in_file:
        metrics.keep_in(tmp_path, "here")

    def work(_: int) -> None:
        for _ in range(500):
            limiter.acquire("many", 0.5)
            limiter.acquire("api")
            metrics.waited("api", 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))
    shown = page(registry)
    assert (shown("granted_total", bucket="many"), shown("granted_tokens_total", bucket="many")) == (8000, 4000)
    assert (shown("granted_total", **API), shown("refused_total", **API)) == (5, 7995)
    assert (shown("wait_seconds_count", **API), shown("wait_seconds_sum", **API)) == (8000, 8000)


def forked(work: Callable[[], object]) -> int:
    """A process that does this and is killed."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    return child


def counting(directory: Path, slot: str, calls: int) -> Callable[[], None]:
    """What a pool's process does."""

    def work() -> None:
        limiter = Limiter([MANY], MemoryStore(FakeClock(7 * SECOND)))
        measure(limiter, None).keep_in(directory, slot)
        for _ in range(calls):
            limiter.acquire("many", 0.5)

    return work


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_are_killed_lose_no_count(tmp_path: Path, registry: CollectorRegistry) -> None:
    metrics = Metrics({"many": MANY})
    metrics.gather(tmp_path)
    registry.register(metrics)
    seen = [0.0]
    for calls in (20_000, 5_000):  # the latter go on where the former were
        running = {forked(counting(tmp_path, str(slot), calls)) for slot in range(3)}
        while running:
            running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
            seen.append(page(registry)("granted_total", bucket="many"))
    assert seen == sorted(seen), "what others see never goes down"
    shown = page(registry)
    assert (shown("granted_total", bucket="many"), shown("granted_tokens_total", bucket="many")) == (75_000, 37_500)
    assert len(list(tmp_path.iterdir())) == 3


def test_short_ways_are_soon_in_the_file(tmp_path: Path, clock: FakeClock, registry: CollectorRegistry) -> None:
    limiter = Limiter([MANY], FileStore(tmp_path / "state", clock))
    metrics = measure(limiter, None)
    metrics.keep_in(tmp_path, "other")
    here = Metrics({"many": MANY})
    here.gather(tmp_path)
    registry.register(here)

    def seen() -> float:
        return page(registry)("granted_total", bucket="many")

    for number in (1, 2, 3):
        assert limiter.acquire("many")
        assert seen() == number, "whoever asks once and then no more has counted that"
        clock.advance(RECHECK)
    for _ in range(5):
        assert limiter.acquire("many")
    assert seen() == 4, "in quick succession"
    metrics.waited("many", 0)
    assert seen() == 8
    assert limiter.acquire("many", 0.5, key="alice")
    assert limiter.acquire("many", 0.5, key="alice")
    clock.advance(RECHECK)
    assert limiter.acquire("many")
    assert seen() == 11
    assert page(registry)("granted_tokens_total", bucket="many") == 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_whom_a_process_forks_does_not_count_in_its_file(
    tmp_path: Path, clock: FakeClock, registry: CollectorRegistry, kind: str
) -> None:
    limiter = Limiter([MANY], MemoryStore() if kind == "memory" else FileStore(tmp_path / "state", clock))
    metrics = measure(limiter, registry)
    metrics.keep_in(tmp_path, "parent")
    for _ in range(3):
        assert limiter.acquire("many")
    clock.advance(RECHECK)
    os.waitpid(forked(lambda: limiter.acquire("many")), 0)
    assert page(registry)("granted_total", bucket="many") == 3


def test_a_node_that_begins_anew_counts_from_0(
    limiter: Limiter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(DIRECTORY, "")
    measure_node(limiter)
    (before,) = tmp_path.iterdir()
    registry = CollectorRegistry()
    registry.register(measure_node(limiter))  # as after SIGHUP: the same process, with the same variables
    (after,) = tmp_path.iterdir()
    assert after != before
    measure_process(limiter, 0)
    assert limiter.acquire("api")
    assert page(registry)("granted_total", **API) == 1


def test_a_process_that_has_no_file_says_so(
    limiter: Limiter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DIRECTORY, "/nowhere/at/all")
    measure_process(limiter, 0)
    assert limiter.acquire("api")
    assert "what this process counts is not on the page: " in caplog.text
    assert "/nowhere/at/all" in caplog.text


def test_a_process_with_other_buckets_is_left_out(tmp_path: Path, registry: CollectorRegistry) -> None:
    metrics = Metrics({"api": BUCKETS[0], "two": BUCKETS[1]})
    metrics.gather(tmp_path)
    registry.register(metrics)
    for names in (("api", "two"), ("two", "api"), ("api",)):
        limiter = Limiter({name: Bucket(name, (Limit(5, 1),)) for name in names}, MemoryStore())
        measure(limiter, None).keep_in(tmp_path, "0")
        limiter.acquire("api")
    (tmp_path / f"begun{next(tmp_path.iterdir()).suffix}").touch()
    assert page(registry)("granted_total", **API) == 1


# -- worker nodes


@pytest.fixture
def site(tmp_path: Path, client: str) -> Iterator[Site]:
    site = Site(tmp_path, client, settings={**SETTINGS, "metrics_port": free_port()})
    try:
        yield site
    finally:
        site.stop()
        tasks.app.backend.client.flushall()


def port_of(site: Site) -> int:
    port = site.settings["metrics_port"]
    assert isinstance(port, int)
    return port


@pytest.mark.server
def test_the_page_of_a_node_tells_what_ran(site: Site) -> None:
    node = site.start("node", "-c", "2", "--prefetch-multiplier", "32").ready()
    until(lambda: "tb_celery: metrics at port" in node.read(), "the page is there")
    before = scrape(port_of(site))
    assert before("granted_total", bucket="core") == 0
    assert before("tokens", bucket="core", limit="1") == 5
    sent_back = {tasks.core.delay(number).id for number in range(20)}
    held = {tasks.routed.delay(number).id for number in range(5)}
    site.bodies(sent_back | held)
    shown = scrape(port_of(site))

    deliveries = site.of(sent_back, "delivery")
    deferred = sum(len(each) - 1 for each in deliveries.values())
    assert deferred > 0
    assert shown("granted_total", bucket="core") == shown("granted_tokens_total", bucket="core") == 20
    assert shown("deferred_total", bucket="core") == deferred
    assert shown("refused_total", bucket="core") >= deferred
    assert shown("wait_seconds_count", bucket="core") == 20
    bodies = site.of(sent_back)
    longest = sum(bodies[each][0]["began"] - deliveries[each][0]["at"] for each in sent_back)
    assert 0 < shown("wait_seconds_sum", bucket="core") <= longest, "it ends before the body begins"
    assert shown("wait_seconds_bucket", bucket="core", le="+Inf") == 20

    assert shown("granted_total", bucket="quick") == 5
    assert 1 <= shown("deferred_total", bucket="quick") <= 4, "whoever had to wait, and not the first"
    assert shown("wait_seconds_count", bucket="quick") == 5
    assert shown("wait_seconds_sum", bucket="quick") > 0
    assert 20 + deferred <= shown("store_seconds_count") <= 25 + deferred + shown("refused_total", bucket="core")
    assert shown("store_errors_total", bucket="core") == 0
    assert shown("store_up") == 1
    assert [shown("held_tasks", bucket=bucket) for bucket in ("core", "quick")] == [0, 0]

    picture = (ROOT / "docs" / "metrics.svg").read_text("utf-8")
    assert set(re.findall(r"tb_celery_\w+", picture)) == shown.names, "run python -m benchmarks.screenshot"

    (directory,) = site.folder.glob("tb_celery-metrics-*")
    assert node.stop() == 0
    assert not directory.exists()


@pytest.mark.server
def test_held_tasks_and_turns_are_shown(site: Site) -> None:
    site.settings["routes"] = {"app.routed": {"bucket": "slow", "on_reject": "hold"}}
    site.start("node", "-c", "1", "--prefetch-multiplier", "32").ready()
    for number in range(4):
        tasks.routed.delay(number)
    for _ in range(2):
        tasks.api.delay()
    until(lambda: scrape(port_of(site))("held_tasks", bucket="slow") == 3, "one runs, and three are held")
    until(lambda: scrape(port_of(site))("turns", bucket="slow", limit="1") == 1, "the head has a turn")
    assert scrape(port_of(site))("keys", bucket="slow") == 1


@pytest.mark.server
@pytest.mark.slow
def test_what_a_process_that_is_killed_has_counted_stays_counted(site: Site) -> None:
    site.start("node", "-c", "1", "--max-tasks-per-child", "2").ready()
    ids = [tasks.core.delay(number).id for number in range(3)]
    bodies = site.bodies(ids)
    pids = {each["pid"] for found in bodies.values() for each in found}
    assert len(pids) > 1
    os.kill(bodies[ids[-1]][0]["pid"], signal.SIGKILL)
    site.bodies([tasks.core.delay(3).id])
    assert scrape(port_of(site))("granted_total", bucket="core") == 4
    (directory,) = site.folder.glob("tb_celery-metrics-*")
    assert len(list(directory.iterdir())) == 1, "that of all that its pool has had"


ASKING = """\
from app import app, unlimited
from tb_celery import limiter_of


@unlimited()
def asking(self, calls):
    for _ in range(calls):
        limiter_of(app).acquire("five")
"""


@pytest.mark.server
@pytest.mark.slow
def test_what_a_body_asks_for_is_counted_when_its_process_ends(site: Site) -> None:
    (site.folder / "asking.py").write_text(ASKING, "utf-8")
    site.app = "asking"
    site.start("node", "-c", "1", "--max-tasks-per-child", "1").ready()
    tasks.app.send_task("asking.asking", (7,))
    until(lambda: scrape(port_of(site))("refused_total", bucket="five") == 2, "all seven calls")
    assert scrape(port_of(site))("granted_total", bucket="five") == 5


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.skipif("worker_pool_start_method" not in SETTING_KEYS, reason="this Celery forks")
def test_processes_that_are_not_forked_are_counted(site: Site) -> None:
    site.conf["worker_pool_start_method"] = "spawn"
    node = site.start("node", "-c", "2").ready()
    site.bodies([tasks.core.delay(number).id for number in range(6)])
    assert "/SpawnPoolWorker-" in node.read()
    shown = scrape(port_of(site))
    assert shown("granted_total", bucket="core") == shown("wait_seconds_count", bucket="core") == 6


@pytest.mark.server
def test_a_port_that_is_taken_is_one_warning(site: Site) -> None:
    first = site.start("first", "-c", "1").ready()
    until(lambda: "tb_celery: metrics at port" in first.read(), "the page is there")
    second = site.start("second", "-c", "1").ready()
    warning = f"tb_celery: metrics are not served, port {port_of(site)} cannot be had"
    until(lambda: warning in second.read(), "the warning is there")
    assert second.read().count("WARNING/MainProcess] tb_celery: metrics") == 1
    assert "Traceback" not in second.read()
    first.stop()
    site.bodies([tasks.core.delay(1).id])


@pytest.mark.server
@pytest.mark.parametrize("pool", ["solo", "threads", "gevent", "eventlet"])
def test_pools_without_processes_have_a_page_too(site: Site, pool: str) -> None:
    node = site.start("node", "-P", pool, "-c", "2").ready()
    until(lambda: "tb_celery: metrics at port" in node.read(), "the page is there")
    site.bodies([task.delay(number).id for number in range(3) for task in (tasks.core, tasks.routed)])
    shown = scrape(port_of(site))
    assert shown("granted_total", bucket="core") == 3
    assert shown("granted_total", bucket="quick") == 3
    assert [shown("wait_seconds_count", bucket=bucket) for bucket in ("core", "quick")] == [3, 3]


USERS = """\
from celery import signals
from prometheus_client import Counter

from app import app

mine = Counter("mine", "What the user counts")


@signals.task_success.connect
def count(**_):
    mine.inc()
"""


@pytest.mark.server
@pytest.mark.slow
def test_the_users_own_metrics_are_on_the_page(site: Site) -> None:
    directory = site.folder / "prometheus"
    directory.mkdir()
    (site.folder / "users.py").write_text(USERS, "utf-8")
    site.app = "users"
    site.environment["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    site.start("node", "-c", "2").ready()
    site.bodies([tasks.core.delay(number).id for number in range(6)])
    until(lambda: scrape(port_of(site)).samples["mine_total", frozenset()] == 6, "what all processes have counted")
    assert scrape(port_of(site))("granted_total", bucket="core") == 6
    site.stop()
    assert {each.suffix for each in directory.iterdir()} == {".db"}, "it is the user's alone"


@pytest.mark.server
def test_without_a_port_nothing_listens_and_nothing_is_imported(site: Site) -> None:
    site.settings["metrics_port"] = 0
    node = site.start("node", "-c", "1").ready()
    site.bodies([tasks.core.delay(1).id])
    assert "metrics at" not in node.read()
    assert not list(site.folder.glob("tb_celery-metrics-*"))


def worker(site: Site, *, without: str = "") -> str:
    """What a worker says that does not start, ``without`` a module."""
    script = f"import sys; sys.modules[{without!r}] = None; " if without else ""
    script += "from celery.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, *site.command()[3:]],
        cwd=site.folder,
        env=site.variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_worker_without_the_extra_says_what_to_install(tmp_path: Path) -> None:
    said = worker(Site(tmp_path, "memory://", settings={"metrics_port": 9464}), without="prometheus_client")
    assert "setting metrics_port (TB_CELERY_METRICS_PORT) needs the package prometheus_client" in said
    assert "pip install 'tb-celery[metrics]'" in said


def test_a_directory_that_is_missing_is_told_of(tmp_path: Path) -> None:
    site = Site(tmp_path, "memory://", settings={"metrics_port": 9464})
    site.environment["PROMETHEUS_MULTIPROC_DIR"] = "/nowhere/at/all"
    assert "PROMETHEUS_MULTIPROC_DIR: there is no directory '/nowhere/at/all'" in worker(site)


# -- what is shown of them


@pytest.fixture
def shown(limiter: Limiter, registry: CollectorRegistry) -> Page:
    """Every metric there is."""
    registry.register(_Standing(limiter, dict))
    return page(registry)


def test_the_dashboard_asks_for_metrics_that_there_are(shown: Page) -> None:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"]["query"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    asked = {name for query in queries for name in re.findall(r"tb_celery_\w+", query)}
    assert asked <= shown.names
    families = {name.removesuffix("_created") for name in shown.types}
    told = {name for name in families if any(each.startswith(name) for each in asked)}
    assert told == families, "every metric is on the dashboard"


def test_the_page_on_metrics_lists_them_all(shown: Page) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = re.findall(r"^\| `(tb_celery_\w+)` \| (\w+) \|", text, re.MULTILINE)
    families = {name: kind for name, kind in shown.types.items() if not name.endswith("_created")}
    assert dict(rows) == {name + "_total" * (kind == "counter"): kind for name, kind in families.items()}
