"""The stores that are compared. Each is opened in the process that uses it and answers by one call: may this one pass?

All of them say yes every time (the bucket never runs out and is never full), so all of them read, step and write.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_UN, flock
from functools import partial
from typing import TYPE_CHECKING

import redis
from filelock import lock_descriptor, unlock_descriptor

from tb_celery import Bucket, Limit, Limiter
from tb_celery.stores.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CAPACITY, RATE = 1_000_000_000, 1
TENANT = Limit(2_000_000, 0.001)
"""For each key. So slow that none is full again, and its record given to another, before the next repetition."""

SCRIPT = """
local capacity, rate, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local state = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local tokens = tonumber(state[1]) or capacity
tokens = math.min(capacity, tokens + math.max(0, now - (tonumber(state[2]) or now)) * rate)
local allowed = tokens >= cost
if allowed then tokens = tokens - cost end
redis.call('HSET', KEYS[1], 'tokens', string.format('%.6f', tokens), 'at', string.format('%.6f', now))
redis.call('EXPIRE', KEYS[1], math.ceil(capacity / rate))
return allowed and 1 or 0
"""


@dataclass(frozen=True)
class Site:
    """Where the contenders keep their state."""

    folder: Path
    server: str


def ours(site: Site) -> Callable[[], object]:
    return partial(_limiter(site, Limit(CAPACITY, RATE)).acquire, "api")


def ours_by_key(site: Site, keys: int) -> Callable[[], object]:
    """Our store with so many keys of one bucket in turn, each seen before."""
    acquire = _limiter(site, TENANT).acquire
    names = [f"tenant-{number}" for number in range(keys)]
    for name in names:
        acquire("api", key=name)
    turns = itertools.cycle(names)
    return lambda: acquire("api", key=next(turns))


def _limiter(site: Site, limit: Limit) -> Limiter:
    return Limiter([Bucket("api", (limit,))], FileStore(site.folder / f"{limit.refill_rate}.state"))


def bare(site: Site) -> Callable[[], object]:
    """The limit: what a file store in Python cannot do without."""
    file = _two_records(site.folder / "bare")

    def decide() -> bool:
        flock(file, LOCK_EX)
        os.pwrite(file, os.pread(file, 64, 64), 64)
        flock(file, LOCK_UN)
        return True

    return decide


def bare_same_lock(site: Site) -> Callable[[], object]:
    """The same with our own lock: filelock's, which works on Windows too, and short sleeps while others hold it."""
    file = _two_records(site.folder / "bare_same_lock")

    def decide() -> bool:
        while not lock_descriptor(file, blocking=False):
            time.sleep(0.0001)
        os.pwrite(file, os.pread(file, 64, 64), 64)
        unlock_descriptor(file)
        return True

    return decide


def _two_records(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(file, bytes(128), 0)
    return file


def original(site: Site) -> Callable[[], object]:
    """The method of the script that tb_celery began as: the whole state as JSON, rewritten and synced each time."""
    path = site.folder / "original.json"

    def decide() -> bool:
        with path.open("a+") as file:
            flock(file, LOCK_EX)
            try:
                file.seek(0)
                state = json.loads(file.read() or "{}")
                now = time.time()
                bucket = state.setdefault("api", {"tokens": CAPACITY, "last_update": now})
                tokens = min(CAPACITY, bucket["tokens"] + (now - bucket["last_update"]) * RATE)
                allowed: bool = tokens >= 1
                bucket.update(tokens=tokens - allowed, last_update=now)
                file.seek(0)
                file.truncate()
                json.dump(state, file)
                file.flush()
                os.fsync(file.fileno())
            finally:
                flock(file, LOCK_UN)
        return allowed

    return decide


def on_redis(site: Site) -> Callable[[], object]:
    """A token bucket in Lua, called through redis-py on loopback."""
    client = redis.Redis.from_url(site.server)
    script = client.script_load(SCRIPT)
    return partial(client.evalsha, script, 1, "bucket:api", CAPACITY, RATE, 1)


OURS, BARE, SAME_LOCK, ORIGINAL, REDIS = (
    "tb_celery",
    "bare, fcntl",
    "bare, filelock",
    "original script",
    "Redis",
)
CONTENDERS: dict[str, Callable[[Site], Callable[[], object]]] = {
    OURS: ours,
    BARE: bare,
    SAME_LOCK: bare_same_lock,
    ORIGINAL: original,
    REDIS: on_redis,
}
