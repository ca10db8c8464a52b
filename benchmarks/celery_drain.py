"""What Celery's workers make of a quota: `python -m benchmarks.celery_drain`; some minutes, on a server of its own.

Three parts: plain tasks beside a starved bucket, a backlog on two nodes, and kills in the middle of one; each in the
modes "retry" and "hold", the first two with Celery's own `rate_limit` as well.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import app as tasks
from servers import Site, until
from valkey_server import valkey_server

from tb_celery.bucket import SECOND
from tb_celery.stores.redis_server import Server
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from celery.result import AsyncResult

CAPACITY, RATE = 5, 50
STARVED = {"capacity": 1, "refill_rate": 0.001}
BUCKETS = {**tasks.BUCKETS, "core": {"capacity": CAPACITY, "refill_rate": RATE}, "slow": STARVED}
NATIVE = "rate_limit"
MODES = ("retry", "hold")
NODES, CHILDREN = 2, 2
SOON = {"visibility_timeout": 16, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
"""Options of a Redis broker by which it soon delivers again what a lost node had."""


@contextmanager
def site(server: str, mode: str, **conf: Any) -> Iterator[Site]:
    """A folder, for nodes that refuse tasks in this way; the server is empty again afterwards."""
    settings: dict[str, object] = {"buckets": BUCKETS, "on_reject": "retry" if mode == NATIVE else mode}
    if "broker_transport_options" in conf:
        settings["max_countdown"] = SOON["visibility_timeout"] / 2
    with tempfile.TemporaryDirectory(prefix="tb_celery-drain-") as folder:
        made = Site(Path(folder), server, conf={"task_ignore_result": True, **conf}, settings=settings)
        try:
            yield made
        finally:
            made.stop()
            Server(server).command("FLUSHALL")


def started(site: Site, *options: str, nodes: int = NODES) -> None:
    for number in range(nodes):
        site.start(f"node{number}", "-c", str(CHILDREN), *options)
    for node in site.nodes:
        node.ready()


def ids(results: Sequence[AsyncResult]) -> set[str]:
    return {each.id for each in results}


def beside_a_starved_bucket(server: str, mode: str, patience: float = 30.0) -> str:
    """One node that prefetches 4 messages, 200 tasks of a bucket that is empty, and then 20 plain ones."""
    native = {"task_annotations": {"app.routed": {"rate_limit": "1/h"}}} if mode == NATIVE else {}
    with site(server, mode, worker_prefetch_multiplier=2, **native) as made:
        started(made, nodes=1)
        starved = tasks.routed if mode == NATIVE else tasks.slow
        for _ in range(200):
            starved.delay()
        begin = time.time()
        plain = ids([tasks.plain.delay() for _ in range(20)])
        try:
            until(lambda: made.of(plain).keys() == plain, "all plain tasks run", patience)
        except AssertionError:
            return f"{mode:10}  {len(made.of(plain))} of 20 plain tasks within {patience:g} s"
        last = max(each["began"] for bodies in made.of(plain).values() for each in bodies)
    return f"{mode:10}  20 of 20 plain tasks within {last - begin:.2f} s"


def backlog(server: str, mode: str, count: int) -> str:
    """``count`` tasks that wait in the queue when two warm nodes begin to take them."""
    # Celery's own limit is each node's, so each has its share.
    native = {"task_annotations": {"app.plain": {"rate_limit": f"{RATE // NODES}/s"}}} if mode == NATIVE else {}
    task = tasks.plain if mode == NATIVE else tasks.core
    with site(server, mode, **native) as made:
        started(made)
        if mode != NATIVE:
            made.bodies(ids([tasks.core.apply_async((number,), key="warm") for number in range(60)]))
        wanted = ids([task.apply_async((number,), queue="backlog") for number in range(count)])
        tasks.app.control.add_consumer("backlog", reply=True, timeout=2)
        patience = 3 * count / RATE + 10
        with suppress(AssertionError):
            until(lambda: made.of(wanted).keys() == wanted, "all bodies run", patience)
        bodies = [each for found in made.of(wanted).values() for each in found]
        if len(made.of(wanted)) < count:
            return f"{mode:10}  {len(made.of(wanted))} of {count} tasks after {patience:.0f} s"
        republished = sum(len(each) - 1 for each in made.of(wanted, "delivery").values()) / count
    now = [int(each["began"] * SECOND) if mode == NATIVE else each["granted"] for each in bodies]
    took = (max(now) - min(now)) / SECOND
    ideal = (count - CAPACITY) / RATE
    violation = first_violation([(each, 1) for each in now], CAPACITY, RATE)
    return (
        f"{mode:10}  {took:.2f} s (ideal {ideal:.2f} s, {took / ideal - 1:+.1%}), {republished:.2f} republished a task,"
        f" {len(bodies)} bodies of {count} tasks, {violation or 'every window within the bound'}"
    )


def kill(server: str, mode: str, victim: str, count: int) -> str:
    """A pool process, or a node, is killed when a third of ``count`` tasks, acknowledged late, has run."""
    late: dict[str, Any] = {"task_acks_late": True, "task_reject_on_worker_lost": True}
    if victim == "node":
        late["broker_transport_options"] = SOON
    with site(server, mode, **late) as made:
        started(made)
        wanted = ids([tasks.core.apply_async((number,)) for number in range(count)])
        until(lambda: len(made.of(wanted)) > count // 3, "a third has run")
        now = time.time()
        if victim == "node":
            made.nodes.pop().kill()
        else:
            os.kill(children_of(made.nodes[0].process.pid)[0], signal.SIGKILL)
        until(lambda: made.of(wanted).keys() == wanted, "all bodies run", count / RATE + 60)
        bodies = made.of(wanted)
    began = sorted(each["began"] for found in bodies.values() for each in found)
    gap = max(after - before for before, after in pairwise(began) if before >= now - 1 / RATE)
    runs = [len(found) for found in bodies.values()]
    granted = [(each["granted"], 1) for found in bodies.values() for each in found]
    violation = first_violation(granted, CAPACITY, RATE)
    return (
        f"{mode:10}  {victim}: {len(runs)} of {count} tasks ran, {sum(each > 1 for each in runs)} more than once;"
        f" longest pause afterwards {gap:.2f} s; {violation or 'every window within the bound'}"
    )


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000, help="in the backlog")
    parser.add_argument("--only", choices=("plain", "backlog", "kill"), help="this part alone")
    options = parser.parse_args()
    with valkey_server() as server:
        tasks.app.conf.update(broker_url=server, result_backend=server)
        if options.only in {None, "plain"}:
            print("One node, 200 tasks of a starved bucket, then 20 plain ones:")
            for mode in (*MODES, NATIVE):
                print(beside_a_starved_bucket(server, mode), flush=True)
        if options.only in {None, "backlog"}:
            print(f"{options.tasks} tasks at {RATE}/s on {NODES} nodes of {CHILDREN} processes:")
            for mode in (*MODES, NATIVE):
                print(backlog(server, mode, options.tasks), flush=True)
        if options.only in {None, "kill"}:
            print("SIGKILL in the middle of 300 tasks, acknowledged late:")
            for victim in ("process", "node"):
                for mode in MODES:
                    print(kill(server, mode, victim, 300), flush=True)


if __name__ == "__main__":
    main()
