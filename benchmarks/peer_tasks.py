"""The tests' application, and a task for each way in which others limit one."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import app as ours

if TYPE_CHECKING:
    from celery import Task

RATE = 50
"""A second, and at most at once: they know nothing else."""
app = ours.app

try:
    from celery_heimdall import HeimdallTask
except ImportError:
    pass
else:

    @ours.unlimited(base=HeimdallTask, heimdall={"times": RATE, "per": 1, "key": "api"})
    def heimdall(self: Task, _number: int) -> None:
        ours.note("body", self, began=time.time())


@cache
def window() -> tuple[Any, Any]:
    from limits import RateLimitItemPerSecond  # noqa: PLC0415 - not everybody has it
    from limits.storage import storage_from_string  # noqa: PLC0415
    from limits.strategies import MovingWindowRateLimiter  # noqa: PLC0415

    return MovingWindowRateLimiter(storage_from_string(os.environ["TEST_BROKER"])), RateLimitItemPerSecond(RATE)


@ours.unlimited(max_retries=None)
def by_hand(self: Task, _number: int) -> None:
    """As the manuals of limiters have it: refused, it comes again when the window has room."""
    limiter, item = window()
    if not limiter.hit(item, "api"):
        room_at = limiter.get_window_stats(item, "api").reset_time
        raise self.retry(countdown=max(0.0, room_at - time.time()))
    ours.note("body", self, began=time.time())
