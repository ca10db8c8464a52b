"""How many tasks a second a real worker runs: limited ones against plain ones."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import redis

from benchmarks import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.contenders import Site

QUEUE = "celery"


def compare(site: Site, pool: str, batch: int, repeats: int) -> list[dict[str, float]]:
    """Tasks a second of each kind, in each of the repeats, on one worker node.

    Messages are made beforehand and put into the queue in one step; the clock stops when the last is acknowledged.
    """
    os.environ["CELERY_BROKER_URL"] = site.server
    os.environ["TB_CELERY_STATE_FILE"] = str(site.folder / "tasks.state")
    client = redis.Redis.from_url(site.server)
    from benchmarks.tasks import limited, plain  # noqa: PLC0415 - reads the environment

    messages = {}
    for task in (plain, limited):
        for _ in range(batch):
            task.apply_async()
        messages[task.name.rpartition(".")[2]] = client.lrange(QUEUE, 0, -1)
        client.delete(QUEUE)
    rounds = []
    with _worker(pool):
        for number in range(repeats + 1):
            rates = {}
            for kind in random.sample(sorted(messages), len(messages)):
                rates[kind] = batch / _drain(client, messages[kind])
            if number:  # the first round was to warm up
                rounds.append(rates)
    return rounds


def _drain(client: redis.Redis, messages: list[bytes | str]) -> float:
    """Seconds that the worker needs for the messages."""
    started = empty_at = time.perf_counter()
    client.lpush(QUEUE, *messages)
    empty = 0
    # A message on its way from the queue to the worker is in neither list: empty is what stays empty.
    while empty < 5:
        left = client.llen(QUEUE) + client.hlen("unacked")
        empty = 0 if left else empty + 1
        if empty <= 1:
            empty_at = time.perf_counter()
        if empty_at - started > 60:
            message = f"of {len(messages)} tasks, {left} are left after a minute"
            raise RuntimeError(message)
        time.sleep(0.002)
    return empty_at - started


@contextmanager
def _worker(pool: str) -> Iterator[None]:
    command = (
        f"-W ignore -m celery -A benchmarks.tasks worker -P {pool} -c 2 -l ERROR --without-gossip --without-mingle"
    )
    process = subprocess.Popen(
        [sys.executable, *command.split()], cwd=ROOT, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
