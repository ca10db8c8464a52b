"""How many tasks a second a real worker runs: limited ones against plain ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import redis

from benchmarks import ROOT
from benchmarks.tasks import app, limited, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.contenders import Site

QUEUE = "celery"
PATIENCE = 600.0
"""Seconds after which a worker is taken to stand still."""


def compare(site: Site, pool: str, batch: int, repeats: int) -> list[dict[str, float]]:
    """Tasks a second of each kind, in each of the repeats, on one worker node.

    Messages are made beforehand and put into the queue in one step; the clock stops when the last is acknowledged.
    Small batches, one way round and then the other: what the machine does for longer than a blink hits both alike.
    """
    # For the worker alone: what else is measured afterwards has other servers.
    environment = {"CELERY_BROKER_URL": site.server, "TB_CELERY_STATE_FILE": str(site.folder / "tasks.state")}
    app.conf.broker_url = site.server
    client = redis.Redis.from_url(site.server)
    messages = {}
    for task in (plain, limited):
        for _ in range(batch):
            task.apply_async()
        messages[task.name.rpartition(".")[2]] = client.lrange(QUEUE, 0, -1)
        client.delete(QUEUE)
    first, second = messages
    rounds = []
    with worker(pool, **environment):
        for number in range(repeats + 1):
            took = dict.fromkeys(messages, 0.0)
            for kind in (first, second, second, first) if number % 2 else (second, first, first, second):
                took[kind] += drain(client, messages[kind])
            if number:  # the first round was to warm up
                rounds.append({kind: 2 * batch / took[kind] for kind in took})
    return rounds


def drain(client: redis.Redis, messages: list[bytes | str], queue: str = QUEUE) -> float:
    """Seconds that the worker needs for the messages."""
    started = empty_at = time.perf_counter()
    client.lpush(queue, *messages)
    empty = 0
    # A message on its way from the queue to the worker is in neither list: empty is what stays empty.
    while empty < 5:
        left = client.llen(queue) + client.hlen("unacked")
        empty = 0 if left else empty + 1
        if empty <= 1:
            empty_at = time.perf_counter()
        if empty_at - started > PATIENCE:
            message = f"of {len(messages)} tasks, {left} are left after {PATIENCE:g} s"
            raise RuntimeError(message)
        time.sleep(0.002)
    return empty_at - started


@contextmanager
def worker(pool: str, queue: str = QUEUE, **environment: str) -> Iterator[int]:
    """A node that consumes from ``queue``, with these variables besides; its process id."""
    command = (
        f"-W ignore -m celery -A benchmarks.tasks worker -P {pool} -c 2 -Q {queue} -n {queue}@%h -l ERROR"
        " --without-gossip --without-mingle"
    )
    process = subprocess.Popen(
        [sys.executable, *command.split()],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
