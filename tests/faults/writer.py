"""Writers: processes that ask for tokens as fast as they can, and write down each grant. ``writer.py STATE LOGS``.

A program, so that it can be started with other rights, in namespaces of its own, or with a library before the system's.
It forks a writer for each line of its stdin, which has the writer's options, and ends with all of them when that ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

from tb_celery import Bucket, Limit, Limiter, StoreError
from tb_celery.clock import SystemClock
from tb_celery.stores.file import FileStore

API = Bucket("api", (Limit(40, 3000),))
OTHER = Bucket("other", (Limit(50, Fraction(10_000, 3)),))
SLOW = Bucket("slow", (Limit(5, 0.001),))
"""Not refilled while a test runs: its keys stay in the file."""
BUCKETS = {bucket.name: bucket for bucket in (API, OTHER, SLOW)}
REST = 0.005
"""Seconds after an error, of which people would not want thousands either."""


def write(
    state: Path,
    log: Path,
    take: dict[str, float] | None = None,
    *,
    fresh: bool = False,
    lock_timeout: float = 10.0,
    user: tuple[int, int, int] | None = None,
) -> None:
    """Ask, for ever, and write a line for each grant and for each error.

    Args:
        state: the state file.
        log: where the lines go; opened before anything else is.
        take: names of buckets, and tokens; one of ``API`` unless given.
        fresh: whether to ask with another key each time.
        lock_timeout: seconds.
        user: user, group and umask to ask with.
    """
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if user:
        uid, gid, umask = user
        os.umask(umask)
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    limiter = Limiter(BUCKETS.values(), FileStore(state, lock_timeout=lock_timeout))
    costs, clock, number = take or {API.name: 1}, limiter.store.clock.identity, 0
    bucket, cost = next(iter(costs.items()))
    asked = bucket if len(costs) == 1 else costs
    while True:
        number += 1
        key = f"{os.getpid()}-{number}" if fresh else None
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        try:
            decision = limiter.acquire(asked, cost, key=key)
        except StoreError as error:
            os.write(out, json.dumps(str(error)).encode() + b"\n")
            time.sleep(REST)
        else:
            # Or what is counted by it would prove nothing.
            assert before <= decision.now <= time.clock_gettime_ns(time.CLOCK_BOOTTIME), "it tells the true instant"
            if decision:
                lines = [json.dumps([name, key, clock, decision.now, cost]) for name, cost in costs.items()]
                os.write(out, "".join(f"{line}\n" for line in lines).encode())


def main() -> None:
    state, logs = map(Path, sys.argv[1:])
    SystemClock()  # imports what it takes: the users that writers become may not read Python's own files
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their ends are the test's business
    try:
        for number, line in enumerate(sys.stdin):
            log = logs / f"{os.getpid()}-{number}"
            pid = os.fork()
            if not pid:
                try:
                    write(state, log, **json.loads(line))
                finally:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            print(pid, log.name, flush=True)  # noqa: T201 - to whom has asked for it
    finally:
        with suppress(ProcessLookupError):
            os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
