"""What differs on macOS and Windows, played on this system, with the locks of this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tb_celery.clock import SystemClock

if TYPE_CHECKING:
    import pytest

WITHOUT_UNIX = """
import asyncio, os, shutil, subprocess, sys, time
import click, filelock, pydantic_settings
for name in ("fchmod", "fork", "geteuid", "pread", "pwrite", "register_at_fork", "sched_yield"):
    if hasattr(os, name):
        delattr(os, name)
if hasattr(time, "CLOCK_BOOTTIME"):
    del time.CLOCK_BOOTTIME, time.clock_gettime_ns
shutil.which = os.path.abspath  # asks Windows itself, by its name
sys.platform = "win32"
"""
"""Takes away what only Unix has: who uses it without looking fails. The lock is that of this system."""
ASKS = """
from tb_celery import Bucket, Limit, Limiter
from tb_celery.stores.file import FileStore
limiter, other = (Limiter([Bucket("api", (Limit(3, 0.001),))], FileStore(sys.argv[1])) for _ in range(2))
print([bool(each.acquire("api")) for each in (limiter, other, limiter, other)])
print(limiter.reset("api"), bool(other.acquire("api")))
"""
RUNS = """
from tb_celery.cli import main
sys.argv = ["tb-celery", *sys.argv[1:]]
try:
    main()
finally:
    print("came back", flush=True)
"""


def without_unix(program: str, *arguments: str | Path, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_UNIX + program, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_state_file_needs_nothing_that_only_unix_has(tmp_path: Path) -> None:
    assert without_unix(ASKS, tmp_path / "state") == (0, "[True, True, True, False]\n1 True\n", "")


def test_run_waits_for_its_command_where_an_exec_would_not_be_waited_for(tmp_path: Path) -> None:
    command = ["run", "api", "--", sys.executable, "-c", "print('ran'); raise SystemExit(7)"]
    settings = {"TB_CELERY_STATE_FILE": str(tmp_path / "state"), "TB_CELERY_BUCKETS": json.dumps({"api": "1/s"})}
    assert without_unix(RUNS, *command, **settings) == (7, "ran\ncame back\n", "")


def test_the_doctor_looks_without_what_only_unix_has(tmp_path: Path) -> None:
    _, out, err = without_unix(RUNS, "doctor", TB_CELERY_STATE_FILE=str(tmp_path / "state"))
    found = dict(re.findall(r"^ok +(.*?)  +(.*)$", out, re.MULTILINE))
    assert (found["file system"], err) == ("of a kind that cannot be told here", "")
    # The second process that it starts is one of this system, whose clock is another.
    assert found.keys() >= {"directory", "state file", "lock"}


def test_without_a_boot_time_clock_time_is_the_monotonic_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = SystemClock()
    with monkeypatch.context() as patch:
        patch.delattr(time, "CLOCK_BOOTTIME", raising=False)
        clock, other = SystemClock(), SystemClock()
    before = time.monotonic_ns()
    assert before <= clock.now() <= time.monotonic_ns()
    assert clock.identity == other.identity
    assert (clock.identity == usual.identity) == (usual.now is time.monotonic_ns)


def test_without_proc_there_is_a_clock_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, *_: object, **__: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(Path, "stat", missing)
    assert SystemClock().identity == SystemClock().identity
