"""Buckets that are not enforced: what would have waited is let through, and nobody else notices."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import app as tasks
import pytest
from celery import chain, group
from line import START, Line, declare, draw, logged, make_app
from private_redis import redis_store
from prometheus_client import CollectorRegistry
from servers import ROOT, Site, until

import tb_celery.worker
from tb_celery import Bucket, ConfigurationError, Limit, Limiter, Settings, StoreError, open_limiter, spread
from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND
from tb_celery.clock import FakeClock
from tb_celery.explain import explain_bucket, tell_bucket, tell_task
from tb_celery.grantlog import read_log
from tb_celery.metrics import measure
from tb_celery.quota import quota_of
from tb_celery.report import onlooker, survey, table
from tb_celery.reschedule import HEADER
from tb_celery.shadow import ShadowStore, _Tally, lot_of, percent, tell
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore
from tb_celery.usage import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from celery import Celery

    from tb_celery.arithmetic import Decision
    from tb_celery.shadow import Enforce
    from tb_celery.stores import Store

API = Bucket("api", (Limit(5, 0.5),))
OTHER = Bucket("other", (Limit(1, 1),))
BUCKETS = [API, OTHER]
OFF: Enforce = False
ON: Enforce = True
CLEAN = {name: text for name, text in os.environ.items() if not name.startswith("TB_CELERY_")} | {
    "PYTHONPATH": str(ROOT)
}
HELD, FREE = Place(lot=0.0), Place(lot=99.9)


@pytest.fixture(autouse=True)
def _as_if_alone() -> Iterator[None]:
    """Nothing is left to tell from other tests."""
    tell()
    yield
    tell()


@pytest.fixture(params=["memory", "file", "redis"])
def store(request: pytest.FixtureRequest, clock: FakeClock, tmp_path: Path) -> Store:
    makers: dict[str, Callable[[], Store]] = {
        "memory": lambda: MemoryStore(clock),
        "file": lambda: FileStore(tmp_path / "state", clock),
        "redis": lambda: redis_store(request.getfixturevalue("server"), clock),
    }
    return makers[request.param]()


def shadowed(store: Store, enforce: Enforce = OFF) -> Limiter:
    return Limiter(BUCKETS, ShadowStore(store, enforce))


# -- the setting


@pytest.mark.parametrize(
    ("enforce", "api", "other"),
    [
        (True, 100, 100),
        (False, 0, 0),
        (20, 20, 20),
        (0.5, 0.5, 0.5),
        ({"api": False}, 0, 100),
        ({"api": 20, "other": True}, 20, 100),
        ({}, 100, 100),
    ],
)
def test_what_is_set_is_a_percentage_of_each_bucket(enforce: Enforce, api: float, other: float) -> None:
    settings = Settings(enforce=enforce)
    assert (percent(settings.enforce, "api"), percent(settings.enforce, "other")) == (api, other)


@pytest.mark.parametrize("enforce", [-1, 101, float("nan"), "no", None, [True], {"api": "no"}, {"api": {"api": 1}}])
def test_what_is_no_percentage_is_refused(enforce: object) -> None:
    with pytest.raises(ConfigurationError, match="setting enforce must be true, false, a percentage such as 20, or"):
        Settings(enforce=enforce)


@pytest.mark.parametrize(
    ("text", "enforce"), [("false", False), ("true", True), ("25", 25), ('{"api": false}', {"api": False})]
)
def test_the_environment_can_set_it(monkeypatch: pytest.MonkeyPatch, text: str, enforce: Enforce) -> None:
    monkeypatch.setenv("TB_CELERY_ENFORCE", text)
    assert Settings(enforce=7).enforce == enforce


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TB_CELERY_ENFORCE", "perhaps")
    with pytest.raises(ConfigurationError, match=r"variable TB_CELERY_ENFORCE must be true, false, .*, not 'perhaps'"):
        Settings()


def test_what_is_enforced_has_no_copy() -> None:
    assert not isinstance(open_limiter(Settings(store="memory")).store, ShadowStore)


# -- any caller, any store


def test_each_is_told_the_wait_behind_all_before_it(store: Store, clock: FakeClock) -> None:
    limiter = shadowed(store)
    decisions = [limiter.acquire("api") for _ in range(9)]
    assert all(decision.allowed and decision.wait == 0 for decision in decisions)
    assert [decision.would_wait for decision in decisions] == [0, 0, 0, 0, 0, 2, 4, 6, 8]
    clock.advance(10 * SECOND)
    assert limiter.acquire("api").would_wait == 0
    assert limiter.acquire("api").would_wait == 2
    assert {decision.bucket for decision in decisions} == {"api"}


def test_the_bucket_itself_is_left_alone(store: Store) -> None:
    for _ in range(1000):
        assert shadowed(store).acquire("api")
    enforcing = Limiter(BUCKETS, store)
    assert [bool(enforcing.acquire("api")) for _ in range(6)] == [True] * 5 + [False]


def test_keys_and_costs_are_those_of_the_bucket(store: Store) -> None:
    limiter = shadowed(store)
    assert limiter.acquire("api", 5, key="alice").would_wait == 0
    assert limiter.acquire("api", 3, key="alice").would_wait == 6
    assert limiter.acquire("api", 3, key="bob").would_wait == 0
    with pytest.raises(ConfigurationError, match="above capacity"):
        limiter.acquire("api", 6)


def test_nobody_who_waits_waits(store: Store, clock: FakeClock) -> None:
    limiter = shadowed(store)
    limiter.acquire("api", 5)
    assert limiter.wait("api", timeout=0).would_wait == 2
    assert limiter.wait("api").would_wait == 4
    assert asyncio.run(limiter.wait_async("api")).would_wait == 6
    assert clock.now() <= START + SECOND, "a server's clock goes on by itself"


def test_a_look_tells_what_a_call_would(store: Store) -> None:
    limiter = shadowed(store, {"api": False})
    limiter.acquire("api", 5)
    look = limiter.peek("api", 2)
    assert (look.allowed, look.would_wait, look.bucket) == (True, 4, "api")
    assert limiter.peek({"api": 1, "other": 1})
    assert limiter.acquire("other")
    look = limiter.peek({"api": 1, "other": 1})
    assert (look.allowed, look.bucket, look.would_wait) == (False, "other", 0)


def test_an_enforced_bucket_beside_it_refuses_as_ever(store: Store, clock: FakeClock) -> None:
    limiter = shadowed(store, {"api": False})
    both = {"api": 5, "other": 1}
    assert limiter.acquire(both).would_wait == 0
    refusal = limiter.acquire(both)
    assert (refusal.allowed, refusal.bucket, refusal.wait) == (False, "other", 1)
    clock.advance(SECOND)
    let_through = limiter.acquire(both)
    assert (let_through.allowed, let_through.bucket, let_through.would_wait) == (True, "api", 9)
    assert not limiter.acquire("other"), "its token was taken"


def test_an_answer_survives_the_way_to_the_pool() -> None:
    limiter = shadowed(MemoryStore(FakeClock(START)))
    limiter.acquire("api", 5)
    decision = limiter.acquire("api")
    assert pickle.loads(pickle.dumps(decision)) == decision  # noqa: S301 - our own
    assert repr(decision).endswith("would_wait=2.0)")


def test_a_store_that_fails_holds_nobody_up(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "tb_celery")
    limiter = shadowed(FileStore(tmp_path / "state"))
    limiter.acquire("api")
    (tmp_path / "state").unlink()
    (tmp_path / "state").mkdir()
    limiter = shadowed(FileStore(tmp_path / "state"))
    assert limiter.acquire("api")
    assert limiter.acquire("api")
    tell()
    ((level, line),) = logged(caplog)
    assert level == "WARNING"
    assert line.startswith("bucket 'api' is not enforced, and what would have waited is not known: state ")
    with pytest.raises(StoreError):
        shadowed(FileStore(tmp_path / "state"), {"api": False}).acquire({"api": 1, "other": 1})


def test_none_is_lost_to_the_figures_when_many_ask_at_once(tmp_path: Path) -> None:
    path = tmp_path / "state"
    asker = (
        "import sys; from pathlib import Path; from tb_celery import *; "
        "limiter = open_limiter(Settings(buckets={'slow': '1/h'}, state_file=Path(sys.argv[1]), enforce=False)); "
        "assert all(limiter.acquire('slow') for _ in range(250))"
    )
    askers = [subprocess.Popen([sys.executable, "-c", asker, str(path)], env=CLEAN) for _ in range(4)]
    assert [each.wait(60) for each in askers] == [0] * 4
    limiter = open_limiter(Settings(buckets={"slow": "1/h"}, state_file=path, enforce=False))
    assert 999 * 3600 < limiter.acquire("slow").would_wait <= 1000 * 3600


# -- for a part of the tasks


def test_a_share_of_the_tasks_is_held_and_always_the_same_ones() -> None:
    ids = [f"task-{number}" for number in range(10_000)]
    held = [each for each in ids if lot_of(each) < 20]
    assert 1900 < len(held) < 2100
    assert held == [each for each in ids if lot_of(each) < 20]
    assert set(held) < {each for each in ids if lot_of(each) < 40}, "a larger share has the smaller one in it"
    assert all(0 <= lot_of(each) < 100 for each in ids)


def test_those_who_are_held_have_the_bucket_to_themselves(store: Store) -> None:
    store = ShadowStore(store, 50)
    limiter = Limiter(BUCKETS, store)
    charges = limiter.charges("api")
    assert all(store.acquire(charges, FREE) for _ in range(20))
    assert all(store.acquire(charges, HELD).would_wait == 0 for _ in range(5))
    refusal = store.acquire(charges, HELD)
    assert (refusal.allowed, refusal.booked, refusal.wait) == (False, True, 2)
    assert store.acquire(charges, Place(lot=50.0)), "below it, not at it"
    # 26 before it, of which the first 5 would not have waited.
    assert store.acquire(charges, FREE).would_wait == 2 * (27 - 4)


def test_who_comes_back_on_its_turn_is_counted_once(store: Store, clock: FakeClock) -> None:
    store = ShadowStore(store, 50)
    charges = Limiter(BUCKETS, store).charges("other")
    assert store.acquire(charges, HELD)
    turn = store.acquire(charges, HELD).at
    clock.advance(SECOND)
    assert store.acquire(charges, Place(turn, lot=0.0))
    assert store.acquire(charges, FREE).would_wait == 1


def test_who_is_no_task_is_held_only_when_all_are() -> None:
    for enforce in (0.1, 50, 99.9):
        limiter = shadowed(MemoryStore(FakeClock(START)), enforce)
        assert all(limiter.acquire("api") and limiter.wait("api", timeout=0) for _ in range(10))
    limiter = shadowed(MemoryStore(FakeClock(START)), 100)
    assert [bool(limiter.acquire("api")) for _ in range(6)] == [True] * 5 + [False]


# -- what is seen of it


def test_the_status_is_that_of_the_copy(store: Store) -> None:
    limiter = shadowed(store, {"api": False, "other": 20})
    for _ in range(7):
        limiter.acquire("api", key="alice")
    status = limiter.status("api", key="alice")
    assert (status.limits[0].tokens, status.limits[0].wait, status.keys, status.enforced) == (0, 6, 1, 0)
    assert (limiter.status("other").limits[0].tokens, limiter.status("other").enforced) == (1, 20)
    shown = table(survey(limiter, key="alice")["buckets"])
    assert "api (key 'alice') (not enforced) " in shown
    assert "other (key 'alice') (enforced for 20 %) " in shown
    assert [row.state for row in Watch(limiter).look({})] == ["not enforced", "enforced for 20 %"]
    assert limiter.reset("api") == 1
    assert limiter.acquire("api", key="alice").would_wait == 0


def test_it_is_shown_before_there_is_a_state_file(tmp_path: Path) -> None:
    limiter = onlooker(shadowed(FileStore(tmp_path / "state")))
    assert survey(limiter)["buckets"]["api"]["enforced_percent"] == 0
    assert not (tmp_path / "state").exists()


def test_what_is_ordered_counts_for_the_copy_too(store: Store, clock: FakeClock) -> None:
    limiter = shadowed(store)
    limiter.pause("api", 60)
    # A file's clock is looked at again from time to time, and a fake one goes on meanwhile.
    assert 59 < limiter.acquire("api").would_wait <= 60
    assert 59 < limiter.status("api").paused <= 60
    assert not Limiter(BUCKETS, store).acquire("api")
    limiter.resume("api")
    limiter.set("api", refill_rate=1, capacity=1)
    clock.advance(60 * SECOND)
    assert [limiter.acquire("api").would_wait for _ in range(3)] == [0, 1, 2]


def test_what_a_call_cost_more_is_drawn_from_the_copy(store: Store) -> None:
    limiter = shadowed(store)
    limiter.acquire("api", 5)
    limiter.settle("api", taken=5, actual=7)
    assert limiter.acquire("api").would_wait == 6
    assert Limiter(BUCKETS, store).acquire("api", 5)


def test_the_log_has_a_line_for_each_bucket_and_not_for_each_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tb_celery")
    limiter = shadowed(MemoryStore(FakeClock(START)))
    for _ in range(1000):
        limiter.acquire("api")
    limiter.acquire("other")
    assert not caplog.records
    tell()
    ((level, line),) = logged(caplog)
    assert level == "INFO"
    assert line == (
        "bucket 'api' is not enforced: 995 let through in 60 s or less, of which the last in line would have waited"
        " 1990.000 s"
    )
    tell()
    assert len(caplog.records) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_tells_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tb_celery")
    limiter = shadowed(MemoryStore(FakeClock(START)))
    limiter.acquire("api", 5)
    limiter.acquire("api")
    pid = os.fork()
    if not pid:
        tell()
        before = len(caplog.records)
        limiter.acquire("api")
        tell()
        os._exit(0 if (before, len(caplog.records)) == (0, 1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    tell()
    assert len(caplog.records) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_process_that_gathers_tells_for_its_forks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tb_celery")
    tally = _Tally()
    tally.gather()
    tally.count("api", 1.0)
    for wait in (2.0, 3.0):
        pid = os.fork()
        if not pid:
            tally.count("api", wait)
            tally.fail("other", "gone")
            tally.tell()
            os._exit(len(caplog.records))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    tally.tell()
    through, unknown = (each.getMessage() for each in caplog.records)
    assert through.startswith("bucket 'api' is not enforced: 3 let through in 60 s or less, of which the last in line")
    assert through.endswith("3.000 s")
    assert unknown == "bucket 'other' is not enforced, and what would have waited is not known: gone"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_fork_that_cannot_pass_on_tells_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tb_celery")
    tally = _Tally()
    tally.gather()
    pid = os.fork()
    if not pid:
        assert tally._outlet is not None  # noqa: SLF001 - its other end may not be read
        os.close(tally._outlet)  # noqa: SLF001
        tally.count("api", 1.0)
        tally.tell()
        os._exit(len(caplog.records))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def reached(records: list[logging.LogRecord], count: int) -> bool:
    return len(records) >= count


def test_the_line_comes_by_itself(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "tb_celery")
    monkeypatch.setattr("tb_celery.shadow.EVERY", 0.01)
    limiter = shadowed(MemoryStore(FakeClock(START)))
    for count in (1, 2):
        limiter.acquire("api", 5)
        limiter.acquire("api", 5)
        until(partial(reached, caplog.records, count), "the line")


def test_grants_alone_are_logged_as_such(tmp_path: Path, clock: FakeClock) -> None:
    settings = Settings(store="memory", buckets={"api": "1/s", "other": "1/s"}, grant_log=tmp_path / "grants")
    limiter = open_limiter(settings.model_copy(update={"enforce": {"api": False}}), clock=clock)
    limiter.acquire({"api": 1, "other": 1})
    limiter.acquire("api")
    assert [entry.bucket for entry in read_log(tmp_path / "grants")] == ["other"]


def test_it_is_counted(clock: FakeClock) -> None:
    registry = CollectorRegistry()
    limiter = shadowed(MemoryStore(clock))
    measure(limiter, registry)
    for _ in range(7):
        limiter.acquire("api")

    def count(name: str) -> float | None:
        return registry.get_sample_value(f"tb_celery_{name}_total", {"bucket": "api"})

    assert (count("unenforced"), count("granted"), count("refused")) == (2, 7, 0)
    assert limiter.status("api").enforced == 0, "seen through what counts"


# -- tasks


def shadow_app(clock: FakeClock, enforce: Enforce = OFF) -> Celery:
    app = make_app(enforce=enforce)
    quota_of(app).limiter.store = ShadowStore(MemoryStore(clock), enforce)
    return app


@pytest.mark.parametrize("on_reject", ["retry", "hold", "fail", "drop", lambda _: "fail"])
def test_a_task_over_quota_runs_at_once_whatever_is_done_with_the_refused(clock: FakeClock, on_reject: object) -> None:
    line = Line(app := shadow_app(clock), clock)
    seen: list[Decision] = []

    def body() -> None:
        seen.append(task.request.tb_celery)

    task = declare(app, body, bucket="one", on_reject=on_reject, max_wait=1)
    assert [line.send_and_deliver(task).state for _ in range(3)] == ["SUCCESS"] * 3
    assert [decision.would_wait for decision in seen] == [0, 2, 4]
    assert clock.now() == START
    assert line.pop() is None


def test_eager_tasks_and_maps_do_not_wait(clock: FakeClock) -> None:
    line = Line(app := shadow_app(clock), clock)
    task = declare(app, lambda number: number, bucket="one")
    assert [task.apply((number,)).get() for number in range(3)] == [0, 1, 2]
    assert line.send_and_deliver(app.tasks["celery.map"], task.s(), list(range(3))).state == "SUCCESS"
    assert clock.now() == START
    assert quota_of(app).limiter.peek("one").would_wait == 12


def test_a_task_that_was_sent_back_earlier_runs_when_it_is_back(clock: FakeClock) -> None:
    line = Line(app := shadow_app(clock, ON), clock)
    task = declare(app, bucket="one")
    draw(app, "one")
    assert line.send_and_deliver(task).countdown == 2
    quota_of(app).limiter.store = ShadowStore(quota_of(app).limiter.store, OFF)
    assert line.deliver().state == "SUCCESS"


def of_share(share: float, *, held: bool) -> str:
    return next(each for each in map(str, range(1000)) if (lot_of(each) < share) is held)


def test_a_task_is_held_or_let_through_by_its_id(clock: FakeClock) -> None:
    line = Line(app := shadow_app(clock, 30), clock)
    task = declare(app, bucket="one")
    quota_of(app).limiter.store.acquire(quota_of(app).limiter.charges("one"), HELD)
    assert line.send_and_deliver(task, task_id=of_share(30, held=False)).state == "SUCCESS"
    refused = line.send_and_deliver(task, task_id=of_share(30, held=True))
    assert (refused.state, refused.countdown) == ("RETRY", 2)
    clock.advance(2 * SECOND)
    assert line.deliver().state == "SUCCESS"


def test_calls_in_a_map_are_held_as_it_is(clock: FakeClock) -> None:
    line = Line(app := shadow_app(clock, 30), clock)
    task = declare(app, lambda number: number, bucket="one")
    many = app.tasks["celery.map"]
    assert line.send_and_deliver(many, task.s(), [1, 2, 3], task_id=of_share(30, held=False)).state == "SUCCESS"
    assert clock.now() == START
    assert line.send_and_deliver(many, task.s(), [1, 2, 3], task_id=of_share(30, held=True)).state == "SUCCESS"
    assert clock.now() == START + 4 * SECOND


def test_only_those_who_are_held_are_spread(clock: FakeClock) -> None:
    app = shadow_app(clock, {"one": False, "other": 30})
    free, some = declare(app, bucket="one", name="free"), declare(app, bucket="other", name="some")
    spread(free.s() for _ in range(5))
    line = Line(app, clock)
    for _ in range(5):
        assert HEADER not in line.take().headers
    spread([some.si().set(task_id=of_share(30, held=held)) for held in (True, False)])
    assert [HEADER in line.take().headers for _ in range(2)] == [True, False]
    spreading = spread(group(chain(some.si(), free.si()) for _ in range(40)))
    sent = [line.take() for _ in range(40)]
    assert all((HEADER in each.headers) == (lot_of(each.headers["id"]) < 30) for each in sent)
    assert [each.parent.id for each in spreading.result] == [each.headers["id"] for each in sent]


def test_a_queue_is_left_alone_only_for_what_holds_everybody(clock: FakeClock) -> None:
    app = shadow_app(clock)
    routes = {"queue:mail": {"bucket": "one", "on_reject": "hold"}}
    for enforce, queue in ((True, "mail"), (100, "mail"), ({"five": False}, "mail"), (99, None), ({"one": 5}, None)):
        quota = quota_of(app)
        quota.settings = Settings(buckets=quota.limiter.buckets, routes=routes, enforce=enforce)
        assert quota.common_queue({"exchange": "", "routing_key": "mail"}, {"one"}) == queue


# -- workers


def test_the_banner_tells_of_it(clock: FakeClock) -> None:
    app = shadow_app(clock, {"one": False, "fast": 20})
    declare(app, bucket="one", name="proj.post")
    assert tb_celery.worker._announcement(app).splitlines()[1:] == [  # noqa: SLF001 - a worker prints it
        "  . proj.post: one",
        "  . let through what is over quota: one (not enforced), fast (enforced for 20 %)",
    ]


def test_what_is_not_enforced_is_explained(clock: FakeClock) -> None:
    app = shadow_app(clock, {"one": False})
    found = explain_bucket(app, "one", None, timeout=0.01)
    assert tell_bucket(found).startswith("bucket 'one' (not enforced): 0.5 tokens a second, at most 1\n")
    node: dict[str, object] = {"running": False, "draws": {"one": 1.0, "five": 1.0}, "not_enforced": ["one"]}
    task = {"id": "1", "state": "RETRY", "nodes": {"node": node}}
    assert tell_task(task).endswith("\nnode has it, and it waits for no bucket: 'one' is not enforced for it")
    node |= {"sent_back": 1, "binds": {"bucket": "five", "capacity": 5, "refill_rate": 1.0, "wait": 1.0}}
    assert "it draws 1 from 'one' (not enforced for it), 1 from 'five'; what binds is 'five'" in tell_task(task)


@pytest.mark.server
def test_real_workers_run_everything_at_once_and_say_what_would_have_waited(client: str, tmp_path: Path) -> None:
    routes = {"app.routed": {"bucket": "slow", "on_reject": "hold"}}
    site = Site(tmp_path, client, settings={"routes": routes, "enforce": {"five": False, "slow": 40}})
    queue = {"queue": "shadowed"}
    try:
        node = site.start("shadow", "-c", "2", "-Q", "shadowed").ready()
        assert "let through what is over quota: slow (enforced for 40 %), five (not enforced)" in node.read()
        sent = [tasks.one_of_five.apply_async(**queue).id for _ in range(30)]
        held = [tasks.routed.apply_async(task_id=f"held-{number}", **queue).id for number in range(20)]
        free = [each for each in held if lot_of(each) >= 40]
        assert 5 < len(free) < 15
        bodies = site.bodies([*sent, *free])
        assert all(len(each) == 1 for each in bodies.values())
        assert {len(each) for each in site.of([*sent, *held], "delivery").values()} == {1}, "nothing was sent back"
        assert len(site.of(held)) - len(free) == 1, "of the others the first one had a token"
        limiter = open_limiter(
            Settings(buckets=tasks.BUCKETS, state_file=site.state_file, enforce={"five": False, "slow": 40})
        )
        assert limiter.status("five").limits[0].wait > 25_000
        assert node.stop() == 0
        lines = [line for line in site.log().splitlines() if "bucket 'five' is not enforced" in line]
        assert [int(line.split(" let through")[0].rpartition(" ")[2]) for line in lines] == [25], "one line a node"
    finally:
        site.stop()
