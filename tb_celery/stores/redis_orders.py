"""What stands about buckets beside their records on a Redis or Valkey server, as one process knows it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from tb_celery.bucket import FOREVER, MOST_LIMITS, PAUSE, PAUSED, pause
from tb_celery.stores.claims import Claim, Others, claims_of, is_news, look_again, name_of
from tb_celery.stores.orders import change, collect
from tb_celery.stores.redis_format import DAY, IDENTITY, packed, unpacked_order
from tb_celery.stores.redis_keys import MS, RedisKeys

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tb_celery.bucket import Charge, Name
    from tb_celery.clock import Clock
    from tb_celery.state import State
    from tb_celery.stores.claims import Claims
    from tb_celery.stores.orders import Orders
    from tb_celery.stores.redis_server import Server

REMEMBERED = 1 << 14
"""Charges whose words, and quotas whose orders, a process keeps."""
SALT = 16
"""Bytes of what the names in a store are made with."""
NOTHING_ORDERED = bytes(IDENTITY - SALT)
"""What stands behind these in the identity of a store in which nothing was ever ordered."""
CLAIM = Path(__file__).with_name("redis_claim.lua").read_text("utf-8")


class RedisOrders(RedisKeys, ABC):
    """The orders and claims under a prefix; see :class:`RedisKeys` for what it takes."""

    claiming = CLAIM
    clock: Clock

    def __init__(self, server: Server, prefix: str) -> None:
        super().__init__(server, prefix)
        self._identity = b""
        self._orders: dict[tuple[str, str | None], Orders] = {}
        self._claims: dict[tuple[str, int], tuple[Claims, int]] = {}
        self._others = Others(FOREVER)

    @abstractmethod
    def _open(self) -> bytes:
        """What the store is known by now."""

    def _forget_orders(self) -> None:
        self._orders.clear()
        self._claims.clear()

    def _standing(self, bucket: str, key: str | None) -> Orders:
        """What is ordered about a bucket and key, as of the last look at the store."""
        if (bucket, key) not in self._orders:
            names = [pause(bucket, each)[:3] for each in {None, key}]
            names += [change(bucket, number, PAUSE)[:3] for number in range(MOST_LIMITS)]
            found = self._found(names)
            if len(self._orders) >= REMEMBERED:
                self._orders.clear()
            orders = collect(bucket, found.get, self.clock.now())
            self._orders[bucket, key] = orders if key is None else orders.with_pause(key, found[bucket, key, PAUSED])
        return self._orders[bucket, key]

    def _claimed(self, bucket: str, count: int) -> Claims:
        """What is claimed of a bucket by those who declare so many limits, as of a look at the store not long ago."""
        now = self.clock.now()
        claims, until = self._claims.get((bucket, count), ({}, 0))
        if until <= now:
            find = self._found([name_of(bucket, count, number) for number in range(count)]).get
            claims = claims_of(bucket, count, find, now)
            self._claims[bucket, count] = claims, min(look_again(claims.values(), now), default=FOREVER)
        return claims

    def _claim(self, asked: Sequence[Charge], heard: Sequence[Charge], written: Iterable[State | None] = ()) -> bool:
        """Have others hear of the numbers that are declared here, if need be; whether that is so."""
        now = self.clock.now()
        met = self._others.meet(asked, heard, written, self._find, now)
        due = [*self._others.due(asked, met, self._standing, self._claimed, now)]
        for name, old, new in due:
            self._put(name, old, new)
        if due:
            self._claims.clear()
            self._open()
        return bool(due)

    def _put(self, name: Name, old: Claim | None, new: Claim) -> None:
        """Have a claim take the place of another, unless somebody else was faster."""
        salt = self._identity[:SALT]
        key = self.key_of(salt, *name)
        [seen] = self.seen([key])
        known = unpacked_order(seen)
        claim = Claim.of(known, self.clock.now()) if known else None
        if claim == old or not (claim and claim.stands):
            state = new.state()
            raw = packed(state._replace(interval=-state.interval))
            until = (max(new.slow_until, new.small_until) + DAY) // MS
            told = "news" if is_news(old, new) else ""
            self.server.command("EVAL", self.claiming, 2, self.marker, key, salt, seen or b"", raw, until, told)

    def _about(self, charges: Sequence[Charge]) -> list[State | None]:
        """The orders about the limits of ``charges``, also those that have ended."""
        names = [change(charge.bucket, charge.number, charge.limit)[:3] for charge in charges]
        is_ordered = names and self._identity[SALT:] != NOTHING_ORDERED
        found = self._found(names) if is_ordered else {}
        return [found.get(name) for name in names]

    def _find(self, name: Name) -> State | None:
        """The order known by a bucket's name, a key and a number."""
        return self._found([name])[name]

    def _found(self, names: Sequence[Name]) -> dict[Name, State | None]:
        keys = [self.key_of(self._identity[:SALT], *name) for name in names]
        return dict(zip(names, map(unpacked_order, self.server.command("MGET", *keys)), strict=True))
