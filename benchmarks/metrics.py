"""What counting for Prometheus costs: `python -m benchmarks.metrics`; two minutes, on a server of its own.

With metrics and without, in turns: the bare loop of decisions on a state file, by one process and by some at once; what
a pool process does for each limited task, without a worker; and limited tasks that do nothing, on a worker node with
two processes for each kind. What is more is the median over the rounds, with their quartiles. Processes that are
counted count as a pool's do, in a file. What a state file's store tallies whether or not it is counted is in both, and
measured by itself.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import redis
from celery.app.trace import build_tracer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from valkey_server import valkey_server

from benchmarks.contenders import CAPACITY, RATE
from benchmarks.load import measure as measure_load
from benchmarks.throughput import drain, worker
from tb_celery import Bucket, Limit, Limiter
from tb_celery.metrics import Metrics, measure
from tb_celery.quota import quota_of
from tb_celery.stores.file import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PLAIN, METERED = "plain", "metered"
AT_ONCE = 8
BUCKETS = [Bucket("api", (Limit(CAPACITY, RATE),))]


class Took(NamedTuple):
    """Seconds for one of many; of the processor's time, where that was looked at."""

    clock: float
    processor: float = 0.0


def rounds(count: int, run: Callable[[str], Took]) -> list[dict[str, Took]]:
    """What ``run`` measured of each kind, round by round; the first was to warm up."""
    found = [{kind: run(kind) for kind in random.sample((PLAIN, METERED), 2)} for _ in range(count + 1)]
    return found[1:]


def counted(limiter: Limiter, folder: Path) -> Metrics:
    metrics = measure(limiter, None)
    metrics.keep_in(folder, str(os.getpid()))
    return metrics


def decisions(folder: Path, count: int, each: int) -> list[dict[str, Took]]:
    limiters = {kind: Limiter(BUCKETS, FileStore(folder / f"{kind}.state")) for kind in (PLAIN, METERED)}
    counted(limiters[METERED], folder)

    def run(kind: str) -> Took:
        acquire = limiters[kind].acquire
        began, spent = time.perf_counter(), time.process_time()
        for _ in range(each):
            acquire("api")
        return Took((time.perf_counter() - began) / each, (time.process_time() - spent) / each)

    return rounds(count, run)


def tallied(count: int, each: int) -> float:
    """Seconds that it takes to tally a grant."""
    tally = FileStore("nowhere").tallies["api"]
    found = []
    for _ in range(count):
        began = time.process_time()
        for _ in repeat(None, each):
            pass
        between = time.process_time()
        for _ in repeat(None, each):
            tally.granted += 1
            tally.tokens += 1.0
        found.append((time.process_time() - between - (between - began)) / each)
    return statistics.median(found)


def decisions_at_once(folder: Path, count: int, seconds: float) -> list[dict[str, Took]]:
    def run(kind: str) -> Took:
        def make() -> Callable[[], object]:
            limiter = Limiter(BUCKETS, FileStore(folder / "at-once.state"))
            if kind == METERED:
                counted(limiter, folder)
            return lambda: limiter.acquire("api")

        return Took(1 / measure_load(make, AT_ONCE, seconds).rate)

    return rounds(count, run)


def deliveries(folder: Path, count: int, each: int) -> list[dict[str, Took]]:
    from benchmarks.tasks import app, limited  # noqa: PLC0415 - reads the environment

    app.finalize()
    quota = quota_of(app)
    stores = {PLAIN: quota.limiter.store}
    counts = {PLAIN: None, METERED: counted(quota.limiter, folder)}
    stores[METERED] = quota.limiter.store
    trace = build_tracer(limited.name, limited, app=app)
    message = {"delivery_info": {"exchange": "", "routing_key": "celery"}, "hostname": "benchmark"}

    def run(kind: str) -> Took:
        quota.limiter.store, quota.metrics = stores[kind], counts[kind]
        began, spent = time.perf_counter(), time.process_time()
        for number in range(each):
            trace(str(number), (), {}, dict(message))
        return Took((time.perf_counter() - began) / each, (time.process_time() - spent) / each)

    return rounds(count, run)


def tasks(url: str, count: int, each: int) -> list[dict[str, Took]]:
    client = redis.Redis.from_url(url)
    from benchmarks.tasks import limited  # noqa: PLC0415 - reads the environment

    messages = {}
    for kind in (PLAIN, METERED):
        for _ in range(each):
            limited.apply_async(queue=kind)
        messages[kind] = client.lrange(kind, 0, -1)
        client.delete(kind)
    with (
        worker("prefork", PLAIN) as plain,
        worker("prefork", METERED, TB_CELERY_METRICS_PORT=str(free_port())) as metered,
    ):
        nodes = {PLAIN: plain, METERED: metered}

        def run(kind: str) -> Took:
            spent = processor_time(nodes[kind])
            clock = drain(client, messages[kind], kind)
            return Took(clock / each, (processor_time(nodes[kind]) - spent) / each)

        return rounds(count, run)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def processor_time(pid: int) -> float:
    """Seconds that a process and its children have spent, as Linux tells."""
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    own = sum(int((each / "schedstat").read_text("ascii").split()[0]) for each in threads) / 1e9
    children = [child for each in threads for child in (each / "children").read_text("ascii").split()]
    return own + sum(processor_time(int(child)) for child in children)


def typical(found: Sequence[dict[str, Took]], number: int) -> tuple[float, float]:
    """Microseconds without metrics and with them."""
    before, after = (1e6 * statistics.median(each[kind][number] for each in found) for kind in (PLAIN, METERED))
    return before, after


def row(what: str, found: Sequence[dict[str, Took]], number: int) -> str:
    before, after = typical(found, number)
    more = [each[METERED][number] / each[PLAIN][number] - 1 for each in found if each[PLAIN][number]]
    low, middle, high = statistics.quantiles(more, n=4)
    return f"| {what} | {before:.2f} | {after:.2f} | {middle:+.1%} | {low:+.1%} to {high:+.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="of the tasks on a worker node; others have more")
    options = parser.parse_args()
    count = options.rounds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tb_celery-metrics-bench-")))
        server = stack.enter_context(valkey_server())
        # Before the application is imported, which reads them once.
        os.environ |= {"CELERY_BROKER_URL": server, "TB_CELERY_STATE_FILE": str(folder / "tasks.state")}
        loop = decisions(folder, 200 * count, 100)
        at_once = decisions_at_once(folder, 2 * count, 0.2)
        alone = deliveries(folder, 20 * count, 100)
        whole = tasks(server, count, 500)
    lines = [
        "| microseconds of the processor | without | with metrics | more | quartiles |",
        "|---|---|---|---|---|",
        row("a limited task that does nothing, on a worker node", whole, 1),
        row("what its pool process does for it, without a worker", alone, 1),
        row(f"a decision, {AT_ONCE} processes as fast as they can: the clock's time", at_once, 0),
        row("a decision, one process as fast as it can", loop, 1),
    ]
    before, after = typical(alone, 1)
    share = (after - before) / typical(whole, 1)[0]
    print("\n".join(lines))
    own = 1e6 * tallied(20 * count, 1000)
    print(f"\nOf a decision, {own:.3f} us are for the tally that its store keeps in any case.")
    print(f"\nWhat a pool process does more is {share:.1%} of all the processor time that a limited task takes.")


if __name__ == "__main__":
    main()
