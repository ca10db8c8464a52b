"""Write docs/operating.md, whose commands are run against two live nodes under load: `python -m benchmarks.operating`.

Two runs differ in their numbers alone.
"""

from __future__ import annotations

import argparse
import json
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
POSTS, MAILS = 100, 12
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
WORKER_TESTS = """\
import time

from celery.contrib.testing.worker import start_worker

from proj import app, post
from tb_celery.bucket import SECOND

app.conf.update(broker_url="memory://", result_backend="cache+memory://")


def test_one_post_too_many_waits_for_its_turn(bucket_clock):
    app.conf.task_always_eager = False
    clock = bucket_clock(app)
    with start_worker(app, perform_ping_check=False):
        *_, last = (post.delay(f"post {number}") for number in range(6))
        deadline = time.monotonic() + 30
        while last.state != "RETRY" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert last.info.wait == 2
        clock.advance(2 * SECOND)
        last.get(timeout=30)
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
TURNS are tokens that waiting tasks have turns for, DONE IN is when the last of these has its tokens, KEYS the keys
that are not full. Where keys are in use, a row says which quota it is: `mail (without a key; with one 12 turns)`, or
with `--key alice` `mail (key 'alice')`. `tb-celery status --app proj` prints the same without a broker. Both look at
the state from this host; what the nodes see, on whichever host they are, and how many tasks they hold because of
`"on_reject": "hold"`, they tell by themselves. In `held` are the tasks held, the lines they wait in, and the tokens
that those behind the first one draw; `sent_back` is how often the node has sent a task back since its start because
this bucket refused it, and `dropped` how many tasks it has dropped because its `on_reject` is `"drop"`:

{inspect}
`behind` is for the quota that was asked about, here the one without a key, and `most` for the key with the most. A
program asks with `app.control.broadcast("buckets", {{"bucket": "mail"}}, reply=True)`. A node without tb_celery answers
with an error, and goes on.

## Live

`celery -A proj buckets top` (extra `tb-celery[tui]`) shows every bucket in the terminal, anew every second or every
`-n SECONDS`, until `q` or Ctrl-C. With `--once`, and where stdout is no terminal, it looks twice and prints one frame:

{top}
USED/S is the mean of the last minute, all keys together, next to what is allowed; the line shows it over time, where a
full mark is all that is allowed, or more. Both are worked out from the state, so of a bucket that was full now and then
more may have been used: `≥` says so. WAIT is turns (in tokens) and the tasks that nodes hold behind those. Where
several keys are in use, `x3` tells how many, TOKENS is the emptiest one's, and DONE IN that of the one that takes
longest. `tb-celery top --app proj` shows the same without a broker, and so without held tasks.

![six buckets, as top shows them](top.svg)

## Why it waits, and until when

{explain}
Where keys are in use, a line tells how much all of them together wait for; `--key alice` tells of one. Tasks that no
node has received yet are unknown to everybody but the broker, so they are in none of these numbers. A task's own answer
comes from the node that has it:

{held}
{sent_back}
Where no node has it, the result backend tells what it was refused with, as `AsyncResult` does in a program:

{info}
With `-E` a refusal is also an event, `task-rate-limited` with `bucket`, `wait` (seconds) and `turn` (seconds since
1970), that `celery events` and Flower show. Only a task that was sent back has one; what is held stays received.

## Paused

A bucket can be paused, such as when the other side is down, or says that you have called too often. Every process
heeds it in its next decision, on whichever host it shares the state; nothing is lost, and tasks that are refused
meanwhile get turns after it:

{pause}
Times are seconds, or a number with s, m, h or d, up to 31 days. Of two pauses the one that ends later stands, until
it is ended. With `--key alice` only that key is paused, and `resume --key alice` ends that. `status`, `explain`,
`top` and `doctor` tell of it, and a task that waits says why, also in its `AsyncResult.info`, which has `paused`
then:

{paused}
{waits}
{resume}
What a node holds (`"on_reject": "hold"`) starts within about a second of that. What was sent back with a countdown is
with the broker, and comes when that is over: about one time each, whenever the pause ends. A task whose turn is
further off than `max_countdown` is sent on every so often. Who asks from then on has a turn as if the pause had been
no longer, behind as many tokens as those in line want, so that no quota lies idle until the others come.

From a distance `celery -A proj control` does it on the nodes, and each answers how the bucket stands there; several
nodes that share the state all give the same order, which does no harm:

{remote}
`bucket_resume BUCKET [KEY]`, `bucket_set BUCKET REFILL_RATE [CAPACITY [DURATION [LIMIT]]]` (`-` leaves what is
declared) and `bucket_unset BUCKET [LIMIT]` are the others. A program says `app.control.broadcast("bucket_pause",
{{"bucket": "mail", "duration": 120}})`. With `-E` the node that did it sends an event `bucket-paused` with `bucket`,
`one_key` (whether it is about a single key, which is not shown) and `until` (seconds since 1970), or
`bucket-resumed`. Here `celery -A proj events --dump` runs beside it:

{events}
## Other numbers

Numbers can be changed without a deploy, for a time or for good: everybody heeds them in the next decision, a node
that holds tasks as well. The tokens that are there stay what they are, and from then on they come at the other rate,
also for keys that nobody asks for meanwhile. `status`, `top` and the metrics tell so at once:

{set}
Of a bucket with several limits `--limit 0` names the one that refills the fastest. A call that costs more than the
bucket then holds takes all that it holds. What is set for good stays set when workers are deployed with other
settings: end it.

{unset}
Where processes were started with settings that differ, such as in a rolling deploy, the smaller capacity and the
slower rate count for all of them, until a minute after the last ask of whoever declares them
([how](decisions/0008-claims.md)). Each of them tells once, with a WARNING; who declares more says
`bucket 'mail': another process uses 1 at 0.1/s where 5 at 0.5/s is declared here`. There `status`, `explain` and
`doctor` say `as another process declares`, and `top` says `differs`. To find who that is, look for what was not started
again; until it is, `set` is heeded by everybody, whatever they declare. Where one declares more limits than the other,
each process goes by its own numbers.

## Full again

{reset}
From a distance `celery -A proj control bucket_reset mail -d node1@host` has one node do it. Without `-d` every node
does: once each, even where they share the state.

## Proof

The setting `grant_log` names a file to which every process appends a line for each grant, after the decision:
bucket, a salted hash of the key, instant, and cost. It survives `kill -9`, which costs at most the line of the
decision being made. At 64 MB, some 600 000 grants, it becomes `grants.1` in place of the one before. A grant that
cannot be logged is given all the same, with a WARNING. `reset`, `pause`, `resume`, `set` and `unset` are logged as
well, and what calls cost after all (`settle`), so whoever gives or tells these needs the same setting. The directory
has to exist, and to be writable for workers and scripts.

{verify}
It is exact: no number is rounded, and each window between any two grants is looked at. Exit code 2 and the window
that ends first tell of a log in which somebody got too much, here one in which the fifth post stands six times:

{doctored}
A window is judged by the numbers that counted while it lasted: it may hold the capacity that counted when it began,
and what was refilled at each rate while that counted. Besides, a limit whose capacity is raised may have the
difference at once, for it may have been full. One whose numbers end by themselves (`--for`) may be full again then:
nobody is there at that instant to carry over what is forgotten as soon as it is full. While an order is given, for
some milliseconds, both the old and the new numbers may count, and of a last call that cost more than the bucket then
held only that much had to be there. In a pause nothing may be granted.

What a call gives back (`settle`) may be granted again, so a window may hold that besides, whenever the call itself was
granted. What is drawn for a call after all makes no window too full, for it may be owed; but it is paid before the next
grant, and so counts in the windows that end with that or a later one. What a bucket owes when its state is lost is
never paid, and the log shows that.

Where the declared numbers are not the settings', give them: `tb-celery verify LOG --bucket mail --capacity 1
--refill-rate 0.1`.

## In your own tests

tb_celery is a pytest plugin. `test_proj.py`:

```python
{tests}```

With a worker in a thread of the test's process, as Celery's own `celery_worker` is one, tasks are sent back as they
are in production. `test_worker.py`:

```python
{worker_tests}```

{pytest}
Buckets on `bucket_clock` are full and in memory, for the length of the test; whoever waits moves the clock on
instead of sleeping. What the app sends in this process with a countdown or ETA, its own retries as well, waits until
the clock has been moved so far, and is not sent at all if the test ends before. A worker that holds tasks
(`"on_reject": "hold"`) looks at the clock once a second; give it the clock before it starts. What goes by the real
clock are workers in other processes, `expires`, time limits and beat. `assert_within` also takes the path of a grant
log. Where tasks should not ask at all, set `enabled` to `False`.
"""


class Stage:
    """A folder with the project, its server and its nodes."""

    def __init__(self, folder: Path, server: str, project: str = PROJECT) -> None:
        self.folder = folder
        (folder / "log").mkdir()
        local = project.replace("redis://localhost:6379/0", server).replace("/var/log/tb-celery", str(folder / "log"))
        (folder / "proj.py").write_text(local)
        (folder / "test_proj.py").write_text(TESTS)
        (folder / "test_worker.py").write_text(WORKER_TESTS)
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
        # Each has a queue of its own besides, so that it has its part of the mails.
        command = "-m celery -A proj worker -E -c 1 --prefetch-multiplier 32 -l INFO --without-heartbeat -Q"
        running = []
        try:
            for number in (1, 2):
                with (self.folder / f"node{number}.log").open("wb") as log:
                    running.append(
                        subprocess.Popen(
                            [sys.executable, *command.split(), f"celery,node{number}", "-n", f"node{number}@host"],
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

    @contextmanager
    def listening(self) -> Iterator[Callable[[], list[str]]]:
        """What `celery events --dump` shows of buckets meanwhile."""
        path = self.folder / "events.log"
        with path.open("wb") as log:
            command = [sys.executable, "-u", "-m", "celery", "-A", "proj", "events", "--dump"]
            dump = subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=log, stderr=log)
        try:
            until(
                lambda: bool(self.run("celery -A proj control heartbeat")) and "heartbeat" in path.read_text(),
                "it listens",
            )
            yield lambda: [line for line in path.read_text().splitlines() if " bucket " in line]
        finally:
            dump.terminate()
            dump.wait()

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

    def behind_another(self) -> str:
        """The id of a mail that a node holds, but not as its first."""
        for number in reversed(range(MAILS)):
            _, told = self.run(f"celery -A proj buckets explain mail-{number} --json")
            if any(node.get("place", 1) > 1 for node in json.loads(told)["nodes"].values()):
                return f"mail-{number}"
        sys.exit("operating: no node holds two mails")

    def show(self, command: str, wanted: str = "", hidden: str = "") -> str:
        """A command and what it prints, as a block of the page.

        Args:
            command: as it is shown.
            wanted: what is in its output where both nodes answer in time; until then it is asked again.
            hidden: options that are not shown.
        """
        deadline = time.monotonic() + PATIENCE
        code, out = self.run(f"{command}{hidden}")
        while not re.search(wanted, out):
            if time.monotonic() > deadline:
                sys.exit(f"operating: not within {PATIENCE:g} s: {command} shows {wanted}\n{out}")
            code, out = self.run(f"{command}{hidden}")
        command = command.replace(str(self.folder / "log"), "/var/log/tb-celery")
        out = out.replace(str(self.folder), "/var/lib/tb-celery")
        exit_code = f"$ echo $?\n{code}\n" if code else ""
        return f"```console\n$ {command}\n{out.strip()}\n{exit_code}```\n"


def until(look: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not look():
        if time.monotonic() > deadline:
            sys.exit(f"operating: not within {PATIENCE:g} s: {what}")
        time.sleep(0.05)


BOTH = " --timeout 30 --destination node1@host,node2@host"
"""Celery's command waits until both have answered, however busy the machine."""


def page(stage: Stage) -> str:
    """The page; the nodes have been idle until now."""
    log = stage.folder / "log" / "grants"
    post = f"post-{POSTS - 1}"

    def send(task: str, name: str, numbers: range, options: str = "") -> None:
        call = f"proj.{task}.apply_async((f'{{number}}',), task_id=f'{name}-{{number}}'{options})"
        stage.run(f'python -c "import proj\nfor number in {numbers}: {call}"')

    send("post", "post", range(POSTS))
    send("send_mail", "mail", range(MAILS - 1), ", queue=f'node{number % 2 + 1}'")
    until(lambda: stage.logs().count("retry: bucket") >= POSTS - 5, "all posts were sent back")
    until(lambda: "mail" in log.read_text(), "the first mail has its token")  # two nodes: any one can be the first
    send("send_mail", "mail", range(MAILS - 1, MAILS))
    until(lambda: len(re.findall(r"\[mail-\d+\] received", stage.logs())) == MAILS, "all mails are received")
    mail = stage.behind_another()
    info = f"from proj import app; print(app.AsyncResult('{post}').info.turn)"
    # What does not wait for long comes first.
    blocks = {
        "held": stage.show(f"celery -A proj buckets explain {mail}", "holds it"),
        "explain": stage.show("celery -A proj buckets explain twitter_api")
        + "\n"
        + stage.show("celery -A proj buckets explain mail", "by node1@host, .* by node2@host"),
        "inspect": stage.show("celery -A proj inspect buckets mail", hidden=BOTH),
        "sent_back": stage.show(f"celery -A proj buckets explain {post}", "has it"),
        "info": stage.show(f'python -c "{info}"'),
        "status": stage.show("celery -A proj buckets status"),
        "top": stage.show("celery -A proj buckets top --once -n 5", "nodes that answer: 2"),
        "pause": stage.show("celery -A proj buckets pause twitter_api 1m"),
        "paused": stage.show("celery -A proj buckets status"),
        **_steered(stage),
        "verify": stage.show(f"tb-celery verify {log} --app proj"),
        "reset": stage.show("celery -A proj buckets reset mail"),
    }
    lines = log.read_text().splitlines(keepends=True)
    # Six at one instant are too many, whenever the others were.
    fifth = [line for line in lines if "twitter_api" in line and '"cost": 1' in line][4]
    (stage.folder / "doctored").write_text("".join([*lines, *[fifth] * 5]))
    blocks["doctored"] = stage.show("tb-celery verify doctored --bucket twitter_api --app proj")
    blocks["pytest"] = stage.show("pytest -q -p no:cacheprovider test_proj.py test_worker.py")
    return PAGE.format(project=PROJECT, tests=TESTS, worker_tests=WORKER_TESTS, posts=POSTS, mails=MAILS, **blocks)


def _steered(stage: Stage) -> dict[str, str]:
    """The blocks about a bucket that is paused already, and about other numbers."""
    late = f"post-{POSTS}"
    stage.run(f"python -c \"from proj import post; post.apply_async(('late',), task_id='{late}')\"")
    until(lambda: f"[{late}] retry: bucket 'twitter_api'" in stage.logs(), "a post is refused")
    blocks = {
        "waits": stage.show(f"celery -A proj buckets explain {late}", "has it"),
        "resume": stage.show("celery -A proj buckets resume twitter_api"),
    }
    with stage.listening() as events:
        blocks["remote"] = stage.show("celery -A proj control bucket_pause mail 90s", hidden=BOTH)
        stage.run(f"celery -A proj control bucket_resume mail{BOTH}")
        until(lambda: len(events()) >= 4, "the events come")
        shown = sorted(events(), key=lambda line: "resumed" in line)  # one node may send its second before the other
        blocks["events"] = "```console\n$ celery -A proj events --dump\n" + "\n".join(shown) + "\n```\n"
    blocks["set"] = stage.show("celery -A proj buckets set twitter_api --refill-rate 5 --for 2h")
    blocks["unset"] = stage.show("celery -A proj buckets unset twitter_api")
    return blocks


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
