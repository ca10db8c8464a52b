"""Real worker nodes share one quota, on a server of their own; ends with a verdict from what was recorded. `make demo`.

The same file is the workers' application (`celery -A demo worker`) and the program that starts and judges them.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from celery import Celery, Task, signals
from valkey_server import NoServerError, valkey_server

from tb_celery import RateLimitedTask
from tb_celery.bucket import SECOND
from tb_celery.clock import SystemClock
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from celery.app.task import Context
    from celery.worker.consumer import Consumer

CAPACITY, RATE = 5, 10
PROCESSES = 4
"""Of each node's pool."""
BAR, STEADY, MOST = "█┊│" if "utf" in (sys.stdout.encoding or "").lower() else "#:|"
clock = SystemClock()

# -- the application

app = Celery("demo")
app.conf.task_ignore_result = True
app.conf.tb_celery = {"buckets": {"api": {"capacity": CAPACITY, "refill_rate": RATE}}}


class Record(NamedTuple):
    """A line of the log, written by whoever runs a task or sends one back."""

    event: str
    node: str
    number: int = 0
    granted: int = 0
    """The instant at which the task got its token, in nanoseconds of the host's boot-time clock."""
    began: int = 0
    """The instant at which its body began, a little later."""
    retries: int = 0


def write(record: Record) -> None:
    log = os.open(os.environ["DEMO_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(log, (" ".join(map(str, record)) + "\n").encode())
    os.close(log)


def read(log: Path) -> list[Record]:
    records = []
    for line in log.read_text().split("\n")[:-1]:
        event, node, *numbers = line.split()
        records.append(Record(event, node, *map(int, numbers)))
    return records


@app.task(bind=True, base=RateLimitedTask, bucket="api")
def limited(self: Task, number: int) -> None:
    request = self.request
    write(Record("limited", request.hostname, number, request.tb_celery.now, clock.now(), request.retries))


@app.task(bind=True)
def unlimited(self: Task, number: int) -> None:
    now = clock.now()
    write(Record("unlimited", self.request.hostname, number, now, now, self.request.retries))


@signals.task_retry.connect
def sent_back(request: Context, **_: Any) -> None:
    write(Record("sent-back", request.hostname, request.args[0]))


@signals.worker_ready.connect
def ready(sender: Consumer, **_: Any) -> None:
    write(Record("ready", sender.hostname))


# -- the nodes


@contextmanager
def worker_nodes(count: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run worker nodes; ended with their pools on every way out."""
    nodes: list[subprocess.Popen[bytes]] = []
    command = f"-m celery -A demo worker -c {PROCESSES} -l WARNING --without-gossip --without-mingle -n"
    try:
        for number in range(1, count + 1):
            with (folder / f"node{number}.log").open("wb") as log:
                node = subprocess.Popen(
                    [sys.executable, *command.split(), f"node{number}@demo"],
                    cwd=Path(__file__).parent,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C reaches only us, and a pool can be ended through its group
                )
            nodes.append(node)
        yield nodes
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            try:
                node.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def wait_until_ready(nodes: Sequence[subprocess.Popen[bytes]], folder: Path, log: Path) -> None:
    deadline = time.monotonic() + 30
    while sum(record.event == "ready" for record in read(log)) < len(nodes):
        if time.monotonic() > deadline or any(process.poll() is not None for process in nodes):
            wrote = [(output.name, output.read_text("utf-8", "replace").strip()) for output in folder.glob("*.log")]
            last = "; ".join(f"{name}: {(text or 'nothing').splitlines()[-1]}" for name, text in sorted(wrote))
            sys.exit(f"demo: not every worker node came up; the last that they wrote: {last}")
        time.sleep(0.05)


# -- the picture


def chart(log: Path, tasks: Counter[tuple[str, int]], deadline: float) -> None:
    """Draw a line for each second, as it passes, until every task has run or the deadline has passed."""
    live = sys.stdout.isatty()
    print(
        f"starts a second:  {BAR} limited   {STEADY} refill of {RATE}   {MOST} refill and a whole burst of {CAPACITY}"
    )
    drawn = 0
    while True:
        seen = [record for record in read(log) if record.began]
        over = tasks.keys() <= {(record.event, record.number) for record in seen} or time.monotonic() > deadline
        if seen:
            first = min(record.began for record in seen)
            passed = (clock.now() - first) // SECOND
            while drawn < passed + over:
                print(row(drawn, seen, first))
                drawn += 1
            if live and not over:
                print(row(drawn, seen, first), end="\r", flush=True)
        if over:
            return
        time.sleep(0.1)


def row(second: int, seen: Iterable[Record], first: int) -> str:
    count = Counter(record.event for record in seen if (record.began - first) // SECOND == second)
    cells = [BAR * 2 if at < count["limited"] else "  " for at in range(max(CAPACITY + RATE, count["limited"]))]
    if count["limited"] <= RATE:
        cells[RATE] = f"{STEADY} "
    cells.insert(CAPACITY + RATE, MOST)
    others = f"   and {count['unlimited']} unlimited" if count["unlimited"] else ""
    return f"{second + 1:3} s  {''.join(cells)} {count['limited']:3}{others}"


# -- the verdict


def verdict(records: Sequence[Record], tasks: Counter[tuple[str, int]], queued: int) -> bool:
    """Print what the records say; whether all is as promised."""
    runs = [record for record in records if record.began]
    posts = [record for record in runs if record.event == "limited"]
    if not posts:
        print("  BAD  no limited task has run")
        return False
    ran = Counter((record.event, record.number) for record in runs)
    grants = sorted(record.granted for record in posts)
    violation = first_violation([(at, 1) for at in grants], CAPACITY, RATE)
    elapsed = grants[-1] - grants[0]
    used = len(grants) / (CAPACITY + RATE * elapsed / SECOND)
    sent_back = Counter(record.number for record in records if record.event == "sent-back")
    each = sent_back.total() / len(posts)
    wrong = {task for task in tasks | ran if ran[task] != 1}
    over = f", but there are {violation}" if violation else ""
    checks = [
        (violation is None, f"no window of w seconds holds over {CAPACITY} + {RATE} w" + over),
        (used >= 0.99, f"quota used: {used:.2%}, {len(grants)} tasks in {elapsed / SECOND:.3f} s"),
        (each <= 1.1, f"sent back: {each:.3f} times a task, at most {max(sent_back.values(), default=0)} times"),
        (not wrong, f"every task ran exactly once: {len(tasks) - len(wrong & tasks.keys())} of {len(tasks)}"),
        (not any(record.retries for record in runs), "retries were 0 in every body"),
    ]
    print()
    for good, text in checks:
        print(f"{'  ok ' if good else '  BAD'}  {text}")
    nodes = Counter(record.node for record in posts)
    lags = [(record.began - record.granted) / 1e6 for record in posts]
    rest = [(record.began - queued) / SECOND for record in runs if record.event == "unlimited"]
    print(f"       by node: {', '.join(f'{name} {nodes[name]}' for name in sorted(nodes))}")
    print(f"       from grant to body: {statistics.median(lags):.1f} ms (median), {max(lags):.1f} ms at most")
    if rest:
        print(f"       the unlimited tasks, queued last, had all begun {max(rest):.1f} s later")
    return all(good for good, _ in checks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--tasks", type=int, default=200, help="limited tasks (default: %(default)s)")
    parser.add_argument("--unlimited", type=int, default=60, help="tasks without a bucket (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=2, help="worker nodes (default: %(default)s)")
    options = parser.parse_args()
    kinds = [("limited", options.tasks), ("unlimited", options.unlimited)]
    tasks = Counter((kind, number) for kind, count in kinds for number in range(count))

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tb_celery-demo-")))
        log = folder / "starts"
        log.touch()
        for name in [name for name in os.environ if name.startswith("TB_CELERY_")]:
            del os.environ[name]
        os.environ["TB_CELERY_STATE_FILE"] = str(folder / "buckets.state")
        os.environ["DEMO_LOG"] = str(log)
        os.environ["TMPDIR"] = str(folder)  # what a pool leaves behind when it is killed goes with the folder
        os.environ["CELERY_BROKER_URL"] = stack.enter_context(valkey_server())
        with worker_nodes(options.nodes, folder) as nodes:
            wait_until_ready(nodes, folder, log)
            print(f"{len(nodes)} nodes x {PROCESSES} processes, {len(tasks)} tasks, {options.tasks} of them limited")
            for kind, number in tasks:
                app.send_task(f"demo.{kind}", (number,))
            queued = clock.now()
            chart(log, tasks, time.monotonic() + options.tasks / RATE + 15)
        return 0 if verdict(read(log), tasks, queued) else 1


def leave(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    try:
        sys.exit(main())
    except NoServerError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
