"""Draw docs/concepts/arithmetic.svg, from what a limiter answers on a clock of its own: `python docs/pictures.py`."""

from __future__ import annotations

import heapq
import sys
from pathlib import Path
from typing import NamedTuple

from tb_celery import Bucket, Limit, Limiter
from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND
from tb_celery.clock import FakeClock
from tb_celery.stores.memory import MemoryStore

PICTURE = Path(__file__).parent / "concepts" / "arithmetic.svg"
CAPACITY, RATE = 5, 0.5
ASKS = [1.0] * 8 + [10.0] + [20.0] * 6
"""The seconds at which tasks ask for the first time."""
END = 30.0

WIDTH, LEFT, RIGHT = 760, 64, 740
TOKENS, TASKS, GRANTS = (40, 160), (200, 330), (370, 540)
"""From where to where the three panels reach, downwards."""
TOP = 16.0
"""Grants at the upper edge of the last panel."""


class Ask(NamedTuple):
    """One task that asks, in seconds; ``turn`` is what it was told if it was refused."""

    task: int
    at: float
    turn: float | None


class Run(NamedTuple):
    """What came of it: the asks in their order, and the tokens right before and after each change."""

    asks: list[Ask]
    tokens: list[tuple[float, float]]


def run() -> Run:
    """Have the tasks ask, each again at its turn, and write down what they are told."""
    clock = FakeClock()
    limiter = Limiter([Bucket("api", (Limit(CAPACITY, RATE),))], MemoryStore(clock))

    def tokens() -> tuple[float, float]:
        return clock.now() / SECOND, limiter.status("api").limits[0].tokens

    line: list[tuple[int, int, int | None]] = [(int(at * SECOND), task, None) for task, at in enumerate(ASKS)]
    asks, seen = [], [tokens()]
    while line:
        now, task, turn = heapq.heappop(line)
        clock.advance(now - clock.now())
        seen.append(tokens())
        answer = limiter.acquire("api", place=Place(turn))
        if not answer:
            heapq.heappush(line, (answer.at, task, answer.at))
        asks.append(Ask(task, now / SECOND, None if answer else answer.at / SECOND))
        seen.append(tokens())
    full = seen[-1][0] + (CAPACITY - seen[-1][1]) / RATE
    return Run(asks, [*seen, (full, CAPACITY), (END, CAPACITY)])


def x(second: float) -> float:
    return LEFT + (RIGHT - LEFT) * second / END


def y(part: float, panel: tuple[int, int]) -> float:
    """The height of ``part``, 0 to 1, of a panel."""
    top, bottom = panel
    return bottom - (bottom - top) * part


def path(points: list[tuple[float, float]], kind: str) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{left:.1f},{down:.1f}" for left, down in points)}"/>'


def text(left: float, down: float, words: str, kind: str = "") -> str:
    return f'<text x="{left:.1f}" y="{down:.1f}" class="{kind}">{words}</text>'


def draw(found: Run) -> str:
    """The picture of a run."""
    drawn = [text(LEFT, 24, f"tokens at hand: {CAPACITY} at most, one more every {1 / RATE:g} s")]
    drawn += [path([(x(at), y(held / CAPACITY, TOKENS)) for at, held in found.tokens if at <= END], "tokens")]
    for held in range(CAPACITY + 1):
        drawn.append(text(LEFT - 8, y(held / CAPACITY, TOKENS) + 4, str(held), "scale"))

    drawn.append(text(LEFT, TASKS[0] - 14, "tasks, one a row: refused (hollow) with a turn, and started (full) at it"))
    for ask in found.asks:
        down = y(1 - (ask.task + 0.5) / len(ASKS), TASKS)
        kind = "refused" if ask.turn else "granted"
        drawn.append(f'<circle cx="{x(ask.at):.1f}" cy="{down:.1f}" r="4" class="{kind}"/>')
        if ask.turn:
            drawn.insert(0, path([(x(ask.at), down), (x(ask.turn), down)], "wait"))

    starts = [ask.at for ask in found.asks if ask.turn is None]
    drawn.append(text(LEFT, GRANTS[0] - 14, "started in all, and the most that may be: capacity + rate * time"))
    stairs = [(x(0), y(0, GRANTS))]
    for count, at in enumerate(starts, 1):
        stairs += [(x(at), stairs[-1][1]), (x(at), y(count / TOP, GRANTS))]
    drawn.append(path([*stairs, (x(END), stairs[-1][1])], "granted"))
    reached = min(END, starts[0] + (TOP - CAPACITY) / RATE)
    bound = [(at, (CAPACITY + RATE * (at - starts[0])) / TOP) for at in (starts[0], reached)]
    drawn.append(path([(x(at), y(part, GRANTS)) for at, part in bound], "bound"))
    for count in range(0, int(TOP) + 1, 2):
        drawn.append(text(LEFT - 8, y(count / TOP, GRANTS) + 4, str(count), "scale"))

    axes = [path([(LEFT, top), (LEFT, bottom), (RIGHT, bottom)], "axis") for top, bottom in (TOKENS, TASKS, GRANTS)]
    ticks = [text(x(second), GRANTS[1] + 18, f"{second} s", "tick") for second in range(0, int(END) + 1, 5)]
    return "\n".join([HEAD, *axes, *ticks, *drawn, "</svg>\n"])


HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 570" font-family="sans-serif" font-size="13">
<style>
rect {{ fill: #fff }}
polyline {{ fill: none; stroke-width: 2 }}
.axis {{ stroke: #999; stroke-width: 1 }}
.tokens {{ stroke: #2563a8 }}
.wait {{ stroke: #ccc; stroke-width: 1.5 }}
.bound {{ stroke: #b3401f; stroke-dasharray: 6 4 }}
polyline.granted {{ stroke: #2e7d4f }}
circle.granted {{ fill: #2e7d4f }}
circle.refused {{ fill: #fff; stroke: #b3401f; stroke-width: 1.5 }}
.scale {{ text-anchor: end; fill: #555 }}
.tick {{ text-anchor: middle; fill: #555 }}
</style>
<rect width="100%" height="100%"/>"""


if __name__ == "__main__":
    Path(sys.argv[1] if sys.argv[1:] else PICTURE).write_text(draw(run()), "utf-8")
