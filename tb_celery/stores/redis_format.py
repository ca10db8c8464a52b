"""The bytes that a Redis or Valkey server is given and gives back: ``redis.lua`` has the other half."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tb_celery.arithmetic import UNCLAIMED
from tb_celery.bucket import FOREVER, LONGEST_SPAN, SECOND
from tb_celery.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tb_celery.arithmetic import Place
    from tb_celery.bucket import Charge, Limit

NUMBERS = struct.Struct(">qq")
RECORD = struct.Struct(">qqqqqqqB")
"""``interval`` and ``span`` in nanoseconds; ``full_at`` and ``booked_at`` in whole seconds and nanoseconds; the second
until which it is kept although it is full by then, because somebody has asked with other numbers; whether it is in
debt. An order's interval is negative."""
IDENTITY = 20
"""Bytes that a marker begins with: the salt, and how often something was ordered about a bucket."""
MARKER = struct.Struct(">16sIqqB")
"""These; the instant at which it was made; see :class:`Marker`."""
INSTANT = struct.Struct(">qq")
"""Or a span of time: whole seconds and nanoseconds."""
ANSWER = struct.Struct(">qqqqqqHB")


class Marker(NamedTuple):
    """What a store is known by, and since when.

    Attributes:
        salt: what its names are made with.
        orders: how often something was ordered.
        made_at: when it was made, or the server was started, in nanoseconds.
        lost: whether there was another before, whose state is lost: for :data:`MAYBE`, nobody knows.
    """

    salt: bytes
    orders: int
    made_at: int
    lost: int

    @classmethod
    def unpack(cls, raw: bytes) -> Marker:
        """The marker in the bytes that are stored."""
        salt, orders, made, made_ns, lost = MARKER.unpack(raw)
        return cls(salt, orders, made * SECOND + made_ns, lost)

    def pack(self) -> bytes:
        """What :meth:`unpack` takes."""
        return MARKER.pack(self.salt, self.orders, *divmod(self.made_at, SECOND), self.lost)

    def lost_at(self, limit: Limit) -> int | None:
        """The instant until which a limit without a record may have been drawn from; ``None`` for never."""
        return self.made_at if self.lost == 1 or (self.lost == MAYBE and limit.span > SHORT) else None


MAYBE = 2
"""Of a store that nobody knew before: its server may have had one before it was started."""
DAY = 86_400 * SECOND
"""Nanoseconds for which an order is still known after it has ended."""
SHORT = 3600 * SECOND
"""Nanoseconds to fill in which a limit is short enough to start full then."""


def packed(state: State, keep: int = 0) -> bytes:
    """``state`` as a record, kept until the second ``keep`` at least."""
    full, booked = divmod(state.full_at, SECOND), divmod(state.booked_at, SECOND)
    return RECORD.pack(state.interval, state.span, *full, *booked, keep, state.in_debt)


def unpacked(record: bytes | None) -> tuple[State | None, int]:
    """The state in a record, and until which second it is kept at least; ``None`` where it is none of ours."""
    if record is None or len(record) != RECORD.size:
        return None, 0
    interval, span, full, full_ns, booked, booked_ns, keep, in_debt = RECORD.unpack(record)
    if interval <= 0 or not 0 < span <= LONGEST_SPAN:
        return None, 0
    return State(full * SECOND + full_ns, booked * SECOND + booked_ns, interval, span, in_debt == 1), keep


def packed_order(charge: Charge, until: int) -> bytes:
    """The record of an order that stands until an instant."""
    interval, span = charge.limit.numbers
    return packed(State(until, until, -interval, span))


def unpacked_order(record: bytes | None) -> State | None:
    """What an order says, if it is one."""
    if record is None or len(record) != RECORD.size:
        return None
    interval, span, full, full_ns, booked, booked_ns, *_ = RECORD.unpack(record)
    return State(full * SECOND + full_ns, booked * SECOND + booked_ns, -interval, span) if interval < 0 else None


@lru_cache(256)
def packed_place(place: Place, paused: int = 0) -> bytes:
    """``place`` as the script takes it, with the arithmetic's constants, and the end of the last pause."""
    kind = (place.turn is not None) + 2 * (place.longest is not None) + 4 * (place.ahead > 0)
    spans = (place.turn or 0, place.soonest, place.patience, place.longest or 0, UNCLAIMED, LONGEST_SPAN, paused)
    return bytes([kind]) + b"".join(INSTANT.pack(*divmod(min(span, FOREVER), SECOND)) for span in spans)


def repeats(asked: bytes) -> bool:
    """Whether others will ask the same: no turn or end of somebody's own is in it."""
    return not asked or not asked[0] & 3


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """What is drawn from one limit: words of a call of the script, as they go over the wire."""

    key: bytes
    """Where the limit's record is."""
    charge: bytes


def called(  # noqa: PLR0913, PLR0917
    script: bytes, marker: bytes, drawn: Sequence[Drawn], identity: bytes, asked: bytes, settled: Sequence[bytes]
) -> bytes:
    """A call of the script, whose command and name or text are wired already, as it goes over the wire."""
    keys, charges = [each.key for each in drawn], [each.charge for each in drawn]
    told = (wired_word(identity), wired_word(asked), *charges, *map(wired_word, settled))
    words = (script, wired_word(len(keys) + 1), wired_word(marker), *keys, *told)
    return b"*%d\r\n%b" % (len(words) + 1, b"".join(words))


def wired(*words: str | bytes | int) -> bytes:
    """A command as it goes over the wire."""
    return b"*%d\r\n%b" % (len(words), b"".join(map(wired_word, words)))


def wired_word(word: str | bytes | int) -> bytes:
    """A word of a command as it goes over the wire; redis-py takes twice as long."""
    raw = word if isinstance(word, bytes) else str(word).encode()
    return b"$%d\r\n%b\r\n" % (len(raw), raw)
