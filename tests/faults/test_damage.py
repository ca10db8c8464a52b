"""What becomes of the state file under processes that use it."""

from __future__ import annotations

import os
import random
import shutil
from typing import TYPE_CHECKING

import pytest
from faults.crew import all_granted, one_more
from faults.means import injected, is_locked
from faults.report import fault
from faults.writer import API, BUCKETS, SLOW
from servers import until

from tb_celery import Bucket, Limit, Limiter
from tb_celery.bucket import SECOND
from tb_celery.stores.file import RECHECK, FileStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from faults.conftest import Measured
    from faults.crew import Crew

TIMES = 10
HEADER = 64


def overwrite(state: Path, dice: random.Random, start: int, end: int) -> None:
    with state.open("r+b") as file:
        file.seek(start)
        file.write(dice.randbytes(end - start))


def overwrite_somewhere(state: Path, dice: random.Random) -> None:
    start = dice.randrange(8, state.stat().st_size)
    overwrite(state, dice, start, dice.randrange(start, state.stat().st_size) + 1)


def zero(state: Path, _: random.Random) -> None:
    size = state.stat().st_size
    os.truncate(state, HEADER)
    os.truncate(state, size)


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated to nothing": lambda state, _: os.truncate(state, 0),
    "truncated within the header": lambda state, dice: os.truncate(state, dice.randrange(1, HEADER)),
    "truncated to the header": lambda state, _: os.truncate(state, HEADER),
    "truncated within the records": lambda state, dice: os.truncate(
        state, dice.randrange(HEADER, state.stat().st_size)
    ),
    "records filled with zeros": zero,
    "records filled with noise": lambda state, dice: overwrite(state, dice, HEADER, state.stat().st_size),
    "header filled with noise": lambda state, dice: overwrite(state, dice, 8, HEADER),
    "noise somewhere": overwrite_somewhere,
}


@fault(
    "the file is truncated, zeroed or overwritten",
    "What may have been lost counts as empty, for everybody, and fills from then on.",
)
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged(crew: Crew, state: Path, measured: Measured, kind: str) -> None:
    """Under three processes that take tokens of one bucket, and one that takes a token of a new key of a slow one each
    time: every kind of damage, ten times, at any instant; all go on each time, and no such key is full again."""
    dice = random.Random(kind)
    crew.add(3)
    crew.add(take={SLOW.name: 1}, fresh=True)
    all_granted(crew.writers)
    known = {entry.key for entry in crew.entries() if entry.bucket == SLOW.name}
    survived = 0
    for _ in range(TIMES):
        DAMAGE[kind](state, dice)
        survived += all_granted(crew.writers[:3]) == 3
    assert crew.errors() == []
    slow = Limiter(BUCKETS.values(), FileStore(state))
    assert not any(slow.acquire(SLOW.name, SLOW.limits[0].capacity, key=key) for key in known)
    measured(crew.entries(), tried=TIMES, survived=survived)


@fault(
    "the file is truncated within a decision",
    "The same: what is then written after the end of the file does not make it a foreign one.",
)
@pytest.mark.parametrize("left", [0, 4, HEADER])
def test_truncated_within_a_decision(crew: Crew, state: Path, measured: Measured, left: int) -> None:
    """strace holds up the writes of one process; while it has the lock and is about to write, the file is cut off. It
    goes on, and so do three that start only then."""
    (slow,) = crew.add()
    all_granted([slow])
    with injected("pwrite64:delay_enter=300000", slow):
        until(lambda: is_locked(state), "it is about to write", pause=0.01)
        os.truncate(state, left)
        until(lambda: state.stat().st_size > HEADER, "it has written")
    crew.add(3)
    survived = all_granted(crew.writers)
    assert crew.errors() == []
    measured(crew.entries(), tried=len(crew.writers), survived=survived)


def made_anew(crew: Crew) -> None:
    """By somebody who does not know that there was one."""
    crew.state.unlink()
    (newcomer,) = crew.add()
    newcomer.granted(1)
    newcomer.kill()


def moved_with_its_directory(crew: Crew) -> None:
    directory = crew.state.parent
    number = len(list(directory.parent.glob("moved*")))
    directory.rename(directory.with_name(f"moved{number}"))


def replaced_by_a_copy(crew: Crew) -> None:
    copy = crew.state.with_name("copy")
    shutil.copy(crew.state, copy)
    copy.replace(crew.state)


REMOVAL: dict[str, Callable[[Crew], None]] = {
    "deleted": lambda crew: crew.state.unlink(),
    "moved away with its directory": moved_with_its_directory,
    "deleted and made anew": made_anew,
    "replaced by an older copy": replaced_by_a_copy,
}


@fault(
    "the file is deleted or replaced",
    "Buckets start empty for all who knew it. Who has the old one open still, for 10 ms at most, or did not know it may"
    " be granted tokens meanwhile: each time costs at most one more capacity, and what 10 ms refill.",
)
@pytest.mark.parametrize("kind", REMOVAL)
def test_replaced(crew: Crew, measured: Measured, kind: str) -> None:
    """Ten times under three processes that take tokens of one bucket, and one that took all of a slow one: deleted,
    moved away with its directory, made anew by somebody who did not know it, replaced by an older copy. All go on each
    time, and the slow one gives nothing more."""
    (slow,) = crew.add(take={SLOW.name: 1})
    slow.granted(int(SLOW.limits[0].capacity))
    writers = crew.add(3)
    survived, more = 0, []
    for _ in range(TIMES):
        all_granted(writers)
        more.append(one_more())
        REMOVAL[kind](crew)
        survived += all_granted(writers) == len(writers)
    (limit,) = API.limits
    both = float(limit.refill_rate) * RECHECK / SECOND  # from two files at once
    allowed = Bucket(API.name, (Limit(limit.capacity + both, limit.refill_rate),))
    measured([*crew.entries(), *more], BUCKETS | {API.name: allowed}, tried=TIMES, survived=survived)
