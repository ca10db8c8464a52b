"""One cell of the matrix: a pool, a broker and a mode, with a node on which the scenarios run side by side."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import time
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from kombu import Connection
from servers import Site
from valkey_server import valkey_server

from tb_celery import open_limiter
from tb_celery.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from types import ModuleType

    from celery.result import AsyncResult
    from servers import Node

    from tb_celery import Limiter

POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")
BROKERS = ("redis", "rabbitmq", "quorum")
MODES = ("retry", "hold")
STORES = ("file", "redis")
"""Where the buckets' state is; the latter is a server of its own, and not the broker's."""
AMQP = "amqp://guest:guest@127.0.0.1:5672/"
PATIENCE = 60.0
"""Seconds after which something that should happen at once or in a few seconds is taken not to happen."""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Feature:
    """What is shown, by what, and where.

    Attributes:
        title: as the table has it.
        show: raises AssertionError where it does not hold; answers a figure, or nothing.
        pools: where Celery can do it at all.
        brokers: where the test can do it.
        why: what is to say of the others.
        alone: shown before the others, which would be in its way.
    """

    title: str
    show: Callable[[Cell], Awaitable[str | None]]
    pools: tuple[str, ...] = POOLS
    brokers: tuple[str, ...] = BROKERS
    why: str = ""
    alone: bool = False


FEATURES: list[Feature] = []


def feature(
    title: str, **limits: Any
) -> Callable[[Callable[[Cell], Awaitable[str | None]]], Callable[[Cell], Awaitable[str | None]]]:
    def register(show: Callable[[Cell], Awaitable[str | None]]) -> Callable[[Cell], Awaitable[str | None]]:
        FEATURES.append(Feature(title, show, **limits))
        return show

    return register


@dataclass(frozen=True)
class Outcome:
    """What came out: ``ok``, ``failed`` or ``unsupported``, with a figure, a traceback or a reason."""

    verdict: str
    text: str = ""


@dataclass
class Cell:
    """The means that scenarios have. They take turns in one thread: whoever waits lets the others go on."""

    pool: str
    broker: str
    mode: str
    store: str
    site: Site
    tasks: ModuleType
    limiter: Limiter
    names: list[str] = field(default_factory=list)

    async def until(
        self, look: Callable[[], Answer], what: str | Callable[[], str], patience: float = PATIENCE
    ) -> Answer:
        """What ``look`` answers, as soon as that is true; ``what`` tells what has not happened, or is asked then."""
        deadline = time.monotonic() + patience
        while True:
            answer = look()
            if answer:
                return answer
            assert time.monotonic() < deadline, f"not within {patience:g} s: {what() if callable(what) else what}"
            await asyncio.sleep(0.05)

    async def start(self, *options: str, queue: str | None = None, pool: str = "", **changes: Any) -> Node:
        """A node, ready; on a queue of its own, or the cell's, and with the cell's pool unless told another."""
        pool = pool or self.pool
        few = [] if pool == "solo" else ["-c", "2" if pool in {"prefork", "threads"} else "10"]
        tasks = self.tasks
        site = dataclasses.replace(self.site, **changes) if changes else self.site
        name = f"{tasks.PREFIX}-{len(self.names)}"
        self.names.append(name)
        where = queue or f"{tasks.PREFIX},{tasks.LIMITED},{tasks.CUSTOM}"
        node = site.start(name, "-P", pool, *few, "-Q", where, *options)
        await self.until(lambda: node.logs(" ready."), f"node {node.name} is ready")
        return node

    # -- the buckets

    def drain(self, bucket: str, key: str | None = None) -> None:
        while self.limiter.acquire(bucket, key=key):
            pass

    # -- what the tasks have done

    async def bodies(self, ids: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """What these tasks' bodies have written, as soon as each has run."""
        wanted = set(ids)
        await self.until(lambda: self.site.of(wanted).keys() == wanted, f"all {len(wanted)} bodies run")
        return self.site.of(wanted)

    async def once(self, *results: AsyncResult) -> list[dict[str, Any]]:
        """All have succeeded, and each body has run once, having spent no retry: what they wrote."""
        await self.state("SUCCESS", *results)
        bodies = await self.bodies(each.id for each in results)
        assert {name: len(each) for name, each in bodies.items() if len(each) != 1} == {}
        assert {body["retries"] for each in bodies.values() for body in each} == {0}
        return [body for each in bodies.values() for body in each]

    async def state(self, state: str, *results: AsyncResult) -> None:
        await self.until(
            lambda: all(each.state == state for each in results),
            lambda: f"all have the state {state}, but {[(str(each), each.state) for each in results]}",
        )

    async def waiting(self, *results: AsyncResult) -> None:
        """All have been refused: sent back, or kept. Or they ran meanwhile, on a slow machine."""
        sign = "(retry: bucket|succeeded)" if self.mode == "retry" else "received"
        wanted = {each.id for each in results}
        found = re.compile(rf"\[([^] ]+)\] {sign}")
        await self.until(lambda: wanted <= {match[1] for match in found.finditer(self.log())}, f"all {sign}")

    def log(self) -> str:
        return "".join(path.read_text("utf-8", "replace") for path in self.site.folder.glob("*.log"))

    def refusals(self, ids: Iterable[str]) -> int:
        """How often these tasks were sent back."""
        return sum(len(each) - 1 for each in self.site.of(ids, "delivery").values())


async def run(cell: Cell, features: Iterable[Feature]) -> dict[str, Outcome]:
    """Show all ``features`` at once."""

    async def outcome(each: Feature) -> Outcome:
        if cell.pool not in each.pools or cell.broker not in each.brokers:
            return Outcome("unsupported", each.why)
        try:
            return Outcome("ok", await each.show(cell) or "")
        except Exception:  # noqa: BLE001
            return Outcome("failed", traceback.format_exc(limit=-3))

    features = list(features)
    await cell.start()
    found = {each.title: await outcome(each) for each in features if each.alone}
    others = [each for each in features if not each.alone]
    outcomes = await asyncio.gather(*map(outcome, others))
    return found | {each.title: one for each, one in zip(others, outcomes, strict=True)}


@contextmanager
def opened(pool: str, broker: str, mode: str, store: str, folder: Path, server: str) -> Iterator[Cell]:
    """A cell; this process becomes its client, and cannot become another's.

    Args:
        pool: one of :data:`POOLS`.
        broker: one of :data:`BROKERS`.
        mode: one of :data:`MODES`.
        store: one of :data:`STORES`.
        folder: for logs, and the state where it is a file.
        server: address of a Redis or Valkey server: the broker, or where results go when that is another one.
    """
    conf: dict[str, object] = {"result_backend": server, "worker_prefetch_multiplier": 4}
    if broker == "quorum":
        conf |= {"task_default_queue_type": "quorum", "task_default_exchange_type": "topic"}
    kinds = {"redis": "", "rabbitmq": "classic", "quorum": "quorum"}
    prefix = f"tb_celery_matrix_{pool}_{broker}_{mode}_{os.getpid()}"
    at = nullcontext(server) if broker == "redis" else virtual_host(prefix)
    with at as address, nullcontext("file") if store == "file" else valkey_server() as kept:
        site = Site(
            folder,
            address,
            conf=conf,
            settings={"on_reject": mode, "store": kept},
            environment={"TEST_QUEUE": prefix, "TEST_KIND": kinds[broker]},
            app="celery_matrix.tasks",
        )
        os.environ.update({name: text for name, text in site.variables().items() if name.startswith("TEST_")})
        from celery_matrix import tasks  # noqa: PLC0415 - reads the environment

        if broker == "quorum":
            # A node binds all of them for messages that the broker delays, and declares only those that it consumes.
            with Connection(address) as connection:
                for each in tasks.app.conf.task_queues:
                    each(connection.default_channel).declare()
        declared: Mapping[str, Any] = {
            "buckets": tasks.BUCKETS,
            "state_file": str(site.state_file),
            "store": kept,
        }
        try:
            yield Cell(pool, broker, mode, store, site, tasks, open_limiter(load_settings(declared)))
        finally:
            site.stop()
            # Or results that end with the process ask a server that is gone.
            tasks.app.backend.result_consumer.stop()
            tasks.app.close()


@contextmanager
def virtual_host(name: str) -> Iterator[str]:
    """A part of the RabbitMQ server that is the cell's alone, and goes with it.

    Messages that the broker delays would outlive the cell elsewhere, where all have the same queues for them.
    """
    rabbitmqctl("add_vhost", name)
    try:
        rabbitmqctl("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
        yield f"{AMQP}{name}"
    finally:
        rabbitmqctl("delete_vhost", name)


def rabbitmqctl(*words: str) -> str:
    return subprocess.run(["rabbitmqctl", "-q", *words], capture_output=True, text=True, check=True).stdout  # noqa: S607
