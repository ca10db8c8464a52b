"""The state file's bytes: a header, then records of 64 bytes, laid out as ``docs/state-file.md`` says.

Everything is little-endian. The last of the eight words of the header and of each record is chosen so that the words
add up to :data:`SUM`: that finds what damages a file as well as a CRC, for a third of its cost in Python.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tb_celery.bucket import Limit

MAGIC = b"TBCELERY"
VERSION = 1
SIZE = 64
BLOCK = 8
"""Records that are searched together."""
FIRST_LEVEL = 8
"""Blocks of level 0; each further level has twice as many."""
SUM = int.from_bytes(MAGIC, "little")
WORD = (1 << 64) - 1
"""Sums are taken modulo 2**64."""
KEPT = 1 << 62
"""Added to the span of a record that was written with several numbers: full by these, it may not be so by others."""
OWN = 8
"""Bytes of a name that are the record's own; those of its bucket are behind them."""

_HEADER = struct.Struct("<8sII16sqqq")
_MARK = struct.Struct("<12sIqq")
_RECORD = struct.Struct("<12sIqqqqqQ")
_WORDS = struct.Struct("<8Q")

unpack = _RECORD.unpack
"""Name, clock, ``interval``, ``span``, ``epoch``, ``full_at``, ``booked_at``, check word."""
unpack_tail = struct.Struct("<32xqqqQ").unpack
"""The last four of these, which change from decision to decision; the first half is the :func:`mark`."""
pack_record = struct.Struct("<32sqqqQ").pack
"""The opposite: a record of its mark and the last four."""


def missing(raw: bytes) -> int:
    """What the words of ``raw`` (as many as there are, up to eight) lack of the sum: the check word behind seven."""
    total: int = sum(_WORDS.unpack(raw.ljust(SIZE, b"\0")))
    return (SUM - total) & WORD


def is_sound(raw: bytes) -> bool:
    """Whether ``raw`` is all of a header or record, as somebody wrote it."""
    return len(raw) == SIZE and not missing(raw)


def mark(name: bytes, clock: int, interval: int, span: int) -> bytes:
    """The first half of a record: what it is known by, and what its instants mean."""
    return _MARK.pack(name, clock, interval, span)


FREE = bytes(SIZE - 8) + MAGIC
"""A record that belongs to nobody. It is not all zeros: a hole in the file is damage, not a full bucket."""


class Slot:
    """Where a limit's record lies, what is the same in it from decision to decision, and what was in it last."""

    __slots__ = ("booked_at", "full_at", "kept", "limit", "mark", "missing", "name", "offset", "seen")

    def __init__(self, offset: int, name: bytes, limit: Limit, clock: int, kept: int) -> None:
        self.offset = offset
        self.name = name
        self.limit = limit
        self.kept = kept
        self.mark = mark(name, clock, limit.interval, limit.span | kept)
        # Large enough to stay positive whatever is taken off: masking a negative number takes twice as long.
        self.missing = missing(self.mark) + 4 * (WORD + 1)
        self.seen: bytes | None = None  # which equals nothing that is read, not even at the end of a file cut short
        self.full_at = self.booked_at = 0

    def recognizes(self, raw: bytes) -> bool:
        """Whether ``raw`` is sound and this limit's, with these numbers on this clock; if so it was seen last."""
        if len(raw) != SIZE or not raw.startswith(self.mark):
            return False
        epoch, full_at, booked_at, check = unpack_tail(raw)
        if (self.missing - epoch - full_at - booked_at) & WORD != check:
            return False
        self.full_at = full_at
        self.booked_at = booked_at
        self.seen = raw
        return True

    def record(self, epoch: int, full_at: int, booked_at: int) -> bytes:
        """The record's bytes."""
        check = (self.missing - epoch - full_at - booked_at) & WORD
        return pack_record(self.mark, epoch, full_at, booked_at, check)


class Header(NamedTuple):
    """The first 64 bytes.

    ``lost_at`` is the last instant (on the clock that read 0 at ``epoch``) at which records were found damaged or
    missing: whoever has no record since may have been emptied by then. 0 means never.
    """

    salt: bytes
    levels: int
    lost_at: int = 0
    epoch: int = 0
    clock: int = 0

    def pack(self) -> bytes:
        body = _HEADER.pack(MAGIC, VERSION, self.levels, self.salt, self.lost_at, self.epoch, self.clock)
        return body + missing(body).to_bytes(8, "little")

    @classmethod
    def unpack(cls, raw: bytes) -> Header | None:
        """The header in ``raw``, or ``None`` where it is damaged."""
        if not is_sound(raw):
            return None
        _, version, levels, salt, lost_at, epoch, clock = _HEADER.unpack_from(raw)
        return cls(salt, levels, lost_at, epoch, clock) if version == VERSION else None


def hash_name(salt: bytes, *parts: str | int | None) -> bytes:
    """Eight bytes that stand for a name; nobody can read the name from them."""
    text = "".join("-" if part is None else f"{len(str(part))}:{part}" for part in parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=salt).digest()


def bucket_name(salt: bytes, bucket: str) -> bytes:
    """What all records of a bucket have in common; half of the hash, or a record would not fit its 64 bytes."""
    return hash_name(salt, bucket)[:4]


def record_name(salt: bytes, bucket: str, key: str | None, index: int) -> bytes:
    """What a record is known by: eight bytes of its own and those of its bucket."""
    return hash_name(salt, bucket, key, index) + bucket_name(salt, bucket)


def file_size(levels: int) -> int:
    """Bytes of a file of so many levels."""
    return SIZE + SIZE * BLOCK * FIRST_LEVEL * ((1 << levels) - 1)


def block_offset(name: bytes, level: int) -> int:
    """Where the block of ``level`` that may hold the record known by ``name`` begins."""
    blocks = FIRST_LEVEL << level
    return file_size(level) + SIZE * BLOCK * (int.from_bytes(name[:OWN], "little") % blocks)
