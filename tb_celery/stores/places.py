"""Where the record of a limit is in an open state file, and where there is room for one.

A search reads one block in each level, and what it has read serves for all that follows: where nothing was found, it
tells where there is room.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, NamedTuple

from tb_celery.bucket import LONGEST_PAUSE, SECOND
from tb_celery.stores import record
from tb_celery.stores.finding import Records
from tb_celery.stores.hosting import read_at
from tb_celery.stores.record import BLOCK, FREE, KEPT, SIZE, Header, is_sound

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from tb_celery.bucket import Name
    from tb_celery.clock import Clock

YEAR = 365 * 86400 * SECOND
"""Nanoseconds for which a record stays full before it is given to others although it was written with other numbers."""
SOUND = 1 << 21
"""Bytes of the file, those that are searched most often, of which a process remembers what it found sound."""
_BLOCK = SIZE * BLOCK
_HEAD = record.file_size(1)
"""Bytes of the header and the first level, which are read together: each read costs more than what it reads."""
_AT = range(0, _BLOCK, SIZE)
_EMPTY = FREE * BLOCK
_records = struct.Struct(f"{SIZE}s" * BLOCK).unpack


class Look(NamedTuple):
    """What a search has found.

    Attributes:
        header: of the file.
        sought: a bucket's name, a key and a number.
        name: what their record is known by.
        offset: where it is; 0 where there is none.
        raw: its bytes.
        blocks: where there is none, the offset and bytes of those that may hold it, from the last level to the first.
    """

    header: Header
    sought: Name
    name: bytes
    offset: int
    raw: bytes
    blocks: list[tuple[int, bytes]]


class Places(Records):
    """Finds records, and room for others; see :class:`~tb_celery.stores.upkeep.StateFile` for what it takes."""

    def __init__(self, fd: int, path: Path, clock: Clock) -> None:
        super().__init__(fd, path, clock)
        self._heading = b""
        self._headed: Header | None = None  # what that says
        self._sound: dict[int, bytes] = {}

    def _stands(self) -> bool:
        """Whether the header is the one that was noted, and the file as long as that says."""
        if self._headed is None or read_at(self.fd, SIZE, 0) != self._heading:
            return False
        return os.fstat(self.fd).st_size >= record.file_size(self._headed.levels)

    def _note(self, header: Header) -> None:
        """Take the header for this one as long as its bytes are the same."""
        self._headed = header
        self._heading = header.pack()

    def look(self, sought: Name, now: int) -> Look:
        """Search for the record of a bucket's name, a key and a number, and mend damage that it may be lost to."""
        head = read_at(self.fd, _HEAD, 0)
        header = self._headed
        if header is None or not head.startswith(self._heading):
            header = self._header(now)
            head = read_at(self.fd, _HEAD, 0)
        name = record.record_name(header.salt, *sought)
        blocks = []
        is_whole = True
        fd, sound = self.fd, self._sound
        # The last levels hold the most records: one that is there is found after two or three blocks.
        for start in reversed(record.block_offsets(name, header.levels)):
            block = read_at(fd, _BLOCK, start) if start >= _HEAD else head[start : start + _BLOCK]
            if name in block:
                at = block.find(name)
                if at % SIZE == 0 and is_sound(raw := block[at : at + SIZE]):
                    return Look(header, sought, name, start + at, raw, [])
            blocks.append((start, block))
            is_whole = is_whole and (block == sound.get(start, _EMPTY) or self._is_sound(start, block))
        if not is_whole:
            self._mend(blocks, header, now)
            return self.look(sought, now)
        return Look(header, sought, name, 0, b"", blocks)

    def _is_sound(self, start: int, block: bytes) -> bool:
        """Whether nothing in ``block`` is damaged; looks at what has changed since that was so."""
        if len(block) < _BLOCK:
            return False
        before = _records(self._sound.get(start, _EMPTY))
        for raw, known in zip(_records(block), before, strict=True):
            if raw != known and not is_sound(raw):
                return False
        if start < SOUND:
            self._sound[start] = block
        return True

    def _mend(self, blocks: list[tuple[int, bytes]], header: Header, now: int) -> None:
        """Have what is damaged in ``blocks`` known to be lost, and free."""
        if any(len(block) < _BLOCK for _, block in blocks):
            self._header(now)  # which notices that the file was cut short
            return
        for start, block in blocks:
            for at, raw in zip(_AT, _records(block), strict=True):
                if not is_sound(raw):
                    header = self._condemn(raw, start + at, header, now)

    def room(self, look: Look, now: int, taken: Collection[int]) -> tuple[int, bytes, bytes]:
        """Where a record can go that was searched for in vain, its name, and what is there until then.

        That is free, or of a bucket that is full, and none of those ``taken``; if there is none such, the file grows.
        """
        # In the last level first, where most are: the others are left for those who find no room there.
        for start, block in look.blocks:
            at = block.find(FREE)
            while at >= 0:
                if at % SIZE == 0 and start + at not in taken:
                    return start + at, look.name, FREE
                at = block.find(FREE, at + 1)
        for start, block in look.blocks:
            for at, raw in zip(_AT, _records(block), strict=True):
                if self._is_full(raw, now) and start + at not in taken:
                    return start + at, look.name, raw
        header = self._header(now)
        if (header.salt, header.levels) == (look.header.salt, len(look.blocks)):
            self._grow(header)
        return self.room(self.look(look.sought, now), now, taken)

    def _is_full(self, raw: bytes, now: int) -> bool:
        """Whether nothing is lost with ``raw``, which is sound."""
        _, clock, _, span, epoch, full_at, booked_at, _ = record.unpack(raw)
        due: int = full_at if full_at > booked_at else booked_at  # noqa: FURB136 - a call costs more
        if span & KEPT:
            due += YEAR
        if clock != self._clock:
            due += self._shift(epoch, clock)
            if record.is_order(raw):
                # Only the wall clock tells when it ends, which may be wrong after a reboot. But since then a clock has
                # run that begins at 0, and no pause is longer than this.
                due = max(due, LONGEST_PAUSE)
        return due <= now

    def _grow(self, header: Header) -> None:
        self._fill(record.file_size(header.levels), record.file_size(header.levels + 1))
        self._write(header._replace(levels=header.levels + 1).pack(), 0)
