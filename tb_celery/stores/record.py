"""The state file's bytes: a header, then records of 64 bytes, laid out as ``docs/state-file.md`` says.

Everything is little-endian. The last of the eight words of the header and of each record is chosen so that the words
add up to :data:`SUM`: that finds what damages a file as well as a CRC, for a third of its cost in Python.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tb_celery.bucket import Limit
    from tb_celery.state import State

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
"""Added to the span of a record that was written with several numbers (full by these, it may not be so by others), or
made full after damage (without it the limit would be empty). And to that of an order that gave other numbers, which has
to be known when it has ended."""
IN_DEBT = 1 << 62
"""Added to the interval of a limit of which more was drawn than there was. An order's interval is negative."""
OWN = 8
"""Bytes of a name that are the record's own; those of its bucket are behind them."""

_HEADER = struct.Struct("<8sHHI16sqqq")
_MARK = struct.Struct("<12sIqq")
_RECORD = struct.Struct("<12sIqqqqqQ")
_HALF = struct.Struct("<4Q")
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


def is_order(raw: bytes) -> bool:
    """Whether a sound record is that of an order and not of a limit."""
    return raw[23] >= 0x80  # noqa: PLR2004 - its interval is negative


def is_sound(raw: bytes) -> bool:
    """Whether ``raw`` is all of a header or record, as somebody wrote it."""
    return len(raw) == SIZE and sum(_WORDS.unpack(raw)) & WORD == SUM


def mark(name: bytes, clock: int, interval: int, span: int) -> bytes:
    """The first half of a record: what it is known by, and what its instants mean."""
    return _MARK.pack(name, clock, interval, span)


FREE = bytes(SIZE - 8) + MAGIC
"""A record that belongs to nobody. It is not all zeros: a hole in the file is damage, not a full bucket."""


class Slot:
    """Where a limit's record lies, what is the same in it from decision to decision, and what was in it last."""

    __slots__ = ("booked_at", "debt", "full_at", "kept", "limit", "mark", "missing", "name", "offset", "seen")

    def __init__(self, offset: int, name: bytes, limit: Limit, clock: int, kept: int = 0, debt: int = 0) -> None:  # noqa: PLR0913, PLR0917
        self.offset = offset
        self.name = name
        self.limit = limit
        self.kept = kept
        self.debt = debt
        self.mark = mark(name, clock, limit.interval | debt, limit.span | kept)
        # Large enough to stay positive whatever is taken off: masking a negative number takes twice as long.
        self.missing = SUM - sum(_HALF.unpack(self.mark)) + 8 * (WORD + 1)
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

    ``orders`` counts how often something was ordered, modulo 2**32, and never comes back to 0. ``lost_at`` is the last
    instant (on the clock that read 0 at ``epoch``) at which records were found damaged or missing: whoever has no
    record since may have been emptied by then. 0 means never.
    """

    salt: bytes
    levels: int
    orders: int = 0
    lost_at: int = 0
    epoch: int = 0
    clock: int = 0

    def pack(self) -> bytes:
        body = _HEADER.pack(MAGIC, VERSION, self.levels, self.orders, self.salt, self.lost_at, self.epoch, self.clock)
        return body + missing(body).to_bytes(8, "little")

    @classmethod
    def unpack(cls, raw: bytes) -> Header | None:
        """The header in ``raw``, or ``None`` where it is damaged."""
        if not is_sound(raw):
            return None
        _, version, levels, orders, salt, lost_at, epoch, clock = _HEADER.unpack_from(raw)
        return cls(salt, levels, orders, lost_at, epoch, clock) if version == VERSION else None


def packed(name: bytes, clock: int, epoch: int, state: State, kept: int = 0) -> bytes:
    """The record of a state, or of an order, whose interval is negative and which holds until its ``full_at``."""
    interval = state.interval | IN_DEBT if state.in_debt else state.interval
    body = pack_record(mark(name, clock, interval, state.span | kept), epoch, state.full_at, state.booked_at, 0)[:-8]
    return body + missing(body).to_bytes(8, "little")


def hash_name(salt: bytes, *parts: str | int | None) -> bytes:
    """Eight bytes that stand for a name; nobody can read the name from them."""
    text = ""
    for part in parts:
        text += "-" if part is None else f"{len(str(part))}:{part}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=salt).digest()


@lru_cache
def bucket_name(salt: bytes, bucket: str) -> bytes:
    """What all records of a bucket have in common; half of the hash, or a record would not fit its 64 bytes."""
    return hash_name(salt, bucket)[:4]


def own_name(salt: bytes, bucket: str, key: str | None, number: int) -> bytes:
    """Eight bytes for the record of a limit, of which the highest three bits tell its number, or for an order's."""
    own = hash_name(salt, bucket, key, number)
    return own if number < 0 else own[:-1] + bytes((own[-1] & 0x1F | number << 5,))


def number_of(own: bytes) -> int:
    """The number of the limit whose record is known by ``own``."""
    return own[-1] >> 5


def record_name(salt: bytes, bucket: str, key: str | None, number: int) -> bytes:
    """What a record is known by: eight bytes of its own and those of its bucket."""
    return own_name(salt, bucket, key, number) + bucket_name(salt, bucket)


def file_size(levels: int) -> int:
    """Bytes of a file of so many levels."""
    return SIZE + SIZE * BLOCK * FIRST_LEVEL * ((1 << levels) - 1)


_LEVELS = [(file_size(level), (FIRST_LEVEL << level) - 1) for level in range(56)]
"""Where each level begins, and which bits of a name tell the block in it: as many levels as 64 bits can count."""


def block_offsets(name: bytes, levels: int) -> list[int]:
    """Where the blocks begin that may hold the record known by ``name``, one in each level, from the first on."""
    own = int.from_bytes(name[:OWN], "little")
    return [begin + SIZE * BLOCK * (own & bits) for begin, bits in _LEVELS[:levels]]
