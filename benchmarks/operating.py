"""Write docs/operating.md, whose commands are run against two live nodes under load: `python -m benchmarks.operating`.

Two runs differ in their numbers alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from valkey_server import NoServerError, valkey_server

from benchmarks import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE = 30.0
POSTS, MAILS = 24, 8
PROJECT = """\
from celery import Celery

from tb_celery import RateLimitedTask

app = Celery("proj", broker="redis://localhost:6379/0", backend="redis://localhost:6379/0")
app.conf.tb_celery = {
    "buckets": {"twitter_api": {"capacity": 5, "refill_rate": 0.5}, "mail": "6/m"},
    "routes": {"proj.send_mail": {"bucket": "mail", "on_reject": "hold"}},
    "grant_log": "/var/log/tb-celery/grants",
}


@app.task(base=RateLimitedTask, bucket="twitter_api")
def post(text): ...


@app.task
def send_mail(to): ...
"""
TESTS = """\
import pytest

from proj import app, post
from tb_celery import RateLimitExceeded, limiter_of
from tb_celery.bucket import SECOND
from tb_celery.testing import always_refuse, assert_within, unlimited

app.conf.update(task_always_eager=True, task_eager_propagates=True)


def test_posts_keep_to_the_quota_and_take_no_time(bucket_clock):
    clock = bucket_clock(app)
    grants = []
    for number in range(8):
        post.delay(f"post {number}")
        grants.append((clock.now(), 1))
    assert clock.now() == 6 * SECOND  # the first five at once, then one in two seconds
    assert_within(grants, limiter_of(app).buckets["twitter_api"])


def test_what_has_nothing_to_do_with_quotas():
    with unlimited(app):
        for number in range(1000):
            post.delay(f"post {number}")


def test_what_happens_when_there_is_none():
    with always_refuse(app), pytest.raises(RateLimitExceeded):
        post.delay("post")
"""
PAGE = """\
# Operating

Every command below was run against two worker nodes under load, and its output pasted, by `python -m
benchmarks.operating`. The application, `proj.py`:

```python
{project}```

Its two nodes are `celery -A proj worker -E -n node1@%h` and the same with `node2`; {posts} tasks `post` and {mails}
tasks `send_mail` were sent, with ids such as `post-9`.

## How the buckets stand

{status}
TURNS are tokens that waiting tasks have turns for, KEYS the keys that are not full. `tb-celery status --app proj`
prints the same without a broker. Both look at the state from this host; what the nodes see, on whichever host they
are, and how many tasks they hold because of `"on_reject": "hold"`, they tell by themselves. In `held` are the tasks
held, the lines they wait in, and the tokens that those behind the first one draw:

{inspect}
A program asks with `app.control.broadcast("buckets", {{"bucket": "mail"}}, reply=True)`. A node without tb_celery
answers with an error, and goes on.

## Why it waits, and until when

{explain}
Tasks that no node has received yet are unknown to everybody but the broker, so they are in none of these numbers. A
task's own answer comes from the node that has it:

{held}
{sent_back}
Where no node has it, the result backend tells what it was refused with, as `AsyncResult` does in a program:

{info}
With `-E` a refusal is also an event, `task-rate-limited` with `bucket`, `wait` (seconds) and `turn` (seconds since
1970), that `celery events` and Flower show. Only a task that was sent back has one; what is held stays received.

## Full again

{reset}
From a distance `celery -A proj control bucket_reset mail -d node1@host` has one node do it. Without `-d` every node
does: once each, even where they share the state.

## Proof

The setting `grant_log` names a file to which every process appends a line for each grant, after the decision:
bucket, a salted hash of the key, instant, and cost. It survives `kill -9`, which costs at most the line of the
decision being made. At 64 MB, some 600 000 grants, it becomes `grants.1` in place of the one before. A grant that
cannot be logged is given all the same, with a WARNING. `reset` is logged as well. The directory has to exist, and
to be writable for workers and scripts.

{verify}
It is exact: no number is rounded, and each window between any two grants is looked at. Exit code 2 and the window
that ends first tell of a log in which somebody got too much, here one with a line added:

{doctored}
Where the numbers are not the settings', give them: `tb-celery verify LOG --bucket mail --capacity 1 --refill-rate
0.1`.

## In your own tests

tb_celery is a pytest plugin. `test_proj.py`:

```python
{tests}```

{pytest}
Buckets on `bucket_clock` are full and in memory, for the length of the test; whoever waits moves the clock on
instead of sleeping. `assert_within` also takes the path of a grant log. Where tasks should not ask at all, set
`enabled` to `False`.
"""


class Stage:
    """A folder with the project, its server and its nodes."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder = folder
        (folder / "log").mkdir()
        local = PROJECT.replace("redis://localhost:6379/0", server).replace("/var/log/tb-celery", str(folder / "log"))
        (folder / "proj.py").write_text(local)
        (folder / "test_proj.py").write_text(TESTS)
        clean = {name: text for name, text in os.environ.items() if not name.startswith(("TB_CELERY_", "CELERY_"))}
        self.environment = {
            **clean,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
            "TB_CELERY_STATE_FILE": str(folder / "buckets.state"),
            "TMPDIR": str(folder),
            "C_FORCE_ROOT": "1",
            "NO_COLOR": "1",
        }

    @contextmanager
    def nodes(self) -> Iterator[None]:
        command = "-m celery -A proj worker -E -c 1 --prefetch-multiplier 32 -l INFO --without-heartbeat -n"
        running = []
        try:
            for number in (1, 2):
                with (self.folder / f"node{number}.log").open("wb") as log:
                    running.append(
                        subprocess.Popen(
                            [sys.executable, *command.split(), f"node{number}@host"],
                            cwd=self.folder,
                            env=self.environment,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                        )
                    )
            until(lambda: self.logs().count(" ready.") == 2, "the nodes are ready")
            yield
        finally:
            for node in running:
                node.terminate()
            for node in running:
                node.wait()

    def logs(self) -> str:
        return "".join(path.read_text("utf-8", "replace") for path in sorted(self.folder.glob("node*.log")))

    def run(self, command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in {0, 2} or (done.stderr and not done.returncode):
            sys.exit(f"operating: {command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.returncode, done.stdout

    def show(self, command: str) -> str:
        """A command and what it prints, as a block of the page."""
        code, out = self.run(command)
        command = command.replace(str(self.folder / "log"), "/var/log/tb-celery")
        exit_code = f"$ echo $?\n{code}\n" if code else ""
        return f"```console\n$ {command}\n{out.strip()}\n{exit_code}```\n"


def until(look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not look():
        if time.monotonic() > deadline:
            sys.exit(f"operating: not within {PATIENCE:g} s: {what}")
        time.sleep(0.05)


def page(stage: Stage) -> str:
    """The page; the nodes have been idle until now."""
    send = f"""
import proj
for number in range({POSTS}): proj.post.apply_async((f"post {{number}}",), task_id=f"post-{{number}}")
for number in range({MAILS}): proj.send_mail.apply_async((f"user {{number}}",), task_id=f"mail-{{number}}")
"""
    (stage.folder / "send.py").write_text(send)
    stage.run(f"{sys.executable} send.py")
    log = stage.folder / "log" / "grants"
    until(lambda: len(re.findall(r"\[mail-\d+\] received", stage.logs())) == MAILS, "all mails are received")
    until(lambda: stage.logs().count("retry: bucket") >= POSTS - 5, "all posts were sent back")
    post, mail = f"post-{POSTS - 1}", f"mail-{MAILS - 1}"
    info = f"from proj import app; print(app.AsyncResult('{post}').info.turn)"
    blocks = {
        "status": stage.show("celery -A proj buckets status"),
        "inspect": stage.show("celery -A proj inspect buckets mail"),
        "explain": stage.show("celery -A proj buckets explain twitter_api")
        + "\n"
        + stage.show("celery -A proj buckets explain mail"),
        "held": stage.show(f"celery -A proj buckets explain {mail}"),
        "sent_back": stage.show(f"celery -A proj buckets explain {post}"),
        "info": stage.show(f'python -c "{info}"'),
        "verify": stage.show(f"tb-celery verify {log} --app proj"),
        "reset": stage.show("celery -A proj buckets reset mail"),
    }
    lines = log.read_text().splitlines(keepends=True)
    doctored = next(line for line in reversed(lines) if "twitter_api" in line)
    (stage.folder / "doctored").write_text("".join([*lines, doctored]))
    blocks["doctored"] = stage.show("tb-celery verify doctored --bucket twitter_api --app proj")
    blocks["pytest"] = stage.show("pytest -q -p no:cacheprovider test_proj.py")
    return PAGE.format(project=PROJECT, tests=TESTS, posts=POSTS, mails=MAILS, **blocks)


def write() -> str:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tb_celery-operating-")))
        stage = Stage(folder, stack.enter_context(valkey_server()))
        stack.enter_context(stage.nodes())
        return page(stage)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.operating", description="Write docs/operating.md.")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "operating.md", help="the file to write")
    options = parser.parse_args()
    options.into.write_text(write(), "utf-8")


if __name__ == "__main__":
    try:
        main()
    except NoServerError as error:
        sys.exit(f"benchmarks.operating: {error}")
