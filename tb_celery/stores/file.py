"""State in one local file behind an OS file lock, shared by every process of the host.

A decision is lock, read, step, write, unlock on a descriptor that is opened once per process. Records sit at fixed
places and are written with one ``pwrite``, so a process killed at any instruction leaves the old record or the new one.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import lock_descriptor, unlock_descriptor

from tb_celery.arithmetic import Decision, acquire, fit
from tb_celery.clock import Clock, SystemClock
from tb_celery.errors import StoreError, StoreTimeoutError
from tb_celery.stores.hosting import network_file_system, read_at, write_at
from tb_celery.stores.record import SIZE, WORD, pack_record
from tb_celery.stores.table import Table, create, no_room

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tb_celery.arithmetic import Place, State
    from tb_celery.bucket import Bucket, Charge

logger = logging.getLogger("tb_celery")

RECHECK = 10_000_000
"""Nanoseconds after which a process looks whether its path still names the file that it holds open."""
PAUSE = 0.0005
"""Seconds for which a survey lets others have the lock, after each piece of the file."""
BRIEF = 0.005
"""Seconds for which a wait for the lock polls at its shortest: the lock is held for microseconds, mostly."""
PLACE = "name another path in the setting state_file (TB_CELERY_STATE_FILE)"
_OPEN = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_yield = getattr(os, "sched_yield", lambda: time.sleep(0))
_new = object.__new__


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
        self._known: tuple[object, ...] | None = None
        self._seen = self._look_again = 0
        # One thread at a time: whoever takes the baton out. Taking it and putting it back are single instructions that
        # no signal handler comes between, as with a lock in a ``with``, which would be a tenth of a decision's cost.
        self._baton: dict[int, None] = {0: None}
        self._wanted = 0.0
        _stores.add(self)

    def __del__(self) -> None:
        # Not every store is made once and kept: nobody else lets go of the descriptor.
        if hasattr(self, "_table"):
            self._forget()

    def __repr__(self) -> str:
        return f"FileStore({str(self.path)!r})"

    def acquire(  # noqa: C901, PLR0912, PLR0915 - every call that would make it shorter makes it slower
        self, charges: Sequence[Charge], place: Place | None = None
    ) -> Decision:
        baton = self._baton
        try:
            del baton[0]
            pauses = None
        except KeyError:
            pauses = self._wait_for_baton(baton)
        try:
            table = self._table or self._open()
            fd = table.fd
            if not lock_descriptor(fd, blocking=False):
                self._wait_for_lock(fd, pauses)
            now = self._now()
            if now >= self._look_again:
                table, now = self._rechecked(table, pauses)
                fd = table.fd
            # The short way, written out in one piece because every call costs: an ask that was made before, of one
            # limit, whose record is what this process saw last or is sound and written with the same numbers on the
            # same clock. What follows is acquire() for tokens that are there and a line that is empty, or that the
            # asker is no part of.
            repeated = table.repeated.get(id(charges))
            if repeated is not None:
                slot, charge, cost, span, _ = repeated
                raw = read_at(fd, SIZE, slot.offset)
                if raw == slot.seen or slot.recognizes(raw):
                    full_at = slot.full_at
                    booked_at = slot.booked_at
                    filled = (full_at if full_at > now else now) + cost  # noqa: FURB136 - a call costs more
                    at = filled - span
                    if at <= now and (place is None or not (place.ahead or full_at < booked_at > now)):
                        if booked_at < filled:  # noqa: PLR1730 - a call costs more
                            booked_at = filled
                        epoch = table.epoch
                        check = (slot.missing - epoch - filled - booked_at) & WORD
                        raw = pack_record(slot.mark, epoch, filled, booked_at, check)
                        if write_at(fd, raw, slot.offset) != SIZE:
                            raise no_room(self.path)
                        slot.full_at = filled
                        slot.booked_at = booked_at
                        slot.seen = raw
                        decision = _new(Decision)
                        decision.now = decision.at = now
                        decision.booked = False
                        decision._charge = charge  # noqa: SLF001 - its constructor takes longer than the rest
                        decision._full_at = filled  # noqa: SLF001
                        return decision
                    if place is None and now < at and full_at - span <= now:
                        return Decision(now, at, charge, full_at)
            return self._decide(table, charges, now, place)
        except OSError as error:
            if error.errno is None:
                raise  # not the system's: a TimeoutError that a signal handler raised, say
            raise self._failure(error) from error
        finally:
            try:
                if self._table is not None:
                    unlock_descriptor(self._table.fd)
            except BaseException as error:
                # Closed behind our back, or a signal handler raised on the way, and nobody else would let go of it.
                self._unlock()
                if not isinstance(error, OSError) or error.errno is None:
                    raise
            finally:
                baton[0] = None
                if self._wanted:
                    self._give_way()

    def read(self, charges: Sequence[Charge]) -> tuple[int, list[State]]:
        with self._entered() as (table, now):
            return now, [table.load(charge, now, keep=False)[1] for charge in charges]

    def survey(self, bucket: Bucket) -> tuple[int, list[State]]:
        now, states = 0, []
        for _, now, found in self._pieces(bucket):  # noqa: B007 - the last is the answer's
            states += [state for _, state in found]
        return now, states

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        count = 0
        if key is None:
            for table, _, found in self._pieces(bucket):
                for offset, _ in found:
                    table.free(offset)
                count += len(found)
        with self._entered() as (table, now):
            # Full, too, where damage makes those without a record start empty.
            for charge in bucket.draw(key):
                slot, state = table.load(charge, now)
                if slot:
                    table.free(slot.offset)
                    count += 1
                    slot, state = table.load(charge, now)
                if state.full_at > now:
                    table.save(charge, slot or table.make_room(charge, now, ()), fit(None, charge.limit, now))
        return count

    # -- under the lock

    def _decide(self, table: Table, charges: Sequence[Charge], now: int, place: Place | None) -> Decision:
        """A decision as :func:`~tb_celery.arithmetic.acquire` makes it."""
        slots, states = zip(*[table.load(charge, now) for charge in charges], strict=True)
        decision, new = acquire(charges, states, now, place)
        if new is not None:
            taken = {slot.offset for slot in slots if slot}
            for charge, known, state in zip(charges, slots, new, strict=True):
                slot = known or table.make_room(charge, now, taken)
                taken.add(slot.offset)
                table.save(charge, slot, state)
        if len(charges) == 1 and slots[0]:
            table.repeat(charges, slots[0])
        return decision

    def _pieces(self, bucket: Bucket) -> Iterator[tuple[Table, int, list[tuple[int, State]]]]:
        """The records of ``bucket``, a piece of the file at a time, locked; in between others have the lock."""
        start = 0
        while True:
            with self._entered() as (table, now):
                found, start = table.records(bucket.name, start, now)
                yield table, now, found
            if not start:
                return
            time.sleep(PAUSE)

    @contextmanager
    def _entered(self) -> Iterator[tuple[Table, int]]:
        baton = self._baton
        try:
            del baton[0]
            pauses = None
        except KeyError:
            pauses = self._wait_for_baton(baton)
        try:
            yield self._rechecked(self._locked(pauses), pauses)
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
            finally:
                baton[0] = None
                if self._wanted:
                    self._give_way()

    def _locked(self, pauses: Iterator[float] | None) -> Table:
        """The table that this process has open, locked."""
        table = self._table or self._open()
        if not lock_descriptor(table.fd, blocking=False):
            self._wait_for_lock(table.fd, pauses)
        return table

    def _rechecked(self, table: Table, pauses: Iterator[float] | None) -> tuple[Table, int]:
        """``table``, or the one of the file that the path names by now, locked; and the instant of the look."""
        while True:
            now = self._now()
            if self._is_current(table.fd):
                table.look_at_clocks(now)
                if table.is_new:
                    self._known = table.recognize(now, self._known, self._seen)
                self._seen = now
                self._look_again = now + RECHECK
                return table, now
            # First: a descriptor that cannot be closed, because nobody can tell whose it is, must not keep the lock.
            self._unlock()
            self._forget()
            table = self._locked(pauses)

    def _wait_for_lock(self, fd: int, pauses: Iterator[float] | None) -> None:
        for pause in pauses or self._pauses():
            _rest(pause)
            if lock_descriptor(fd, blocking=False):
                return

    def _wait_for_baton(self, baton: dict[int, None]) -> Iterator[float]:
        """Take it when the thread that is inside has put it back; the pauses that are left to wait for the lock."""
        pauses = self._pauses()
        while True:
            pause = next(pauses)
            self._wanted = max(self._wanted, pause)
            _rest(pause)
            try:
                del baton[0]
            except KeyError:
                continue
            return pauses

    def _give_way(self) -> None:
        """Sleep for longer than another thread does, which else would find the baton taken whenever it looks."""
        pause, self._wanted = self._wanted, 0.0
        time.sleep(2 * pause)

    def _pauses(self) -> Iterator[float]:
        """How long to wait between looks while others are inside: no signal, no thread, and greenlets go on.

        Raises:
            StoreTimeoutError: it has been ``lock_timeout`` seconds.
        """
        started = time.monotonic()
        yield from (0.0, 0.0, 0.0)
        pause = 0.0001
        while (left := started + self.lock_timeout - time.monotonic()) > 0:
            yield min(pause, left)
            if time.monotonic() - started > BRIEF:
                pause = min(pause * 1.5, 0.002)
        message = (
            f"state file {self.path} was locked by others for {self.lock_timeout:g} s; end the process that"
            " holds it if it is stopped, or raise the setting lock_timeout (TB_CELERY_LOCK_TIMEOUT)"
        )
        raise StoreTimeoutError(message)

    # -- the descriptor

    def _open(self) -> Table:
        if kind := network_file_system(self.path.parent):
            what = f"is on a network file system ({kind}), whose locks cannot be relied on"
            message = f"state file {self.path} {what}; {PLACE}"
            raise StoreError(message)
        try:
            fd = os.open(self.path, _OPEN)
        except FileNotFoundError:
            if self._known:
                logger.warning("state file %s was removed while in use: its buckets start empty", self.path)
            create(self.path, self.clock, lost=self._known is not None)
            fd = os.open(self.path, _OPEN)
        try:
            found = os.fstat(fd)
            self._refuse_unlockable(fd, found)
        except BaseException:
            os.close(fd)
            raise
        self._file = (found.st_dev, found.st_ino)
        self._table = Table(fd, self.path, self.clock)
        self._look_again = 0
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
        self._baton = {0: None}
        self._wanted = 0.0

    def _unlock(self) -> None:
        """Also after a failure, and explicitly: a descriptor copied by a fork would keep the lock through a close."""
        if self._table is not None:
            try:
                unlock_descriptor(self._table.fd)
            except OSError:
                # Somebody closed every descriptor of the process, as programs do that become daemons.
                self._forget()

    def _failure(self, error: OSError) -> StoreError:
        self._look_again = 0
        if error.errno == errno.ELOOP:
            return StoreError(f"state file {self.path} is a symbolic link, which is refused; {PLACE}")
        if error.errno in _NO_LOCKS:
            return StoreError(f"the file system of {self.path} has no working file locks ({error.strerror}); {PLACE}")
        return StoreError(f"state file {self.path}: {error.strerror or error}; mend it, or {PLACE}")


def _rest(pause: float) -> None:
    if pause:
        time.sleep(pause)
    else:
        _yield()


_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in _stores:
        store._after_fork()  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
