"""For the tests of those who use us. pytest finds the fixture by itself wherever this package is installed."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tb_celery.arithmetic import State, look
from tb_celery.bucket import SECOND
from tb_celery.clock import FakeClock
from tb_celery.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from fractions import Fraction

    from celery import Celery

    from tb_celery.arithmetic import Decision, Place
    from tb_celery.bucket import Bucket, Charge
    from tb_celery.stores import Store

HOUR = 3600 * SECOND


@pytest.fixture
def bucket_clock() -> Iterator[Callable[[Celery], FakeClock]]:
    """Put an app's buckets on a clock that moves only when told to.

    ``clock = bucket_clock(app)``: for the rest of the test the buckets are full, and in memory. Whoever waits, such as
    a task run eagerly, moves the clock on instead; ``clock.advance(nanoseconds)`` does so by hand.
    """
    with ExitStack() as stack:

        def put(app: Celery) -> FakeClock:
            clock = FakeClock()
            stack.enter_context(_kept_in(MemoryStore(clock), app))
            return clock

        yield put


@contextmanager
def unlimited(app: Celery) -> Iterator[None]:
    """Let the buckets of ``app`` have all the tokens that they are asked for."""
    with _kept_in(_Fixed(FakeClock()), app):
        yield


@contextmanager
def always_refuse(app: Celery) -> Iterator[None]:
    """Let the buckets of ``app`` have no token for an hour, whenever they are asked; waiting for one fails the test."""
    with _kept_in(_Fixed(_Impatient(), HOUR), app):
        yield


def assert_within(grants: str | os.PathLike[str] | Iterable[tuple[int, float | Fraction]], bucket: Bucket) -> None:
    """Check that every window of every length is within each limit of ``bucket``.

    Args:
        grants: the path of a log, as the setting ``grant_log`` has it, or the instant, in nanoseconds, and the cost of
            each grant.
        bucket: such as ``limiter_of(app).buckets["twitter_api"]``.

    Raises:
        AssertionError: in a window there was more; it says in which.
    """
    from tb_celery.grantlog import Entry, read_log  # noqa: PLC0415 - every run of pytest imports this module
    from tb_celery.verify import exact, verify  # noqa: PLC0415

    if isinstance(grants, str | os.PathLike):
        entries = read_log(Path(grants))
    else:
        entries = (Entry(bucket.name, None, 0, at, exact(cost)) for at, cost in grants)
    over = [str(verdict) for verdict in verify(entries, {bucket.name: bucket}) if verdict.violation]
    if over:
        raise AssertionError("\n".join(over))


@contextmanager
def _kept_in(store: Store, app: Celery) -> Iterator[None]:
    """Have the state of ``app``'s buckets in ``store`` for a while."""
    from tb_celery.quota import limiter_of  # noqa: PLC0415 - takes its time, and every run of pytest imports this module

    limiter = limiter_of(app)
    before, limiter.store = limiter.store, store
    try:
        yield
    finally:
        limiter.store = before


class _Fixed(MemoryStore):
    """Every limit is full, or has no token before ``wait`` nanoseconds have passed: at any time, whatever is taken."""

    def __init__(self, clock: FakeClock, wait: int = 0) -> None:
        super().__init__(clock)
        self._wait = wait

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:  # noqa: ARG002
        now, states = self.read(charges)
        return look(charges, states, now)

    def read(self, charges: Sequence[Charge]) -> tuple[int, list[State]]:
        now = self.clock.now()
        fulls = [now + self._wait + charge.limit.span * bool(self._wait) for charge in charges]
        pairs = zip(fulls, charges, strict=True)
        return now, [State(full, full, charge.limit.interval, charge.limit.span) for full, charge in pairs]


class _Impatient(FakeClock):
    def sleep(self, seconds: float) -> None:
        pytest.fail(f"somebody waits {seconds:.3f} s for a bucket that always refuses: give a timeout, or max_wait")
