"""Half a minute of a saturated fleet on one Valkey server: left alone, stopped for 10 s, gone for 10 s and empty.

`python -m benchmarks.redis_fleet`: four nodes of two processes on two "hosts" (folders), 5 tokens at most, 10 a second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from fleet import CAPACITY, RATE, Fleet
from private_redis import private_server
from valkey_server import valkey_server

from tb_celery.bucket import SECOND

if TYPE_CHECKING:
    from fleet import Verdict
    from private_redis import PrivateServer

OUTAGE = 10.0
CASES = ("left alone", "stopped (SIGSTOP)", "restarted empty")


def play(case: str, seconds: float, lock_timeout: float) -> str:
    """One row of the table."""
    with (
        valkey_server() as broker,
        private_server() as quota,
        tempfile.TemporaryDirectory(prefix="tb_celery-fleet-") as folder,
        Fleet(Path(folder), broker, quota.url, lock_timeout=lock_timeout).running() as fleet,
    ):
        time.sleep(1)  # the bucket fills
        ids = fleet.send(round(CAPACITY + RATE * seconds))
        begin = time.time_ns()
        end = begin
        if case != CASES[0]:
            begin, end = _outage(fleet, ids, quota, case)
        verdict = fleet.finish(ids, patience=3 * seconds + 120)
    return _row(case, verdict, begin, end)


def _outage(fleet: Fleet, ids: list[str], quota: PrivateServer, case: str) -> tuple[int, int]:
    """From when to when there was no server, in nanoseconds since 1970."""
    begin = fleet.until_granted(ids, len(ids) // 3)
    (quota.pause if case == CASES[1] else quota.stop)()
    time.sleep(OUTAGE)
    (quota.resume if case == CASES[1] else quota.start)()
    return begin, time.time_ns()


def _row(case: str, verdict: Verdict, begin: int, end: int) -> str:
    count = len(verdict.runs)
    parts = [verdict.used()] if begin >= end else [verdict.used(0, begin), verdict.used(_first(verdict, end))]
    again = _first(verdict, end) - end
    cells = [
        case,
        "all" if verdict.violation is None else f"**no**: {verdict.violation}",
        f"{sum(runs == 1 for runs in verdict.runs)} of {count}",
        " / ".join(f"{part:.2%}" for part in parts),
        "" if begin >= end else f"{again / SECOND:.1f} s",
        f"{verdict.sent_back:.2f}, at most {max(verdict.deliveries) - 1}",
    ]
    return "| " + " | ".join(cells) + " |"


def _first(verdict: Verdict, since: int) -> int:
    return min((now for now in verdict.grants if now >= since), default=since)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--lock-timeout", type=float, default=1.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    given = parser.parse_args()
    print("| server | windows within the bound | ran once | quota used | first grant after | sent back a task |")
    print("|---|---|---|---|---|---|", flush=True)
    for case in given.cases:
        print(play(case, given.seconds, given.lock_timeout), flush=True)


if __name__ == "__main__":
    main()
