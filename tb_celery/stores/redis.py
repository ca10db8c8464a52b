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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tb_celery.arithmetic import UNCLAIMED, UNCLAIMED_TURNS, Decision, Place, runs_over
from tb_celery.bucket import MOST_LIMITS, SECOND
from tb_celery.errors import ConfigurationError, StoreError
from tb_celery.state import State, fit, strictest
from tb_celery.stores.orders import consequence, heeded, last_pause, late, outlived, overtaken
from tb_celery.stores.record import hash_name
from tb_celery.stores.redis_format import (
    ANSWER,
    IDENTITY,
    INSTANT,
    MARKER,
    MAYBE,
    NUMBERS,
    Drawn,
    Marker,
    called,
    packed,
    packed_order,
    packed_place,
    repeats,
    unpacked,
    unpacked_order,
    wired_word,
)
from tb_celery.stores.redis_keys import DIGITS, kept_for
from tb_celery.stores.redis_orders import NOTHING_ORDERED, REMEMBERED, SALT, RedisOrders
from tb_celery.stores.redis_server import NoScriptError, Server, ServerClock

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from tb_celery.bucket import Bucket, Charge, Limit
    from tb_celery.clock import Clock
    from tb_celery.stores.orders import Orders, Step

logger = logging.getLogger("tb_celery")

LOOK, SETTLE = b"look", b"settle"
ATTEMPTS = 100
"""How often others may be faster to change what a call has to settle: each time, somebody else was served."""
SCRIPT, OPEN, ORDER = (
    Path(__file__).with_name(name).read_text("utf-8") for name in ("redis.lua", "redis_open.lua", "redis_order.lua")
)


class RedisStore(RedisOrders):
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
    ordering = ORDER

    def __init__(self, address: str, timeout: float = 10.0, prefix: str = "tb_celery") -> None:
        if not re.fullmatch(r"[\w.:-]{1,100}", prefix, re.ASCII):
            message = (
                "setting key_prefix (TB_CELERY_KEY_PREFIX) must be 1 to 100 letters, digits, or any of . : _ - and not"
                f" {prefix!r}"
            )
            raise ConfigurationError(message)
        super().__init__(Server(address, timeout), prefix)
        self._clock = ServerClock(self.server)
        self.clock: Clock = self._clock
        name = hashlib.sha1(self.script.encode(), usedforsecurity=False).hexdigest()
        self._by_name = wired_word("EVALSHA") + wired_word(name)
        self._whole = wired_word("EVAL") + wired_word(self.script)
        self._made_at = 0
        self._drawn: dict[tuple[object, ...], Drawn] = {}
        self._calls: dict[tuple[object, ...], bytes] = {}
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"RedisStore({self.server.place!r}, prefix={self.prefix!r})"

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        settled: list[bytes] = []
        for _ in range(ATTEMPTS):
            reply, heard = self._run(charges, place, settled)
            if isinstance(reply, bytes):
                now, now_ns, at, at_ns, full, full_ns, binding, booked = ANSWER.unpack(reply)
                return Decision(
                    now * SECOND + now_ns,
                    at * SECOND + at_ns,
                    heard[binding],
                    full * SECOND + full_ns,
                    booked == 1,
                )
            settled = self._settled(heard, reply)
            self._claim(charges, heard, [unpacked(record)[0] for record in reply[2:]])
        raise self._contended(charges)

    def settle(self, charges: Sequence[Charge]) -> int:
        settled: list[bytes] = []
        for _ in range(ATTEMPTS):
            reply, heard = self._run(charges, SETTLE, settled)
            if isinstance(reply, bytes):
                now, now_ns, *_ = ANSWER.unpack(reply)
                return int(now * SECOND + now_ns)
            settled = self._settled(heard, reply)
        raise self._contended(charges)

    def order(self, charge: Charge, span: int, declared: Limit | None = None) -> None:
        now, *_ = self.read(())  # which notices what was ordered meanwhile
        step = consequence(charge, span, self._find, declared, now)
        words = packed_order(charge, 0), *divmod(span, SECOND), "pause" if charge.is_pause else ""
        for _ in range(ATTEMPTS):
            salt = (self._identity or self._open())[:SALT]
            if self.server.command("EVAL", self.ordering, 2, self.marker, self._key(charge, salt), salt, *words):
                break
            self._open()
        else:
            raise self._forgetful()
        while step:
            self._carry(charge, step, salt)
            charge, step = overtaken(charge, self._find, declared, self.read(())[0])

    def _carry(self, charge: Charge, step: Step, salt: bytes) -> None:
        """Have the records that there are of a bucket, or of one key, stand where an order about it says."""
        pieces: Iterable[list[bytes]] = self.scan(self.named(charge.bucket), b"?" * DIGITS)
        if charge.key is not None:
            pieces = [[self.key_of(salt, charge.bucket, charge.key, number) for number in range(MOST_LIMITS)]]
        for keys in pieces:
            for _ in range(ATTEMPTS):
                records = self.seen(keys)
                now, *_ = self.read(())  # no earlier than the last decision that is in them
                keys = self.swap(keys, records, step, now)  # noqa: PLW2901
                if not keys:
                    break
            else:
                raise self._contended([charge])

    def orders(self, bucket: Bucket, key: str | None = None) -> tuple[int, Orders]:
        now, *_ = self.read(())  # which notices what was ordered meanwhile
        return now, self._standing(bucket.name, key).at(now)

    def _contended(self, charges: Sequence[Charge]) -> StoreError:
        return StoreError(
            f"{self.server}: others keep changing what bucket {charges[0].bucket!r} was last used with; declare the"
            " same numbers everywhere"
        )

    def read(self, charges: Sequence[Charge]) -> tuple[int, Sequence[Charge], list[State]]:
        reply, heard = self._run(charges, LOOK)
        now, marker, records = self._shown(reply)
        return now, heard, self._states(heard, records, marker, now)

    def survey(self, buckets: Collection[Bucket]) -> tuple[int, dict[str, list[State]]]:
        now, *_ = self.read(())
        drawn = [charge for each in buckets for charge in each.draw(None)]
        orders: dict[str, list[tuple[State | None, Limit]]] = {each.name: [] for each in buckets}
        for charge, order in zip(drawn, self._about(drawn), strict=True):
            orders[charge.bucket].append((order, charge.limit))
        found = {name: list[State]() for name in orders}
        for name, _, state in self.records(found):
            if state:
                found[name].append(late(state, orders[name], now))
        return now, found

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        if key is None:
            forgotten = sum(self.server.command("UNLINK", name) for _, name, _ in [*self.records([bucket.name])])
        else:
            salt = (self._identity or self._open())[:SALT]
            keys = [self._key(charge, salt) for charge in bucket.draw(key)]
            forgotten = self.server.command("UNLINK", *keys)
        # Full, too, where a loss makes those without a record start empty; whoever does this knows of it.
        self._warned.add(f"{bucket.name}?")
        now, charges, states = self.read(bucket.draw(key))
        for charge, state in zip(charges, states, strict=True):
            if state.full_at > now and not charge.is_pause:
                # Kept when it is full again: without a record it would be taken to start empty as before.
                full = packed(fit(None, charge.limit, now), state.full_at // SECOND + 1)
                name = self._key(charge, self._identity[:SALT])
                self.server.command("SET", name, full, "PXAT", (state.full_at // SECOND + 1) * 1000)
        return int(forgotten)

    # -- the script

    def _run(
        self, charges: Sequence[Charge], asking: bytes | Place | None, settled: Sequence[bytes] = ()
    ) -> tuple[Any, Sequence[Charge]]:
        """What the script answers, from a store that we know, and the charges by the orders that stand."""
        for _ in range(ATTEMPTS):
            identity = self._identity or self._open()
            heard, paused = charges, 0
            if identity[SALT:] != NOTHING_ORDERED:
                heard = heeded(charges, self._standing, self._claimed, self.clock.now(), asks=asking != SETTLE)
                is_claimed = any(claims for claims, _ in self._claims.values())
                if is_claimed and not isinstance(asking, bytes) and self._claim(charges, heard):
                    continue
                paused = last_pause(charges, self._standing)
            asked = packed_place(asking, paused) if isinstance(asking, Place) else asking or b""
            drawn = [self._draw(charge, identity, asking.ahead if isinstance(asking, Place) else 0) for charge in heard]
            told = identity, asked, settled
            sent = self._clock.local()
            try:
                reply = self.server.send(self._call(drawn, *told))
            except NoScriptError:
                # It has lost it in a restart, a failover or a SCRIPT FLUSH, and takes it along with the call.
                reply = self.server.send(called(self._whole, self.marker, drawn, *told))
            if reply != 0:
                raw = reply if isinstance(reply, bytes) else reply[0]
                now, now_ns = INSTANT.unpack_from(raw)
                self._clock.learn(now * SECOND + now_ns, sent, self._clock.local())
                self._others.opened_at = min(self._others.opened_at, now * SECOND + now_ns)
                return reply, heard
            self._open()
        raise self._forgetful()

    def _call(self, drawn: Sequence[Drawn], identity: bytes, asked: bytes, settled: Sequence[bytes]) -> bytes:
        """A call by the script's name. To put it into words takes as long as to send it, and most are made again."""
        if settled or not repeats(asked):
            return called(self._by_name, self.marker, drawn, identity, asked, settled)
        known = (identity, asked, *drawn)
        call = self._calls.get(known)
        if call is None:
            if len(self._calls) >= REMEMBERED:
                self._calls.clear()
            self._calls[known] = call = called(self._by_name, self.marker, drawn, identity, asked, settled)
        return call

    def _forgetful(self) -> StoreError:
        return StoreError(f"{self.server} loses its state again and again; see that nobody empties it")

    def _shown(self, reply: list[Any]) -> tuple[int, Marker, list[bytes | None]]:
        instant, marker, *records = reply
        now, now_ns = INSTANT.unpack(instant)
        return now * SECOND + now_ns, Marker.unpack(marker), records

    def _settled(self, charges: Sequence[Charge], reply: list[Any]) -> list[bytes]:
        """Each record that was seen, and the one to put in its place."""
        now, marker, records = self._shown(reply)
        states = self._states(charges, records, marker, now)
        pairs: list[bytes] = []
        for charge, record, state in zip(charges, records, states, strict=True):
            known = record is not None or state.full_at > now
            old, keep = unpacked(record)
            if old and old.numbers != state.numbers:
                keep = max(keep, kept_for(old, now))
            new = packed(state, keep) if known and not charge.is_pause else b""
            pairs += (record or b"", b"" if new == record else new)
        return pairs

    def _states(
        self, charges: Sequence[Charge], records: Sequence[bytes | None], marker: Marker, now: int
    ) -> list[State]:
        """The states in records as their limits see them."""
        states, others = [], dict[object, list[State]]()
        for charge, record in zip(charges, records, strict=True):
            found, _ = unpacked(record)
            if found and found.numbers != charge.limit.numbers and charge[:2] not in others:
                # No call is granted meanwhile: it would change a record that is shown, too.
                written = self.seen([self.key_of(marker.salt, *charge[:2], number) for number in range(MOST_LIMITS)])
                others[charge[:2]] = [state for state, _ in map(unpacked, written) if state]
            states.append(self._state(charge, record, marker, now))
        return [
            strictest(state, charge.limit, others.get(charge[:2], ()), now)
            for charge, state in zip(charges, states, strict=True)
        ]

    def _state(self, charge: Charge, record: bytes | None, marker: Marker, now: int) -> State:
        """The state in a record, or in the lack of one, as its limit sees it."""
        limit = charge.limit
        if charge.is_pause:
            return unpacked_order(record) or fit(None, limit, now)
        if record is None:
            state = fit(None, limit, now)
            lost_at = marker.lost_at(limit)
            if lost_at is not None and lost_at + limit.span > now:
                # It may have been emptied just before its record was lost; by a clock that was set back since, now.
                full_at = min(lost_at, now) + limit.span
                state = state._replace(full_at=full_at, booked_at=full_at)
                if marker.lost == MAYBE:
                    self._warn(
                        f"{charge.bucket}?",
                        "nobody knows what %s held before it was started: bucket %r, which takes long to fill, has what"
                        " was refilled since; on a new server make it full with 'tb-celery reset NAME'",
                        charge,
                    )
            return state
        found, _ = unpacked(record)
        if found is None:
            self._warn(f"{charge.bucket}!", "%s holds a record of bucket %r that is none: it starts empty", charge)
            return State(now + limit.span, now + limit.span, limit.interval, limit.span)
        if found.numbers == limit.numbers:
            return fit(found, limit, now)
        return outlived(found, self._about([charge])[0], limit, now)

    def _warn(self, once: str, message: str, charge: Charge) -> None:
        if once not in self._warned:
            self._warned.add(once)
            logger.warning(message, self.server, charge.bucket)

    # -- names

    def _open(self) -> bytes:
        """Make the store known to us, or ourselves to the store; the salt that its names are made with."""
        known = self._identity[:SALT]
        facts, new = self.server.examined(), secrets.token_bytes(SALT)
        raw = self.server.command("EVAL", self.opening, 1, self.marker, known, new)
        if len(raw) != MARKER.size:
            message = (
                f"{self.server} holds something else under the name {self.marker.decode()!r}; remove it, or choose"
                " another prefix in the setting key_prefix (TB_CELERY_KEY_PREFIX)"
            )
            raise StoreError(message)
        self._identity = raw[:IDENTITY]
        self._forget_orders()
        marker, before = Marker.unpack(raw), self._made_at
        self._made_at = marker.made_at
        if known == marker.salt and before == marker.made_at:
            return self._identity  # something was ordered, that is all
        if known and (known != marker.salt or raw.startswith(new[: IDENTITY - SALT], SALT)):
            logger.warning("%s has lost its state: buckets start empty", self.server)
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
            logger.warning(
                "%s may evict buckets, which then are full again: its maxmemory-policy must be noeviction, not %s",
                self.server,
                policy,
            )
        return self._identity

    def _key(self, charge: Charge, salt: bytes) -> bytes:
        return self.key_of(salt, *charge[:3])

    def _draw(self, charge: Charge, identity: bytes, turns: int = 0) -> Drawn:
        """``charge`` as the script takes it, when so many turns share it."""
        bucket, key, number, limit, cost = charge
        known = (identity, bucket, key, number, cost, limit.interval, limit.span, turns)
        drawn = self._drawn.get(known)
        if drawn is None:
            late = runs_over(limit.interval)
            idle, spare = UNCLAIMED + UNCLAIMED_TURNS * limit.interval, limit.span - cost - limit.interval
            times = (cost, limit.span, late, idle, spare)
            salt = identity[:SALT]
            drawn = Drawn(
                wired_word(self._key(charge, salt)),
                wired_word(
                    NUMBERS.pack(-limit.interval if charge.is_pause else limit.interval, limit.span)
                    + b"".join(INSTANT.pack(*divmod(span, SECOND)) for span in times)
                    + bytes([cost > limit.interval * (turns or 1)])
                    + hash_name(salt, bucket)[:4]
                    + hash_name(salt, bucket, key)[:4]
                ),
            )
            if len(self._drawn) >= REMEMBERED:
                self._drawn.clear()
            self._drawn[known] = drawn
        return drawn
