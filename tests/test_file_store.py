"""What only a file can do to its users, and what its users and its host can do to the file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gc
import importlib.util
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from faults.means import is_locked

from tb_celery.arithmetic import Place
from tb_celery.bucket import LONGEST_SPAN, SECOND, Bucket, Charge, Limit, pause
from tb_celery.clock import FakeClock, SystemClock
from tb_celery.errors import StoreError, StoreTimeoutError
from tb_celery.limiter import Limiter
from tb_celery.page import _Standing
from tb_celery.report import survey
from tb_celery.state import State
from tb_celery.stores import asks as asks_module
from tb_celery.stores import backoff, finding, hosting, places, table, upkeep
from tb_celery.stores import file as file_module
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore
from tb_celery.stores.orders import change
from tb_celery.stores.record import FREE, IN_DEBT, SIZE, Header, file_size, packed
from tb_celery.usage import Watch
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkContext, SpawnContext
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

    from tb_celery.clock import Clock

MS = SECOND // 1000
HOUR = 3600 * SECOND
BOOT = 17 * HOUR
NEVER = Fraction(1, 10**6)
"""A rate at which no second token comes while a test runs."""
RECHECK = 20 * MS
"""Longer than a process goes on without looking at its path."""
READERS = (asks_module, file_module, finding, places, table, upkeep)
"""The modules that read the file."""
NOISE = random.Random(1).randbytes(8192)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become other users")
# Forked on purpose, also in a pytest process that other tests have left threads in.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@functools.cache  # so that an ask is made by the same object again, as a limiter does it, and takes the short way
def charge(
    capacity: float = 5, rate: float | Fraction = 1, *, key: str | None = None, cost: float = 1
) -> tuple[Charge, ...]:
    limit = Limit(capacity, rate)
    return (Charge("api", key, 0, limit, limit.charge(cost)),)


API = Bucket("api", (Limit(5, 1),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "tb_celery.state"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(BOOT)


@pytest.fixture
def store(path: Path, clock: FakeClock) -> FileStore:
    return FileStore(path, clock)


class Inside(FakeClock):
    """A clock that does something when it is read, which is under the lock."""

    def __init__(self, deed: Callable[[], object]) -> None:
        super().__init__(BOOT)
        self.deed = deed

    def now(self) -> int:
        self.deed()
        return super().now()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Somebody else is inside."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def forked(deed: Callable[[], object]) -> int:
    """A child that does one thing and is gone; its exit status is 0 only if nothing was raised."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        deed()
        status = 0
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def as_user(uid: int, deed: Callable[[], object], *, gid: int = 65_534, umask: int = 0o022) -> None:
    """Do something as another user, where the tests may."""

    def demoted() -> None:
        os.umask(umask)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        deed()

    assert ended(forked(demoted)) == 0


# -- several processes


def take_burst(store: FileStore | Path, together: Barrier, granted: Queue[int]) -> None:
    store = FileStore(store) if isinstance(store, Path) else store
    together.wait()
    granted.put(sum(bool(store.acquire(charge(100, NEVER))) for _ in range(60)))


@forks
@pytest.mark.parametrize("before", [False, True], ids=["fork before first use", "fork after first use"])
def test_forked_processes_share_one_exact_quota(path: Path, before: bool) -> None:  # noqa: FBT001
    store = FileStore(path)
    if before:
        assert store.acquire(charge(100, NEVER))
    granted = in_processes(multiprocessing.get_context("fork"), 4, take_burst, store)
    assert sum(granted) == 100 - before
    assert not store.acquire(charge(100, NEVER))


def test_spawned_processes_share_one_exact_quota(path: Path) -> None:
    assert sum(in_processes(multiprocessing.get_context("spawn"), 2, take_burst, path)) == 100


def race_to_create(paths: list[Path], together: Barrier, granted: Queue[int]) -> None:
    for path in paths:
        together.wait()
        granted.put(int(bool(FileStore(path).acquire(charge(1, NEVER)))))


@forks
def test_of_eight_processes_that_create_the_file_at_once_one_gets_the_only_token(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) / "state" for number in range(40)]
    granted = in_processes(multiprocessing.get_context("fork"), 8, race_to_create, paths, answers=40)
    assert sum(granted) == 40
    assert [names(path.parent) for path in paths] == [["state"]] * 40


def in_processes(
    context: ForkContext | SpawnContext, number: int, work: Callable[..., None], argument: object, answers: int = 1
) -> list[int]:
    together, granted = context.Barrier(number), context.Queue()
    processes = [context.Process(target=work, args=(argument, together, granted)) for _ in range(number)]
    for process in processes:
        process.start()
    results = [granted.get(timeout=60) for _ in range(number * answers)]
    for process in processes:
        process.join()
    granted.close()
    granted.join_thread()
    assert [process.exitcode for process in processes] == [0] * number
    return results


def test_nobody_trusts_what_it_saw_last(path: Path, clock: FakeClock) -> None:
    # Case 3.
    one, other = FileStore(path, clock), FileStore(path, clock)
    assert one.acquire(charge())
    assert other.acquire(charge(cost=4))
    assert not one.acquire(charge())


@forks
def test_a_fork_while_another_thread_is_inside_waits_and_does_not_let_it_out(path: Path) -> None:
    parent, entered, leave = os.getpid(), threading.Event(), threading.Event()

    def linger() -> None:
        if os.getpid() == parent and threading.current_thread() is thread:
            entered.set()
            assert leave.wait(60)

    store = FileStore(path, Inside(linger))
    thread = threading.Thread(target=store.acquire, args=(charge(2, NEVER),))
    store.acquire(charge(2, NEVER))
    thread.start()
    assert entered.wait(60)
    assert ended(forked(lambda: None)) == 0
    assert is_locked(path), "a child that ends takes its copy of the descriptor along, not the lock"
    ready, tell = os.pipe()

    def child() -> None:
        os.write(tell, b"!")
        assert not store.acquire(charge(2, NEVER)), "the thread got the last token"

    pid = forked(child)
    os.read(ready, 1)
    leave.set()
    thread.join()
    assert ended(pid) == 0
    os.close(ready)
    os.close(tell)


# -- the short way


@pytest.mark.parametrize("seed", range(5))
def test_the_short_way_answers_as_the_long_one_does(path: Path, clock: FakeClock, seed: int) -> None:
    """Callers with and without a place in line, who repeat themselves and see what others wrote."""
    dice, plain = random.Random(seed), MemoryStore(clock)
    stores = [FileStore(path, clock) for _ in range(2)]
    turns: list[tuple[int, tuple[Charge, ...]]] = []
    for _ in range(3000):
        clock.advance(dice.choice([0, 1, MS, 100 * MS, SECOND, 30 * SECOND, -3 * SECOND]))
        if turns and dice.random() < 0.3:
            turn, charges = turns.pop(dice.randrange(len(turns)))
            place: Place | None = Place(turn)
        else:
            charges = charge(key=dice.choice([None, "ann"]), cost=dice.choice([1, 2]))
            place = dice.choice([None, None, Place(), Place(), Place(ahead=True)])
        expected = plain.acquire(charges, place)
        assert dice.choice(stores).acquire(charges, place) == expected
        assert stores[0].read(charges) == plain.read(charges)
        if expected.booked and len(turns) < 10:
            turns.append((expected.at, charges))


@pytest.mark.parametrize("seed", range(5))
def test_the_short_way_over_several_limits_answers_as_the_long_one_does(
    path: Path, clock: FakeClock, seed: int
) -> None:
    """Of buckets and keys that are new, were asked for before, by others too, or have given their records to others."""
    dice, plain = random.Random(seed), MemoryStore(clock)
    stores = [FileStore(path, clock) for _ in range(2)]
    two = Bucket("two", (Limit(5, 1), Limit(20, 0.1)))
    eight = Bucket("eight", tuple(Limit(number, number) for number in range(2, 10)))
    asks: list[tuple[Charge, ...]] = []
    for number in range(1500):
        clock.advance(dice.choice([0, 1, MS, 100 * MS, SECOND, 30 * SECOND]))
        if not asks or dice.random() < 0.5:
            key = dice.choice([None, "ann", f"{number}"])
            buckets = dice.choice([[two], [eight], [API, two], [two, eight, API]])
            asks.append(sum((each.draw(key, each.charge(dice.choice([1, 2]))) for each in buckets), ()))
        charges = dice.choice(asks[-20:])
        place = dice.choice([None, None, None, Place(), Place(clock.now()), Place(ahead=2)])
        expected = plain.acquire(charges, place)
        assert dice.choice(stores).acquire(charges, place) == expected
        now, _, states = stores[0].read(charges)
        # What is full may be forgotten.
        assert [max(now, *each[:2]) for each in states] == [max(now, *each[:2]) for each in plain.read(charges)[2]]


def test_a_refusal_is_no_record(path: Path, clock: FakeClock) -> None:
    """Where there was room for one when it was refused, others come and go while it gets one elsewhere."""
    one, other = FileStore(path, clock), FileStore(path, clock)
    spent = (charge(1, NEVER)[0]._replace(bucket="spent"),)
    both = (*charge(), *spent)
    assert one.acquire(spent)
    for _ in range(2):
        assert not one.acquire(both)
    assert path.read_bytes().count(FREE) == 63
    keys = [*map(str, range(40))]
    assert all(other.acquire(charge(key=key, cost=5)) for key in keys)
    assert other.acquire(charge(cost=5))
    for key in keys:
        other.reset(API, key)
    one.reset(Bucket("spent", (Limit(1, NEVER),)))
    assert not one.acquire(both)
    assert one.acquire(spent)


def test_a_debt_that_was_paid_is_none_when_the_clock_is_set_back(store: FileStore, clock: FakeClock) -> None:
    assert store.acquire(charge())
    store.settle([charge()[0]._replace(cost=10 * SECOND)])
    clock.advance(HOUR)
    assert all(store.acquire(charge()) for _ in range(3))
    clock.advance(-2 * HOUR)
    assert store.acquire(charge()).wait == 1


def test_what_is_remembered_is_bounded_and_without_effect(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "REMEMBERED", 20)
    monkeypatch.setattr(asks_module, "REPEATED", 10)
    store = FileStore(path)
    keys = [*map(str, range(50)), "a" * table.LONGEST_KEY, "b" * (table.LONGEST_KEY + 1)]
    assert sum(bool(store.acquire(charge(3, NEVER, key=key))) for _ in range(4) for key in keys) == 3 * len(keys)
    opened = store._table  # noqa: SLF001
    assert opened is not None
    assert len(opened._slots) <= 20  # noqa: SLF001
    assert len(opened.repeated) <= 10
    for key in keys:
        store.acquire((*charge(key=key), *charge(key=f"{key}, too")))
    assert len(opened.together) <= 10
    assert ("api", keys[-2], 0) in opened._slots  # noqa: SLF001
    assert ("api", keys[-1], 0) not in opened._slots  # noqa: SLF001


def test_damage_within_a_record_that_was_asked_for_again_and_again_grants_nothing(
    path: Path, store: FileStore, clock: FakeClock
) -> None:
    for _ in range(5):
        assert store.acquire(charge())
    [at] = [at for at in range(64, 4160, 64) if path.read_bytes()[at : at + 64] != FREE]
    overwritten(path, at + 40, bytes(16))
    assert not store.acquire(charge())
    assert recovers(store, FileStore(path, clock), clock, already=5)


def test_a_file_that_is_cut_short_before_the_short_way_is_first_taken(
    path: Path, store: FileStore, clock: FakeClock
) -> None:
    for _ in range(2):
        store.acquire(charge(cost=2))
    os.truncate(path, 64)
    assert not store.acquire(charge(cost=2))
    assert recovers(store, FileStore(path, clock), clock, already=4)


def test_a_list_that_changes_is_not_taken_for_what_it_was(store: FileStore) -> None:
    charges = [*charge()]
    assert store.acquire(charges)
    charges[0] = charge(key="other")[0]
    assert all(store.acquire(charges) for _ in range(5))
    assert store.acquire(charge(cost=4))


# -- clocks


@pytest.mark.parametrize(
    ("passed", "tokens"), [(3 * SECOND, 3), (0, 0), (-HOUR, 0), (5 * SECOND, 5), (HOUR, 5), (100 * 365 * 24 * HOUR, 5)]
)
@pytest.mark.parametrize("now", [7, BOOT, 1 << 61])
def test_a_reboot_carries_the_state_over_by_wall_time(path: Path, now: int, passed: int, tokens: int) -> None:
    before = FakeClock(BOOT, wall=10**18, identity=1)
    assert FileStore(path, before).acquire(charge(cost=5))
    after = FakeClock(now, wall=10**18 + passed, identity=2)
    store = FileStore(path, after)
    assert [bool(store.acquire(charge())) for _ in range(tokens + 1)] == [True] * tokens + [False]
    after.advance(SECOND)
    assert store.acquire(charge())
    assert not store.acquire(charge())


class Interrupted(FakeClock):
    """A clock of a process that is interrupted for so long before each reading."""

    def __init__(self, now: int, identity: int, delay: int) -> None:
        super().__init__(now, 10**18, identity)
        self.epoch = 10**18 - now
        self._delay = delay

    def now(self) -> int:
        self.advance(self._delay)
        return super().now()

    def wall(self) -> int:
        self.advance(self._delay)
        return super().wall()


@pytest.mark.parametrize("delays", [(0, 3 * MS), (3 * MS, 0), (3 * MS, 3 * MS)])
def test_what_is_carried_over_between_two_clocks_is_never_too_early(path: Path, delays: tuple[int, int]) -> None:
    before, after = Interrupted(7, 1, delays[0]), Interrupted(BOOT, 2, delays[1])
    taken = before.epoch + FileStore(path, before).acquire(charge(1)).now
    after.advance(SECOND // 2)
    due = after.epoch + FileStore(path, after).acquire(charge(1)).at
    assert due - taken - SECOND in range(10 * MS)


@pytest.mark.parametrize("step", [-10 * HOUR, HOUR, 100 * 365 * 24 * HOUR])
def test_steps_of_the_wall_clock_have_no_effect(path: Path, clock: FakeClock, step: int) -> None:
    store = FileStore(path, clock)
    assert store.acquire(charge(cost=5))
    clock.step_wall(step)
    for caller in (store, FileStore(path, clock)):
        assert caller.acquire(charge()).wait == 1.0
    clock.advance(SECOND)
    assert store.acquire(charge())
    assert not store.acquire(charge())


# -- many keys


def test_ten_thousand_keys_have_a_quota_each(path: Path, clock: FakeClock) -> None:
    store = FileStore(path, clock)
    assert all(store.acquire(charge(1, key=str(key))) for key in range(10_000))
    assert not any(store.acquire(charge(1, key=str(key))) for key in range(10_000))
    assert not any(FileStore(path, clock).acquire(charge(1, key=str(key))) for key in range(0, 10_000, 97))


def test_a_new_key_goes_where_there_is_the_most_room(path: Path, store: FileStore, clock: FakeClock) -> None:
    """In the last level: where all of the others were filled up first, the file would grow a third sooner."""
    for key in range(1000):
        store.acquire(charge(key=str(key)))
    assert store.reset(API) == 1000
    for caller in (store, FileStore(path, clock)):
        before = path.read_bytes()
        assert caller.acquire(charge(key=f"of {id(caller)}"))
        after = path.read_bytes()
        [at] = [at for at in range(0, len(after), 64) if before[at : at + 64] != after[at : at + 64]]
        header = Header.unpack(after[:64])
        assert header is not None
        assert len(before) == len(after) == file_size(header.levels)
        assert at >= file_size(header.levels - 1)


def test_the_file_stops_growing_when_buckets_are_full_again(path: Path, clock: FakeClock) -> None:
    # Case 100.
    store = FileStore(path, clock)
    for generation in range(12):
        assert all(store.acquire(charge(key=f"{generation} {key}")) for key in range(1000))
        clock.advance(SECOND)
    assert path.stat().st_size < 12_000 * 64 / 2


def test_no_name_is_in_the_file_or_in_a_file_name(path: Path, store: FileStore) -> None:
    # Case 99.
    secret = "sk-secret-of-a-customer"  # noqa: S105
    store.acquire(charge(key=secret))
    os.truncate(path, 2000)
    store.acquire(charge(key=secret))
    everything = b"".join(each.name.encode() + each.read_bytes() for each in path.parent.iterdir())
    assert secret.encode() not in everything
    assert secret.encode().hex().encode() not in everything
    assert b"api" not in everything


def test_others_decide_while_a_large_file_is_surveyed_or_reset(
    path: Path, store: FileStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in range(3000):
        store.acquire(charge(key=str(key)))
    other, decided = FileStore(path, clock, lock_timeout=0), list[bool]()
    other.read(charge())
    monkeypatch.setattr(time, "sleep", lambda _: decided.append(bool(other.acquire(charge(100, key="other")))))
    assert len(store.survey([API])[1][API.name]) >= 3000
    assert len(decided) >= 3
    before = len(decided)
    assert store.reset(API) >= 3000
    assert len(decided) == 2 * before
    assert all(decided)
    assert len(store.survey([API])[1][API.name]) <= 1, "that of the one who asked meanwhile"


def test_the_file_is_read_once_however_many_buckets_are_looked_at(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets = [Bucket(f"bucket {number}", (Limit(5, 1),)) for number in range(20)]
    limiter = Limiter(buckets, FileStore(path, clock))
    for bucket in buckets:
        for key in range(150):
            assert limiter.acquire(bucket.name, key=str(key))
    pieces, read = list[int](), finding.Records.piece

    def piece(records: finding.Records, start: int, *asked: int) -> finding.Piece:
        pieces.append(start)
        return read(records, start, *asked)

    monkeypatch.setattr(finding.Records, "piece", piece)
    assert limiter.status("bucket 0").keys == 150
    once = pieces.copy()
    assert len(once) > 3
    for look in (
        lambda: {name: bucket["keys"] for name, bucket in survey(limiter)["buckets"].items()},
        lambda: {row.bucket: row.keys for row in Watch(limiter).look({})},
        lambda: {
            each.labels["bucket"]: each.value
            for gauge in _Standing(limiter, dict).collect()
            if gauge.name == "tb_celery_keys"
            for each in gauge.samples
        },
    ):
        pieces.clear()
        assert look() == dict.fromkeys(limiter.buckets, 150)
        assert pieces == once


def test_nobody_waits_while_what_was_read_is_worked_out(path: Path, store: FileStore) -> None:
    for key in range(200):
        store.acquire(charge(key=str(key)))
    busy = []

    def written(records: finding.Records, raw: bytes, written: Callable[..., State] = finding.Records.written) -> State:
        busy.append(is_locked(path))
        return written(records, raw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding.Records, "written", written)
        assert len(store.survey([API])[1]["api"]) == 200
    assert busy == [False] * 200


# -- descriptors and inodes


def test_no_descriptor_is_lost(path: Path, clock: FakeClock) -> None:
    # Case 66.
    gc.collect()
    store = FileStore(path, clock)
    store.acquire(charge())
    before = names("/proc/self/fd")
    for _ in range(2000):
        store.acquire(charge(10_000))
    for _ in range(50):
        for plant in (lambda: None, lambda: path.write_bytes(b"foreign"), path.mkdir, lambda: path.symlink_to("/")):
            remove(path)
            plant()
            clock.advance(RECHECK)
            with contextlib.suppress(StoreError):
                store.acquire(charge())
    remove(path)
    clock.advance(RECHECK)
    store.acquire(charge())
    assert names("/proc/self/fd") == before


def test_the_file_is_never_replaced(path: Path, store: FileStore, clock: FakeClock) -> None:
    # Cases 58 and 69: nothing is renamed or unlinked, so there is nothing for others to hold on to.
    store.acquire(charge())
    before = path.stat().st_ino
    for key in range(1000):
        clock.advance(MS)
        store.acquire(charge(key=str(key)))
    os.truncate(path, 1000)
    store.acquire(charge())
    store.reset(API)
    assert path.stat().st_ino == before


def test_a_descriptor_that_was_closed_or_reused_behind_its_back_is_opened_anew(
    path: Path, store: FileStore, clock: FakeClock, tmp_path: Path
) -> None:
    """As a program does that becomes a daemon, and closes all it has open."""
    other = tmp_path / "other"
    for reuse in (False, True):
        store.acquire(charge(100))
        [fd] = [int(fd) for fd in names("/proc/self/fd") if links_to(f"/proc/self/fd/{fd}", path)]
        os.close(fd)
        if reuse:
            with other.open("wb") as file:
                os.dup2(file.fileno(), fd)
        clock.advance(RECHECK)
        with contextlib.suppress(StoreError):
            store.acquire(charge(100))
        assert store.acquire(charge(100))
    assert other.read_bytes() == b""
    os.close(fd)


def test_a_store_that_is_dropped_lets_go_of_its_descriptor(path: Path, clock: FakeClock) -> None:
    gc.collect()
    before = names("/proc/self/fd")
    for _ in range(10):
        FileStore(path, clock).acquire(charge())
    gc.collect()
    assert names("/proc/self/fd") == before


@pytest.mark.parametrize("content", [b"", b"TBCELERY"])
def test_another_file_that_got_the_number_of_its_descriptor_is_left_alone(
    path: Path, store: FileStore, tmp_path: Path, content: bytes
) -> None:
    other = tmp_path / "other"
    for use in (store.acquire, store.read):
        store.acquire(charge(100))
        store.acquire(charge(100))
        other.write_bytes(content)
        [fd] = [int(fd) for fd in names("/proc/self/fd") if links_to(f"/proc/self/fd/{fd}", path)]
        taken = os.open(other, os.O_RDWR)
        os.dup2(taken, fd)
        os.close(taken)
        # The clock stands still: it is not yet time to look whether the path still names the file.
        with contextlib.suppress(StoreError):
            use(charge(100))
        assert other.read_bytes() == content
        assert store.acquire(charge(100)), "opened anew at once"
        os.close(fd)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def names(directory: Path | str) -> list[str]:
    return sorted(each.name for each in Path(directory).iterdir())


def links_to(link: str, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return Path(link).readlink() == path
    return False


# -- what may lie at the path


@pytest.mark.parametrize(
    "content",
    [
        b"\n",
        b"{}",
        b'{"twitter_api": {"tokens": 5}}',
        b"SQLite format 3\x00" + bytes(4080),
        bytes(64),
        bytes(4160),
        bytes(4096) + b"\n",
        bytes(128) + NOISE[:64],
        b"TBCELERX" + bytes(4152),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(path: Path, store: FileStore, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    for use in (
        lambda: store.acquire(charge()),
        lambda: store.read(charge()),
        lambda: store.survey([API]),
        lambda: store.reset(API),
    ):
        with pytest.raises(StoreError, match=r"state file.*state_file") as caught:
            use()
        assert str(path) in str(caught.value)
    assert path.read_bytes() == content
    assert names(path.parent) == [path.name]


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_is_refused_and_its_target_left_alone(
    path: Path,
    store: FileStore,
    tmp_path: Path,
    dangling: bool,  # noqa: FBT001
) -> None:
    # Case 76.
    target = tmp_path / "target"
    if not dangling:
        target.write_text("precious")
    path.parent.mkdir()
    path.symlink_to(target)
    with pytest.raises(StoreError, match=r"symbolic link.*state_file"):
        store.acquire(charge())
    assert dangling or target.read_text() == "precious"
    assert target.exists() != dangling


def test_a_link_planted_where_damaged_bytes_go_is_not_followed(path: Path, store: FileStore, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    store.acquire(charge(cost=5))
    path.with_name(path.name + ".damaged").symlink_to(target)
    os.truncate(path, 64)
    with contextlib.suppress(StoreError):
        store.acquire(charge())
    assert target.read_text() == "precious"


@pytest.mark.parametrize("plant", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_is_refused(
    path: Path, store: FileStore, clock: FakeClock, plant: Callable[[Path], None]
) -> None:
    path.parent.mkdir()
    plant(path)
    with pytest.raises(StoreError) as caught:
        store.acquire(charge())
    assert str(path) in str(caught.value)
    assert "state_file" in str(caught.value)
    remove(path)
    clock.advance(RECHECK)
    assert store.acquire(charge())


# -- what may be wrong with the directory and the disk


def refused(store: FileStore, *words: str) -> Callable[[], None]:
    def attempt() -> None:
        with pytest.raises(StoreError) as caught:
            store.acquire(charge())
        for word in (str(store.path), "TB_CELERY_STATE_FILE", *words):
            assert word in str(caught.value)

    return attempt


def test_missing_directories_are_made(tmp_path: Path) -> None:
    assert FileStore(tmp_path / "a" / "b" / "state").acquire(charge())


def test_a_directory_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(FileStore(tmp_path / "file" / "state"))()


def test_a_directory_that_cannot_be_written_is_told(public: Path) -> None:
    public.chmod(0o555)
    as_user(65_534, refused(FileStore(public / "state"), "Permission denied"))
    as_user(65_534, refused(FileStore(public / "missing" / "state"), "Permission denied"))
    assert names(public) == []


def test_a_file_that_cannot_be_written_is_told(public: Path) -> None:
    path = public / "state"
    FileStore(path).acquire(charge())
    path.chmod(0o444)
    as_user(65_534, refused(FileStore(path), "Permission denied"))


def test_a_read_only_file_system_is_told(mounted: Callable[..., Path]) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    assert ended(forked(lambda: FileStore(point / "state").acquire(charge()))) == 0
    subprocess.run(["/bin/mount", "-o", "remount,ro", point], check=True)
    refused(FileStore(point / "state"), "Read-only file system")()
    refused(FileStore(point / "other"), "Read-only file system")()


def test_a_full_disk_is_told_when_the_file_is_made_and_leaves_nothing(mounted: Callable[..., Path]) -> None:
    # Case 71.
    for kept in (0, 4096):
        point = mounted("-t", "tmpfs", "-o", "size=64k", "tmpfs")
        fill(point / "ballast", kept)
        store = FileStore(point / "state")
        refused(store, "No space left on device")()
        assert names(point) == ["ballast"]
        (point / "ballast").unlink()
        assert store.acquire(charge(cost=5)), "made whole, and full, once there is room"


@forks
def test_a_file_that_may_not_grow_stops_new_keys_and_no_old_ones(path: Path, clock: FakeClock) -> None:
    """The same without a file system of its own: a limit on the size of files."""

    def overflow() -> None:
        store = FileStore(path, clock)
        assert store.acquire(charge(key="old"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        granted = grow(store, "No space left on device")
        assert store.acquire(charge(cost=4, key="old"))
        assert not any(store.acquire(charge(key=str(key))) for key in granted)

    assert ended(forked(overflow)) == 0


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_write_that_fails_grants_nothing_and_spoils_nothing(
    path: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    store.acquire(charge(cost=4))
    before = path.read_bytes()

    def fail(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        for module in (upkeep, file_module):
            patch.setattr(module, "write_at", fail)
        refused(store, os.strerror(error))()
    assert path.read_bytes() == before
    assert store.acquire(charge())
    assert not store.acquire(charge())


def test_a_write_that_is_cut_short_grants_nothing(
    path: Path, store: FileStore, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.acquire(charge(cost=4))
    assert store.acquire(charge())
    with monkeypatch.context() as patch:
        for module in (upkeep, file_module):
            patch.setattr(module, "write_at", lambda fd, raw, offset: os.pwrite(fd, raw[:50], offset))
        clock.advance(SECOND)
        refused(store, "No space left on device")()
    assert recovers(store, FileStore(path, clock), clock, already=5)


def grow(store: FileStore, reason: str) -> list[int]:
    """Empty buckets of new keys until there is no room for one; the keys."""
    for key in range(1000):
        try:
            assert store.acquire(charge(cost=5, key=str(key)))
        except StoreError as error:
            assert reason in str(error)  # noqa: PT017
            return list(range(key))
    pytest.fail("there is room for ever")


def fill(ballast: Path, kept: int) -> None:
    """Leave no more than ``kept`` bytes of room."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(ballast, ballast.stat().st_size - kept)


def test_an_open_that_fails_once_is_tried_again(path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    # Case 68: as on Windows, while a virus scanner has the file.
    FileStore(path, clock).acquire(charge(cost=4))
    store, opened = FileStore(path, clock), os.open

    def fail(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", fail)
    for _ in range(2):
        refused(store, "Permission denied")()
    monkeypatch.setattr(os, "open", opened)
    assert store.acquire(charge())
    assert not store.acquire(charge())


# -- damage


def overwritten(path: Path, offset: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(raw)


def punched(path: Path, offset: int) -> None:
    size = path.stat().st_size
    os.truncate(path, offset)
    os.truncate(path, size)


def cut_off(path: Path, left: int) -> None:
    """As by somebody who had read it before, and writes only then."""
    whole = path.read_bytes()
    at = next(at for at in range(64, len(whole), 64) if whole[at : at + 64] != FREE)
    os.truncate(path, left)
    overwritten(path, at, whole[at : at + 64])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "nothing left": lambda path: os.truncate(path, 0),
    "nothing left but a record": lambda path: cut_off(path, 0),
    "half of the magic left and a record": lambda path: cut_off(path, 4),
    "half of the magic left": lambda path: os.truncate(path, 4),
    "half of the header left": lambda path: os.truncate(path, 32),
    "header left": lambda path: os.truncate(path, 64),
    "cut in the middle of a record": lambda path: os.truncate(path, 64 + 64 * 13 + 20),
    "last byte gone": lambda path: os.truncate(path, path.stat().st_size - 1),
    "records zeroed": lambda path: overwritten(path, 64, bytes(path.stat().st_size - 64)),
    "records punched out": lambda path: punched(path, 64),
    "records overwritten": lambda path: overwritten(path, 64, NOISE[: path.stat().st_size - 64]),
    "overwritten and longer": lambda path: overwritten(path, 64, NOISE),
    "header overwritten": lambda path: overwritten(path, 8, NOISE[:56]),
    "one bit of the salt": lambda path: overwritten(path, 16, bytes([path.read_bytes()[16] ^ 1])),
    "all but the magic": lambda path: overwritten(path, 8, NOISE[: path.stat().st_size - 8]),
}


def recovers(one: FileStore, other: FileStore, clock: FakeClock, already: int) -> bool:
    """Both callers go on for 30 s: nothing is over-admitted, and by then the bucket is in use again."""
    grants = [(clock.now(), already)]
    for _ in range(120):
        clock.advance(SECOND // 4)
        grants += [(decision.now, 1) for store in (one, other) if (decision := store.acquire(charge()))]
    assert first_violation(grants, 5, 1) is None
    return len(grants) >= 25


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("noticed_by", ["the one that knows the record", "another", "one that opens the file"])
def test_damage_grants_nothing(
    path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], noticed_by: str
) -> None:
    knows, other = FileStore(path, clock), FileStore(path, clock)
    assert knows.acquire(charge(cost=5))
    assert other.acquire(charge(cost=5, key="other"))
    damage(path)
    if noticed_by == "another":
        other.acquire(charge(key="third"))
    elif noticed_by != "another":
        knows, other = (knows, other) if "knows" in noticed_by else (FileStore(path, clock), knows)
    assert not knows.acquire(charge())
    assert recovers(knows, other, clock, already=5)
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert all(str(path) in record.getMessage() for record in caplog.records)
    assert path.with_name(path.name + ".damaged").exists()


@pytest.mark.parametrize("left", [0, 4, 64, 1000])
@pytest.mark.parametrize("before", range(8))
@pytest.mark.parametrize("key", [None, "new"])
def test_damage_before_any_of_a_decisions_reads_grants_nothing(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, before: int, left: int, key: str | None
) -> None:
    store, reads = FileStore(path, clock), 0
    assert store.acquire(charge(cost=5))
    clock.advance(RECHECK)

    def read_at(fd: int, length: int, offset: int) -> bytes:
        nonlocal reads
        if reads == before:
            os.truncate(path, left)
        reads += 1
        return os.pread(fd, length, offset)

    with monkeypatch.context() as patch:
        for module in READERS:
            patch.setattr(module, "read_at", read_at)
        store.acquire(charge(key=key))
    assert recovers(store, FileStore(path, clock), clock, already=5)


def test_bytes_after_the_end_are_no_damage(path: Path, store: FileStore, caplog: pytest.LogCaptureFixture) -> None:
    store.acquire(charge(cost=4))
    with path.open("ab") as file:
        file.write(bytes(10_000))
    assert store.acquire(charge())
    for key in range(500):
        assert store.acquire(charge(cost=5, key=str(key)))
    assert not any(store.acquire(charge(key=key)) for key in [None, *map(str, range(500))])
    assert not caplog.records


def test_a_damaged_record_takes_no_other_with_it(path: Path, store: FileStore) -> None:
    for key in range(20):
        store.acquire(charge(key=str(key)))
    before = path.read_bytes()
    store.acquire(charge(key="7"))
    [at] = [at for at in range(0, len(before), 64) if before[at : at + 64] != path.read_bytes()[at : at + 64]]
    overwritten(path, at + 30, b"noise")
    assert not store.acquire(charge(key="7"))
    assert all(store.acquire(charge(cost=4, key=str(key))) for key in range(20) if key != 7)


@pytest.mark.parametrize("numbers", [(0, SECOND), (7, 1), (1, LONGEST_SPAN), (IN_DEBT, SECOND)])
def test_numbers_that_another_program_has_written_stop_nobody(
    path: Path, store: FileStore, clock: FakeClock, numbers: tuple[int, int]
) -> None:
    limiter = Limiter([API], store)
    assert limiter.acquire("api")
    whole = path.read_bytes()
    at = next(at for at in range(64, len(whole), 64) if whole[at : at + 64] != FREE)
    for use in (
        lambda: limiter.acquire("api"),
        lambda: limiter.set("api", refill_rate=2),
        lambda: limiter.unset("api"),
        lambda: limiter.status("api"),
    ):
        state = State(clock.now() + SECOND, clock.now() + SECOND, *numbers)
        overwritten(path, at, packed(whole[at : at + 12], clock.identity, clock.wall() - clock.now(), state))
        use()


def damage_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"\xff\xff")


def test_a_header_found_damaged_amid_a_decision_leaves_one_quota(
    path: Path, store: FileStore, clock: FakeClock
) -> None:
    """One limit is found where it was, and then the header is mended in search of another."""
    other = (charge()[0]._replace(bucket="other"),)
    assert store.acquire(charge())
    damage_header(path)
    store.acquire((*charge(), *other), Place())
    clock.advance(HOUR)
    second = FileStore(path, clock)
    assert sum(bool(each.acquire(charge())) for each in (store, second) * 6) == 5


def test_a_header_found_damaged_where_numbers_were_changed_grants_nothing(
    path: Path, store: FileStore, clock: FakeClock
) -> None:
    other = (charge()[0]._replace(bucket="other"),)
    for _ in range(5):
        assert store.acquire(charge())
        assert store.acquire(other)
    second = FileStore(path, clock)
    assert not second.acquire(charge(rate=2))
    damage_header(path)
    assert not store.acquire(charge())
    assert not second.acquire(other)


@pytest.mark.parametrize("seed", range(10))
def test_noise_anywhere_grants_nothing(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    for number in range(6):
        clock, path = FakeClock(BOOT), tmp_path / str(number)
        one, other = FileStore(path, clock), FileStore(path, clock)
        for key in [None, *map(str, range(dice.randrange(100)))]:
            one.acquire(charge(cost=5, key=key))
        size = path.stat().st_size
        offset = dice.randrange(8, size)
        overwritten(path, offset, dice.randbytes(dice.randint(1, 2 * (size - offset))))
        assert not dice.choice([one, other, FileStore(path, clock)]).acquire(charge())
        assert recovers(one, other, clock, already=5)


def test_a_state_file_that_became_something_else_is_refused_until_it_is_moved_away(
    path: Path, store: FileStore, clock: FakeClock
) -> None:
    store.acquire(charge(cost=5))
    overwritten(path, 0, NOISE[:4160])
    for caller in (store, FileStore(path, clock)):
        refused(caller, "not a state file")()
    assert path.read_bytes() == NOISE[:4160]
    path.rename(path.with_name("noise"))
    clock.advance(RECHECK)
    assert not store.acquire(charge()), "the burst is not granted again"


def test_damage_is_told_once(path: Path, store: FileStore, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    for key in range(2000):
        store.acquire(charge(key=str(key)))
    overwritten(path, 64, random.Random(1).randbytes(path.stat().st_size - 64))
    store.acquire(charge(key="1"))
    assert len(caplog.records) == 1
    for _ in range(10):
        clock.advance(SECOND)
        store.acquire(charge(key="1"))
    assert len(caplog.records) == 1


@forks
def test_damage_that_cannot_be_mended_is_told_once(
    path: Path, store: FileStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    store.acquire(charge(cost=5))
    os.truncate(path, 64)

    def overflow() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        for _ in range(10):
            refused(store)()
            clock.advance(MS)
        assert len(caplog.records) == 1

    assert ended(forked(overflow)) == 0
    assert not store.acquire(charge())
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("plant", [Path.mkdir, os.mkfifo])
def test_damage_is_mended_also_where_what_was_there_cannot_be_kept(
    path: Path, store: FileStore, clock: FakeClock, plant: Callable[[Path], None]
) -> None:
    store.acquire(charge(cost=5))
    plant(path.with_name(path.name + ".damaged"))
    os.truncate(path, 64)
    assert not store.acquire(charge())
    clock.advance(SECOND)
    assert store.acquire(charge())


def test_a_reset_after_damage_makes_the_bucket_full(path: Path, store: FileStore) -> None:
    store.acquire(charge(cost=5))
    os.truncate(path, 0)
    assert not store.acquire(charge())
    store.reset(API)
    assert store.acquire(charge(cost=5))
    assert not store.acquire(charge())


def test_what_was_reset_after_damage_stays_full_whoever_else_needs_room(path: Path, store: FileStore) -> None:
    store.acquire(charge())
    os.truncate(path, 0)
    keys = [*map(str, range(20))]
    for key in keys:
        store.reset(API, key)
    assert all(store.acquire(charge(key=key, cost=5)) for key in keys)


def test_a_reset_after_damage_makes_the_bucket_full_by_the_numbers_that_are_ordered(
    path: Path, store: FileStore
) -> None:
    store.acquire(charge())
    [damaged] = [at for at in range(64, 4160, 64) if path.read_bytes()[at : at + 64] != FREE]
    store.order(change("api", 0, Limit(50, 1)), HOUR)
    overwritten(path, damaged, bytes(64))
    assert not store.acquire(charge())
    store.reset(API)
    assert [bool(store.acquire(charge(cost=5))) for _ in range(11)] == [True] * 10 + [False]


@pytest.mark.parametrize("instant", [0, BOOT])
def test_damage_is_remembered_whatever_the_clock_says(path: Path, instant: int) -> None:
    clock = FakeClock(instant)
    store = FileStore(path, clock)
    store.acquire(charge(cost=5))
    os.truncate(path, 0)
    assert not store.acquire(charge())
    assert not FileStore(path, clock).acquire(charge())


def test_damage_and_a_clock_that_is_set_back_stop_nobody_for_long(
    path: Path, store: FileStore, clock: FakeClock
) -> None:
    store.acquire(charge(cost=5))
    os.truncate(path, 0)
    assert not store.acquire(charge())
    clock.advance(-HOUR)
    for key in (None, "new"):
        assert not store.acquire(charge(key=key))
    clock.advance(SECOND)
    for key in (None, "new", "newer"):
        assert store.acquire(charge(key=key))


# -- deleted, replaced


def test_deleted_while_in_use_it_starts_empty(
    path: Path, store: FileStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    # Case 59.
    store.acquire(charge(cost=5))
    path.unlink()
    clock.advance(RECHECK)
    assert not store.acquire(charge())
    assert recovers(store, FileStore(path, clock), clock, already=5)
    [record] = caplog.records
    assert (record.levelno, str(path) in record.getMessage()) == (logging.WARNING, True)


def test_deleted_with_its_directory_it_starts_empty(path: Path, store: FileStore, clock: FakeClock) -> None:
    store.acquire(charge(cost=5))
    shutil.rmtree(path.parent)
    clock.advance(RECHECK)
    assert not store.acquire(charge())


def test_deleted_and_made_anew_by_a_newcomer_it_is_one_fresh_capacity(
    path: Path, store: FileStore, clock: FakeClock
) -> None:
    assert store.acquire(charge(cost=5))
    path.unlink()
    newcomer = FileStore(path, clock)
    assert newcomer.acquire(charge(cost=5))
    clock.advance(RECHECK)
    assert not store.acquire(charge())
    assert recovers(store, newcomer, clock, already=5)


def test_made_anew_by_a_process_that_did_not_know_it_starts_empty_for_those_who_did(
    path: Path, store: FileStore, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    knows_too = FileStore(path, clock)
    for caller in (store, knows_too):
        assert caller.acquire(charge(cost=2))
    assert store.acquire(charge(cost=5, key="other"))
    path.unlink()
    assert ended(forked(lambda: FileStore(path, clock).acquire(charge()))) == 0
    assert lost_at(path) == 0
    clock.advance(RECHECK)
    assert not store.acquire(charge(key="other"))
    noticed = lost_at(path)
    assert noticed == clock.now()
    assert not store.acquire(charge()), "the newcomer's record counts for nothing: it might be an older copy's"
    clock.advance(2 * SECOND)
    assert knows_too.acquire(charge(cost=2, key="other"))
    assert not knows_too.acquire(charge(key="other"))
    assert lost_at(path) == noticed, "not once for each of those who knew it"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_older_copy_in_its_place_gives_nothing(path: Path, store: FileStore, clock: FakeClock) -> None:
    assert store.acquire(charge(cost=1))
    copy = path.with_name("copy")
    for _ in range(3):
        shutil.copy(path, copy)
        store.acquire(charge(cost=4))
        copy.replace(path)
        clock.advance(RECHECK)
        assert not store.acquire(charge())
        assert not FileStore(path, clock).acquire(charge())


def lost_at(path: Path) -> int:
    header = Header.unpack(path.read_bytes()[:64])
    assert header is not None
    return header.lost_at


def test_replaced_by_another_state_file_that_one_holds(path: Path, store: FileStore, clock: FakeClock) -> None:
    spare = FileStore(path.with_name("spare"), clock)
    spare.acquire(charge(cost=5))
    assert store.acquire(charge())
    spare.path.rename(path)
    clock.advance(RECHECK)
    assert not store.acquire(charge())
    clock.advance(SECOND)
    assert store.acquire(charge())
    assert not FileStore(path, clock).acquire(charge())


def test_another_state_file_copied_over_it_gives_nothing(path: Path, store: FileStore, clock: FakeClock) -> None:
    spare = FileStore(path.with_name("spare"), clock)
    assert spare.acquire(charge())
    assert store.acquire(charge(cost=5))
    overwritten(path, 0, spare.path.read_bytes())
    clock.advance(RECHECK)
    assert not store.acquire(charge())
    assert not FileStore(path, clock).acquire(charge())


@forks
def test_a_header_that_was_mended_once_is_news_to_no_child(path: Path, store: FileStore, clock: FakeClock) -> None:
    assert store.acquire(charge())
    damage_header(path)
    clock.advance(RECHECK)
    assert not store.acquire(charge())
    clock.advance(HOUR)
    for cost in (1, 2):
        assert store.acquire(charge(cost=cost))
        clock.advance(RECHECK)
        assert ended(forked(lambda: None if store.acquire(charge()) else os.abort())) == 0


# -- locks


def test_a_file_system_whose_locks_exclude_nobody_is_refused(
    path: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    refused(store, "do not exclude")()
    assert not path.exists() or path.stat().st_size == 4160


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("used", [False, True], ids=["from the start", "while in use"])
def test_a_file_system_without_locks_is_refused(
    store: FileStore,
    monkeypatch: pytest.MonkeyPatch,
    error: int,
    used: bool,  # noqa: FBT001
) -> None:
    # Case 78.
    def fail(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    if used:
        store.acquire(charge(cost=4))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        patch.setattr(time, "sleep", lambda _: pytest.fail("there is nothing to wait for"))
        refused(store, os.strerror(error))()
    assert store.acquire(charge())


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/var/lib/tb", None),
        ("/home/ann/state", "nfs4"),
        ("/home", "nfs4"),
        ("/homestead", None),
        ("/home/ann/local/state", None),
        ("/mnt/with space/state", "cifs"),
        ("/mnt/with", None),
        ("/mnt/Böhm/state", "fuse.sshfs"),
        ("/covered/state", None),
    ],
)
def test_network_file_systems_are_known_by_their_mounts(tmp_path: Path, directory: str, kind: str | None) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "30 22 0:40 / /home rw shared:7 master:2 - nfs4 server:/home rw,vers=4.2\n"
        "31 30 8:2 / /home/ann/local rw - xfs /dev/sdb1 rw\n"
        "32 22 0:41 / /mnt/with\\040space rw - cifs //server/share rw\n"
        "33 22 0:42 / /mnt/Böhm rw shared:9 - fuse.sshfs böhm: rw\n"
        "34 22 0:43 / /covered rw - nfs server:/x rw\n"
        "35 34 0:44 / /covered rw - tmpfs tmpfs rw\n"
        "odd\n",
        "utf-8",
    )
    assert hosting.network_file_system(Path(directory), mounts) == kind


def test_a_network_file_system_is_refused(path: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "network_file_system", lambda _: "nfs4")
    refused(store, "network file system", "nfs4")()
    assert not path.exists()


class Reckoned:
    """The time module, with a clock that only sleeping moves and that lets the second thread come before it does."""

    def __init__(self, threads: int) -> None:
        self.reading = 100.0
        self.everybody = threading.Event()
        self._asked: set[int] = set()
        self._threads = threads

    def monotonic(self) -> float:
        self._asked.add(threading.get_ident())
        if len(self._asked) == self._threads:
            self.everybody.set()
        return self.reading

    def sleep(self, seconds: float) -> None:
        assert self.everybody.wait(60)
        self.reading += seconds


def test_threads_that_wait_for_one_lock_time_out_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, reckoned, gave_up = FileStore(path), Reckoned(3), []
    store.read(charge())
    for module in (file_module, backoff):
        monkeypatch.setattr(module, "time", reckoned)

    def wait() -> None:
        with pytest.raises(StoreTimeoutError):
            store.acquire(charge())
        gave_up.append(reckoned.reading)

    with locked(path):
        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert gave_up == pytest.approx([110] * 3, abs=0.1)
    assert store.acquire(charge())


def test_a_thread_that_asks_without_a_pause_starves_no_other(path: Path) -> None:
    store, stop, patient = FileStore(path), threading.Event(), []
    many = charge(10**9, 10**6)

    def hammer_until_told() -> None:
        while not stop.is_set():
            store.acquire(many)

    def ask_a_few_times() -> None:
        patient.append(sum(bool(store.acquire(many)) for _ in range(50)))  # or StoreTimeoutError

    greedy = threading.Thread(target=hammer_until_told)
    others = [threading.Thread(target=ask_a_few_times) for _ in range(3)]
    for thread in (greedy, *others):
        thread.start()
    for thread in others:
        thread.join()
    stop.set()
    greedy.join()
    assert patient == [50, 50, 50]


# -- users


@as_root
@forks
def test_a_directory_made_under_umask_077_is_private(public: Path) -> None:
    public.chmod(0o777)
    path = public / "made" / "state"
    as_user(1001, lambda: FileStore(path).acquire(charge()), umask=0o077)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    as_user(1002, refused(FileStore(path), "Permission denied"))


# -- signals


class SoftTimeLimit(Exception):  # noqa: N818
    pass


def interrupt(*_: object) -> None:
    raise SoftTimeLimit


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Hypothesis has the collector call it, where what a signal handler raises is ignored."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def soft_time_limit(no_collection: None) -> Iterator[None]:  # noqa: ARG001
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("soft_time_limit")
def test_an_exception_from_a_signal_leaves_no_lock_behind(path: Path) -> None:
    """Celery's soft time limit, at thousands of different instructions."""
    store, dice, probe = FileStore(path), random.Random(1), FileStore(path, lock_timeout=0)
    many = charge(10**6, 10**6)
    assert store.acquire(many)
    for _ in range(3000):
        with contextlib.suppress(SoftTimeLimit):
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(2e-5, 1e-4))
            while True:
                store.acquire(many)
        probe.acquire(many)


@pytest.mark.usefixtures("soft_time_limit")
def test_an_exception_inside_spends_nothing(path: Path) -> None:
    inside = Inside(lambda: signal.raise_signal(signal.SIGALRM))
    store = FileStore(path, inside)
    for use in (store.acquire, store.read):
        with pytest.raises(SoftTimeLimit):
            use(charge())
        assert not is_locked(path)
    inside.deed = lambda: None
    assert store.acquire(charge(cost=5))


def interrupted(use: Callable[[], object], number: int) -> SoftTimeLimit | None:
    """What comes out of ``use`` that a signal handler interrupts at one of its calls, where such handlers run."""
    calls = 0

    def profile(_frame: object, event: str, _: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_return"}
        if calls == number:
            raise SoftTimeLimit

    try:
        sys.setprofile(profile)
        use()
    except SoftTimeLimit as error:
        return error
    finally:
        sys.setprofile(None)
    return None


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("used", ["acquire", "read", "settle", "order", "orders", "survey", "reset", "reset a key"])
def test_whoever_keeps_an_exception_from_a_signal_keeps_no_lock(
    path: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch, used: str
) -> None:
    monkeypatch.setattr(finding, "PIECE", 40 * SIZE)  # so that there are two
    monkeypatch.setattr(time, "sleep", lambda _: None)
    use: Callable[[], object] = {
        "acquire": lambda: store.acquire(charge()),
        "read": lambda: store.read(charge()),
        "settle": lambda: store.settle(charge()),
        "order": lambda: store.order(change("api", 0, Limit(7, 2)), HOUR, Limit(5, 1)),
        "orders": lambda: store.orders(API),
        "survey": lambda: store.survey([API]),
        "reset": lambda: store.reset(API),
        "reset a key": lambda: store.reset(API, "a"),
    }[used]
    use()
    kept: list[SoftTimeLimit] = []
    while (error := interrupted(use, len(kept) + 1)) is not None:
        kept.append(error)
        assert not is_locked(path), "".join(traceback.format_exception(error))
        assert store.read(charge()), "nor its thread's place"
    assert len(kept) > 10


@pytest.mark.usefixtures("no_collection")
def test_whom_an_exception_interrupts_as_it_hears_of_a_pause_hears_of_it_again(
    path: Path, store: FileStore, clock: FakeClock
) -> None:
    other = FileStore(path, clock)
    assert store.acquire(charge(10**6, 1))
    for number in range(1, 60):
        other.order(pause("api", None), HOUR)
        interrupted(functools.partial(store.acquire, charge(10**6, 1)), number)
        clock.advance(RECHECK)
        assert not store.acquire(charge(10**6, 1))
        other.order(pause("api", None), 0)
        assert store.acquire(charge(10**6, 1))


def test_an_exception_of_somebody_else_is_not_taken_for_a_fault_of_the_file(path: Path) -> None:
    # Case 75: TimeoutError, which a handler of the user's own may raise, is an OSError.
    def fail() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        FileStore(path, Inside(fail)).acquire(charge())


# -- greenlets


GREENLETS = """
from gevent import monkey
monkey.patch_all()
import fcntl, os, sys, gevent
from tb_celery.bucket import Charge, Limit
from tb_celery.stores.file import FileStore

limit = Limit(5, 1e-6)
store = FileStore(sys.argv[1], lock_timeout=60)
store.read([Charge("api", None, 0, limit, 0)])
held = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(held, fcntl.LOCK_EX)

def beat():
    for _ in range(20):
        gevent.sleep(0.001)
    fcntl.flock(held, fcntl.LOCK_UN)

heart = gevent.spawn(beat)
asking = [gevent.spawn(store.acquire, [Charge("api", None, 0, limit, limit.charge(1))]) for _ in range(8)]
gevent.joinall([heart, *asking], raise_error=True)
print(sum(bool(greenlet.value) for greenlet in asking))
"""


def test_greenlets_go_on_while_others_wait_for_the_lock(path: Path) -> None:
    """Case 83. It is a greenlet that lets the lock go: if those who wait stopped it, they would wait in vain."""
    pytest.importorskip("gevent")
    done = subprocess.run(
        [sys.executable, "-c", GREENLETS, path], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout, done.returncode) == ("5\n", 0), done.stderr


# -- Windows


def test_without_pread_and_pwrite_it_works_the_same(
    path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.find_spec("tb_celery.stores.hosting")
    assert spec is not None
    assert spec.loader is not None
    windows = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        spec.loader.exec_module(windows)
    assert windows.read_at is not os.pread
    for module in READERS:
        monkeypatch.setattr(module, "read_at", windows.read_at)
    for module in (upkeep, file_module):
        monkeypatch.setattr(module, "write_at", windows.write_at)
    store = FileStore(path, clock)
    for _ in range(5):
        for key in range(300):
            assert store.acquire(charge(key=str(key)))
    monkeypatch.undo()
    for caller in (store, FileStore(path, clock)):
        assert not any(caller.acquire(charge(key=str(key))) for key in range(300))


def test_the_system_clock_is_one_for_all_processes() -> None:
    clock: Clock = SystemClock()
    program = "from tb_celery.clock import SystemClock as C; c = C(); print(c.identity, c.now())"
    before = clock.now()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    identity, now = map(int, done.stdout.split())
    assert identity == clock.identity
    assert before < now < clock.now()


def test_a_descriptor_that_cannot_be_looked_at_keeps_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket("api", (Limit(5, 1),))
    first, other = (FileStore(tmp_path / "state", lock_timeout=0.2) for _ in range(2))
    charges = bucket.draw(None, bucket.charge(1))
    assert first.acquire(charges)
    first._look_again = 0  # noqa: SLF001 - due for another look

    def broken(_: int) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as fault:
        fault.setattr(os, "fstat", broken)
        with pytest.raises(StoreError):
            first.acquire(charges)
    assert other.acquire(charges)
    assert first.acquire(charges)
