"""Processes that are killed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from faults.crew import all_granted
from faults.means import injected
from faults.report import LONG, fault
from faults.writer import API, BUCKETS, OTHER
from servers import until

from tb_celery import Limiter
from tb_celery.stores.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from faults.conftest import Measured
    from faults.crew import Crew, Writer


def logged(writers: Iterable[Writer]) -> int:
    """Bytes in their logs."""
    return sum(each.size() for each in writers)


@fault(
    "processes killed at random (SIGKILL)",
    "The state stays whole and readable, the lock is free, and no token is granted again: at most those just taken are"
    " lost.",
)
@pytest.mark.parametrize("kills", [50, pytest.param(500, marks=LONG)])
def test_killed_at_random(crew: Crew, state: Path, measured: Measured, kills: int) -> None:
    """Of eight processes that take tokens of one bucket or of two at once, one is killed again and again while it does
    so, and another one takes its place; each time, somebody else reads the state."""
    dice, onlooker = random.Random(kills), Limiter(BUCKETS.values(), FileStore(state))
    kinds = [{API.name: 1}, {API.name: 1, OTHER.name: 1}]
    writers = [crew.add(take=kinds[number % 2])[0] for number in range(8)]
    all_granted(writers)
    for _ in range(kills):
        number = dice.randrange(8)
        size = logged(writers) + dice.randint(1, 500)
        until(lambda size=size: logged(writers) >= size, "they are granted tokens", pause=0)  # type: ignore[misc]
        writers[number].kill()
        onlooker.peek({API.name: 1, OTHER.name: 1})
        writers[number] = crew.add(take=kinds[number % 2])[0]
    all_granted(writers)
    assert crew.errors() == []
    assert [*state.parent.iterdir()] == [state], "nothing was damaged and nothing lies about"
    measured(crew.entries(), tried=kills, survived=kills)


INSTANTS = ("flock", "pread64", "pwrite64")


@fault(
    "a process killed within a decision",
    "The same, whichever of the system calls that a decision is made of is its last one.",
)
def test_killed_within_a_decision(crew: Crew, state: Path, measured: Measured) -> None:
    """strace kills a process as it takes or lets go of the lock, reads and writes; two others go on each time."""
    others = crew.add(2)
    tried = survived = 0
    for call in INSTANTS:
        for when in (50, 51):  # every other flock lets go
            (victim,) = crew.add()
            all_granted([victim, *others])
            with injected(f"{call}:signal=SIGKILL:when={when}", victim):
                until(lambda victim=victim: not victim.state, "it is killed")  # type: ignore[misc]
            tried += 1
            survived += all_granted(others) == len(others)
    assert crew.errors() == []
    assert [*state.parent.iterdir()] == [state]
    measured(crew.entries(), tried=tried, survived=survived)
