"""What the tests start: worker nodes, on a server of the tests' own; and how they wait for them: never a fixed time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from celery.utils.nodenames import gethostname

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).parent.parent
PATIENCE = 60.0
"""Seconds after which something that should happen at once or in a few seconds is taken not to happen."""
LONGEST = 800.0
"""Seconds for a program that does a lot, a minute on an idle machine: it ends before pytest ends the run."""
Answer = TypeVar("Answer")


def until(look: Callable[[], Answer], what: str, patience: float = PATIENCE, pause: float = 0.02) -> Answer:
    """What ``look`` answers, as soon as that is true; it is asked every ``pause`` seconds."""
    deadline = time.monotonic() + patience
    while True:
        answer = look()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {patience:g} s: {what}"
        time.sleep(pause)


class Done(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


@dataclass
class Site:
    """A folder with a state file, and a log in which tasks write what happens to them, whichever node runs them."""

    folder: Path
    broker: str
    conf: dict[str, object] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    app: str = "app"
    _read: int = field(default=0, init=False)
    _events: list[dict[str, Any]] = field(default_factory=list, init=False)

    @property
    def state_file(self) -> Path:
        return self.folder / "buckets.state"

    @property
    def events_file(self) -> Path:
        return self.folder / "events"

    def variables(self) -> dict[str, str]:
        """The environment that tests/app.py reads."""
        clean = {
            name: text for name, text in os.environ.items() if not name.startswith(("TB_CELERY_", "CELERY_", "TEST_"))
        }
        return {
            **clean,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "TMPDIR": str(self.folder),  # what a pool leaves behind when it is killed goes with the folder
            "C_FORCE_ROOT": "1",  # or a worker of root's refuses messages in pickle, which some tests send
            "TEST_BROKER": self.broker,
            "TEST_EVENTS": str(self.events_file),
            "TEST_CONF": json.dumps(self.conf),
            "TEST_SETTINGS": json.dumps({"state_file": str(self.state_file), **self.settings}),
            **self.environment,
        }

    def command(self, *options: str) -> list[str]:
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        return [sys.executable, "-m", "celery", "-A", self.app, "worker", "-l", "INFO", *quiet, *options]

    def celery(self, *arguments: str) -> Done:
        """What Celery's command says here."""
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", self.app, "--no-color", *arguments],
            cwd=self.folder,
            env=self.variables(),
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * PATIENCE,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def start(self, name: str, *options: str) -> Node:
        """Start a node; it is ready some time later."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command("-n", f"{name}@%h", *options),
                cwd=self.folder,
                env=self.variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node = Node(name, process, log)
        self.nodes.append(node)
        return node

    def stop(self) -> None:
        """End all nodes at once; how one ends in good order is shown by :meth:`Node.stop`, and takes seconds."""
        for node in self.nodes:
            node.kill()

    def log(self) -> str:
        """What all nodes have logged so far."""
        return "".join(node.read() for node in self.nodes)

    def events(self, event: str = "") -> list[dict[str, Any]]:
        if self.events_file.exists():
            with self.events_file.open("rb") as log:
                log.seek(self._read)
                # A line that is being written has no end yet.
                lines, end, _ = log.read().rpartition(b"\n")
            self._events += map(json.loads, lines.splitlines())
            self._read += len(lines) + len(end)
        return [each for each in self._events if event in {"", each["event"]}]

    def of(self, ids: Iterable[str], event: str = "body") -> dict[str, list[dict[str, Any]]]:
        """The events of these tasks, task by task."""
        wanted = set(ids)
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for each in self.events(event):
            if each["id"] in wanted:
                found[each["id"]].append(each)
        return found

    def bodies(self, ids: Iterable[str], patience: float = PATIENCE) -> dict[str, list[dict[str, Any]]]:
        """What these tasks' bodies have written, as soon as each has run."""
        wanted = set(ids)
        until(lambda: self.of(wanted).keys() == wanted, f"all {len(wanted)} bodies run", patience)
        return self.of(wanted)


def answered_by(*nodes: str) -> list[str]:
    """Options by which Celery's command waits until the nodes at these addresses have answered, and no longer."""
    return ["--destination", ",".join(nodes), "--timeout", str(PATIENCE)]


@dataclass
class Node:
    """A worker: its main process, and what it logs."""

    name: str
    process: subprocess.Popen[bytes]
    path: Path

    @property
    def address(self) -> str:
        """The name by which others know it."""
        return f"{self.name}@{gethostname()}"

    def read(self) -> str:
        return self.path.read_text("utf-8", "replace")

    def logs(self, text: str) -> bool:
        assert self.process.poll() is None, (
            f"node {self.name} ended with {self.process.returncode}:\n{self.read()[-2000:]}"
        )
        return text in self.read()

    def ready(self) -> Node:
        until(lambda: self.logs(" ready."), f"node {self.name} is ready")
        return self

    def stop(self, patience: float = 2 * PATIENCE) -> int:
        """End it as an operator does, for which Celery may take 30 s; if it does not, it and its pool by force."""
        self.process.terminate()
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it and its pool by force: they are in a session of their own, with nobody else."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()
