"""Tasks of the tests' application that call a service, which may turn them down: ``celery -A calling worker``."""

from __future__ import annotations

import contextvars
import os
import threading
import time
from typing import TYPE_CHECKING

import requests
from app import app, body, limited, note, now, unlimited
from celery import signals

import tb_celery
from tb_celery import RateLimited

if TYPE_CHECKING:
    from celery import Task

__all__ = ["app", "asks", "calls", "calls_again", "calls_plainly", "estimates", "estimates_elsewhere"]


@signals.task_retry.connect
def note_leaving(sender: Task, **_: object) -> None:
    if "TEST_EVENTS" in os.environ:  # not in the tests' own process, which imports this too
        note("left", sender, at=now())


def call(task: Task, url: str) -> str:
    body(task)
    response = requests.get(url, timeout=30)
    if not response.ok:
        note("turned-down", task, at=now())
    response.raise_for_status()
    note("done", task)
    return response.text


@limited(bucket="calls", max_retries=0, autoretry_for=(Exception,))
def calls(self: Task, url: str) -> str:
    return call(self, url)


@limited(bucket="calls", max_retries=0, acks_late=True)
def calls_again(self: Task, url: str) -> str:
    return call(self, url)


@unlimited(max_retries=0)
def calls_plainly(self: Task, url: str) -> str:
    """Limited, where the settings have a route for it."""
    return call(self, url)


@limited(bucket=["calls", "both"], max_retries=0, autoretry_for=(Exception,))
def asks(self: Task, url: str) -> str:
    """What the setting does, by hand, and about one of two buckets."""
    body(self)
    said = tb_celery.observe(requests.get(url, timeout=30), bucket="both")
    if said.rejected:
        note("turned-down", self, at=now())
        raise RateLimited(retry_after=said.pause, bucket="both")
    note("done", self)
    return "called"


@limited(bucket="tokens", cost=100)
def estimates(self: Task, actual: float) -> None:
    tb_celery.settle(actual / 2)
    time.sleep(0.01)  # others of the same process come between
    tb_celery.settle(actual)
    note("done", self)


@limited(bucket="tokens", cost=100)
def estimates_elsewhere(self: Task, actual: float) -> None:
    """Settles in threads that the body starts: in one without its context that is refused, and not forgotten."""

    refused = []

    def settle(cost: float) -> None:
        try:
            self.settle(cost)
        except tb_celery.ConfigurationError as error:
            refused.append(str(error))

    threads = [
        threading.Thread(target=settle, args=(actual + 1,)),
        threading.Thread(target=contextvars.copy_context().run, args=(settle, actual)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    note("done", self, refused=refused)
