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
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tb_celery.arithmetic import State, fit
from tb_celery.bucket import LONGEST_SPAN, SECOND
from tb_celery.errors import StoreError
from tb_celery.stores import record
from tb_celery.stores.hosting import read_at, write_at
from tb_celery.stores.record import BLOCK, FREE, KEPT, MAGIC, OWN, SIZE, Header, Slot, is_sound

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from tb_celery.bucket import Charge
    from tb_celery.clock import Clock

logger = logging.getLogger("tb_celery")

REMEMBERED = 1 << 16
"""Limits whose slot a process remembers."""
REPEATED = 1 << 14
"""Asks that a process keeps worked out."""
LONGEST_KEY = 256
"""Characters of a key that is worth remembering."""
PIECE = SIZE * 1024
"""Bytes that are surveyed before the lock is let go for a while."""
YEAR = 365 * 86400 * SECOND
"""Nanoseconds for which a record stays full before it is given to others although it was written with other numbers."""
_CHUNK = FREE * 4096
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class Repeated(NamedTuple):
    """An ask for one limit that was made before, and may be again."""

    slot: Slot
    charge: Charge
    cost: int
    span: int
    charges: Sequence[Charge]
    """What was asked for, kept alive so that nothing else gets its ``id``."""


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
        self.epoch = 0
        self.repeated: dict[int, Repeated] = {}
        found = os.fstat(fd)
        self.file = (found.st_dev, found.st_ino)
        self.is_new = True
        self._clock = clock.identity
        self._slots: dict[tuple[str, str | None, int], Slot] = {}
        self._changed: set[str] = set()
        self._cut = False

    def look_at_clocks(self, now: int) -> None:
        """Note the wall time at which the clock read 0; called often enough to follow the wall clock's steps."""
        self.epoch = self.clock.wall() - now

    def recognize(self, now: int, known: tuple[object, ...] | None, until: int) -> tuple[object, ...]:
        """What the file is known by; if another was at its path ``until`` some instant, what that held is lost.

        What such a file holds is of no worth either: it may be an older copy. So everything starts empty, unless that
        was noted since: by whoever made the file and knew the other one, or noticed before.
        """
        header = self._header(now)
        lost_at = header.lost_at and header.lost_at + self._shift(header.epoch, header.clock)
        if known not in {None, (*self.file, header.salt)} and (not lost_at or lost_at < until):
            logger.warning("state file %s was replaced while in use: its buckets start empty", self.path)
            self._fill(SIZE, record.file_size(header.levels))
            header = self._mark_lost(header._replace(salt=secrets.token_bytes(16)), now)
        self.is_new = False
        return (*self.file, header.salt)

    def repeat(self, charges: Sequence[Charge], slot: Slot) -> None:
        """Remember an ask for one limit by the object that it came as, if that can never change."""
        known = self.repeated.get(id(charges))
        charge = charges[0]
        if (known is None or known.slot is not slot) and type(charges) is tuple and _is_short(charge.key):
            _drop_oldest(self.repeated, REPEATED)
            self.repeated[id(charges)] = Repeated(slot, charge, charge.cost, charge.limit.span, charges)

    def load(self, charge: Charge, now: int, *, keep: bool = True) -> tuple[Slot | None, State]:
        """The slot of ``charge``'s limit, ``None`` where it has no record, and where it stands at ``now``.

        Args:
            charge: whose limit.
            now: the instant of the look.
            keep: whether to write a state that is seen otherwise than it was written: a new rate, or a clock that was
                set back, counts from the first look.
        """
        slot = self._slots.get(charge[:3])
        if slot is not None:
            raw = read_at(self.fd, SIZE, slot.offset)
            if raw.startswith(slot.name) and is_sound(raw):
                return self._state(charge, slot, raw, now, keep=keep)
        header = self._header(now)
        name = record.record_name(header.salt, *charge[:3])
        blocks = []
        # The last levels hold the most records: one that is there is found after two or three blocks.
        for start, block in self._blocks(reversed(range(header.levels)), name):
            blocks.append((start, block))
            at = block.find(name)
            raw = block[at : at + SIZE]
            if at >= 0 and at % SIZE == 0 and is_sound(raw):
                return self._state(charge, self._slot(charge, start + at, name, 0), raw, now, keep=keep)
        for start, block in blocks:
            for at in range(0, SIZE * BLOCK, SIZE):
                raw = block[at : at + SIZE]
                if raw != FREE and not is_sound(raw):
                    header = self._condemn(raw, start + at, header, now)
        if keep and header.lost_at + self._shift(header.epoch, header.clock) > now:
            header = self._mark_lost(header, now)  # the clock was set back: empty once, not at every look
        return None, self._unseen(charge, header, now)

    def make_room(self, charge: Charge, now: int, taken: Collection[int]) -> Slot:
        """A slot for a limit that has no record: free, or of a bucket that is full, but none of those ``taken``."""
        header = self._header(now)
        name = record.record_name(header.salt, *charge[:3])
        for start, block in self._blocks(range(header.levels), name):
            for at in range(0, SIZE * BLOCK, SIZE):
                raw = block[at : at + SIZE]
                if start + at not in taken and (raw == FREE or self._is_full(raw, now)):
                    return self._slot(charge, start + at, name, 0)
        return self._slot(charge, self._grow(header, name), name, 0)

    def save(self, charge: Charge, slot: Slot, state: State) -> None:
        """Write ``state`` into ``slot``.

        Raises:
            OSError: the disk is full, read-only or broken; the old record stands.
        """
        slot = self._slot(charge, slot.offset, slot.name, slot.kept)
        self._write(slot.record(self.epoch, state.full_at, state.booked_at), slot.offset)

    def records(self, bucket: str, start: int, now: int) -> tuple[list[tuple[int, State]], int]:
        """The records of ``bucket`` in the piece of the file that begins at ``start``, or at 0 for the first.

        Returns:
            Their offsets and where they stand at ``now``, and where the next piece begins: 0 if this was the last.
        """
        header = self._header(now)
        name = record.bucket_name(header.salt, bucket)
        start, end = start or SIZE, record.file_size(header.levels)
        raw = read_at(self.fd, min(PIECE, end - start), start)
        found = []
        for at in range(0, len(raw), SIZE):
            if raw.startswith(name, at + OWN) and is_sound(one := raw[at : at + SIZE]):
                _, clock, interval, span, epoch, full_at, booked_at, _ = record.unpack(one)
                shift = self._shift(epoch, clock)
                found.append((start + at, State(full_at + shift, booked_at + shift, interval, span & ~KEPT)))
        return found, start + PIECE if start + PIECE < end else 0

    def free(self, offset: int) -> None:
        """Forget one record."""
        self._write(FREE, offset)

    # -- finding

    def _slot(self, charge: Charge, offset: int, name: bytes, kept: int) -> Slot:
        """The slot of ``charge``'s limit, remembered."""
        slot = self._slots.get(charge[:3])
        known = slot and (slot.offset, slot.name, slot.limit, slot.kept)
        if slot is None or known != (offset, name, charge.limit, kept):
            slot = Slot(offset, name, charge.limit, self._clock, kept)
            if _is_short(charge.key):
                _drop_oldest(self._slots, REMEMBERED)
                self._slots[charge[:3]] = slot
        return slot

    def _blocks(self, levels: Iterable[int], name: bytes) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of the blocks that may hold the record known by ``name``, one in each of ``levels``."""
        for level in levels:
            start = record.block_offset(name, level)
            yield start, read_at(self.fd, SIZE * BLOCK, start)

    def _is_full(self, raw: bytes, now: int) -> bool:
        """Whether nothing is lost with the record ``raw``."""
        _, clock, _, span, epoch, full_at, booked_at, _ = record.unpack(raw)
        due: int = max(full_at, booked_at) + self._shift(epoch, clock) + (YEAR if span & KEPT else 0)
        return due <= now

    def _unseen(self, charge: Charge, header: Header, now: int) -> State:
        """Full, unless its record may be among those that were lost: then it was empty, at worst, when they were."""
        state = fit(None, charge.limit, now)
        if header.lost_at:
            lost_at = header.lost_at + self._shift(header.epoch, header.clock)
            full_at = min(lost_at, now) + charge.limit.span
            if full_at > now:
                state = state._replace(full_at=full_at, booked_at=full_at)
        return state

    def _state(self, charge: Charge, slot: Slot, raw: bytes, now: int, *, keep: bool) -> tuple[Slot, State]:
        """The slot, and the state in its sound record on this process's clock and as its limit sees it."""
        _, clock, interval, span, epoch, full_at, booked_at, _ = record.unpack(raw)
        limit = charge.limit
        kept, span = span & KEPT, span & ~KEPT
        if interval > 0 and 0 < span <= LONGEST_SPAN:
            shift = self._shift(epoch, clock)
            state = fit(State(full_at + shift, booked_at + shift, interval, span), limit, now)
        else:
            # Sound to its check word and still impossible: written by something else, so empty.
            state = State(now + limit.span, now + limit.span, limit.interval, limit.span)
        if (interval, span) != (limit.interval, limit.span):
            kept = KEPT
        if (interval, span) != (limit.interval, limit.span) and charge.bucket not in self._changed:
            self._changed.add(charge.bucket)
            logger.warning(
                "bucket %r was last used with other numbers than those declared here; declare the same everywhere",
                charge.bucket,
            )
        slot = self._slot(charge, slot.offset, slot.name, kept)
        if keep and (clock != self._clock or state != (full_at, booked_at, interval, span)):
            self.save(charge, slot, state)
        return slot, state

    def _shift(self, epoch: int, clock: int) -> int:
        """Nanoseconds from the record's clock to ours: after a reboot only the wall clock knows."""
        return 0 if clock == self._clock else epoch - self.epoch

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
        found = os.fstat(self.fd)
        if (found.st_dev, found.st_ino) != self.file:
            # Closed behind our back, and its number given to another file: not a byte of that is ours to mend.
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(self.path))
        size = found.st_size
        if header is None:
            if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
                message = (
                    f"{self.path} is not a state file; move it away, or name another path in the setting state_file"
                    " (TB_CELERY_STATE_FILE)"
                )
                raise StoreError(message)
            if is_sound(raw):
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
        cut = size < record.file_size(header.levels)
        if cut:
            # Told once: on a full disk everybody who comes finds it cut again.
            header = self._mark_lost(header, now) if self._cut else self._lose(b"", size, header, now)
        self._cut = cut
        if cut:
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
        header = header._replace(lost_at=max(now, 1), epoch=self.epoch, clock=self._clock)
        self._write(header.pack(), 0)
        return header

    def _write(self, raw: bytes, offset: int) -> None:
        if write_at(self.fd, raw, offset) != len(raw):
            raise no_room(self.path)


def _is_short(key: str | None) -> bool:
    return key is None or len(key) <= LONGEST_KEY


def _drop_oldest(remembered: dict[Any, Any], most: int) -> None:
    """Make room where ``most`` are remembered: for several at once, as looking for the first takes time."""
    if len(remembered) >= most:
        for name in [*islice(remembered, 1 + most // 64)]:
            del remembered[name]


def no_room(path: Path) -> OSError:
    """What a write that came short means, as the system would say it."""
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
            raise no_room(path)
        # The only fsync: after a power cut the file is old or absent, never half made.
        os.fsync(fd)
        try:
            os.link(new, path)
        except FileExistsError:
            return
    finally:
        os.close(fd)
        new.unlink(missing_ok=True)
