"""Decisions on a Redis or Valkey server against the least that one call costs: `python -m benchmarks.redis_store`."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from functools import partial
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


OURS, FLOOR = "tb_celery", "a script that does nothing, by redis-py"
CONTENDERS: dict[str, Callable[[str], Callable[[], object]]] = {
    OURS: ours,
    "tb_celery, as a task asks": queued,
    "tb_celery, two buckets at once": two_buckets,
    FLOOR: floor,
    "the same over a connection of ours": own_floor,
}


def run(repetitions: int, seconds: float, processes: tuple[int, ...]) -> dict[str, dict[int, list[Cell]]]:
    """Everybody in turn, in another order each time."""
    cells: dict[str, dict[int, list[Cell]]] = {name: {number: [] for number in processes} for name in CONTENDERS}
    dice = random.Random(1)
    with valkey_server() as url:
        for round_ in range(repetitions):
            for number in processes:
                for name in dice.sample(sorted(CONTENDERS), len(CONTENDERS)):
                    cells[name][number].append(measure(partial(CONTENDERS[name], url), number, seconds))
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
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8])
    given = parser.parse_args()
    cells = run(given.repetitions, given.seconds, tuple(given.processes))
    print(table(cells))


if __name__ == "__main__":
    main()
