"""What docker-compose.yml deploys: in containers, or as processes of this machine that answer in the same way.

Both are pytest-celery's setup, so the same tests run on either. Its plugin stays off: its fixtures would replace those
of Celery, and start containers for each test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
import yaml
from celery import Celery
from pytest_celery import (
    CeleryBrokerCluster,
    CeleryTestBroker,
    CeleryTestSetup,
    CeleryTestWorker,
    CeleryWorkerCluster,
    CeleryWorkerContainer,
    RedisContainer,
)
from servers import PATIENCE, ROOT, Node, Site, until
from valkey_server import valkey_server

from tb_celery.grantlog import Entry, read_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

COMPOSE_FILE = ROOT / "docker-compose.yml"
COMPOSE = yaml.safe_load(COMPOSE_FILE.read_text("utf-8"))
HEALTH_CHECK: list[str] = COMPOSE["services"]["worker"]["healthcheck"]["test"][1:]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
(_CMD,) = re.findall(r"^CMD (.*)$", DOCKERFILE, re.MULTILINE)
COMMAND: list[str] = json.loads(_CMD)
"""What a worker container runs."""
(STATE_FILE,) = map(Path, re.findall(r"TB_CELERY_STATE_FILE=(\S+)", DOCKERFILE))
WORKERS = 3
CAPACITY, RATE = 5, 10
BUILD = 900.0
"""Seconds within which images are fetched and built, where there are none yet."""


def settings(state: Path) -> dict[str, str]:
    """The environment of a worker whose quota is quick enough for a test, and whose grants are logged."""
    return {
        "TB_CELERY_STATE_FILE": str(state),
        "TB_CELERY_BUCKETS__twitter_api": json.dumps({"capacity": CAPACITY, "refill_rate": RATE}),
        "TB_CELERY_GRANT_LOG": str(state.with_name("grants")),
    }


class Worker(CeleryTestWorker):
    """A worker, and what our tests ask of it."""

    def run(self, *command: str) -> tuple[int, str]:
        """Run a command where the worker runs, as ``docker exec`` does: exit code and output."""
        code, output = self.container.exec_run(list(command))
        return code, output.decode()

    def posted(self) -> list[str]:
        """The arguments of the tasks whose bodies have run."""
        return re.findall(r"posted: (\S+)", self.logs())

    def healthy(self) -> bool:
        """Whether the engine says so, from its own health checks."""
        self.container.reload()
        return bool(self.container.attrs["State"]["Health"]["Status"] == "healthy")

    def ended(self) -> bool:
        self.container.reload()
        return bool(self.container.status == "exited")

    def exit_code(self) -> int:
        """Its main process's, once that has ended."""
        until(self.ended, f"worker {self.name()} ends")
        code: int = self.container.attrs["State"]["ExitCode"]
        return code

    def until_ready(self, starts: int = 1) -> None:
        """For the ``starts``-th time; pytest-celery's own methods look once a second."""
        until(lambda: self.logs().count(" ready.") >= starts, f"worker {self.name()} is ready")

    def start_again(self) -> None:
        starts = self.logs().count(" ready.")
        self.container.restart(timeout=int(2 * PATIENCE))
        self.until_ready(starts + 1)


class Deployment(CeleryTestSetup):
    """A broker, and workers that share one quota: the bucket ``twitter_api``.

    Args:
        broker: where the tests and the workers meet.
        containers: of the workers.
        state: the state file, where the workers see it.
    """

    def __init__(self, broker: RedisContainer, containers: Sequence[CeleryWorkerContainer], state: Path) -> None:
        app = Celery("twitter", broker=broker.celeryconfig["host_url"], set_as_current=False)
        workers = CeleryWorkerCluster(*(Worker(container, None) for container in containers))
        super().__init__(workers, CeleryBrokerCluster(CeleryTestBroker(broker)), None, app)
        self.state = state

    @property
    def workers(self) -> list[Worker]:
        return list(self.worker_cluster)

    def teardown(self) -> None:
        self.app.close()

    def post(self, *texts: str) -> list[str]:
        """Send tasks, and tell their ids."""
        return [self.app.send_task("twitter.post", (text,)).id for text in texts]

    def posted(self) -> list[str]:
        """The arguments of the tasks whose bodies have run, on whichever worker."""
        return [text for worker in self.workers for text in worker.posted()]

    def at_rest(self, ids: Iterable[str]) -> bool:
        """Whether these tasks wait for their turns in workers, none of which runs anything."""
        ask = self.app.control.inspect(timeout=PATIENCE, limit=WORKERS)
        waiting = {task["request"]["id"] for tasks in (ask.scheduled() or {}).values() for task in tasks}
        return waiting >= set(ids) and not any((ask.active() or {}).values())

    def grants(self, folder: Path) -> list[Entry]:
        """What was granted to all of them; ``folder`` is the test's, for a copy of the log."""
        asked = next(worker for worker in self.workers if not worker.ended())
        code, log = asked.run("cat", str(self.state.with_name("grants")))
        if code:
            return []  # nothing yet
        (folder / "grants").write_text(log, "utf-8")
        return list(read_log(folder / "grants"))


# -- processes


class Nodes(Site):
    """Worker nodes that run what the containers run."""

    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", *COMMAND, *options]


@dataclass
class Process:
    """What pytest-celery asks of a container of docker's, answered by a worker node of this machine."""

    site: Site
    name: str
    node: Node = field(init=False)

    def __post_init__(self) -> None:
        self.node = self.site.start(self.name)

    @property
    def id(self) -> str:
        return self.name

    @property
    def status(self) -> str:
        return "running" if self.node.process.poll() is None else "exited"

    @property
    def attrs(self) -> dict[str, Any]:
        return {
            "State": {"ExitCode": self.node.process.returncode},
            "NetworkSettings": {"Networks": {}, "Ports": {}},
        }

    def reload(self) -> None:
        """There is nothing to remember."""

    def logs(self) -> bytes:
        return self.node.path.read_bytes()

    def kill(self, name: str) -> None:
        """As in a container, nothing outlives its main process."""
        if name == "SIGKILL":
            self.node.kill()
        else:
            self.node.process.send_signal(signal.Signals[name])

    def restart(self, timeout: float) -> None:
        self.node.stop(timeout)
        self.node = self.site.start(self.name)

    def exec_run(self, command: list[str]) -> tuple[int, bytes]:
        done = subprocess.run(
            command,
            cwd=self.site.folder,
            env=self.site.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=PATIENCE,
        )
        return done.returncode, done.stdout


class Server(RedisContainer):
    """A server at an address, wherever it runs."""

    def __init__(self, container: Any, address: str) -> None:  # noqa: ANN401 - what pytest-celery wraps
        super().__init__(container)
        self.address = address

    @property
    def celeryconfig(self) -> dict[str, str]:
        return {"url": self.address, "host_url": self.address}


@contextmanager
def processes(folder: Path) -> Iterator[Deployment]:
    """A server and workers of this machine."""
    with valkey_server() as address:
        (folder / "state").mkdir()
        state = folder / "state" / STATE_FILE.name
        programs = Path(sys.executable).parent
        environment = {
            **settings(state),
            "CELERY_BROKER_URL": address,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]),
        }
        site = Nodes(folder, address, environment=environment)
        try:
            containers = [CeleryWorkerContainer(Process(site, f"worker-{number}")) for number in range(WORKERS)]
            yield from deployed(Deployment(Server(None, address), containers, state))
        finally:
            site.stop()


# -- containers


def no_engine() -> str | None:
    """Why no containers can be run here, in a sentence."""
    if _docker("version", "--format", "{{.Server.Os}}") != "linux":
        return "no engine for Linux containers answers: start one, or name it in DOCKER_HOST"
    if not _docker("compose", "version"):
        return "docker has no compose: install its plugin"
    return None


def _docker(*command: str) -> str:
    """What the command answers; nothing if it fails, or there is none."""
    program = shutil.which("docker")
    if program is None:
        return ""
    done = subprocess.run([program, *command], capture_output=True, text=True, check=False, timeout=PATIENCE)
    return "" if done.returncode else done.stdout.strip()


@contextmanager
def containers(folder: Path) -> Iterator[Deployment]:
    """docker-compose.yml as it is, with more workers, a quicker quota, and its broker's port on this machine."""
    overrides = folder / "overrides.yml"
    changed = {
        "redis": {"ports": ["127.0.0.1::6379"]},
        "worker": {
            "environment": settings(STATE_FILE),
            "healthcheck": {"interval": "5s", "start_period": "0s"},
        },
    }
    overrides.write_text(yaml.safe_dump({"services": changed}), "utf-8")
    project = f"tb-celery-{uuid.uuid4().hex[:8]}"
    compose = ["docker", "compose", "--project-name", project, "--file", str(COMPOSE_FILE), "--file", str(overrides)]
    # Where the command finds the engine, which may be in its own configuration.
    client = docker.DockerClient(_docker("context", "inspect", "--format", "{{.Endpoints.docker.Host}}"))
    try:
        up = ["up", "--detach", "--build", "--scale", f"worker={WORKERS}"]
        subprocess.run([*compose, *up], cwd=ROOT, check=True, timeout=BUILD)
        found = client.containers.list(filters={"label": f"com.docker.compose.project={project}"})
        workers = [each for each in found if each.labels["com.docker.compose.service"] == "worker"]
        (redis,) = [each for each in found if each not in workers]
        (published,) = redis.ports["6379/tcp"]
        broker = Server(redis, f"redis://127.0.0.1:{published['HostPort']}/0")
        yield from deployed(Deployment(broker, list(map(CeleryWorkerContainer, workers)), STATE_FILE))
    finally:
        subprocess.run([*compose, "down", "--volumes", "--timeout", "10"], cwd=ROOT, check=True, timeout=BUILD)
        client.close()


def deployed(deployment: Deployment) -> Iterator[Deployment]:
    """It, as soon as its workers are ready."""
    try:
        assert len(deployment.workers) == WORKERS
        for worker in deployment.workers:
            worker.until_ready()
        yield deployment
    finally:
        deployment.teardown()
