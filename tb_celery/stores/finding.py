"""Where records are in one open state file, and what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tb_celery.bucket import MOST_LIMITS
from tb_celery.state import State, moved
from tb_celery.stores import record
from tb_celery.stores.hosting import read_at
from tb_celery.stores.orders import change, late
from tb_celery.stores.record import BLOCK, IN_DEBT, KEPT, OWN, SIZE, Header, is_order, is_sound
from tb_celery.stores.upkeep import StateFile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from tb_celery.bucket import Bucket, Name
    from tb_celery.stores.orders import Find

PIECE = SIZE * 1024
"""Bytes that are read before the lock is let go for a while."""


class Piece(NamedTuple):
    """A piece of a state file, as it was read.

    Attributes:
        salt: what the names in it are made with.
        start: where it begins.
        raw: its bytes.
        after: where the next one begins; 0 if this is the last.
    """

    salt: bytes
    start: int
    raw: bytes
    after: int

    def records(self, buckets: Iterable[str]) -> dict[str, list[tuple[int, bytes]]]:
        """The sound records of some buckets, and of orders about them: their offsets and bytes."""
        names = {bucket: record.bucket_name(self.salt, bucket) for bucket in buckets}
        found = {name: list[tuple[int, bytes]]() for name in names.values()}
        for at in range(0, len(self.raw), SIZE):
            of_bucket = found.get(self.raw[at + OWN : at + OWN + 4])
            if of_bucket is not None and is_sound(raw := self.raw[at : at + SIZE]):
                of_bucket.append((self.start + at, raw))
        return {bucket: found[name] for bucket, name in names.items()}


class Records(StateFile):
    """Reads records, and writes none; see :class:`StateFile` for what it takes."""

    def piece(self, start: int, now: int, parts: int = 1) -> Piece:
        """The piece of the file that begins at ``start``, or at 0 for the first.

        It is a part of :data:`PIECE`, where the lock would be held for too long.
        """
        header = self._header(now)
        start, end = start or SIZE, record.file_size(header.levels)
        size = PIECE // parts
        raw = read_at(self.fd, min(size, end - start), start)
        return Piece(header.salt, start, raw, start + size if start + size < end else 0)

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
        state = State(full_at, booked_at, interval, span & ~KEPT, in_debt)
        return moved(state, full_at + shift, booked_at + shift) if shift else state

    def _find(self, header: Header, name: bytes) -> tuple[int, bytes]:
        """Where the sound record known by ``name`` is, and its bytes: none where there is none."""
        # The last levels hold the most records: one that is there is found after two or three blocks.
        for start in reversed(record.block_offsets(name, header.levels)):
            block = read_at(self.fd, SIZE * BLOCK, start)
            at = block.find(name)
            if at >= 0 and at % SIZE == 0 and is_sound(raw := block[at : at + SIZE]):
                return start + at, raw
        return 0, b""


def surveyed(
    buckets: Collection[Bucket], pieces: Iterable[tuple[Records, Piece, int]]
) -> tuple[int, dict[str, list[State]]]:
    """What all pieces of a file, each with the instant at which it was read, say of some buckets; at the last one."""
    states = {bucket.name: list[State]() for bucket in buckets}
    orders: dict[bytes, State] = {}
    salt, now = b"", 0
    for table, piece, now in pieces:  # noqa: B007 - the last one
        salt = piece.salt
        for name, records in piece.records(states).items():
            for _, raw in records:
                if is_order(raw):
                    orders[raw[: OWN + 4]] = table.written(raw)
                else:
                    states[name].append(table.written(raw))
    for bucket in buckets if orders else ():
        about = [
            (orders.get(record.record_name(salt, *change(bucket.name, charge.number, charge.limit)[:3])), charge.limit)
            for charge in bucket.draw(None)
        ]
        states[bucket.name] = [late(state, about, now) for state in states[bucket.name]]
    return now, states
