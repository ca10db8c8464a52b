"""Locks: held by somebody who is stopped, by other users, by many, through other mounts, or by everybody at once."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from faults.crew import all_granted, judged
from faults.means import as_root, in_mounts, is_locked, program
from faults.report import fault
from servers import until

if TYPE_CHECKING:
    from pathlib import Path

    from faults.conftest import Measured, StartCrew
    from faults.crew import Crew, Writer


def stopped_inside(writer: Writer, state: Path) -> bool:
    """Whether it could be stopped while it holds the lock, which nobody else does."""
    writer.send(signal.SIGSTOP)
    until(lambda: writer.state == "T", "it is stopped", pause=0)
    if is_locked(state):
        return True
    writer.send(signal.SIGCONT)
    return False


@fault(
    "the process that holds the lock is stopped (SIGSTOP)",
    "The others get a time-out after lock_timeout, which names the file and the setting, never a token. They go on when"
    " it does, or when it is killed.",
)
@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL])
def test_holder_stopped(crew: Crew, state: Path, measured: Measured, end: signal.Signals) -> None:
    """Of four processes with a time-out of 0.2 s one is stopped inside a decision; later it is continued, or killed."""
    (holder,) = crew.add()
    all_granted([holder])
    until(lambda: stopped_inside(holder, state), "it is stopped inside", pause=0)
    others = crew.add(3, lock_timeout=0.2)
    for each in others:
        each.told(f"state file {state} was locked by others for 0.2 s; ")
    assert all("TB_CELERY_LOCK_TIMEOUT" in error for error in crew.errors())
    assert not any(each.entries for each in others)
    holder.send(end)
    writers = crew.writers if end == signal.SIGCONT else others
    measured(crew.entries(), tried=len(writers), survived=all_granted(writers))


@as_root
@fault(
    "users of one group, with different umasks",
    "They share one quota, whoever has made the file. Somebody who is not of the group is refused.",
)
@pytest.mark.parametrize("umasks", [(0o077, 0o022), (0o022, 0o077)])
def test_users_of_a_group(start_crew: StartCrew, public: Path, measured: Measured, umasks: tuple[int, int]) -> None:
    """Two users take tokens at the same time, one with umask 022 and one with 077; either of them is the first. Then a
    third one who is of another group tries."""
    group, directory = 54_321, public / "shared"
    directory.mkdir()
    os.chown(directory, 0, group)
    directory.chmod(0o2770)
    crew = start_crew(at=directory / "state")
    for uid, umask in zip((1001, 1002), umasks, strict=True):
        all_granted(crew.add(2, user=(uid, group, umask)))
    survived = all_granted(crew.writers)
    assert crew.errors() == []
    assert ((directory / "state").stat().st_gid, (directory / "state").stat().st_mode & 0o777) == (group, 0o660)
    (stranger,) = crew.add(user=(1003, 1003, 0o022))
    stranger.told("Permission denied")
    assert not stranger.entries
    measured(crew.entries(), tried=len(crew.writers) - 1, survived=survived)


@fault("sixteen processes at once", "All of them get their tokens, and nobody is timed out.")
def test_sixteen_processes(crew: Crew, measured: Measured) -> None:
    """Sixteen processes ask without a pause until each has been granted tokens fifty times."""
    writers = crew.add(16)
    survived = all_granted(writers, 50)
    assert crew.errors() == []
    measured(crew.entries(), tried=len(writers), survived=survived)


@as_root
@fault(
    "two mounts of one directory",
    "Processes that see the file at different places, as containers with a common volume do, share one quota.",
)
def test_two_mounts_of_one_directory(start_crew: StartCrew, tmp_path: Path, state: Path, measured: Measured) -> None:
    """Two processes use the file where it is, and two through a bind mount of its directory in a mount namespace."""
    state.parent.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    crews = [
        start_crew(),
        start_crew(*in_mounts('mount --bind "$1" "$2"', state.parent, elsewhere), at=elsewhere / state.name),
    ]
    writers = [writer for crew in crews for writer in crew.add(2)]
    survived = all_granted(writers, 100)
    assert [crew.errors() for crew in crews] == [[], []]
    measured([entry for crew in crews for entry in crew.entries()], tried=len(writers), survived=survived)


@as_root
@fault(
    "two layers over one directory",
    "Containers without a common volume have a quota each, which nothing inside them can notice; each holds for"
    " itself.",
)
def test_two_layers_over_one_directory(start_crew: StartCrew, tmp_path: Path, state: Path, measured: Measured) -> None:
    """Two pairs of processes see a state file that was there before through an overlay mount of their own each."""
    (maker,) = start_crew().add()
    all_granted([maker])
    maker.kill()
    pairs = []
    for number in (1, 2):
        parts = [tmp_path / f"{part}{number}" for part in ("upper", "work", "merged")]
        for part in parts:
            part.mkdir()
        script = 'mount -t overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" overlay "$4"'
        pairs.append(start_crew(*in_mounts(script, state.parent, *parts), at=parts[-1] / state.name))
    writers = [writer for pair in pairs for writer in pair.add(2)]
    survived = all_granted(writers, 100)
    assert [pair.errors() for pair in pairs] == [[], []]
    measured(pairs[0].entries(), tried=len(writers), survived=survived)
    assert judged(entry for pair in pairs for entry in pair.entries()).over > 0, "they are two quotas"
    assert judged(pairs[1].entries()).over == 0


@fault(
    "locks that everybody gets at once",
    "A file system whose locks do not exclude is refused by every process that opens the file, and grants nothing.",
)
def test_locks_that_exclude_nobody(start_crew: StartCrew, state: Path, measured: Measured) -> None:
    """strace has the system grant every lock to three processes; before and after, others use the file with locks that
    do exclude."""
    (before,) = start_crew().add()
    all_granted([before])
    before.kill()
    silent = ["-f", "-q", "-o", "/dev/null"]
    crew = start_crew(program("strace"), *silent, "-e", "trace=flock", "-e", "inject=flock:retval=0")
    for each in crew.add(3):
        each.told(f"file locks do not exclude on the file system of {state}; ")
    assert crew.entries() == []
    crew.stop()
    after = start_crew()
    survived = all_granted(after.add(3))
    measured([*before.entries, *after.entries()], tried=3, survived=survived)
