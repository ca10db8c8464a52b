"""From what was measured to figures, and from figures to a page."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.behind import behind
from benchmarks.comparison import comparison
from benchmarks.contenders import BARE, CONTENDERS, ORIGINAL, OURS, REDIS, SAME_LOCK
from benchmarks.load import rounded, typical
from benchmarks.markdown import short, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.load import Cell

OTHERS = [name for name in CONTENDERS if name != OURS]
ONE, MANY = 1, 10_000
"""Keys."""
PACED = 8
"""Processes."""
SHOWN = {
    "celery_drain": ("A backlog, and plain tasks beside it", True),
    "memory": ("Memory of a worker whose tasks wait", True),
    "redis_store": ("Decisions on a server", True),
    "redis_fleet": ("Two hosts and a server", True),
    "metrics": ("Metrics", True),
}
"""Benchmarks of their own, with their headings, and whether what they print is Markdown."""
TOLD = ("celery_drain", "memory")
"""Those that also write down their figures."""
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
    beside: dict[str, Any] = field(default_factory=dict)
    """Others beside us: see benchmarks/beside.py."""
    failed: list[str] = field(default_factory=list)
    """What could not be measured, and why."""


@dataclass
class Shown:
    """What other programs show."""

    text: dict[str, str] = field(default_factory=dict)
    """By name: the demo's verdict, and all that the smaller benchmarks print."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Of those that tell."""


def figures(measured: Measured, conditions: dict[str, str], shown: Shown) -> dict[str, Any]:
    """Medians over the repetitions; of ratios, which are taken within each, also the lowest and the highest."""
    stores = {
        count: {name: typical([each[count][name] for each in measured.stores]) for name in CONTENDERS}
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
        "paced": {name: typical([each[name] for each in measured.paced]) for name in CONTENDERS},
        "paced p99 in ms": _spread(each[OURS].p99 / 1000 for each in measured.paced),
        "keys": _spread(each[ONE].rate / each[MANY].rate for each in measured.keys),
        "tasks": {
            pool: {kind: round(median(each[kind] for each in rounds)) for kind in ("plain", "limited")}
            for pool, rounds in measured.tasks.items()
        },
        "task ratios": {
            pool: _spread(each["limited"] / each["plain"] for each in rounds) for pool, rounds in measured.tasks.items()
        },
        "raw": {
            "stores": [
                {count: {name: _raw(cell) for name, cell in cells.items()} for count, cells in each.items()}
                for each in measured.stores
            ],
            "paced": [{name: _raw(cell) for name, cell in each.items()} for each in measured.paced],
            "keys": [{keys: _raw(cell) for keys, cell in each.items()} for each in measured.keys],
            "tasks": measured.tasks,
        },
        "beside": measured.beside,
        "failed": measured.failed,
        "end to end": shown.figures,
        "shown": shown.text,
    }


def _raw(cell: Cell) -> list[float]:
    return [rounded(figure) for figure in cell]


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
        *(
            ("of a plain task's throughput (prefork)", 0.97, ratio)
            for pool, ratio in found["task ratios"].items()
            if pool == "prefork"
        ),
    ]
    at_most = [
        (f"ms: p99 of {PACED} that pause for 1 ms", 0.5, found["paced p99 in ms"]),
        (f"times the cost of one key, {MANY:,} keys", 1.5, found["keys"]),
    ]
    return [
        *((text, f"at least {aim}", figure, figure[0] >= aim) for text, aim, figure in at_least),
        *((text, f"at most {aim}", figure, figure[0] <= aim) for text, aim, figure in at_most),
    ]


def render(found: dict[str, Any], pictures: dict[str, str]) -> str:
    """The page, for people and for terminals; with the pictures that there are, by file name."""
    judged = aims(found)
    missed = [text for text, _, _, met in judged if not met]
    stores, ratios, paced = found["stores"], found["ratios"], found["paced"]
    counts = [f"{count} process{'es' * (count > 1)}" for count in stores]
    latency = {name: [_latency(stores[count][name]) for count in stores] for name in CONTENDERS}
    parts = [
        "# Performance",
        "Written by `make bench` (`python -m benchmarks`), which measures all of this in one run; do not edit.",
        table(["", ""], list(found["conditions"].items())),
        *(f"Failed: {each}." for each in found["failed"]),
        "## Aims",
        f"Behind: {'; '.join(missed)}." if missed else "All are met.",
        table(
            ["tb_celery is", "aim", "median", "lowest to highest", "met"],
            [
                [text, aim, short(at[0]), f"{short(at[1])} to {short(at[2])}", "yes" if met else "**no**"]
                for text, aim, at, met in judged
            ],
        ),
        "## Where we are behind",
        """\
Every figure on this page in which anybody is ahead of tb_celery, by whatever little, read off the figures. "bare" is no
limiter but the floor beneath ours; how far above their floors tasks are, and decisions on a server, the tables there
tell. Whoever granted too much is left out where it would gain by that.""",
        table(["where", "ours", "", "is", "ahead are"], rows) if (rows := behind(found)) else "Nowhere.",
        *(f"![{text}]({name})" for name, text in pictures.items()),
        "## Decisions on one bucket",
        f"""\
Processes ask one bucket, as fast as they can; every answer is yes, so everyone reads, decides and writes. tb_celery is
asked through its public call, `Limiter.acquire`. "{BARE}" is lock, `pread`, `pwrite`, unlock in a Python loop: no file
store in Python can be faster. "{SAME_LOCK}" is that with the lock that tb_celery takes. "{ORIGINAL}" keeps its state as
JSON and syncs it each time. "{REDIS}" is a token bucket in Lua, called with redis-py on loopback.

All run back to back, in another order in each of {found["repetitions"]} repetitions; a figure is their median, and a
ratio the median of the ratios within each. Absolute figures move with the machine: the ratios are what to read.""",
        "Decisions a second, of all processes together:",
        table(
            ["", *counts], [[name, *(f"{stores[count][name]['rate']:,.0f}" for count in stores)] for name in CONTENDERS]
        ),
        "How many times as many tb_celery decides:",
        table(["", *counts], [[other, *(short(ratios[count][other][0]) for count in ratios)] for other in OTHERS]),
        """\
Microseconds that a decision takes, p50 / p99. A process that waits asks nothing meanwhile, so under full load p99 is
kinder than what a single caller meets; the last column, processes that pause for 1 ms before they ask, is not.""",
        table(
            ["", *counts, f"{PACED}, paced"],
            [[name, *latency[name], _latency(paced[name])] for name in CONTENDERS],
        ),
        *comparison(found),
        "## Tasks",
        """\
Tasks that do nothing, a second, on one worker node with a Valkey broker: plain, and as `RateLimitedTask` with tokens in
hand.""",
        table(
            ["pool", "plain", "limited", "ratio"],
            [
                [KINDS[pool], *(f"{rate:,}" for rate in rates.values()), short(found["task ratios"][pool][0])]
                for pool, rates in found["tasks"].items()
            ],
        ),
    ]
    if "demo" in found["shown"]:
        parts += [
            "## A quota in use",
            "The verdict of `make demo`, run right after: two nodes of four processes, 5 tokens at most, 10 a second.",
            f"```\n{found['shown']['demo']}\n```",
        ]
    for name, (heading, is_table) in SHOWN.items():
        if said := found["shown"].get(name):
            parts += [f"## {heading}", f"By `python -m benchmarks.{name}`.", said if is_table else f"```\n{said}\n```"]
    return "\n\n".join(parts) + "\n"


def _latency(cell: dict[str, float]) -> str:
    return f"{short(cell['p50'])} / {short(cell['p99'])}"
