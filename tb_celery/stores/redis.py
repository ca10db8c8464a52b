"""State in a Redis or Valkey server, shared by everyone who names the same server: one quota for many hosts.

A decision is one script that the server runs by itself (``redis.lua``), on the server's own clock: one round trip and
nobody in between. What the script cannot settle, and what is rare (a record written with other numbers, a clock that
was set back, a server that lost its state), is settled here and put in the old record's place if that still stands.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tb_celery.arithmetic import LATE, UNCLAIMED, UNCLAIMED_TURNS, Decision, State, fit
from tb_celery.bucket import LONGEST_SPAN, SECOND
from tb_celery.clock import SystemClock
from tb_celery.errors import ConfigurationError, StoreError
from tb_celery.stores.record import hash_name
from tb_celery.stores.redis_server import NoScriptError, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tb_celery.arithmetic import Place
    from tb_celery.bucket import Bucket, Charge
    from tb_celery.clock import Clock

logger = logging.getLogger("tb_celery")

REMEMBERED = 1 << 14
"""Charges whose key and arguments a process keeps worked out."""
MS = SECOND // 1000
FOREVER = 1 << 63
SALT = 16
ATTEMPTS = 100
"""How often others may be faster to change what a call has to settle: each time, somebody else was served."""
SCRIPT = Path(__file__).with_suffix(".lua").read_text("utf-8")
OPEN = """
local time = redis.call('TIME')
local marker, known = redis.call('GET', KEYS[1]), ARGV[1]
if not marker then
  local salt, lost = known, 1
  if known == '' then
    salt, lost = ARGV[2], 0
  end
  marker = salt .. struct.pack('>i8i8B', time[1], time[2] * 1000, lost)
  redis.call('SET', KEYS[1], marker)
elseif known ~= '' and #marker == 33 and string.sub(marker, 1, 16) ~= known and string.byte(marker, 33) == 0 then
  marker = string.sub(marker, 1, 32) .. string.char(1)
  redis.call('SET', KEYS[1], marker)
end
return marker
"""
"""Makes the store's marker, and notes in it that there was another before, where the caller knows of one."""

_NUMBERS = struct.Struct(">qq")
_RECORD = struct.Struct(">qqqqqqq")
"""``interval`` and ``span`` in nanoseconds; ``full_at`` and ``booked_at`` in whole seconds and nanoseconds; the second
until which it is kept although it is full by then, because somebody has asked with other numbers."""
_MARKER = struct.Struct(">16sqqB")
"""Salt; the instant at which it was made; 1 where there was another before, whose state is lost."""
_INSTANT = struct.Struct(">qq")
"""Or a span of time: whole seconds and nanoseconds."""
_ANSWER = struct.Struct(">qqqqqqHB")


class Marker(NamedTuple):
    """What a store is known by, and since when."""

    salt: bytes
    made_at: int
    lost: bool

    @classmethod
    def unpack(cls, raw: bytes) -> Marker:
        """The marker in the bytes that are stored."""
        salt, made, made_ns, lost = _MARKER.unpack(raw)
        return cls(salt, made * SECOND + made_ns, lost != 0)

    def pack(self) -> bytes:
        """What :meth:`unpack` takes."""
        return _MARKER.pack(self.salt, *divmod(self.made_at, SECOND), self.lost)


@dataclass(slots=True)
class Drawn:
    """What is drawn from one limit, as the script takes it."""

    key: bytes
    """Where the limit's record is."""
    charge: bytes
    call: list[bytes] = field(default_factory=list)
    """All of a plain caller's command, as it goes over the wire: to make it costs as much as to unpack its answer."""


class ServerClock:
    """The server's clock, as far as its answers tell: for deadlines, never for decisions.

    Every host that asks the same server, or any that keeps time, has the same one: instants are nanoseconds since 1970.

    Args:
        ask: gets an answer from the server, where there has been none.
    """

    identity = zlib.crc32(b"a server's nanoseconds since 1970")

    def __init__(self, ask: Callable[[], object]) -> None:
        self.local = SystemClock().now
        self._ask = ask
        self._ahead: int | None = None

    def learn(self, now: int, sent: int, received: int) -> None:
        """Note that the server's clock read ``now`` some time between two readings of ours."""
        least, most = now - received, now - sent
        self._ahead = least if self._ahead is None else min(max(self._ahead, least), most)

    def now(self) -> int:
        if self._ahead is None:
            with suppress(StoreError):  # whoever goes on to ask for tokens will hear of it
                self._ask()
            if self._ahead is None:
                self._ahead = time.time_ns() - self.local()
        return self.local() + self._ahead

    def wall(self) -> int:
        return self.now()

    sleep = SystemClock.sleep
    sleep_async = SystemClock.sleep_async


class RedisStore:
    """State shared by everyone who names the same server and the same prefix.

    Safe for threads, greenlets and forks: each has a connection of its own while it asks. A command that was sent is
    never sent again, for its answer may be lost after the tokens were taken.

    Args:
        address: ``redis://``, ``rediss://``, ``valkey://``, ``valkeys://``, ``unix://``, ``redis+sentinel://`` or
            ``redis+cluster://``.
        timeout: seconds to wait for a connection, and for an answer.
        prefix: what the names of all keys begin with, in braces: they share one slot of a cluster.

    Raises:
        ConfigurationError: the address or the prefix is wrong, or the package redis is missing.
    """

    script = SCRIPT
    opening = OPEN

    def __init__(self, address: str, timeout: float = 10.0, prefix: str = "tb_celery") -> None:
        if not re.fullmatch(r"[\w.:-]{1,100}", prefix, re.ASCII):
            message = (
                "setting key_prefix (TB_CELERY_KEY_PREFIX) must be 1 to 100 letters, digits, or any of . : _ - and not"
                f" {prefix!r}"
            )
            raise ConfigurationError(message)
        self.server = Server(address, timeout)
        self.prefix = prefix
        self._clock = ServerClock(lambda: self.read(()))
        self.clock: Clock = self._clock
        self._sha = hashlib.sha1(self.script.encode(), usedforsecurity=False).hexdigest()
        self.marker = f"{{{prefix}}}:store".encode()
        self._salt = b""
        self._drawn: dict[tuple[object, ...], Drawn] = {}
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"RedisStore({self.server.place!r}, prefix={self.prefix!r})"

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        asked = b"" if place is None else _packed(place)
        settled: list[bytes] = []
        for _ in range(ATTEMPTS):
            reply = self._run(charges, asked, settled, place.ahead if place else 0)
            if isinstance(reply, bytes):
                now, now_ns, at, at_ns, full, full_ns, binding, booked = _ANSWER.unpack(reply)
                return Decision(
                    now * SECOND + now_ns,
                    at * SECOND + at_ns,
                    charges[binding],
                    full * SECOND + full_ns,
                    booked == 1,
                )
            settled = self._settled(charges, reply)
        message = (
            f"{self.server}: others keep changing what bucket {charges[0].bucket!r} was last used with; declare the"
            " same numbers everywhere"
        )
        raise StoreError(message)

    def read(self, charges: Sequence[Charge]) -> tuple[int, list[State]]:
        now, marker, records = self._look(charges)
        return now, [self._state(charge, record, marker, now) for charge, record in zip(charges, records, strict=True)]

    def survey(self, bucket: Bucket) -> tuple[int, list[State]]:
        now, _ = self.read(())
        raw = [record for keys in self._keys(bucket) for record in self.server.command("MGET", *keys)]
        return now, [state for state, _ in map(unpacked, raw) if state]

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        if key is None:
            forgotten = sum(self.server.command("UNLINK", *keys) for keys in self._keys(bucket))
        else:
            salt = self._salt or self._open()
            keys = [self._draw(charge, salt).key for charge in bucket.draw(key)]
            forgotten = self.server.command("UNLINK", *keys)
        # Full, too, where a loss makes those without a record start empty.
        charges = bucket.draw(key)
        now, states = self.read(charges)
        for charge, state in zip(charges, states, strict=True):
            if state.full_at > now:
                full = packed(fit(None, charge.limit, now))
                name = self._draw(charge, self._salt).key
                self.server.command("SET", name, full, "PXAT", -(-state.full_at // MS))
        return int(forgotten)

    # -- the script

    def _run(self, charges: Sequence[Charge], asked: bytes, settled: Sequence[bytes] = (), turns: int = 0) -> Any:  # noqa: ANN401
        """What the script answers, from a store that we know."""
        for _ in range(ATTEMPTS):
            salt = self._salt or self._open()
            drawn = [self._draw(charge, salt, turns) for charge in charges]
            plain = len(drawn) == 1 and not asked and not settled
            words = () if plain else self._words(drawn, salt, asked, settled)
            packed = drawn[0].call if plain else self.server.pack("EVALSHA", self._sha, *words)
            sent = self._clock.local()
            try:
                reply = self.server.send(packed)
            except NoScriptError:
                # It has lost it in a restart, a failover or a SCRIPT FLUSH, and takes it along with the call.
                words = words or self._words(drawn, salt)
                reply = self.server.command("EVAL", self.script, *words)
            if reply != 0:
                raw = reply if isinstance(reply, bytes) else reply[0]
                now, now_ns = _INSTANT.unpack_from(raw)
                self._clock.learn(now * SECOND + now_ns, sent, self._clock.local())
                return reply
            self._open()
        message = f"{self.server} loses its state again and again; see that nobody empties it"
        raise StoreError(message)

    def _look(self, charges: Sequence[Charge]) -> tuple[int, Marker, list[bytes | None]]:
        return self._shown(self._run(charges, b"look"))

    def _shown(self, reply: list[Any]) -> tuple[int, Marker, list[bytes | None]]:
        instant, marker, *records = reply
        now, now_ns = _INSTANT.unpack(instant)
        return now * SECOND + now_ns, Marker.unpack(marker), records

    def _settled(self, charges: Sequence[Charge], reply: list[Any]) -> list[bytes]:
        """Each record that was seen, and the one to put in its place."""
        now, marker, records = self._shown(reply)
        pairs: list[bytes] = []
        for charge, record in zip(charges, records, strict=True):
            state = self._state(charge, record, marker, now)
            known = record is not None or state.full_at > now
            old, keep = unpacked(record)
            if old and old[2:] != state[2:]:
                # Full for the one may not be full for the other: forgotten, it would be.
                keep = max(keep, (now + old.span) // SECOND + 1)
            new = packed(state, keep) if known else b""
            pairs += (record or b"", b"" if new == record else new)
        return pairs

    def _state(self, charge: Charge, record: bytes | None, marker: Marker, now: int) -> State:
        """The state in a record, or in the lack of one, as its limit sees it."""
        limit = charge.limit
        if record is None:
            state = fit(None, limit, now)
            full_at = marker.made_at + limit.span
            if marker.lost and full_at > now:
                # It may have been emptied just before its record was lost.
                state = state._replace(full_at=full_at, booked_at=full_at)
            return state
        found, _ = unpacked(record)
        if found is None:
            self._warn(f"{charge.bucket}!", "%s holds a record of bucket %r that is none: it starts empty", charge)
            return State(now + limit.span, now + limit.span, limit.interval, limit.span)
        if found[2:] != (limit.interval, limit.span):
            self._warn(
                charge.bucket,
                "%s: bucket %r was last used with other numbers than those declared here; declare the same everywhere",
                charge,
            )
        return fit(found, limit, now)

    def _warn(self, once: str, message: str, charge: Charge) -> None:
        if once not in self._warned:
            self._warned.add(once)
            logger.warning(message, self.server, charge.bucket)

    # -- names

    def _open(self) -> bytes:
        """Make the store known to us, or ourselves to the store; the salt that its names are made with."""
        known = self._salt
        raw = self.server.command("EVAL", self.opening, 1, self.marker, known, secrets.token_bytes(SALT))
        if len(raw) != _MARKER.size:
            message = (
                f"{self.server} holds something else under the name {self.marker.decode()!r}; remove it, or choose"
                " another prefix in the setting key_prefix (TB_CELERY_KEY_PREFIX)"
            )
            raise StoreError(message)
        facts = self.server.facts()
        if facts.get("role") == "slave":  # it would answer with what it had some time ago, and refuse to write alone
            message = f"{self.server} is a read-only replica; name the primary in the setting store (TB_CELERY_STORE)"
            raise StoreError(message)
        self._salt = Marker.unpack(raw).salt
        if known:
            logger.warning("%s has lost its state: buckets start empty", self.server)
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
            logger.warning(
                "%s may evict buckets, which then are full again: its maxmemory-policy must be noeviction, not %s",
                self.server,
                policy,
            )
        return self._salt

    def _draw(self, charge: Charge, salt: bytes, turns: int = 0) -> Drawn:
        """``charge`` as the script takes it, when so many turns share it."""
        bucket, key, number, limit, cost = charge
        known = (salt, bucket, key, number, cost, limit.interval, limit.span, turns)
        drawn = self._drawn.get(known)
        if drawn is None:
            late = min(max(limit.interval // 10, LATE), UNCLAIMED)
            idle, spare = UNCLAIMED + UNCLAIMED_TURNS * limit.interval, limit.span - cost - limit.interval
            times = (cost, limit.span, late, idle, spare)
            drawn = Drawn(
                self.named(bucket) + hash_name(salt, bucket, key, number).hex().encode(),
                _NUMBERS.pack(limit.interval, limit.span)
                + b"".join(_INSTANT.pack(*divmod(span, SECOND)) for span in times)
                + bytes([cost > limit.interval * (turns or 1)]),
            )
            drawn.call = self.server.pack("EVALSHA", self._sha, *self._words([drawn], salt))
            if len(self._drawn) >= REMEMBERED:
                self._drawn.clear()
            self._drawn[known] = drawn
        return drawn

    def _words(
        self, drawn: Sequence[Drawn], salt: bytes, asked: bytes = b"", settled: Sequence[bytes] = ()
    ) -> tuple[bytes | int, ...]:
        """What a call of the script says behind the script's name."""
        keys, charges = [each.key for each in drawn], [each.charge for each in drawn]
        return (len(keys) + 1, self.marker, *keys, salt, asked, *charges, *settled)

    def named(self, bucket: str) -> bytes:
        """What the keys of a bucket have in common; 16 hexadecimal digits follow."""
        return b"{%b}:%b:" % (self.prefix.encode(), bucket.encode("utf-8", "surrogatepass"))

    def _keys(self, bucket: Bucket) -> Iterator[list[bytes]]:
        """The keys of all records of ``bucket``, a few at a time."""
        pattern = re.sub(rb"([\\*?\[\]^-])", rb"\\\1", self.named(bucket.name)) + b"?" * 16
        # SCAN names no key, so a cluster would not send us to the node that has them.
        self.server.command("MGET", self.marker)
        cursor, seen = b"0", set[bytes]()
        while True:
            cursor, keys = self.server.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            fresh = [key for key in keys if key not in seen]
            seen.update(fresh)
            if fresh:
                yield fresh
            if cursor == b"0":
                return


def packed(state: State, keep: int = 0) -> bytes:
    """``state`` as a record, kept until the second ``keep`` at least."""
    full, booked = divmod(state.full_at, SECOND), divmod(state.booked_at, SECOND)
    return _RECORD.pack(state.interval, state.span, *full, *booked, keep)


def unpacked(record: bytes | None) -> tuple[State | None, int]:
    """The state in a record, and until which second it is kept at least; ``None`` where it is none of ours."""
    if record is None or len(record) != _RECORD.size:
        return None, 0
    interval, span, full, full_ns, booked, booked_ns, keep = _RECORD.unpack(record)
    if interval <= 0 or not 0 < span <= LONGEST_SPAN:
        return None, 0
    return State(full * SECOND + full_ns, booked * SECOND + booked_ns, interval, span), keep


@lru_cache(256)
def _packed(place: Place) -> bytes:
    """``place`` as the script takes it, with the arithmetic's constants."""
    kind = (place.turn is not None) + 2 * (place.longest is not None) + 4 * (place.ahead > 0)
    spans = (place.turn or 0, place.soonest, place.patience, place.longest or 0, UNCLAIMED, LONGEST_SPAN)
    return bytes([kind]) + b"".join(_INSTANT.pack(*divmod(min(span, FOREVER), SECOND)) for span in spans)
