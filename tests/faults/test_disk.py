"""Disks that are full, broken, slow or read-only, and descriptors that are used up."""

from __future__ import annotations

import resource
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from faults.crew import all_granted, one_more
from faults.means import as_root, injected, run
from faults.report import fault
from faults.writer import SLOW

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from faults.conftest import Measured, StartCrew
    from faults.crew import Crew


def told(errors: Sequence[str], *places: Path | str) -> None:
    """Every error is one sentence that names these, and the setting."""
    for error in errors:
        assert all(str(place) in error for place in (*places, "TB_CELERY_STATE_FILE")), error
        assert "\n" not in error


@fault(
    "the disk is full",
    "Buckets that are in use go on. A key that needs a new record where there is no room is an error, and is granted"
    " nothing; with room again it goes on.",
)
def test_disk_full(start_crew: StartCrew, mounted: Callable[..., Path], measured: Measured) -> None:
    """On a tmpfs of 64 kB three processes take tokens of one bucket, and two ask for one new key after the other until
    nothing more fits; then the tmpfs is made larger."""
    point = mounted("-t", "tmpfs", "-o", "size=64k", "tmpfs")
    crew = start_crew(at=point / "state")
    known = crew.add(3)
    all_granted(known)
    newcomers = crew.add(2, take={SLOW.name: SLOW.limits[0].capacity}, fresh=True)
    for each in newcomers:
        each.told("No space left on device")
    survived = all_granted(known)
    run("mount", "-o", "remount,size=1m", point)
    survived += all_granted(newcomers)
    told(crew.errors(), point / "state")
    assert {each for writer in known for each in writer.errors} == set()
    measured(crew.entries(), tried=len(crew.writers), survived=survived)


ERRORS = {
    "pread64:error=EIO": "Input/output error",
    "pwrite64:error=EIO": "Input/output error",
    "pwrite64:error=ENOSPC": "No space left on device",
    "pwrite64:error=EROFS": "Read-only file system",
    "pwrite64:retval=32": "No space left on device",
    "flock:error=ENOLCK": "has no working file locks (No locks available)",
}


@fault(
    "I/O errors, and locks that are no longer there, in a running process",
    "An error that names the file and the setting, never a token; nothing is spoilt for others, and it goes on when the"
    " disk does.",
)
@pytest.mark.parametrize("error", ERRORS)
def test_io_errors(crew: Crew, state: Path, measured: Measured, error: str) -> None:
    """strace switches errors of read, write (also half a write) and lock on in one of three processes, then in all
    three, and off again."""
    writers = crew.add(3)
    all_granted(writers)
    survived = 0
    for victims in (writers[:1], writers):
        with injected(error, *victims):
            for each in victims:
                each.told(ERRORS[error])
            survived += all_granted(writers[len(victims) :])
        survived += all_granted(victims)
    told(crew.errors(), state)
    measured(crew.entries(), tried=2 * len(writers), survived=survived)


@fault(
    "the disk hangs",
    "Who waits behind it gets a time-out that names the file and the setting, never a token; all go on when the disk"
    " does.",
)
def test_disk_hangs(crew: Crew, state: Path, measured: Measured) -> None:
    """strace holds up the writes of one of four processes, which has the lock meanwhile; the others wait for the lock
    for 0.2 s at most."""
    (slow,) = crew.add()
    others = crew.add(3, lock_timeout=0.2)
    all_granted(crew.writers)
    with injected("pwrite64:delay_enter=1000000", slow):
        for each in others:
            each.told(f"state file {state} was locked by others for 0.2 s; ")
    survived = all_granted(crew.writers)
    assert all("TB_CELERY_LOCK_TIMEOUT" in error for error in crew.errors())
    measured(crew.entries(), tried=len(crew.writers), survived=survived)


@as_root
@fault(
    "the file system breaks and becomes read-only",
    "An error that names the file and the setting, never a token. Mounted again, its content may be some seconds old:"
    " at most one more capacity.",
)
def test_read_only(start_crew: StartCrew, mounted: Callable[..., Path], tmp_path: Path, measured: Measured) -> None:
    """An ext4 file system in a file is aborted as after an error of its disk, under four processes that take tokens,
    and then mounted again."""
    disk = tmp_path / "disk"
    with disk.open("wb") as file:
        file.truncate(8 << 20)
    run("mkfs.ext4", "-q", disk)
    # What is at the mount point when nothing is mounted there: no directory, so nobody makes a new state file.
    (tmp_path / "mounted" / "state").touch()
    point = mounted("-o", "loop", disk)
    (point / "state").mkdir()
    crew = start_crew(at=point / "state" / "buckets")
    writers = crew.add(4)
    all_granted(writers)
    broken = one_more()
    with suppress(subprocess.CalledProcessError):  # it may tell that it is read-only now
        run("mount", "-o", "remount,abort", point)
    for each in writers:
        each.told("Read-only file system")
    run("umount", "--lazy", point)
    for each in writers:
        each.told("Not a directory")
    mounted("-o", "loop", disk)
    survived = all_granted(writers)
    told(crew.errors(), point / "state" / "buckets")
    measured([*crew.entries(), broken], tried=len(writers), survived=survived)


@fault(
    "no descriptor is left (EMFILE)",
    "Who has the file open goes on. Who has to open it gets an error that names the file and the setting, never a"
    " token.",
)
def test_no_descriptor(crew: Crew, state: Path, measured: Measured) -> None:
    """Four running processes may open nothing more. Then the state file is moved away, so that they have to; then they
    may again."""
    writers = crew.add(4)
    all_granted(writers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for each in writers:
        resource.prlimit(each.pid, resource.RLIMIT_NOFILE, (0, hard))
    survived = all_granted(writers)
    assert crew.errors() == []
    state.rename(state.with_name("away"))
    for each in writers:
        each.told("Too many open files")
    for each in writers:
        resource.prlimit(each.pid, resource.RLIMIT_NOFILE, (soft, hard))
    survived += all_granted(writers)
    told(crew.errors(), state)
    measured(crew.entries(), tried=2 * len(writers), survived=survived)
