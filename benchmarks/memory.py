"""What tasks that wait cost a worker: `python -m benchmarks.memory`; some minutes, on a server of its own, on Linux.

Many more tasks than a slow bucket has tokens for come to one node. It is measured before, and when it takes no more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import app as tasks
from servers import Site, until
from valkey_server import valkey_server

from benchmarks.markdown import table
from benchmarks.rounds import middle, play
from tb_celery.stores.redis_server import Server

QUEUE = "crowd"
NATIVE = "rate_limit"
"""Celery's own, as slow."""
SETTINGS: dict[str, dict[str, object]] = {
    "retry": {"routes": {"app.routed": {"bucket": "slow"}}},
    "hold": {"routes": {"app.routed": {"bucket": "slow", "on_reject": "hold"}}},
    "hold, by the queue": {"routes": {f"queue:{QUEUE}": {"bucket": "slower", "on_reject": "hold"}}},
    NATIVE: {},
}
SLOW = {"capacity": 1, "refill_rate": 1.2}
"""So that a line of `max_held` tasks takes less than `max_countdown`, beyond which nothing is held."""
SLOWER = {"capacity": 1, "refill_rate": 0.5}
"""So that it is empty for long enough for its queue to be left alone."""
STEP = 500
"""Messages that are put there at once."""
STEADY = 20
"""Messages that may come and go meanwhile, for a few tasks run."""


def resident(pid: int) -> float:
    """MB of a process that are in memory."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def crowd(url: str, mode: str, count: int, limit: int | None, quiet: float) -> dict[str, Any]:
    """``count`` tasks that wait, and a node that takes ``limit`` of them at most."""
    server = Server(url)
    settings = {"buckets": {**tasks.BUCKETS, "slow": SLOW, "slower": SLOWER}, **SETTINGS[mode]}
    conf: dict[str, object] = {"task_ignore_result": True, "worker_eta_task_limit": limit}
    if mode == NATIVE:
        conf["task_annotations"] = {"app.routed": {"rate_limit": f"{60 * SLOW['refill_rate']:.0f}/m"}}
    with tempfile.TemporaryDirectory(prefix="tb_celery-memory-") as folder:
        site = Site(Path(folder), url, conf=conf, settings=settings)
        try:
            fill(server, count)
            node = site.start("node", "-c", "2", "-l", "WARNING", "-Q", "empty")
            until(lambda: tasks.app.control.ping(timeout=1), "the node answers")
            before = resident(node.process.pid)
            tasks.app.control.add_consumer(QUEUE, reply=True, timeout=10)
            inside, left = settled(server, site, quiet)
            after = resident(node.process.pid)
        finally:
            site.stop()
            server.command("FLUSHALL")
    return {"mode": mode, "inside": inside, "left": left, "before": before, "after": after}


def fill(server: Server, count: int) -> None:
    """Put ``count`` messages into the queue: to make each takes longer than all that is measured."""
    tasks.routed.apply_async(queue=QUEUE)
    message = json.loads(server.command("LPOP", QUEUE))
    body, headers, delivery = message["body"], message["headers"], message["properties"]
    for first in range(0, count, STEP):
        made = []
        for number in range(first, min(count, first + STEP)):
            task = f"{number:08}{headers['id'][8:]}"
            own = {"headers": {**headers, "id": task, "root_id": task}}
            properties = {"properties": {**delivery, "correlation_id": task, "delivery_tag": task}}
            made.append(json.dumps({**message, "body": body, **own, **properties}))
        server.command("LPUSH", QUEUE, *made)


def row(found: dict[str, Any]) -> list[str]:
    more = found["after"] - found["before"]
    each = f"{more * 1024 / found['inside']:.1f} kB" if found["inside"] > STEADY else ""
    counts = [f"{found[name]:,}" for name in ("inside", "left")]
    return [found["mode"], *counts, f"{found['before']:.0f} MB", f"{found['after']:.0f} MB", each]


def settled(server: Server, site: Site, quiet: float) -> tuple[int, int]:
    """Messages that the node has and that the broker has, as soon as hardly any come and go for ``quiet`` seconds."""
    since, last = time.monotonic(), -STEADY
    while time.monotonic() - since < quiet:
        time.sleep(0.1)
        inside = int(server.command("HLEN", "unacked"))
        # A task that is sent back goes to the end of the queue, so that the numbers stay the same for long.
        moved = inside + len(site.events("delivery"))
        if moved - last > STEADY:
            since, last = time.monotonic(), moved
    return inside, int(server.command("LLEN", QUEUE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=50_000, help="that wait")
    parser.add_argument("--limit", type=int, default=10_000, help="worker_eta_task_limit; 0 for none")
    parser.add_argument("--quiet", type=float, default=5.0, help="seconds without change after which it takes no more")
    parser.add_argument("--rounds", type=int, default=3, help="in which every mode has its turn")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    with valkey_server() as url:
        tasks.app.conf.update(broker_url=url, result_backend=url)
        found, failed = play(
            list(SETTINGS),
            options.rounds,
            lambda mode: crowd(url, mode, options.tasks, options.limit or None, options.quiet),
            lambda runs: middle(runs, lambda run: run["after"] - run["before"]),
        )
    print(
        f"{options.tasks:,} tasks of a slow bucket, worker_eta_task_limit={options.limit or None}; the median of"
        f" {options.rounds} rounds:\n"
    )
    head = ["", "in the worker", "left with the broker", "before", "after", "each"]
    shown = [table(head, [row(each) for each in found])] * bool(found)
    print("\n\n".join(shown + failed))
    if options.json:
        options.json.write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main()
