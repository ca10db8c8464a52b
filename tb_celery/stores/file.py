"""State in one local file behind an OS file lock, shared by every process of the host.

A decision is lock, read, step, write, unlock on a descriptor that is opened once per process. Records sit at fixed
places and are written with one ``pwrite``, so a process killed at any instruction leaves the old record or the new one.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import lock_descriptor, unlock_descriptor

from tb_celery.bucket import acquire, fit
from tb_celery.clock import Clock, SystemClock
from tb_celery.errors import StoreError, StoreTimeoutError
from tb_celery.stores.hosting import network_file_system
from tb_celery.stores.record import hash_name
from tb_celery.stores.table import Table, create

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tb_celery.bucket import Bucket, Charge, Decision, Place, State

logger = logging.getLogger("tb_celery")

RECHECK = 10_000_000
"""Nanoseconds after which a process looks whether its path still names the file that it holds open."""
BRIEF = 0.005
"""Seconds for which a wait for the lock polls at its shortest: the lock is held for microseconds, mostly."""
PLACE = "name another path in the setting state_file (TB_CELERY_STATE_FILE)"
_OPEN = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_yield = getattr(os, "sched_yield", lambda: time.sleep(0))


class FileStore:
    """State shared by everyone on this host who opens the same path.

    The file and its directory are made on first use. Safe for threads, for processes forked before or after first use,
    and for greenlets: nobody sleeps while holding the lock.

    Args:
        path: the state file, on a local file system.
        clock: where "now" comes from; the same kind in every process that shares the file.
        lock_timeout: seconds to wait for the lock while others hold it.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Clock | None = None, lock_timeout: float = 10.0) -> None:
        self.path = Path(path).absolute()
        self.clock: Clock = clock or SystemClock()
        self._now = self.clock.now
        self.lock_timeout = lock_timeout
        self._table: Table | None = None
        self._file = (0, 0)
        self._checked = -RECHECK
        self._mutex = threading.Lock()
        _stores.add(self)

    def __del__(self) -> None:
        # Not every store is made once and kept: nobody else lets go of the descriptor.
        if hasattr(self, "_table"):
            self._forget()

    def __repr__(self) -> str:
        return f"FileStore({str(self.path)!r})"

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        mutex = self._mutex
        # Threads wait for the mutex and then for the lock: the time-out covers both.
        since = time.monotonic() if mutex.locked() else None
        with mutex:
            try:
                table = self._locked(since)
                now = self._now()
                if not 0 <= now - self._checked < RECHECK:
                    table, now = self._rechecked(table, since)
                if len(charges) == 1:
                    decision = table.acquire_one(charges[0], now, place)
                    if decision is not None:
                        return decision
                slots, states = zip(*[table.load(charge, now) for charge in charges], strict=True)
                decision, new = acquire(charges, states, now, place)
                if new is not None:
                    taken = {slot.offset for slot in slots if slot}
                    for charge, known, state in zip(charges, slots, new, strict=True):
                        slot = known or table.make_room(charge, now, taken)
                        taken.add(slot.offset)
                        table.save(charge, slot, state)
                return decision  # noqa: TRY300 - an else clause would say the same in more lines
            except OSError as error:
                if error.errno is None:
                    raise  # not the system's: a TimeoutError that a signal handler raised, say
                raise self._failure(error) from error
            finally:
                try:
                    self._unlock()
                except BaseException:
                    # A signal handler raised on the way to the unlock, and nobody else would let go of the lock.
                    self._unlock()
                    raise

    def read(self, charges: Sequence[Charge]) -> tuple[int, list[State]]:
        with self._entered() as (table, now):
            return now, [table.load(charge, now, keep=False)[1] for charge in charges]

    def survey(self, bucket: Bucket) -> tuple[int, list[State]]:
        with self._entered() as (table, now):
            name = hash_name(table.salt(now), bucket.name)
            return now, [state for slot, state in table.records(now) if slot.name[:8] == name]

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        with self._entered() as (table, now):
            if key is None:
                name = hash_name(table.salt(now), bucket.name)
                slots = [slot for slot, _ in table.records(now) if slot.name[:8] == name]
            else:
                places = [table.load(charge, now, keep=False)[0] for charge in bucket.draw(key)]
                slots = [slot for slot in places if slot]
            for slot in slots:
                table.free(slot)
            # Full, too, where damage makes those without a record start empty.
            for charge in bucket.draw(key):
                known, state = table.load(charge, now)
                if state.full_at > now:
                    table.save(charge, known or table.make_room(charge, now, ()), fit(None, charge.limit, now))
            return len(slots)

    # -- under the lock

    @contextmanager
    def _entered(self) -> Iterator[tuple[Table, int]]:
        since = time.monotonic() if self._mutex.locked() else None
        with self._mutex:
            try:
                yield self._rechecked(self._locked(since), since)
            except OSError as error:
                if error.errno is None:
                    raise  # not the system's: a TimeoutError that a signal handler raised, say
                raise self._failure(error) from error
            finally:
                try:
                    self._unlock()
                except BaseException:
                    # A signal handler raised on the way to the unlock, and nobody else would let go of the lock.
                    self._unlock()
                    raise

    def _locked(self, since: float | None) -> Table:
        """The table that this process has open, locked."""
        table = self._table or self._open()
        if not lock_descriptor(table.fd, blocking=False):
            self._wait_for_lock(table.fd, since)
        return table

    def _rechecked(self, table: Table, since: float | None) -> tuple[Table, int]:
        """``table``, or the one of the file that the path names by now, locked; and the instant of the look."""
        while True:
            now = self._now()
            if self._is_current(table.fd):
                self._checked = now
                table.look_at_clocks(now)
                return table, now
            # First: a descriptor that cannot be closed, because nobody can tell whose it is, must not keep the lock.
            self._unlock()
            self._forget()
            table = self._locked(since)

    def _wait_for_lock(self, fd: int, since: float | None) -> None:
        """Wait for a lock that somebody holds, by short sleeps: no signal, no thread, and greenlets go on.

        Raises:
            StoreTimeoutError: it stayed held for ``lock_timeout`` seconds.
        """
        started = time.monotonic()
        deadline = (since or started) + self.lock_timeout
        for _ in range(3):
            _yield()
            if lock_descriptor(fd, blocking=False):
                return
        pause = 0.0001
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                message = (
                    f"state file {self.path} was locked by others for {self.lock_timeout:g} s; end the process that"
                    " holds it if it is stopped, or raise the setting lock_timeout (TB_CELERY_LOCK_TIMEOUT)"
                )
                raise StoreTimeoutError(message)
            time.sleep(min(pause, left))
            if lock_descriptor(fd, blocking=False):
                return
            if time.monotonic() - started > BRIEF:
                pause = min(pause * 1.5, 0.002)

    # -- the descriptor

    def _open(self) -> Table:
        if kind := network_file_system(self.path.parent):
            message = (
                f"state file {self.path} is on a network file system ({kind}), whose locks cannot be relied on; {PLACE}"
            )
            raise StoreError(message)
        try:
            fd = os.open(self.path, _OPEN)
        except FileNotFoundError:
            known = self._file != (0, 0)
            if known:
                logger.warning("state file %s was removed while in use: its buckets start empty", self.path)
            create(self.path, self.clock, lost=known)
            fd = os.open(self.path, _OPEN)
        try:
            found = os.fstat(fd)
            self._refuse_unlockable(fd, found)
        except BaseException:
            os.close(fd)
            raise
        self._file = (found.st_dev, found.st_ino)
        self._table = Table(fd, self.path, self.clock)
        self._checked = -RECHECK
        return self._table

    def _refuse_unlockable(self, fd: int, found: os.stat_result) -> None:
        """Refuse what is no file, and a file system whose locks are granted to everyone."""
        if not stat.S_ISREG(found.st_mode):
            message = f"{self.path} is not a regular file; {PLACE}"
            raise StoreError(message)
        if not lock_descriptor(fd, blocking=False):
            return
        other = os.open(self.path, _OPEN)
        try:
            if os.path.samestat(os.fstat(fd), os.fstat(other)) and lock_descriptor(other, blocking=False):
                message = f"file locks do not exclude on the file system of {self.path}; {PLACE}"
                raise StoreError(message)
        finally:
            os.close(other)
            unlock_descriptor(fd)

    def _is_current(self, fd: int) -> bool:
        """Whether the path still names the file open at ``fd``, and ``fd`` is still what we opened."""
        try:
            named, held = self.path.lstat(), os.fstat(fd)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino) == self._file

    def _forget(self) -> None:
        """Let go of the descriptor, unless the process has since given its number to another file."""
        table, self._table = self._table, None
        if table is not None:
            with suppress(OSError):
                held = os.fstat(table.fd)
                if (held.st_dev, held.st_ino) == self._file:
                    os.close(table.fd)

    def _after_fork(self) -> None:
        # Never unlock here: the copied descriptor shares its lock with the parent's, which may be inside.
        self._forget()
        self._mutex = threading.Lock()

    def _unlock(self) -> None:
        """Also after a failure, and explicitly: a descriptor copied by a fork would keep the lock through a close."""
        if self._table is not None:
            try:
                unlock_descriptor(self._table.fd)
            except OSError:
                # Somebody closed every descriptor of the process, as programs do that become daemons.
                self._forget()

    def _failure(self, error: OSError) -> StoreError:
        if error.errno == errno.ELOOP:
            return StoreError(f"state file {self.path} is a symbolic link, which is refused; {PLACE}")
        if error.errno in _NO_LOCKS:
            return StoreError(f"the file system of {self.path} has no working file locks ({error.strerror}); {PLACE}")
        return StoreError(f"state file {self.path}: {error.strerror or error}; mend it, or {PLACE}")


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in _stores:
        store._after_fork()  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
