"""The part of the page that shows others beside us."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.beside import COMPETITORS, KEPT, SCARCE
from benchmarks.markdown import short, table
from benchmarks.peers import PEERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Cell = dict[str, float]


def comparison(found: Mapping[str, Any]) -> list[str]:
    beside = found["beside"]
    titles = list(beside["scenes"])
    granted = [title for title in titles if title.startswith("granted")]
    rounds = max(map(len, beside.get("kept raw", {}).values()), default=1)
    return [
        "## Beside other limiters",
        """\
Limiters whose quota several processes share, in turn, in the same scenes, each asked for one of a key by its public
call; SQLite and LMDB are the least that makes a token bucket on them, with one transaction a decision and, as in our
file, nothing synced. What runs on Redis is called over loopback, which is the kindest case for it. "granted": one key,
every answer is yes. "8 buckets at once": all or nothing of one call, where there is such a call (tb_celery, SQLite,
LMDB); from the others eight calls. "keys": in random order, all seen before. pyrate-limiter says no when its file lock
is busy, which "refused" counts; that lock is called here as filelock took it before version 4, since with ours, as
released, its first call fails.""",
        "Decisions a second, of all processes together:",
        _grid(found, granted, _rate),
        _grid(found, [title for title in titles if title not in granted], _rate),
        """\
Microseconds that a decision takes, p50 / p99 / p99.9 (where under a thousand, the longest). The answers of those who
refuse, as above, what they should grant are among them:""",
        _grid(found, granted, lambda cell: " / ".join(short(cell[name]) for name in ("p50", "p99", "p999"))),
        "Fairness: Jain's index of the decisions over the processes; 1 is even, 1/n is all for one of n.",
        _grid(found, granted[1:], lambda cell: f"{cell['fairness']:.3f}"),
        "### Who keeps to a quota",
        f"""\
{COMPETITORS} processes compete for {SCARCE.amount} at most at once, {SCARCE.rate:.0f} a second. "Too many" is by how
much the worst window of w seconds holds more than {SCARCE.amount} + {SCARCE.rate:.0f} w; a grant counts for a window
only if its call began and ended in it, so what is too many is so for certain. A fixed window may give twice its amount
around its end."""
        + f" Medians of {rounds} rounds, but the most too many of any." * (rounds > 1),
        table(
            ["", "granted", "of what there was", "too many", "fairness"],
            [
                [
                    name,
                    f"{kept['granted']:,}",
                    f"{kept['used']:.1%}",
                    f"**{kept['over']:.0f}**" if kept["over"] >= 1 else f"{kept['over']:.1f}",
                    f"{kept['fairness']:.3f}",
                ]
                for name, kept in beside["kept"].items()
            ],
        ),
        *reasons(beside["reasons"]),
    ]


def _rate(cell: Cell) -> str:
    """Of whom says now yes and now no, both are told: where all is granted or all refused, one of them is wrong."""
    refused = f" ({1 - cell['allowed']:.0%} refused)" if 0.001 < cell["allowed"] < 0.999 else ""
    return f"{cell['rate']:,.0f}{refused}"


def _grid(found: Mapping[str, Any], titles: Sequence[str], shown: Callable[[Cell], str]) -> str:
    scenes = found["beside"]["scenes"]
    present = [name for name in PEERS if any(name in scenes[title]["peers"] for title in titles)]
    return table(
        ["", *titles],
        [
            [name, *(shown(scenes[title]["peers"][name]) if name in scenes[title]["peers"] else "" for title in titles)]
            for name in present
        ],
    )


def reasons(by_scene: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Why cells are empty, each reason once."""
    scenes: dict[tuple[str, str], list[str]] = {}
    for title, names in by_scene.items():
        for name, why in names.items():
            scenes.setdefault((name, why), []).append("who keeps to a quota" if title == KEPT else title)
    return [
        "\n".join(
            f"- Not measured: {name} ({'; '.join(titles) if len(titles) < 5 else 'all scenes'}): {why}."
            for (name, why), titles in scenes.items()
        )
    ] * bool(scenes)
