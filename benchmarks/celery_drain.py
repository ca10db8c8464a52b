"""What Celery's workers make of a quota: `python -m benchmarks.celery_drain`; some minutes, on a server of its own.

Two parts: plain tasks beside a starved bucket, and a backlog on two nodes; each in the modes "retry" and "hold", and
with Celery's own `rate_limit` as well, the backlog also with what others make of it, where that is installed:
`pip install 'tb-celery[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import app as tasks
from servers import Site, until
from valkey_server import valkey_server

from benchmarks import peer_tasks
from benchmarks.attempt import attempt
from benchmarks.markdown import table
from benchmarks.peers import PEERS
from benchmarks.rounds import Run, middle, play
from tb_celery.bucket import SECOND
from tb_celery.stores.redis_server import Server
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from celery.result import AsyncResult

CAPACITY, RATE = 5, 50
STARVED = {"capacity": 1, "refill_rate": 0.001}
BUCKETS = {**tasks.BUCKETS, "core": {"capacity": CAPACITY, "refill_rate": RATE}, "slow": STARVED}
NATIVE, HEIMDALL, BY_HAND = "rate_limit", "celery-heimdall", "limits and retry by hand"
MODES = ("retry", "hold")
WINDOWED = {HEIMDALL: "celery-heimdall (Redis)", BY_HAND: "limits moving window (Redis)"}
"""Who has as many at once as a second, and among the peers is called so."""
NODES, CHILDREN = 2, 2


@contextmanager
def site(server: str, mode: str, **conf: Any) -> Iterator[Site]:
    """A folder, for nodes that refuse tasks in this way; the server is empty again afterwards."""
    settings: dict[str, object] = {"buckets": BUCKETS, "on_reject": mode if mode in MODES else "retry"}
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


def beside_a_starved_bucket(server: str, mode: str, patience: float = 10.0) -> str:
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


def backlog(server: str, mode: str, count: int) -> dict[str, Any]:
    """``count`` tasks that wait in the queue when two warm nodes begin to take them."""
    # Celery's own limit is each node's, so each has its share.
    native = {"task_annotations": {"app.plain": {"rate_limit": f"{RATE // NODES}/s"}}} if mode == NATIVE else {}
    at_once = peer_tasks.RATE if mode in WINDOWED else CAPACITY
    with site(server, mode, **native) as made:
        made.app = "benchmarks.peer_tasks"
        started(made)
        if mode in MODES:
            made.bodies(ids([tasks.core.apply_async((number,), key="warm") for number in range(60)]))
        task = task_of(mode)
        wanted = ids([task.apply_async((number,), queue="backlog") for number in range(count)])
        tasks.app.control.add_consumer("backlog", reply=True, timeout=2)
        with suppress(AssertionError):
            until(lambda: made.of(wanted).keys() == wanted, "all bodies run", 2 * count / RATE + 10)
        bodies = [each for found in made.of(wanted).values() for each in found]
        ran = len(made.of(wanted))
        if not ran:
            message = "no task ran"
            raise RuntimeError(message)
        republished = sum(len(each) - 1 for each in made.of(wanted, "delivery").values()) / count
    began = sorted(round(each["began"] * SECOND) for each in bodies)
    # Others leave no word of when they granted it.
    granted = sorted(each["granted"] for each in bodies) if mode in MODES else began
    took = (granted[-1] - granted[0]) / SECOND
    off = [abs((after - before) / SECOND - 1 / RATE) * 1e3 for before, after in pairwise(began[at_once:])]
    return {
        "mode": mode,
        "tasks": count,
        "rate": RATE,
        "ran": ran,
        "bodies": len(bodies),
        "took": took,
        "ideal": (count - at_once) / RATE,
        "republished": republished,
        "used": len(bodies) / (at_once + RATE * took),
        "over": over(granted, at_once),
        "jitter p50": quantiles(off, n=100)[49],
        "jitter p99": quantiles(off, n=100)[98],
        "starts": [round((each - began[0]) / SECOND, 3) for each in began],
    }


def task_of(mode: str) -> Any:  # noqa: ANN401 - Celery's tasks have no type
    if mode in MODES:
        return tasks.core
    return {NATIVE: tasks.plain, BY_HAND: peer_tasks.by_hand, HEIMDALL: getattr(peer_tasks, "heimdall", None)}[mode]


def over(granted: Sequence[int], at_once: int) -> int:
    """The tokens that the worst window of grants holds too many: with so many more at once, all would be within."""
    more = 0
    while violation := first_violation([(each, 1) for each in granted], at_once + more, RATE):
        more += math.ceil(violation.granted - violation.allowed)
    return more


def row(found: dict[str, Any]) -> list[str]:
    """What the page shows of a backlog."""
    return [
        found["mode"],
        f"{found['ran']} of {found['tasks']}" + f", {found['bodies']} bodies" * (found["bodies"] != found["ran"]),
        f"{found['took']:.2f} s",
        f"{found['ideal']:.2f} s",
        f"{found['republished']:.2f}",
        f"{found['used']:.1%}",
        str(found["over"]),
        f"{found['jitter p50']:.1f} / {found['jitter p99']:.1f} ms",
    ]


HEAD = ["", "ran", "took", "ideal", "published again, a task", "quota used", "too many", "off the beat, p50 / p99"]


def backlogs(server: str, count: int, rounds: int) -> tuple[str, list[Run]]:
    """A table of all modes, and the rows in figures."""
    missing = {mode: reason for mode in WINDOWED if (reason := PEERS[WINDOWED[mode]].missing())}
    modes = [mode for mode in (*MODES, NATIVE, *WINDOWED) if mode not in missing]
    found, failed = play(modes, rounds, lambda mode: backlog(server, mode, count), typical)
    failed += [f"{mode}: not measured: {reason}" for mode, reason in missing.items()]
    return "\n\n".join([table(HEAD, [row(each) for each in found])] * bool(found) + failed), found


def typical(runs: Sequence[Run]) -> Run:
    """The run of median duration, with the fewest tasks that ran in any, and the most that were too many."""
    worst = {"ran": min(run["ran"] for run in runs), "over": max(run["over"] for run in runs)}
    return {**middle(runs, lambda run: run["took"]), **worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=500, help="in the backlog")
    parser.add_argument("--rounds", type=int, default=3, help="in which every mode has its turn")
    parser.add_argument("--only", choices=("plain", "backlog"), help="this part alone")
    parser.add_argument("--json", type=Path, help="write the figures of the backlog there")
    options = parser.parse_args()
    with valkey_server() as server:
        tasks.app.conf.update(broker_url=server, result_backend=server)
        if options.only in {None, "backlog"}:
            shown, found = backlogs(server, options.tasks, options.rounds)
            print(
                f"{options.tasks} tasks at {RATE} a second on {NODES} nodes of {CHILDREN} processes. Of"
                f" {options.rounds} rounds, the run of median duration, but the fewest that ran, and the most too many:"
                f"\n\n{shown}\n"
            )
            if options.json:
                options.json.write_text(json.dumps(found), "utf-8")
        if options.only in {None, "plain"}:
            print("One node, 200 tasks of a starved bucket, then 20 plain ones:\n\n```")
            for mode in (*MODES, NATIVE):
                print(attempt(mode, partial(beside_a_starved_bucket, server, mode)), flush=True)
            print("```")


if __name__ == "__main__":
    main()
