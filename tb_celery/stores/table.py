"""Records found by hash in one open state file.

Every method runs under the file's lock, which is the caller's business. The file grows by appending levels, each with
twice as many blocks as the one before; nothing is moved, renamed or unlinked. Records of full buckets go to others.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tb_celery.bucket import LONGEST_SPAN, State, acquire_one, fit
from tb_celery.errors import StoreError
from tb_celery.stores import record
from tb_celery.stores.hosting import read_at, write_at
from tb_celery.stores.record import BLOCK, FREE, MAGIC, SIZE, SOUND, Header, crc

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from tb_celery.bucket import Charge, Decision, Place
    from tb_celery.clock import Clock

logger = logging.getLogger("tb_celery")

REMEMBERED = 1 << 16
"""Limits whose slot a process remembers."""
_CHUNK = FREE * 4096
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Slot(NamedTuple):
    """Where a limit's record lies, and what it is known by."""

    offset: int
    name: bytes


class Table:
    """The records in the file open at ``fd``.

    Args:
        fd: descriptor open for reading and writing.
        path: for messages, and for the file next to it that keeps damaged records.
        clock: tells the identity and wall time that go into records.
    """

    def __init__(self, fd: int, path: Path, clock: Clock) -> None:
        self.fd = fd
        self.path = path
        self.clock = clock
        self._clock = clock.identity
        self._slots: dict[tuple[str, str | None, int], Slot] = {}
        self._changed: set[str] = set()
        self._epoch = 0

    def look_at_clocks(self, now: int) -> None:
        """Note the wall time at which the clock read 0; called often enough to follow the wall clock's steps."""
        self._epoch = self.clock.wall() - now

    def acquire_one(self, charge: Charge, now: int, place: Place | None) -> Decision | None:
        """A decision on one limit, where that is simple; ``None`` where it is not.

        It is simple for plain callers, and for others when nobody waits and the tokens are there; and if the record is
        sound, at its known place, and written with the same numbers on the same clock.
        """
        slot = self._slots.get(charge[:3])
        if slot is None:
            return None
        offset, name = slot
        raw = read_at(self.fd, SIZE, offset)
        if crc(raw) != SOUND or len(raw) != SIZE:
            return None
        found, full_at, booked_at, interval, span, _, clock, _ = record.unpack(raw)
        limit = charge[3]
        if (
            found != name
            or clock != self._clock
            or interval != limit.interval
            or span != limit.span
            or full_at - span > now
            or (place is not None and booked_at > full_at and booked_at > now)
        ):
            return None
        decision, full_at, booked_at = acquire_one(charge, full_at, booked_at, now)
        if decision.allowed:
            body = record.pack_body(name, full_at, booked_at, interval, span, self._epoch, clock)
            if write_at(self.fd, body + record.pack_check(crc(body)), offset) != SIZE:
                raise _no_room(self.path)
        elif place is not None:
            return None
        return decision

    def load(self, charge: Charge, now: int, *, keep: bool = True) -> tuple[Slot | None, State]:
        """The slot of ``charge``'s limit, ``None`` where it has no record, and where it stands at ``now``.

        Args:
            charge: whose limit.
            now: the instant of the look.
            keep: whether to write a state that is seen otherwise than it was written: a new rate, or a clock that was
                set back, counts from the first look.
        """
        slot = self._slots.get(charge[:3])
        raw = b"" if slot is None else read_at(self.fd, SIZE, slot.offset)
        if slot is not None and len(raw) == SIZE and crc(raw) == SOUND and raw.startswith(slot.name):
            return slot, self._state(charge, slot, raw, now, keep=keep)
        header = self._header(now)
        name = record.identity(header.salt, *charge[:3])
        for offset, found in self._candidates(header, name):
            if crc(found) != SOUND:
                header = self._condemn(found, offset, header, now)
            elif found.startswith(name):
                return Slot(offset, name), self._state(charge, Slot(offset, name), found, now, keep=keep)
        if keep and header.lost_at + self._shift(header.epoch, header.clock) > now:
            header = self._mark_lost(header, now)  # the clock was set back: empty once, not at every look
        return None, self._unseen(charge, header, now)

    def make_room(self, charge: Charge, now: int, taken: Collection[int]) -> Slot:
        """A slot for a limit that has no record: free, or of a bucket that is full, but none of those ``taken``."""
        header = self._header(now)
        name = record.identity(header.salt, *charge[:3])
        for offset, raw in self._candidates(header, name):
            _, full_at, booked_at, _, _, epoch, clock, _ = record.unpack(raw)
            due = now - self._shift(epoch, clock)
            if offset not in taken and (raw == FREE or (full_at <= due and booked_at <= due)):
                return Slot(offset, name)
        return Slot(self._grow(header, name), name)

    def save(self, charge: Charge, slot: Slot, state: State) -> None:
        """Write ``state`` into ``slot``.

        Raises:
            OSError: the disk is full, read-only or broken; the old record stands.
        """
        body = record.pack_body(slot.name, *state, self._epoch, self._clock)
        self._write(record.sealed(body), slot.offset)
        if charge[:3] not in self._slots:
            if len(self._slots) >= REMEMBERED:
                self._slots.clear()
            self._slots[charge[:3]] = slot

    def records(self, now: int) -> Iterator[tuple[Slot, State]]:
        """Every record in use, as it stands at ``now``."""
        header = self._header(now)
        for level in range(header.levels):
            end = record.file_size(level + 1)
            for start in range(record.file_size(level), end, len(_CHUNK)):
                raw = read_at(self.fd, min(len(_CHUNK), end - start), start)
                for at in range(0, len(raw), SIZE):
                    one = raw[at : at + SIZE]
                    if one != FREE and crc(one) == SOUND:
                        name, full_at, booked_at, interval, span, epoch, clock, _ = record.unpack(one)
                        shift = self._shift(epoch, clock)
                        yield Slot(start + at, name), State(full_at + shift, booked_at + shift, interval, span)

    def salt(self, now: int) -> bytes:
        """What this file's names are hashed with."""
        return self._header(now).salt

    def free(self, slot: Slot) -> None:
        """Forget one record."""
        self._write(FREE, slot.offset)

    # -- finding

    def _candidates(self, header: Header, name: bytes) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of every record that may be the one known by ``name``."""
        for level in range(header.levels):
            start = record.block_offset(name, level)
            block = read_at(self.fd, SIZE * BLOCK, start)
            for at in range(0, SIZE * BLOCK, SIZE):
                yield start + at, block[at : at + SIZE]

    def _unseen(self, charge: Charge, header: Header, now: int) -> State:
        """Full, unless its record may be among those that were lost: then it was empty, at worst, when they were."""
        state = fit(None, charge.limit, now)
        if header.lost_at:
            lost_at = header.lost_at + self._shift(header.epoch, header.clock)
            full_at = min(lost_at, now) + charge.limit.span
            if full_at > now:
                state = state._replace(full_at=full_at, booked_at=full_at)
        return state

    def _state(self, charge: Charge, slot: Slot, raw: bytes, now: int, *, keep: bool) -> State:
        """The state in a sound record, on this process's clock and as its limit sees it."""
        _, full_at, booked_at, interval, span, epoch, clock, _ = record.unpack(raw)
        limit = charge.limit
        if interval > 0 and 0 < span <= LONGEST_SPAN:
            shift = self._shift(epoch, clock)
            state = fit(State(full_at + shift, booked_at + shift, interval, span), limit, now)
        else:
            # Sound to its check word and still impossible: written by something else, so empty.
            state = State(now + limit.span, now + limit.span, limit.interval, limit.span)
        if (interval, span) != (limit.interval, limit.span) and charge.bucket not in self._changed:
            self._changed.add(charge.bucket)
            logger.warning(
                "bucket %r was last used with other numbers than those declared here; declare the same everywhere",
                charge.bucket,
            )
        if keep and (clock != self._clock or state != (full_at, booked_at, interval, span)):
            self.save(charge, slot, state)
        return state

    def _shift(self, epoch: int, clock: int) -> int:
        """Nanoseconds from the record's clock to ours: after a reboot only the wall clock knows."""
        return 0 if clock == self._clock else epoch - self._epoch

    # -- growing, and what goes wrong

    def _grow(self, header: Header, name: bytes) -> int:
        self._fill(record.file_size(header.levels), record.file_size(header.levels + 1))
        self._write(header._replace(levels=header.levels + 1).pack(), 0)
        return record.block_offset(name, header.levels)

    def _fill(self, start: int, end: int) -> None:
        """Write free records from ``start`` to ``end``: real blocks, so that later decisions find room on the disk."""
        while start < end:
            self._write(_CHUNK[: min(len(_CHUNK), end - start)], start)
            start += len(_CHUNK)

    def _header(self, now: int) -> Header:
        """The header, of a file that is as long as it says."""
        raw = read_at(self.fd, SIZE, 0)
        header = Header.unpack(raw)
        size = os.fstat(self.fd).st_size
        if header is None:
            if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
                message = (
                    f"{self.path} is not a state file; move it away, or name another path in the setting state_file"
                    " (TB_CELERY_STATE_FILE)"
                )
                raise StoreError(message)
            if len(raw) == SIZE and crc(raw) == SOUND:
                message = (
                    f"state file {self.path} was written by a newer version; update tb-celery, or name another path in"
                    " the setting state_file (TB_CELERY_STATE_FILE)"
                )
                raise StoreError(message)
            levels = 1
            while record.file_size(levels + 1) <= size:
                levels += 1
            # Under another salt nobody finds these records, and nobody may go on with one whose place it remembers.
            self._fill(SIZE, record.file_size(levels))
            return self._lose(raw, 0, Header(secrets.token_bytes(16), levels), now)
        if size < record.file_size(header.levels):
            header = self._lose(b"", size, header, now)
            self._fill(size - (size - SIZE) % SIZE if size > SIZE else SIZE, record.file_size(header.levels))
        return header

    def _condemn(self, raw: bytes, offset: int, header: Header, now: int) -> Header:
        header = self._lose(raw, offset, header, now)
        self._write(FREE, offset)
        return header

    def _lose(self, raw: bytes, offset: int, header: Header, now: int) -> Header:
        """Keep what is left of damaged bytes, and count every limit without a record as empty from now on."""
        if (header.lost_at, header.clock) != (max(now, 1), self._clock):
            logger.warning(
                "state file %s is damaged at byte %d: buckets without a sound record start empty; what was there is in"
                " %s.damaged",
                self.path,
                offset,
                self.path,
            )
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {offset} {raw.hex()}\n"
        # It is kept where that can be done, but no decision hangs on it, nor on a link or pipe that somebody planted.
        with suppress(OSError):
            fd = os.open(f"{self.path}.damaged", _APPEND, 0o660)
            try:
                os.write(fd, line.encode("ascii"))
            finally:
                os.close(fd)
        return self._mark_lost(header, now)

    def _mark_lost(self, header: Header, now: int) -> Header:
        # Not at 0, which means never.
        header = header._replace(lost_at=max(now, 1), epoch=self._epoch, clock=self._clock)
        self._write(header.pack(), 0)
        return header

    def _write(self, raw: bytes, offset: int) -> None:
        if write_at(self.fd, raw, offset) != len(raw):
            raise _no_room(self.path)


def _no_room(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def create(path: Path, clock: Clock, *, lost: bool) -> None:
    """Make a whole state file appear at ``path`` at once, unless somebody else was faster.

    Args:
        path: where; its directory is made if need be.
        clock: the clock of the records.
        lost: whether there was one before, so that its buckets must start empty.

    Raises:
        OSError: the directory or the file cannot be written.
    """
    path.parent.mkdir(mode=0o770, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.new")
    fd = os.open(
        new, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o660
    )
    try:
        if hasattr(os, "fchmod"):
            # Members of the directory's group share the file whatever their umask: the directory says who may come in.
            os.fchmod(fd, 0o660)
        header = Header(secrets.token_bytes(16), 1)
        if lost:
            now = clock.now()
            header = header._replace(lost_at=max(now, 1), epoch=clock.wall() - now, clock=clock.identity)
        whole = header.pack() + FREE * (record.file_size(1) // SIZE - 1)
        if write_at(fd, whole, 0) != len(whole):
            raise _no_room(path)
        # The only fsync: after a power cut the file is old or absent, never half made.
        os.fsync(fd)
        try:
            os.link(new, path)
        except FileExistsError:
            return
    finally:
        os.close(fd)
        new.unlink(missing_ok=True)
