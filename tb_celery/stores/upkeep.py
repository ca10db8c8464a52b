"""The state file as a whole: made, measured, and mended where it is damaged."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tb_celery.errors import StoreError
from tb_celery.stores import record
from tb_celery.stores.hosting import read_at, write_at
from tb_celery.stores.record import FREE, MAGIC, SIZE, Header, is_sound

if TYPE_CHECKING:
    from pathlib import Path

    from tb_celery.clock import Clock

logger = logging.getLogger("tb_celery")

_CHUNK = FREE * 4096
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class StateFile:
    """The file open at ``fd``. Every method runs under its lock, which is the caller's business.

    Args:
        fd: descriptor open for reading and writing.
        path: for messages, and for the file next to it that keeps damaged records.
        clock: tells the identity and wall time that go into records.
    """

    def __init__(self, fd: int, path: Path, clock: Clock) -> None:
        self.fd = fd
        self.path = path
        self.clock = clock
        self.epoch = self._least_epoch = 0
        found = os.fstat(fd)
        self.file = (found.st_dev, found.st_ino)
        self._clock = clock.identity
        self._cut = False
        self.mended = 0
        """How often the header was, so that the file has another salt and all its records are free."""

    def look_at_clocks(self, now: int) -> None:
        """Note the wall time at which the clock read 0; called often enough to follow the wall clock's steps.

        Nobody can read two clocks at once: it is at most ``epoch``, which goes into records, and at least what is
        counted with when others' are read. So what is carried over is never too early.
        """
        wall = self.clock.wall()
        self.epoch = wall - now
        self._least_epoch = wall - self.clock.now()

    def _shift(self, epoch: int, clock: int) -> int:
        """Nanoseconds from the record's clock to ours: after a reboot only the wall clock knows."""
        return 0 if clock == self._clock else epoch - self._least_epoch

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
            if raw[: len(MAGIC)] != MAGIC[: len(raw)] and not self._is_cut_off(raw):
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
            self.mended += 1
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

    def _is_cut_off(self, raw: bytes) -> bool:
        """Whether the file was cut off within the header ``raw`` while somebody was about to write behind that.

        So there are zeros in between, and the first bytes behind them are a sound record's.
        """
        if not MAGIC.startswith(raw.rstrip(b"\0")):
            return False
        start = SIZE
        while piece := read_at(self.fd, len(_CHUNK), start):
            zeros = len(piece) - len(piece.lstrip(b"\0"))
            if zeros < len(piece):
                at = zeros - zeros % SIZE
                return is_sound(piece[at : at + SIZE])
            start += len(piece)
        return False

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
