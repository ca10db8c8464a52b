"""From what was measured to figures, and from figures to a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.contenders import BARE, CONTENDERS, ORIGINAL, OURS, REDIS, SAME_LOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.load import Cell

OTHERS = [name for name in CONTENDERS if name != OURS]
ONE, MANY = 1, 10_000
"""Keys."""
PACED = 8
"""Processes."""
SHOWN = {
    "kills": ("Processes killed at any instruction", False),
    "celery_drain": ("A backlog, and plain tasks beside it", False),
    "redis_store": ("Decisions on a server", True),
    "redis_fleet": ("Two hosts and a server", True),
}
"""Benchmarks of their own, with their headings, and whether what they print is a table."""
KINDS = {"prefork": "prefork, 2 processes", "solo": "solo: one process does everything"}


@dataclass
class Measured:
    """What was measured, repetition by repetition."""

    stores: list[dict[int, dict[str, Cell]]] = field(default_factory=list)
    """By number of processes and contender."""
    paced: list[dict[str, Cell]] = field(default_factory=list)
    keys: list[dict[int, Cell]] = field(default_factory=list)
    """By number of keys."""
    tasks: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Tasks a second, by the worker's pool and the task."""


def figures(measured: Measured, conditions: dict[str, str], shown: dict[str, str]) -> dict[str, Any]:
    """Medians over the repetitions; of ratios, which are taken within each, also the lowest and the highest."""
    stores = {
        count: {name: _typical(each[count][name] for each in measured.stores) for name in CONTENDERS}
        for count in measured.stores[0]
    }
    ratios = {
        count: {
            other: _spread(each[count][OURS].rate / each[count][other].rate for each in measured.stores)
            for other in OTHERS
        }
        for count in stores
    }
    return {
        "conditions": conditions,
        "repetitions": len(measured.stores),
        "stores": stores,
        "ratios": ratios,
        "paced": {name: _typical(each[name] for each in measured.paced) for name in CONTENDERS},
        "paced p99 in ms": _spread(each[OURS].p99 / 1000 for each in measured.paced),
        "keys": _spread(each[ONE].rate / each[MANY].rate for each in measured.keys),
        "tasks": {
            pool: {kind: round(median(each[kind] for each in rounds)) for kind in ("plain", "limited")}
            for pool, rounds in measured.tasks.items()
        },
        "task ratios": {
            pool: _spread(each["limited"] / each["plain"] for each in rounds) for pool, rounds in measured.tasks.items()
        },
        "shown": shown,
    }


def _typical(cells: Iterable[Cell]) -> dict[str, float]:
    rates, p50s, p99s = zip(*cells, strict=True)
    return {"rate": round(median(rates)), "p50": round(median(p50s), 1), "p99": round(median(p99s), 1)}


def _spread(ratios: Iterable[float]) -> list[float]:
    ratios = sorted(ratios)
    return [round(ratio, 3) for ratio in (median(ratios), ratios[0], ratios[-1])]


def aims(found: dict[str, Any]) -> list[tuple[str, str, list[float], bool]]:
    """What is aimed for: the text, the aim, the figure with its lowest and highest, and whether it is met."""
    ratios = found["ratios"]
    worst = {other: min(ratios[count][other] for count in ratios) for other in OTHERS}
    at_least = [
        *(
            (f"of {limit}, {count} at once", 0.5 if count == 1 else 0.45, ratios[count][limit])
            for limit in (SAME_LOCK, BARE)
            for count in ratios
        ),
        ("times the original script, at worst", 60, worst[ORIGINAL]),
        ("times Redis, at worst", 8, worst[REDIS]),
        ("of a plain task's throughput (prefork)", 0.97, found["task ratios"]["prefork"]),
    ]
    at_most = [
        (f"ms: p99 of {PACED} that pause for 1 ms", 0.5, found["paced p99 in ms"]),
        (f"times the cost of one key, {MANY:,} keys", 1.5, found["keys"]),
    ]
    return [
        *((text, f"at least {aim}", figure, figure[0] >= aim) for text, aim, figure in at_least),
        *((text, f"at most {aim}", figure, figure[0] <= aim) for text, aim, figure in at_most),
    ]


def render(found: dict[str, Any]) -> str:
    """The page, for people and for terminals."""
    judged = aims(found)
    missed = [text for text, _, _, met in judged if not met]
    stores, ratios, paced = found["stores"], found["ratios"], found["paced"]
    counts = [f"{count} process{'es' * (count > 1)}" for count in stores]
    latency = {name: [_latency(stores[count][name]) for count in stores] for name in CONTENDERS}
    parts = [
        "# Performance",
        "Written by `make bench` (`python -m benchmarks`), which measures all of this in one run; do not edit.",
        _table(["", ""], list(found["conditions"].items())),
        "## Aims",
        f"Behind: {'; '.join(missed)}." if missed else "All are met.",
        _table(
            ["tb_celery is", "aim", "median", "lowest to highest", "met"],
            [
                [text, aim, _short(at[0]), f"{_short(at[1])} to {_short(at[2])}", "yes" if met else "**no**"]
                for text, aim, at, met in judged
            ],
        ),
        "## Decisions on one bucket",
        f"""\
Processes ask one bucket, as fast as they can; every answer is yes, so everyone reads, decides and writes. tb_celery is
asked through its public call, `Limiter.acquire`. "{BARE}" is lock, `pread`, `pwrite`, unlock in a Python loop: no file
store in Python can be faster. "{SAME_LOCK}" is that with the lock that tb_celery takes. "{ORIGINAL}" keeps its state as
JSON and syncs it each time. "{REDIS}" is a token bucket in Lua, called with redis-py on loopback.

All run back to back, in another order in each of {found["repetitions"]} repetitions; a figure is their median, and a
ratio the median of the ratios within each. Absolute figures move with the machine: the ratios are what to read.""",
        "Decisions a second, of all processes together:",
        _table(
            ["", *counts], [[name, *(f"{stores[count][name]['rate']:,}" for count in stores)] for name in CONTENDERS]
        ),
        "How many times as many tb_celery decides:",
        _table(["", *counts], [[other, *(_short(ratios[count][other][0]) for count in ratios)] for other in OTHERS]),
        """\
Microseconds that a decision takes, p50 / p99. A process that waits asks nothing meanwhile, so under full load p99 is
kinder than what a single caller meets; the last column, processes that pause for 1 ms before they ask, is not.""",
        _table(
            ["", *counts, f"{PACED}, paced"],
            [[name, *latency[name], _latency(paced[name])] for name in CONTENDERS],
        ),
        "## Tasks",
        """\
Tasks that do nothing, a second, on one worker node with a Valkey broker: plain, and as `RateLimitedTask` with tokens in
hand.""",
        _table(
            ["pool", "plain", "limited", "ratio"],
            [
                [KINDS[pool], *(f"{rate:,}" for rate in rates.values()), _short(found["task ratios"][pool][0])]
                for pool, rates in found["tasks"].items()
            ],
        ),
    ]
    if found["shown"]:
        parts += [
            "## A quota in use",
            "The verdict of `make demo`, run right after: two nodes of four processes, 5 tokens at most, 10 a second.",
            f"```\n{found['shown']['demo']}\n```",
        ]
        for name, (heading, is_table) in SHOWN.items():
            said = found["shown"][name]
            parts += [f"## {heading}", f"By `python -m benchmarks.{name}`.", said if is_table else f"```\n{said}\n```"]
    return "\n\n".join(parts) + "\n"


def _short(number: float) -> str:
    return f"{number:.3f}" if number < 2 else f"{number:.1f}" if number < 100 else f"{number:.0f}"


def _latency(cell: dict[str, float]) -> str:
    return f"{_short(cell['p50'])} / {_short(cell['p99'])}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown that can be read as it is."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)
