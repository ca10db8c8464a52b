"""What users of mypy see of us, strict: `make check` checks it against the sources, tests/test_package.py the wheel.

Nothing runs it. A type that changes is an error in `assert_type`; so is, by `warn_unused_ignores`, a mistake that is no
longer found.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, assert_type

import tb_celery
from tb_celery import Bucket, Decision, Limit, Limiter, RateLimited, RateLimitedTask, RateLimitExceeded, Settings
from tb_celery.clock import Clock, FakeClock, SystemClock
from tb_celery.status import LimitStatus, Status
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore
from tb_celery.stores.redis import RedisStore
from tb_celery.testing import assert_within

if TYPE_CHECKING:
    from celery import Celery
    from requests import Response

    from tb_celery.stores import Store

bucket = Bucket("api", (Limit(5, 0.5),))
stores: list[Store] = [FileStore(Path("state")), MemoryStore(FakeClock()), RedisStore("redis://localhost")]
clocks: list[Clock] = [FakeClock(), SystemClock()]
limiter = Limiter([bucket], stores[0])

decision = limiter.acquire("api", 2, key="alice")
assert_type(decision, Decision)
assert_type(decision.allowed, bool)
assert_type(decision.wait, float)
assert_type(decision.would_wait, float)
assert_type(decision.tokens, float)
assert_type(decision.bucket, str)
assert_type(decision.limit, Limit | None)
assert_type(limiter.acquire({"api": 1, "all": 0.5}), Decision)
assert_type(limiter.peek("api"), Decision)
assert_type(limiter.wait("api", timeout=1.5), Decision)
status = limiter.status("api")
assert_type(status, Status)
assert_type(status.limits[0], LimitStatus)
assert_type(limiter.reset("api"), int)
assert_type(tb_celery.__version__, str)
assert_within([(0, 1)], bucket)

limiter.acquire(["api"])  # type: ignore[arg-type]
limiter.acquire("api", "2")  # type: ignore[arg-type]
limiter.acquire("api", 1, "alice")  # type: ignore[call-arg]
limiter.acquire("api", cots=2)  # type: ignore[call-arg]
Limit("5", 1)  # type: ignore[arg-type]


async def in_a_loop() -> None:
    assert_type(await limiter.wait_async("api", key=None), Decision)


def opened(app: Celery) -> None:
    settings = tb_celery.load_settings({"buckets": {"api": "2/s"}})
    assert_type(settings, Settings)
    assert_type(tb_celery.open_limiter(settings), Limiter)
    assert_type(tb_celery.limiter_of(app), Limiter)
    tb_celery.install(app)
    assert_type(tb_celery.spread([]).last, datetime)


class Post(RateLimitedTask):
    bucket = "api"
    max_wait = 60

    def run(self, page: int) -> int:
        try:
            return page
        except OSError as error:
            raise RateLimited(retry_after=30) from error


def asked(error: RateLimitExceeded, response: Response) -> None:
    assert_type(error.wait, float)
    assert_type(error.bucket, str)
    tb_celery.settle(3)
    tb_celery.observe(response)
