"""Whether this host can keep a quota where the settings want it.

The real state is looked at and never written. What has to be tried is tried with the real store, on a state file of its
own in a directory that is made next to the real one.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tb_celery.clock import SystemClock
from tb_celery.errors import ConfigurationError, StoreError, StoreTimeoutError
from tb_celery.limiter import Limiter
from tb_celery.report import numbers, onlooker, told, until
from tb_celery.stores.file import FileStore
from tb_celery.stores.hosting import PLACE, network_file_system
from tb_celery.stores.record import SIZE, Header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tb_celery.stores import Store

PATIENCE = 1.0
"""Seconds that the state file's lock may stay busy: a decision holds it for microseconds."""
SECOND_PROCESS = 30.0
"""Seconds that the second process may take to start and answer, on a host under load."""
PROBE = ".tb-celery-doctor-"
ABANDONED = 600.0
"""Seconds after which nobody works any more in a directory that was made to try the lock in."""
SPREAD = 0.1
"""Seconds that the second process waits for the lock, which is held for as long as that process lives."""


class Check(NamedTuple):
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str


def _fine(name: str, detail: str) -> Check:
    return Check(name, ok=True, detail=detail)


def _bad(name: str, detail: object) -> Check:
    return Check(name, ok=False, detail=str(detail))


def examine(open_limiter: Callable[[], Limiter], path: Path | None) -> Iterator[Check]:
    """Look at everything that a quota stands on, one thing after the other.

    Args:
        open_limiter: reads the settings.
        path: of the state file, where they cannot be read.
    """
    try:
        limiter = open_limiter()
    except ConfigurationError as error:
        yield _bad("settings", error)
    else:
        yield _fine("settings", f"buckets: {', '.join(limiter.buckets) or 'none'}")
        path = getattr(limiter.store, "path", None)
        if path is None:
            yield _check_server(limiter.store)
        yield from _check_orders(limiter)
    if path is None:
        return
    try:
        directory = _nearest_directory(path.parent)
    except OSError as error:
        yield _bad("directory", f"{path.parent}: {error.strerror}; {PLACE}")
        return
    writable = _check_directory(path.parent, directory)
    yield writable
    yield _check_file_system(directory)
    yield _check_state_file(path)
    if writable.ok:
        yield from _check_exclusion(directory)


def _check_server(store: Store) -> Check:
    name = "server"
    try:
        store.read([])
        facts: Mapping[str, str] = store.server.facts() if hasattr(store, "server") else {}
    except StoreError as error:
        return _bad(name, error)
    detail = f"{store!r} answers"
    if not facts:
        return _fine(name, detail)
    kind = "Valkey" if "valkey_version" in facts else "Redis"
    version = facts.get("valkey_version") or facts.get("redis_version", "of a version that it does not tell")
    role = "primary" if facts.get("role") == "master" else facts.get("role", "role unknown")
    policy = facts.get("maxmemory_policy", "unknown")
    kept = {
        "1": "an append-only file",
        "0": "no append-only file: a restart loses what came after the last snapshot, if there is any",
    }.get(facts.get("aof_enabled", ""), "persistence unknown")
    detail += f": {kind} {version}, {role}, maxmemory-policy {policy}, {kept}"
    if policy not in {"noeviction", "unknown"} and facts.get("maxmemory") != "0":
        return _bad(name, f"{detail}; it may evict buckets, which then are full again: set maxmemory-policy noeviction")
    return _fine(name, detail)


def _check_orders(limiter: Limiter) -> Iterator[Check]:
    """Tell why buckets may do otherwise than is declared; a store that fails is told of elsewhere."""
    if path := getattr(limiter.store, "path", None):
        limiter = Limiter(limiter.buckets, FileStore(path, lock_timeout=PATIENCE))
    with suppress(StoreError):
        for name in limiter.buckets:
            bucket = told(onlooker(limiter).status(name), None)
            if paused := bucket["paused_seconds"]:
                yield _fine("paused", f"bucket {name!r} for {until(paused)}")
            for limit in [each for each in bucket["limits"] if each["set"]]:
                yield _fine(limit["set"]["reason"], f"bucket {name!r}: {numbers(limit)}")


def _nearest_directory(path: Path) -> Path:
    """``path``, or the nearest directory above it that exists: the one in which it would be made.

    Raises:
        OSError: something on the way is not a directory, or may not be looked into.
    """
    for place in (path, *path.parents):
        with suppress(FileNotFoundError):
            place.lstat()  # a link that leads nowhere is in the way of a directory
            break
    if not place.is_dir():
        raise NotADirectoryError(0, f"{place} is not a directory")
    return place


def _check_directory(wanted: Path, existing: Path) -> Check:
    name = "directory"
    mode = existing.stat().st_mode
    detail = f"{existing} ({stat.filemode(mode)})"
    try:
        Path(tempfile.mkdtemp(prefix=PROBE, dir=existing)).rmdir()
    except OSError as error:
        return _bad(name, f"nothing can be made in {detail}: {error.strerror}; mend it, or {PLACE}")
    if wanted != existing:
        return _fine(name, f"{wanted} is missing and will be made in {detail}")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        detail += "; any user can remove the state file, and with it the quota"
    return _fine(name, detail)


def _check_file_system(directory: Path) -> Check:
    name = "file system"
    if kind := network_file_system(directory):
        return _bad(name, f"{kind} is a network file system, whose locks cannot be relied on; {PLACE}")
    if sys.platform != "win32":
        device = directory.stat().st_dev
        with suppress(OSError):  # only Linux has the table
            for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines():
                fields = line.split(" ")
                if fields[2] == f"{os.major(device)}:{os.minor(device)}":
                    return _fine(name, fields[fields.index("-") + 1])
    return _fine(name, "of a kind that cannot be told here")


def _check_state_file(path: Path) -> Check:
    name = "state file"
    try:
        size = path.lstat().st_size
        # Takes the lock and lets go of it; reads and writes nothing.
        FileStore(path, lock_timeout=PATIENCE).read([])
        with path.open("rb") as file:
            head = file.read(SIZE)
    except FileNotFoundError:
        return _fine(name, f"{path} is not made yet: every bucket is full")
    except OSError as error:
        return _bad(name, f"{path}: {error.strerror}; mend it, or {PLACE}")
    except StoreError as error:
        return _bad(name, error)
    if Header.unpack(head) is None:
        return _bad(name, f"{path} is damaged, or not a state file; move it away, or {PLACE}")
    return _fine(name, f"{path} ({size} bytes)")


class _Meanwhile(SystemClock):
    """A clock that does something when it is first read: the store reads it while it holds the lock."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        actions, look = [action], self.now

        def now() -> int:
            while actions:
                actions.pop()()
            return look()

        self.now = now


class _Answer(NamedTuple):
    """What the second process found."""

    got_lock: bool
    clock: int
    now: int


def _check_exclusion(directory: Path) -> Iterator[Check]:
    clock = SystemClock()
    answers: list[_Answer] = []
    for left in directory.glob(f"{PROBE}*"):  # by one that was killed, as a health check's time-out does
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED:
                shutil.rmtree(left)
    since = clock.now()
    try:
        with tempfile.TemporaryDirectory(prefix=PROBE, dir=directory) as place:
            probe = Path(place, "state")
            FileStore(probe).read([])
            FileStore(probe, _Meanwhile(lambda: answers.append(_ask_second_process(probe)))).read([])
            answers.append(_ask_second_process(probe))
    except StoreError as error:
        yield _bad("lock", str(error).replace(str(probe), str(directory)))
        return
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        yield _bad("lock", f"it cannot be tried in {directory}: {error}; mend it, or {PLACE}")
        return

    source = "CLOCK_BOOTTIME" if hasattr(time, "CLOCK_BOOTTIME") else "the monotonic clock"
    asked = clock.now()
    shared = all(answer.clock == clock.identity and since <= answer.now <= asked for answer in answers)
    verdict = "the same" if shared else "but another one"
    yield Check("clock", ok=shared, detail=f"{source}, identity {clock.identity:08x}, {verdict} in a second process")
    match [answer.got_lock for answer in answers]:
        case [False, True]:
            yield _fine("lock", "it keeps a second process out, and lets it in afterwards")
        case [True, _]:
            yield _bad("lock", f"a second process got the lock while it was held, in {directory}; {PLACE}")
        case _:
            yield _bad("lock", f"a second process did not get the lock when it was free, in {directory}; {PLACE}")


def _ask_second_process(probe: Path) -> _Answer:
    """Have another process, with a descriptor of its own, ask for the lock of ``probe``.

    Raises:
        subprocess.SubprocessError: it could not answer.
    """
    # The same code as here, wherever this process found it.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tb_celery.doctor", str(probe)]
    done = subprocess.run(  # noqa: S603 - ourselves
        command, env=environment, stdout=subprocess.PIPE, check=True, timeout=SECOND_PROCESS
    )
    got_lock, clock, now = map(int, done.stdout.split())
    return _Answer(bool(got_lock), clock, now)


def _be_second_process(probe: str) -> None:
    """Write whether the lock could be had, and what the clock says."""
    clock = SystemClock()
    got_lock = False
    with suppress(StoreTimeoutError):
        FileStore(probe, clock, lock_timeout=SPREAD).read([])
        got_lock = True
    sys.stdout.write(f"{got_lock:d} {clock.identity} {clock.now()}\n")


if __name__ == "__main__":
    _be_second_process(sys.argv[1])
