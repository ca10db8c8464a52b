"""Decisions on a Redis or Valkey server against the least that one call costs, and against other limiters.

`python -m benchmarks.redis_store`. The others are measured where they are installed:
`pip install limits throttled-py pyrate-limiter`, in an environment of their own, for they are no part of this project.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import redis

from benchmarks.load import Cell, measure
from tb_celery import Bucket, Limit, Limiter
from tb_celery.arithmetic import Place
from tb_celery.stores.redis import RedisStore

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from valkey_server import valkey_server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CAPACITY, RATE = 1_000_000_000, 1_000_000
"""Every answer is yes, so that everyone reads, decides and writes; and like a busy bucket's, it is never full."""
RESULT = "return 1"


def ours(url: str) -> Callable[[], object]:
    acquire = _limiter(url).acquire
    return lambda: acquire("api")


def queued(url: str) -> Callable[[], object]:
    acquire, place = _limiter(url).acquire, Place()
    return lambda: acquire("api", place=place)


def two_buckets(url: str) -> Callable[[], object]:
    acquire, both = _limiter(url).acquire, {"api": 1, "other": 1}
    return lambda: acquire(both)


def _limiter(url: str) -> Limiter:
    buckets = [Bucket(name, (Limit(CAPACITY, RATE),)) for name in ("api", "other")]
    limiter = Limiter(buckets, RedisStore(url))
    for bucket in buckets:
        limiter.acquire(bucket.name, CAPACITY // 2)
    return limiter


def floor(url: str) -> Callable[[], object]:
    """A script that does nothing, called with redis-py as everybody does."""
    client = redis.Redis.from_url(url)
    script = client.script_load(RESULT)
    return lambda: client.evalsha(script, 0)


def own_floor(url: str) -> Callable[[], object]:
    """The same over one of our own connections."""
    server = RedisStore(url).server
    script = server.command("SCRIPT", "LOAD", RESULT)
    return lambda: server.command("EVALSHA", script, 0)


def with_limits(url: str) -> Callable[[], object]:
    """`limits` has no token bucket; its fixed window is the fastest that it has."""
    from limits import RateLimitItemPerHour  # noqa: PLC0415
    from limits.storage import storage_from_string  # noqa: PLC0415
    from limits.strategies import FixedWindowRateLimiter  # noqa: PLC0415

    limiter, item = FixedWindowRateLimiter(storage_from_string(url)), RateLimitItemPerHour(CAPACITY)
    return lambda: limiter.hit(item, "api")


def with_throttled(url: str) -> Callable[[], object]:
    from throttled import RateLimiterType, Throttled, rate_limiter, store  # noqa: PLC0415

    throttle = Throttled(
        key="api",
        using=RateLimiterType.GCRA.value,
        quota=rate_limiter.per_hour(RATE * 3600, burst=CAPACITY),
        store=store.RedisStore(server=url, options={}),
    )
    limit: Callable[[], object] = throttle.limit
    return limit


def with_pyrate(url: str) -> Callable[[], object]:
    from pyrate_limiter import GCRA, Rate, RedisStateStore, StateBucket  # noqa: PLC0415
    from pyrate_limiter import Limiter as Pyrate  # noqa: PLC0415

    bucket = StateBucket([Rate(RATE, 1000)], GCRA(), RedisStateStore(redis.Redis.from_url(url), "pyrate"))
    limiter = Pyrate(bucket)
    return lambda: limiter.try_acquire("api", blocking=False)


OURS, FLOOR = "tb_celery", "a script that does nothing, by redis-py"
CONTENDERS: dict[str, tuple[str, Callable[[str], Callable[[], object]]]] = {
    OURS: ("redis", ours),
    "tb_celery, as a task asks": ("redis", queued),
    "tb_celery, two buckets at once": ("redis", two_buckets),
    FLOOR: ("redis", floor),
    "the same over a connection of ours": ("redis", own_floor),
    "limits, fixed window": ("limits", with_limits),
    "throttled-py, GCRA": ("throttled", with_throttled),
    "pyrate-limiter, GCRA": ("pyrate_limiter", with_pyrate),
}


def run(repetitions: int, seconds: float, processes: tuple[int, ...]) -> dict[str, dict[int, list[Cell]]]:
    """Everybody in turn, in another order each time."""
    present = {name: make for name, (package, make) in CONTENDERS.items() if importlib.util.find_spec(package)}
    cells: dict[str, dict[int, list[Cell]]] = {name: {number: [] for number in processes} for name in present}
    dice = random.Random(1)
    with valkey_server() as url:
        for round_ in range(repetitions):
            for number in processes:
                for name in dice.sample(sorted(present), len(present)):
                    cells[name][number].append(measure(lambda name=name: present[name](url), number, seconds))  # type: ignore[misc]
                    time.sleep(0.1)
            print(f"{round_ + 1} of {repetitions} done", file=sys.stderr)
    return cells


def table(cells: Mapping[str, Mapping[int, list[Cell]]]) -> str:
    """In Markdown: the medians, and the medians of the ratios within each repetition."""
    numbers = list(next(iter(cells.values())))
    heads = [head for n in numbers for head in (f"{n} at once: decisions/s", "of the floor", "p50 / p99 us")]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, by_number in cells.items():
        row = [name]
        for number, mine in by_number.items():
            ratios = [one.rate / least.rate for one, least in zip(mine, cells[FLOOR][number], strict=True)]
            p50, p99 = (statistics.median(getattr(cell, field) for cell in mine) for field in ("p50", "p99"))
            rate = statistics.median(cell.rate for cell in mine)
            row += [f"{rate:,.0f}", f"{statistics.median(ratios):.2f}", f"{p50:.0f} / {p99:.0f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8])
    given = parser.parse_args()
    cells = run(given.repetitions, given.seconds, tuple(given.processes))
    print(table(cells))
    for name, (package, _) in CONTENDERS.items():
        if name not in cells:
            print(f"\nNot measured: {name}; the package {package} is not installed.")


if __name__ == "__main__":
    main()
