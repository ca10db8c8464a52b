"""What takes seconds each, measured in rounds: everybody once in each, in another order each time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.attempt import attempt
from benchmarks.beside import shuffled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Run = dict[str, Any]
"""The figures of one run."""


def play(
    names: Sequence[str], rounds: int, once: Callable[[str], Run], typical: Callable[[Sequence[Run]], Run]
) -> tuple[list[Run], list[str]]:
    """What is typical of everybody's runs, each with all of them as its ``rounds``; and why there are none of others.

    Args:
        names: of all.
        rounds: how many.
        once: a run of one of them; whoever fails is left out from then on.
        typical: of somebody's runs.
    """
    runs: dict[str, list[Run]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for _ in range(rounds):
        for name in shuffled(names):
            if name not in failed:
                got = attempt(name, partial(once, name))
                if isinstance(got, str):
                    failed[name] = got
                else:
                    runs[name].append(got)
    found = [{**typical(own), "rounds": [_short(each) for each in own]} for own in runs.values() if own]
    return found, list(failed.values())


def middle(runs: Sequence[Run], size: Callable[[Run], float]) -> Run:
    """The run of median ``size``."""
    return sorted(runs, key=size)[len(runs) // 2]


def _short(run: Run) -> Run:
    """What is one figure of a run, and no list of them."""
    return {name: figure for name, figure in run.items() if not isinstance(figure, list)}
