"""What is shown on nodes of a scenario's own: pools of an unusual kind, shutdowns, and kills."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery.utils.nodenames import gethostname
from celery_matrix.cell import PATIENCE, Cell, feature
from celery_matrix.running import within
from kombu import Connection
from private_redis import PrivateServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from celery.result import AsyncResult
    from servers import Node

AT_ONCE = asyncio.Semaphore(5)
"""Scenarios that start nodes at the same time: on a small machine more would only be slow."""
NO_CHILDREN = "only prefork has processes that can be replaced or killed"
LONG_ENOUGH = 5.0
"""Seconds in which a node is sure to be ended before any of its tasks is on its turn, whose body might be running."""


@asynccontextmanager
async def own_queue(cell: Cell, number: int) -> AsyncIterator[str]:
    async with AT_ONCE:
        yield cell.tasks.OWN[number]


def send(cell: Cell, queue: str, *names: str, **options: Any) -> list[AsyncResult]:
    """One call of each task, all with the queue's name for the key of their bucket."""
    return [getattr(cell.tasks, name).apply_async(queue=queue, key=queue, **options) for name in names]


async def both_kinds_draw(cell: Cell, queue: str) -> list[dict[str, Any]]:
    """Tasks with the base class and plain ones, from one bucket with the queue's name for its key."""
    cell.drain("quick", queue)
    plain = [cell.tasks.annotated.apply_async((queue,), queue=queue) for _ in range(3)]
    bodies = await cell.once(*send(cell, queue, "quick", "quick", "quick"), *plain)
    within(bodies, 1, 4)
    return bodies


@feature("worker_max_tasks_per_child=1", pools=("prefork",), why=NO_CHILDREN)
async def replaced_children(cell: Cell) -> str:
    async with own_queue(cell, 0) as queue:
        await cell.start("--max-tasks-per-child", "1", queue=queue)
        bodies = await both_kinds_draw(cell, queue)
    assert len({body["pid"] for body in bodies}) == len(bodies)
    return f"{len(bodies)} processes"


@feature("pool processes started by spawn", pools=("prefork",), why=NO_CHILDREN)
async def spawned_children(cell: Cell) -> None:
    async with own_queue(cell, 1) as queue:
        node = await cell.start("--pool-start-method", "spawn", queue=queue)
        bodies = await both_kinds_draw(cell, queue)
    assert node.process.pid not in {body["pid"] for body in bodies}


# -- shutdown with waiting tasks, early and late acknowledged ones


async def waits_over_the_end(cell: Cell, queue: str, end: signal.Signals, **changes: Any) -> None:
    """Tasks that wait in a node when that is told to end run once each, in the next one."""
    node = await cell.start(queue=queue, **changes)
    cell.limiter.pause("second", LONG_ENOUGH, key=queue)
    results = send(cell, queue, "late_acked", "early_acked", "late_acked", "early_acked")
    await cell.waiting(*results)
    # A QUIT amid the reading of a pool process's answer loses that, and billiard's process waits half a minute for it.
    await cell.until(lambda: is_idle(cell, node), f"node {node.name} has read the answers")
    node.process.send_signal(end)
    await ended(cell, node)
    await cell.start(queue=queue)
    within(await cell.once(*results), 1, 1)


def is_idle(cell: Cell, node: Node) -> bool:
    """Whether the node's main process knows of no task that is running."""
    name = f"{node.name}@{gethostname()}"
    answer = cell.tasks.app.control.broadcast("active", reply=True, destination=[name], limit=1, timeout=PATIENCE)
    return bool(answer == [{name: []}])


async def ended(cell: Cell, node: Node) -> None:
    await cell.until(lambda: node.process.poll() is not None, f"node {node.name} ends")


@feature("warm shutdown (TERM)")
async def warm_shutdown(cell: Cell) -> None:
    async with own_queue(cell, 2) as queue:
        await waits_over_the_end(cell, queue, signal.SIGTERM)


@feature("cold shutdown (QUIT)")
async def cold_shutdown(cell: Cell) -> None:
    async with own_queue(cell, 3) as queue:
        await waits_over_the_end(cell, queue, signal.SIGQUIT)


@feature("soft shutdown (QUIT, worker_soft_shutdown_timeout)")
async def soft_shutdown(cell: Cell) -> None:
    async with own_queue(cell, 4) as queue:
        soft = {"worker_soft_shutdown_timeout": 2, "worker_enable_soft_shutdown_on_idle": True}
        await waits_over_the_end(cell, queue, signal.SIGQUIT, conf={**cell.site.conf, **soft})


# -- kills


@feature("a pool process killed", pools=("prefork",), why=NO_CHILDREN)
async def killed_child(cell: Cell) -> str:
    """The body that was killed runs again, as in plain Celery; it draws again, and nothing else runs twice."""
    async with own_queue(cell, 5) as queue:
        await cell.start(queue=queue)
        options = {"queue": queue, "key": queue}
        dies = cell.tasks.dies_once.apply_async((str(cell.site.folder / "died"),), **options)
        others = send(cell, queue, "late_acked", "late_acked", "late_acked")
        plain = cell.tasks.dies_once_in_plain_celery.apply_async((str(cell.site.folder / "plainly"),), queue=queue)
        await cell.state("SUCCESS", dies, plain)
        bodies = await cell.once(*others)
    died = cell.site.of([dies.id, plain.id])
    assert [len(died[each.id]) for each in (dies, plain)] == [2, 2]
    within([*bodies, *died[dies.id]], 1, 1)
    return "the killed body runs twice, here as in plain Celery"


@feature("a node killed")
async def killed_node(cell: Cell) -> str:
    """What waits in a node that is killed, early acknowledged or late, runs in the next one."""
    async with own_queue(cell, 6) as queue, own_broker(cell) as server:
        changes = on_broker(cell, server)
        node = await cell.start(queue=queue, **changes)
        cell.limiter.pause("second", LONG_ENOUGH, key=queue)
        with Connection(changes["broker"]) as connection:
            # Nobody confirms: what is published just before the connection ends may be lost.
            results = send(cell, queue, *["late_acked", "early_acked"] * 2, connection=connection)
            await cell.waiting(*results)
            if cell.mode == "retry" and cell.broker == "redis":
                # What kombu is just fetching is in no list of the server's, and would be lost.
                again = [f"[{each.id}] received" for each in results]
                await cell.until(lambda: all(node.read().count(each) >= 2 for each in again), "the copies are fetched")
        node.kill()
        await cell.start(queue=queue, pool=taker(cell), **changes)
        within(await cell.once(*results), 1, 1)
    return f"{len(results)} tasks, each runs once"


@feature("the broker restarted", brokers=("redis",), why="the tests do not restart a server that is not their own")
async def restarted_broker(cell: Cell) -> str:
    """It is gone when tasks wait, and when two are to be sent back: these wait in the pool, and run."""
    # A pool without processes or threads runs one delivery after the other.
    kinds = ("held_up",) if cell.pool == "solo" else ("held_up", "held_up_late")
    told = [cell.site.folder / kind for kind in kinds]
    async with own_queue(cell, 7) as queue, own_broker(cell) as server:
        assert server is not None
        changes = on_broker(cell, server)
        node = await cell.start(queue=queue, **changes)
        for key in (queue, *map(str, told)):
            cell.drain("second", key)
        with Connection(server.url) as connection:
            waits = send(cell, queue, "late_acked", "early_acked", connection=connection)
            await cell.waiting(*waits)
            refused = [
                getattr(cell.tasks, path.name).apply_async((str(path),), queue=queue, connection=connection)
                for path in told
            ]
            await cell.until(
                lambda: all(path.with_suffix(".waits").exists() for path in told), "the deliveries are there"
            )
        server.stop()
        for path in told:
            path.touch()
        sentence = "waits in the worker, no copy could be published"
        # With gevent nothing goes on while Celery's consumer sleeps between its attempts to connect again.
        await cell.until(lambda: node.read().count(sentence) >= len(told), "the refused wait in the worker", 400)
        server.start()
        # Celery's own doing: its worker may end when the server is gone to which it would give back what it holds.
        await cell.start(queue=queue, pool=taker(cell), **changes)
        bodies = await cell.bodies(each.id for each in (*waits, *refused))
    # The one acknowledged early is off the broker's hands; a late one may run again, as in plain Celery.
    assert len(bodies[refused[0].id]) == 1
    return f"{len(bodies)} tasks, none lost"


@asynccontextmanager
async def own_broker(cell: Cell) -> AsyncIterator[PrivateServer | None]:
    """A Redis server of the scenario's own that forgets nothing, where the broker is one: it may be stopped, and what
    is soon delivered again on it is not that of other scenarios."""
    if cell.broker != "redis":
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="tb_celery-broker-") as folder:
        server = PrivateServer(Path(folder), "--appendonly", "yes", "--appendfsync", "always")
        try:
            yield server
        finally:
            server.stop()


def taker(cell: Cell) -> str:
    """The pool of a node that takes over from one that is lost.

    With gevent and eventlet kombu never asks Redis for what others have not acknowledged.
    """
    return "solo" if cell.broker == "redis" and cell.pool in {"gevent", "eventlet"} else cell.pool


def on_broker(cell: Cell, server: PrivateServer | None) -> dict[str, Any]:
    """Changes to the site by which nodes are on ``server``, which soon delivers again what a lost worker had."""
    if server is None:
        return {"broker": cell.site.broker}
    again = {"visibility_timeout": 8, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    # A node that is killed while it looks for such messages keeps the others from it for five minutes.
    again["unacked_mutex_expire"] = 2
    return {
        "broker": server.url,
        "conf": {**cell.site.conf, "broker_transport_options": again},
        "settings": {**cell.site.settings, "max_countdown": 4},
    }
