from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from tb_celery import Bucket, ConfigurationError, Limit, Limiter, StoreError, grantlog, open_limiter
from tb_celery.bucket import SECOND
from tb_celery.clock import FakeClock
from tb_celery.grantlog import Entry, LoggedStore, read_log
from tb_celery.settings import Settings
from tb_celery.stores.memory import MemoryStore
from tb_celery.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

TWO = Bucket("two", (Limit(10, 1), Limit(20, 0.3)))
BUCKETS = {"api": Bucket("api", (Limit(5, 0.5),)), "two": TWO, "thirds": Bucket("thirds", (Limit(1, Fraction(1, 3)),))}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "grants"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(7 * SECOND)


@pytest.fixture
def limiter(log: Path, clock: FakeClock) -> Limiter:
    return Limiter(BUCKETS, LoggedStore(MemoryStore(clock), log))


def test_a_grant_is_a_line_and_a_refusal_is_none(limiter: Limiter, log: Path) -> None:
    assert limiter.acquire("api", 5)
    assert not limiter.acquire("api")
    assert limiter.peek("api").tokens == 0
    expected = {"bucket": "api", "key": None, "clock": 1, "at": 7 * SECOND, "cost": 5}
    assert [json.loads(line) for line in log.read_text().splitlines()] == [expected]


def test_a_call_to_several_buckets_is_a_line_for_each(limiter: Limiter, log: Path) -> None:
    assert limiter.acquire({"api": 2, "two": 3})
    assert list(read_log(log)) == [Entry("api", None, 1, 7 * SECOND, 2), Entry("two", None, 1, 7 * SECOND, 3)]


def test_what_a_call_cost_after_all_is_a_line_for_each_limit(limiter: Limiter, log: Path, clock: FakeClock) -> None:
    assert limiter.acquire("two", 3, key="alice")
    [granted] = read_log(log)
    clock.advance(SECOND)
    limiter.settle("two", taken=3, actual=1.7, key="alice")
    limiter.settle("two", taken=1.7, actual=1.7, key="alice")
    limiter.settle("api", taken=1, actual=25)
    back, more = Fraction(-13, 10), Fraction(24)
    assert list(read_log(log))[1:] == [
        *(granted._replace(at=8 * SECOND, cost=back, limit=number) for number in (1, 0)),
        Entry("api", None, 1, 8 * SECOND, more, limit=0),
    ]


@pytest.mark.parametrize("taken", [0.1, 1 / 3, 0.7, 1])
@pytest.mark.parametrize("actual", [0, 0.001, 0.3, 1 / 7, 5])
def test_no_more_is_given_back_and_no_less_drawn_than_is_logged(
    taken: float, actual: float, limiter: Limiter, log: Path, clock: FakeClock
) -> None:
    store = limiter.store
    assert limiter.acquire("two", 10)
    for bucket in ("thirds", "two"):
        clock.advance(SECOND // 7)
        charges = limiter.charges(bucket)
        _, _, before = store.read(charges)
        limiter.settle(bucket, taken, actual)
        now, _, after = store.read(charges)
        logged = {entry.limit: entry.cost for entry in read_log(log) if entry.bucket == bucket and not entry.is_grant}
        for charge, old, new in zip(charges, before, after, strict=True):
            cost = logged[charge.number]
            assert cost is not None
            assert cost * charge.limit.interval <= new.full_at - max(old.full_at, now)


@pytest.mark.parametrize("cost", [0.1, 0.3, 0.25, 1, 2.5, 0.001, 1e-7, 1 / 3])
@pytest.mark.parametrize("bucket", ["two", "thirds"])
def test_a_cost_is_logged_such_that_it_would_be_charged_the_same(
    bucket: str, cost: float, log: Path, limiter: Limiter
) -> None:
    cost = min(cost, 1)
    assert limiter.acquire(bucket, cost)
    (entry,) = read_log(log)
    assert entry.cost is not None
    assert BUCKETS[bucket].charge(float(entry.cost)) == BUCKETS[bucket].charge(cost)
    if cost != 1 / 3:
        assert entry.cost == Fraction(str(cost)), "as it was asked"


def test_keys_are_told_apart_and_not_told(limiter: Limiter, log: Path) -> None:
    keys = ["alice", "bob", "", None]
    for key in keys * 2:
        assert limiter.acquire("api", key=key)
    logged = [entry.key for entry in read_log(log)]
    assert logged[:4] == logged[4:]
    assert len(set(logged)) == 4
    assert logged[3] is None
    assert "alice" not in log.read_text()


def test_processes_hash_a_key_alike_and_logs_do_not(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for path in (log, log, other):
        assert Limiter(BUCKETS, LoggedStore(MemoryStore(), path)).acquire("api", key="alice")
    first, second = (entry.key for entry in read_log(log))
    (third,) = (entry.key for entry in read_log(other))
    assert first == second != third


def test_members_of_the_group_may_log_whatever_the_umask(limiter: Limiter, log: Path) -> None:
    before = os.umask(0o077)
    try:
        assert limiter.acquire("api", key="alice")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in log.parent.iterdir()} == {0o660}


def test_it_is_bounded_and_keeps_the_last(
    limiter: Limiter, log: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grantlog, "LARGEST", 1000)
    for _ in range(100):
        clock.advance(2 * SECOND)
        assert limiter.acquire("api")
    files = {path.name: path.stat().st_size for path in log.parent.iterdir()}
    assert files.keys() == {"grants", "grants.1", "grants.salt"}
    assert max(files.values()) < 1100
    kept = [entry.at for entry in read_log(log)]
    assert 10 < len(kept) < 30
    assert kept == [(7 + 2 * number) * SECOND for number in range(101 - len(kept), 101)]


WRITER = """
import sys
from pathlib import Path
from tb_celery import Bucket, Limit, Limiter, grantlog
from tb_celery.stores.file import FileStore
grantlog.LARGEST = int(sys.argv[3])
store = grantlog.LoggedStore(FileStore(sys.argv[1]), Path(sys.argv[2]))
limiter = Limiter([Bucket("api", (Limit(50, 1e5),))], store)
print("ready", flush=True)
sys.stdin.readline()
number = int(sys.argv[4])
while number:
    number -= bool(limiter.acquire("api"))
"""


def writers(log: Path, largest: int, number: int) -> list[subprocess.Popen[str]]:
    """Four processes that log so many grants each, all at once, and move a log of that size aside."""
    command = [sys.executable, "-c", WRITER, str(log.with_name("state")), str(log), str(largest), str(number)]
    found = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for each in found:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in found:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return found


def end(processes: list[subprocess.Popen[str]]) -> set[int]:
    codes = set()
    for each in processes:
        with each:
            pass
        codes.add(each.returncode)
    return codes


def test_no_line_of_many_processes_is_lost(log: Path) -> None:
    assert end(writers(log, 1 << 20, 500)) == {0}
    entries = list(read_log(log))
    assert len(entries) == 2000
    (verdict,) = verify(entries, {"api": Bucket("api", (Limit(50, 1e5),))})
    assert (verdict.violation, verdict.grants) == (None, 2000)


def test_many_processes_move_a_full_log_aside_once(log: Path) -> None:
    """If two of them did, one after the other, the last but one file would be a line long, and the rest lost."""
    largest = 10_000
    assert end(writers(log, largest, 500)) == {0}
    assert log.with_name("grants.1").stat().st_size >= largest
    assert sum(1 for _ in read_log(log)) > largest // 100


def test_a_killed_process_leaves_whole_lines(log: Path) -> None:
    running = writers(log, 20_000, 1 << 40)
    while not log.with_name("grants.1").exists():
        assert all(each.poll() is None for each in running)
    for each in running:
        each.send_signal(signal.SIGKILL)
    assert end(running) == {-signal.SIGKILL}
    entries = list(read_log(log))
    assert len(entries) > 100
    (verdict,) = verify(entries, {"api": Bucket("api", (Limit(50, 1e5),))})
    assert verdict.violation is None


def test_a_line_that_was_not_finished_is_left_out(limiter: Limiter, log: Path) -> None:
    assert limiter.acquire("api")
    with log.open("a") as file:
        file.write('{"bucket": "api", "key": nu')
    assert [entry.cost for entry in read_log(log)] == [1]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "7",
        '{"bucket": "api"}',
        '{"bucket": "api", "key": nu{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": 1}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7.5, "cost": 1}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": -1}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": 0, "limit": 0}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": -1, "limit": -1}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": -1, "limit": 0, "interval": 1, "span": 1}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": NaN}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": null}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": 1, "since": 5}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": 1, "more": 1}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": 1, "stands": 1}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": null, "since": 5, "limit": 0}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": null, "since": 5, "stands": 1, "limit": 0}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": null, "since": 5, "stands": 1, "interval": 1}',
        '{"bucket": "api", "key": null, "clock": 1, "at": 7, "cost": null, "since": 5, "stands": -1}',
        "\0" * 80,
    ],
)
def test_any_other_line_is_an_error_that_names_it(line: str, limiter: Limiter, log: Path) -> None:
    assert limiter.acquire("api")
    log.write_text(log.read_text() + line + "\n")
    with pytest.raises(StoreError, match=r"grants': line 2 is no line of a log"):
        list(read_log(log))


def test_a_log_that_is_not_there_is_an_error(log: Path) -> None:
    with pytest.raises(StoreError, match=r"grants' cannot be read: No such file"):
        list(read_log(log))


def test_what_cannot_be_logged_is_granted_and_complained_of_once(
    limiter: Limiter, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log.mkdir()
    assert limiter.acquire("api")
    assert limiter.acquire("api")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(log) in record.getMessage()
    assert "grant_log" in record.getMessage()
    log.rmdir()
    assert limiter.acquire("api")
    log.unlink()
    log.mkdir()
    assert limiter.acquire("api")
    assert len(caplog.records) == 2, "it had worked meanwhile"


def test_the_setting_opens_it(log: Path) -> None:
    settings = Settings(store="memory", buckets={"api": "1/s:2"}, grant_log=str(log))
    limiter = open_limiter(settings)
    assert limiter.wait("api", 2)
    assert [(entry.bucket, entry.cost) for entry in read_log(log)] == [("api", 2)]
    assert not isinstance(open_limiter(settings.model_copy(update={"grant_log": None})).store, LoggedStore)


def test_what_is_ordered_is_logged_and_not_twice_for_a_bucket_that_is_not_enforced(log: Path) -> None:
    settings = Settings(store="memory", buckets={"api": "1/s:2"}, grant_log=str(log), enforce=False)
    limiter = open_limiter(settings)
    limiter.pause("api", 60, key="alice")
    limiter.resume("api")
    limiter.set("api", refill_rate=4, capacity=3, duration=90)
    limiter.unset("api")
    pause, resume, changed, ended = read_log(log)
    assert {entry.bucket for entry in (pause, resume, changed, ended)} == {"api"}
    assert all(entry.since is not None and entry.since <= entry.at for entry in (pause, resume, changed, ended))
    assert pause.key
    assert (pause.stands, pause.limit, resume.key, resume.stands) == (60 * SECOND, None, None, 0)
    assert changed[6:] == (90 * SECOND, 0, SECOND // 4, 3 * SECOND // 4)
    assert (ended.stands, ended.limit) == (0, 0)


def test_what_is_settled_in_a_bucket_that_is_not_enforced_is_not_logged(log: Path) -> None:
    settings = Settings(
        store="memory", buckets={"api": "1/s:2", "off": "1/s:2"}, grant_log=str(log), enforce={"off": False}
    )
    limiter = open_limiter(settings, clock=FakeClock())
    for bucket in ("api", "off"):
        assert limiter.acquire(bucket, 2)
        limiter.settle(bucket, taken=2, actual=7)
    assert [(entry.bucket, entry.cost) for entry in read_log(log)] == [("api", 2), ("api", 5)]
    assert limiter.peek("off", 2).would_wait == 7


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"setting grant_log: there is no directory .*nowhere; make it"):
        open_limiter(Settings(store="memory", grant_log=str(tmp_path / "nowhere" / "grants")))


def test_a_bucket_made_full_again_is_logged_and_no_violation(limiter: Limiter, log: Path, clock: FakeClock) -> None:
    def take_all() -> None:
        clock.advance(1)
        assert limiter.acquire("api", 5, key="alice")
        assert limiter.acquire("api", 5, key="bob")
        clock.advance(1)

    buckets = {"api": BUCKETS["api"]}
    take_all()
    limiter.reset("api", key="alice")
    clock.advance(1)
    assert limiter.acquire("api", 5, key="alice")
    assert verify(read_log(log), buckets)[0].violation is None
    clock.advance(1)
    limiter.reset("api")
    take_all()
    assert verify(read_log(log), buckets)[0].violation is None

    lines = log.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        if "null" in line:
            log.write_text("".join(lines[:number] + lines[number + 1 :]))
            assert verify(read_log(log), buckets)[0].violation is not None, "without it there was too much"
