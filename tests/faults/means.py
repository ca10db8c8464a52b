"""What it takes to have a fault: programs and rights, each of which is a reason to skip where it is missing."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from servers import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faults.crew import Writer

HOUR = 3600
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root's rights")


def program(name: str) -> str:
    """The path of a program, or a skip."""
    found = shutil.which(name)
    if not found:
        pytest.skip(f"there is no {name}")
    return found


def run(name: str, *arguments: str | Path) -> None:
    subprocess.run([program(name), *arguments], check=True, stdin=subprocess.DEVNULL, capture_output=True)


@contextmanager
def injected(fault: str, *writers: Writer) -> Iterator[None]:
    """While it lasts, system calls of these do something else: see strace(1), ``-e inject``."""
    calls = fault.partition(":")[0]
    command = [program("strace"), "-q", "-o", "/dev/null", "-e", f"trace={calls}", "-e", f"inject={fault}"]
    for each in writers:
        command += ["-p", str(each.pid)]
    tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def is_attached() -> bool:
        if tracer.poll() is not None:
            assert tracer.stderr
            if trouble := tracer.stderr.read().decode().strip():
                pytest.skip(f"strace: {trouble}")
            return True  # it has killed them already
        return all(traced(each) == tracer.pid for each in writers)

    try:
        until(is_attached, "strace is attached")
        yield
    finally:
        tracer.terminate()
        tracer.communicate()


def traced(writer: Writer) -> int:
    """The process that traces it; 0 for none, and where it has been killed already."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{writer.pid}/status").read_text("utf-8").splitlines():
            if line.startswith("TracerPid:"):
                return int(line.split()[1])
    return 0


def in_mounts(script: str, *arguments: str | Path) -> list[str | Path]:
    """The start of a command for a program that sees other mounts, which ``script`` makes of the arguments."""
    if os.geteuid():
        pytest.skip("needs root's rights, to mount")
    unshare = program("unshare")
    tried = subprocess.run([unshare, "--mount", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:  # such as in a container, or below a changed root
        pytest.skip(tried.stderr.strip())
    count = len(arguments)
    return [unshare, "--mount", "sh", "-ec", f'{script}\nshift {count}\nexec "$@"', "sh", *arguments]


def in_time(ahead: int) -> list[str]:
    """The start of a command for a program whose boot-time clock is so many seconds ahead."""
    if not Path("/proc/self/ns/time").exists():
        pytest.skip("the kernel has no time namespaces")
    return [program("unshare"), "--time", "--boottime", str(ahead), "--fork"]


def compiled(source: Path, folder: Path) -> Path:
    """A library made of a file in C."""
    library = folder / f"{source.stem}.so"
    run("cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl")
    return library


class WallClock:
    """A wall clock that can be set, for programs with its ``environment``; see stepclock.c."""

    def __init__(self, folder: Path) -> None:
        library = compiled(Path(__file__).parent / "stepclock.c", folder)
        self._wrong = folder / "wrong"
        self._wrong.write_bytes(struct.pack("q", 0))
        self.environment = {"LD_PRELOAD": str(library), "STEPCLOCK": str(self._wrong)}

    def step(self, ahead: int) -> None:
        """Have it be so many seconds ahead of the true one."""
        with self._wrong.open("r+b", buffering=0) as file:
            file.write(struct.pack("q", ahead))
        look = [sys.executable, "-c", "import time; print(time.time())"]
        seen = subprocess.run(look, env=os.environ | self.environment, capture_output=True, text=True, check=True)
        assert abs(float(seen.stdout) - time.time() - ahead) < HOUR / 2, "the library does its work"


def is_locked(state: Path) -> bool:
    """Whether somebody is inside."""
    fd = os.open(state, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)
