"""The state file's bytes: a header, then records of 64 bytes, laid out as ``docs/state-file.md`` says.

Everything is little-endian. The last four bytes of the header and of each record are the CRC-32 of the bytes before
them, so the CRC-32 of a whole sound record is always :data:`SOUND`.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple
from zlib import crc32

MAGIC = b"TBCELERY"
VERSION = 1
SIZE = 64
BLOCK = 8
"""Records that are searched together."""
FIRST_LEVEL = 8
"""Blocks of level 0; each further level has twice as many."""
SOUND = 0x2144DF1C

_HEADER = struct.Struct("<8sII16sqqqI")
_BODY = struct.Struct("<16sqqqqqI")
_RECORD = struct.Struct("<16sqqqqqII")
_CHECK = struct.Struct("<I")

crc = crc32
pack_body = _BODY.pack
"""Identity, ``full_at``, ``booked_at``, ``interval``, ``span``, ``epoch``, clock: a record without its check word."""
pack_check = _CHECK.pack
unpack = _RECORD.unpack
"""The fields of :data:`pack_body` and the check word."""


def sealed(body: bytes) -> bytes:
    """``body`` followed by its check word."""
    return body + pack_check(crc32(body))


FREE = sealed(bytes(SIZE - 4))
"""A record that belongs to nobody. It is not all zeros: a hole in the file is damage, not a full bucket."""


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
        body = _HEADER.pack(MAGIC, VERSION, self.levels, self.salt, self.lost_at, self.epoch, self.clock, 0)
        return sealed(body)

    @classmethod
    def unpack(cls, raw: bytes) -> Header | None:
        """The header in ``raw``, or ``None`` where it is damaged."""
        if len(raw) != SIZE or crc32(raw) != SOUND:
            return None
        _, version, levels, salt, lost_at, epoch, clock, _ = _HEADER.unpack(raw[: SIZE - 4])
        return cls(salt, levels, lost_at, epoch, clock) if version == VERSION else None


def hash_name(salt: bytes, *parts: str | int | None) -> bytes:
    """Eight bytes that stand for a name; nobody can read the name from them."""
    text = "".join("-" if part is None else f"{len(str(part))}:{part}" for part in parts)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=salt).digest()


def identity(salt: bytes, bucket: str, key: str | None, index: int) -> bytes:
    """What a record is known by: eight bytes for its bucket, eight for its place among all records."""
    return hash_name(salt, bucket) + hash_name(salt, bucket, key, index)


def file_size(levels: int) -> int:
    """Bytes of a file of so many levels."""
    return SIZE + SIZE * BLOCK * FIRST_LEVEL * ((1 << levels) - 1)


def block_offset(name: bytes, level: int) -> int:
    """Where the block of ``level`` that may hold the record known by ``name`` begins."""
    blocks = FIRST_LEVEL << level
    return file_size(level) + SIZE * BLOCK * (int.from_bytes(name[8:], "little") % blocks)
