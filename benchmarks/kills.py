"""Processes that hammer one bucket and are killed at any instruction: `python -m benchmarks.kills`."""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tb_celery import Bucket, Limit, Limiter, StoreError
from tb_celery.stores.file import FileStore
from tb_celery.verify import first_violation

PROCESSES = 8
CAPACITY, RATE = 20, 3000
BUCKET = Bucket("api", (Limit(CAPACITY, RATE),))


def hammer(path: Path, log: int) -> int:
    """Start a process that takes tokens and logs each; a kill can lose a line, never add one."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            limiter = Limiter([BUCKET], FileStore(path))
            while True:
                if decision := limiter.acquire("api"):
                    os.write(log, b"%d\n" % decision.now)
        os._exit(1)
    return pid


def run(kills: int, seconds: float) -> str:
    """``kills`` of ``PROCESSES`` processes, spread over ``seconds`` at least; what came of it."""
    with tempfile.TemporaryDirectory(prefix="tb_celery-kills-") as folder:
        path = Path(folder) / "buckets.state"
        log = os.open(f"{folder}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        onlooker = Limiter([BUCKET], FileStore(path))
        pids = [hammer(path, log) for _ in range(PROCESSES)]
        began, unreadable = time.monotonic(), 0
        for number in range(1, kills + 1):
            size = os.fstat(log).st_size
            due = began + seconds * number / kills
            while os.fstat(log).st_size < size + 100 or time.monotonic() < due:
                os.sched_yield()
            victim = random.randrange(PROCESSES)
            os.kill(pids[victim], signal.SIGKILL)
            os.waitpid(pids[victim], 0)
            try:
                onlooker.peek("api")
            except StoreError:
                unreadable += 1
            pids[victim] = hammer(path, log)
        took = time.monotonic() - began
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(log)
        grants = [(int(line), 1) for line in Path(f"{folder}/log").read_bytes().splitlines()]
        damaged = Path(f"{path}.damaged").exists()
    violation = first_violation(grants, CAPACITY, RATE)
    return (
        f"{PROCESSES} processes, {kills} SIGKILLs in {took:.1f} s, {len(grants)} grants of {CAPACITY} tokens at most,"
        f" {RATE} a second: {violation or 'every window within the bound'}; the state was readable after"
        f" {kills - unreadable} of {kills}, records damaged: {'some' if damaged else 'none'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    print(run(options.kills, options.seconds))


if __name__ == "__main__":
    main()
