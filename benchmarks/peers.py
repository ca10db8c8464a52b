"""Other limiters whose quota several processes share, and token buckets on embedded databases, beside ours.

Each is opened in the process that uses it and then answers for one key at a time: may this one pass? What a peer cannot
express is not made up for it: who has no call for several buckets is asked for one after the other.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
import time
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import redis
from celery import Celery
from filelock import FileLock

from tb_celery import Bucket, Limit, Limiter
from tb_celery.stores.file import FileStore
from tb_celery.stores.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.contenders import Site
    from tb_celery.stores import Store

BUCKETS = tuple(f"bucket-{number}" for number in range(8))
BUSY = 10.0
"""Seconds that an embedded database waits for others, as our lock does."""


class Quota(NamedTuple):
    """So much in so many seconds, all of it at once if need be: all of them can be told this."""

    amount: int
    seconds: int

    @property
    def rate(self) -> float:
        return self.amount / self.seconds

    @property
    def cost(self) -> int:
        """Nanoseconds in which one comes back."""
        return self.seconds * 1_000_000_000 // self.amount


class Opened(NamedTuple):
    """A limiter in use."""

    ask: Callable[[str], bool]
    """For one of a key."""
    together: Callable[[Sequence[str]], bool] | None = None
    """For one of each of several buckets, all or nothing."""
    fill: Callable[[Sequence[str]], object] | None = None
    """Make the records of many keys in one go."""


@dataclass(frozen=True)
class Peer:
    open: Callable[[Site, Quota], Opened]
    package: str = ""
    """That must be importable."""
    server: bool = False
    keys: bool = True
    """Whether one limiter has a quota for each key."""
    slow: bool = False
    """Whether many keys take minutes to make."""

    def missing(self) -> str:
        """Why it cannot be measured; empty if it can.

        Its package is imported here, once, and not in each of the processes that are measured.
        """
        try:
            if self.package:
                import_module(self.package)
        except ModuleNotFoundError:
            return f"the package {self.package} is not installed (tb-celery[bench])"
        return ""


def ours(site: Site, quota: Quota) -> Opened:
    return _ours(FileStore(site.folder / "buckets.state"), quota)


def ours_on_redis(site: Site, quota: Quota) -> Opened:
    # A server that has only just been started is what we want, and what it warns of.
    logging.getLogger("tb_celery").setLevel(logging.ERROR)
    return _ours(RedisStore(site.server), quota)


def _ours(store: Store, quota: Quota) -> Opened:
    limits = (Limit(quota.amount, quota.rate),)
    acquire = Limiter([Bucket(name, limits) for name in ("api", *BUCKETS)], store).acquire
    return Opened(
        lambda key: bool(acquire("api", key=key)), lambda names: bool(acquire(dict.fromkeys(names, 1), key="key"))
    )


def sqlite(site: Site, quota: Quota) -> Opened:
    """One row a bucket, one transaction a decision, nothing synced: a kill loses nothing, as with our file."""
    database = sqlite3.connect(site.folder / "buckets.sqlite", timeout=BUSY, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=OFF")
    database.execute("CREATE TABLE IF NOT EXISTS buckets (name TEXT PRIMARY KEY, full_at INTEGER) WITHOUT ROWID")
    most, cost = quota.amount * quota.cost, quota.cost
    take = """
        INSERT INTO buckets VALUES (?1, ?2 + ?3)
        ON CONFLICT (name) DO UPDATE SET full_at = max(full_at, ?2) + ?3 WHERE max(full_at, ?2) + ?3 <= ?2 + ?4
        RETURNING 1"""

    def ask(name: str) -> bool:
        return database.execute(take, (name, time.monotonic_ns(), cost, most)).fetchall() != []

    def together(names: Sequence[str]) -> bool:
        database.execute("BEGIN IMMEDIATE")
        allowed = all(ask(name) for name in names)
        database.execute("COMMIT" if allowed else "ROLLBACK")
        return allowed

    def fill(names: Sequence[str]) -> None:
        database.execute("BEGIN IMMEDIATE")
        now = time.monotonic_ns()
        database.executemany("INSERT INTO buckets VALUES (?, ?)", ((name, now + cost) for name in names))
        database.execute("COMMIT")

    return Opened(ask, together, fill)


def lmdb(site: Site, quota: Quota) -> Opened:
    """One record a bucket, one write transaction a decision, nothing synced."""
    import lmdb as package  # noqa: PLC0415 - not everybody has it

    database = package.open(str(site.folder / "buckets.lmdb"), subdir=False, map_size=1 << 30, sync=False)
    most, cost = quota.amount * quota.cost, quota.cost
    record = struct.Struct("q")

    def step(
        transaction: Any,  # noqa: ANN401 - it has no types
        name: str,
        now: int,
    ) -> bool:
        found = transaction.get(name.encode())
        full_at: int = max(record.unpack(found)[0], now) if found else now
        if full_at + cost > now + most:
            return False
        transaction.put(name.encode(), record.pack(full_at + cost))
        return True

    def together(names: Sequence[str]) -> bool:
        with database.begin(write=True) as transaction:
            now = time.monotonic_ns()
            allowed = all(step(transaction, name, now) for name in names)
            if not allowed:
                transaction.abort()
        return allowed

    def ask(name: str) -> bool:
        with database.begin(write=True) as transaction:
            return step(transaction, name, time.monotonic_ns())

    return Opened(ask, together, together)


def limits_fixed(site: Site, quota: Quota) -> Opened:
    """The fastest that `limits` has; it has no token bucket."""
    return _limits("FixedWindowRateLimiter", site, quota)


def limits_moving(site: Site, quota: Quota) -> Opened:
    """The exact one of `limits`."""
    return _limits("MovingWindowRateLimiter", site, quota)


def _limits(strategy: str, site: Site, quota: Quota) -> Opened:
    from limits import RateLimitItemPerSecond, strategies  # noqa: PLC0415
    from limits.storage import storage_from_string  # noqa: PLC0415

    limiter = getattr(strategies, strategy)(storage_from_string(site.server))
    item = RateLimitItemPerSecond(quota.amount, quota.seconds)
    return Opened(lambda key: bool(limiter.hit(item, key)))


def throttled(site: Site, quota: Quota) -> Opened:
    from datetime import timedelta  # noqa: PLC0415

    from throttled import RateLimiterType, Throttled, rate_limiter, store  # noqa: PLC0415

    throttle = Throttled(
        using=RateLimiterType.GCRA.value,
        quota=rate_limiter.per_duration(timedelta(seconds=quota.seconds), quota.amount, burst=quota.amount),
        store=store.RedisStore(server=site.server, options={}),
    )
    return Opened(lambda key: not throttle.limit(key).limited)


def pyrate_redis(site: Site, quota: Quota) -> Opened:
    from pyrate_limiter import GCRA, Rate, RedisStateStore, StateBucket  # noqa: PLC0415
    from pyrate_limiter import Limiter as Pyrate  # noqa: PLC0415

    rate = Rate(quota.amount, quota.seconds * 1000)
    limiter = Pyrate(StateBucket([rate], GCRA(), RedisStateStore(redis.Redis.from_url(site.server), "pyrate")))
    return Opened(lambda key: bool(limiter.try_acquire(key, blocking=False)))


def pyrate_sqlite(site: Site, quota: Quota) -> Opened:
    """Its SQLite bucket behind its file lock, called as it calls that lock.

    That call, `acquire(False)`, is an error with filelock 4, which read it as a time-out before; here it means what it
    meant.
    """
    from pyrate_limiter import Limiter as Pyrate  # noqa: PLC0415
    from pyrate_limiter import Rate, SQLiteBucket  # noqa: PLC0415

    class Lock:
        def __init__(self, path: str) -> None:
            self.lock = FileLock(path)

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - as its caller has it
            self.lock.acquire(timeout=timeout if blocking else 0)
            return True

        def release(self) -> None:
            self.lock.release()

        def __enter__(self) -> None:
            self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

    path = str(site.folder / "pyrate.sqlite")
    bucket: Any = SQLiteBucket.init_from_file(
        [Rate(quota.amount, quota.seconds * 1000)], db_path=path, use_file_lock=True
    )
    bucket.lock = Lock(f"{path}.lock")
    limiter = Pyrate(bucket)
    return Opened(lambda key: bool(limiter.try_acquire(key, blocking=False)))


def token_throttle(site: Site, quota: Quota) -> Opened:
    """Its cycle for a call whose cost is known: reserve, and tell that so much was used."""
    from token_throttle import (  # noqa: PLC0415
        PerModelConfig,
        SyncRateLimiter,
        SyncSqliteBackendBuilder,
        UsageQuotas,
    )
    from token_throttle import Quota as Requests  # noqa: PLC0415

    quotas = UsageQuotas([Requests(metric="requests", limit=quota.amount, per_seconds=quota.seconds)])
    backend = SyncSqliteBackendBuilder(site.folder / "token_throttle.sqlite", key_prefix="api")
    limiter = SyncRateLimiter(PerModelConfig(quotas=quotas), backend=backend)
    usage = {"requests": 1}

    def ask(key: str) -> bool:
        try:
            reservation = limiter.acquire_capacity(usage, model=key, timeout=0)
        except TimeoutError:
            return False
        limiter.refund_capacity(usage, reservation)
        return True

    return Opened(ask)


def heimdall(site: Site, quota: Quota) -> Opened:
    """The check that its tasks make before each body."""
    from celery_heimdall import HeimdallTask  # noqa: PLC0415
    from celery_heimdall.task import rate_limited_countdown  # noqa: PLC0415

    def nothing() -> None:
        """Its limit is what is asked."""

    app = Celery("heimdall", broker=site.server, set_as_current=False)
    limit = {"times": quota.amount, "per": quota.seconds}
    task = app.task(nothing, base=HeimdallTask, name="nothing", heimdall=limit, lazy=False)
    return Opened(lambda key: rate_limited_countdown(task, key, (), {}) == 0)


OURS, OURS_REDIS = "tb_celery", "tb_celery (Redis)"
PEERS: dict[str, Peer] = {
    OURS: Peer(ours),
    "SQLite token bucket": Peer(sqlite),
    "LMDB token bucket": Peer(lmdb, "lmdb"),
    "pyrate-limiter (SQLite)": Peer(pyrate_sqlite, "pyrate_limiter", keys=False),
    "token-throttle (SQLite)": Peer(token_throttle, "token_throttle", slow=True),
    OURS_REDIS: Peer(ours_on_redis, server=True),
    "limits fixed window (Redis)": Peer(limits_fixed, "limits", server=True),
    "limits moving window (Redis)": Peer(limits_moving, "limits", server=True),
    "throttled-py GCRA (Redis)": Peer(throttled, "throttled", server=True),
    "pyrate-limiter GCRA (Redis)": Peer(pyrate_redis, "pyrate_limiter", server=True, keys=False),
    "celery-heimdall (Redis)": Peer(heimdall, "celery_heimdall", server=True),
}
