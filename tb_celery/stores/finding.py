"""Where records are in one open state file, and what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_celery.arithmetic import State
from tb_celery.bucket import MOST_LIMITS
from tb_celery.stores import record
from tb_celery.stores.hosting import read_at
from tb_celery.stores.record import BLOCK, IN_DEBT, KEPT, OWN, SIZE, Header, is_sound
from tb_celery.stores.upkeep import StateFile

if TYPE_CHECKING:
    from tb_celery.bucket import Name
    from tb_celery.stores.orders import Find

PIECE = SIZE * 1024
"""Bytes that are surveyed before the lock is let go for a while."""


class Records(StateFile):
    """Reads records, and writes none; see :class:`StateFile` for what it takes."""

    def records(
        self, bucket: str, start: int, now: int, *, orders: bool = False, parts: int = 1
    ) -> tuple[list[tuple[int, bytes]], int]:
        """The records of ``bucket`` in the piece of the file that begins at ``start``, or at 0 for the first.

        Such a piece is a part of :data:`PIECE`, where the lock would be held for too long.

        Returns:
            Their offsets and bytes, and where the next piece begins: 0 if this was the last. Or those of the orders
            about it.
        """
        header = self._header(now)
        name = record.bucket_name(header.salt, bucket)
        start, end = start or SIZE, record.file_size(header.levels)
        size = PIECE // parts
        raw = read_at(self.fd, min(size, end - start), start)
        found = []
        for at in range(0, len(raw), SIZE):
            if raw.startswith(name, at + OWN):
                one = raw[at : at + SIZE]
                if is_sound(one) and record.is_order(one) == orders:
                    found.append((start + at, one))
        return found, start + size if start + size < end else 0

    def records_of(self, bucket: str, key: str | None, now: int) -> list[tuple[int, bytes]]:
        """The records of one key of ``bucket``, whatever the limits: their offsets and bytes."""
        header = self._header(now)
        names = [record.record_name(header.salt, bucket, key, number) for number in range(MOST_LIMITS)]
        return [found for name in names if (found := self._find(header, name))[1]]

    def finder(self, now: int) -> Find:
        """Tells what a record known by a bucket's name, a key and a number says; ``None`` where there is none."""
        header = self._header(now)

        def find(name: Name) -> State | None:
            _, raw = self._find(header, record.record_name(header.salt, *name))
            return self.written(raw) if raw else None

        return find

    def written(self, raw: bytes) -> State:
        """What a sound record or order says, on this process's clock."""
        _, clock, interval, span, epoch, full_at, booked_at, _ = record.unpack(raw)
        shift = self._shift(epoch, clock)
        in_debt = interval > 0 and bool(interval & IN_DEBT)
        interval = abs(interval & ~IN_DEBT if in_debt else interval)
        return State(full_at + shift, booked_at + shift, interval, span & ~KEPT, in_debt)

    def _find(self, header: Header, name: bytes) -> tuple[int, bytes]:
        """Where the sound record known by ``name`` is, and its bytes: none where there is none."""
        # The last levels hold the most records: one that is there is found after two or three blocks.
        for start in reversed(record.block_offsets(name, header.levels)):
            block = read_at(self.fd, SIZE * BLOCK, start)
            at = block.find(name)
            if at >= 0 and at % SIZE == 0 and is_sound(raw := block[at : at + SIZE]):
                return start + at, raw
        return 0, b""
