"""The fixture and the doubles, as a user's tests have them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from celery.contrib.testing.worker import start_worker
from celery.signals import setup_logging
from line import Line, declare, make_app
from servers import until

from tb_celery import Bucket, Limit, RateLimitExceeded, limiter_of
from tb_celery.bucket import SECOND
from tb_celery.testing import always_refuse, assert_within, unlimited

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from celery import Celery

    from tb_celery.clock import FakeClock

API = Bucket("api", (Limit(2, 1),))


@pytest.fixture
def app(tmp_path: Path) -> Celery:
    """An application as users have one: its state is in a file."""
    app = make_app(store="file", state_file=str(tmp_path / "state"), grant_log=str(tmp_path / "log"))
    app.conf.task_always_eager = True
    app.conf.task_eager_propagates = True
    return app


def test_tasks_that_wait_move_the_clock(app: Celery, bucket_clock: Callable[[Celery], FakeClock]) -> None:
    clock = bucket_clock(app)
    five = declare(app, lambda: clock.now() // SECOND, bucket="five")
    assert [five.delay().get() for _ in range(8)] == [0, 0, 0, 0, 0, 1, 2, 3]
    clock.advance(5 * SECOND)
    assert [five.delay().get() for _ in range(6)] == [8, 8, 8, 8, 8, 9]


@pytest.fixture
def worked(app: Celery) -> Iterator[Celery]:
    """An application whose tasks a worker in this process runs, which leaves the logging of other tests alone."""
    app.conf.update(task_always_eager=False, broker_transport_options={"polling_interval": 0.01})

    def as_it_is(**_: object) -> None:
        """Or Celery has only errors logged, for as long as this process lives."""

    with patch.dict(os.environ):
        setup_logging.connect(as_it_is)
        yield app
        setup_logging.disconnect(as_it_is)


def test_a_worker_in_this_process_sends_back_by_the_clock(
    worked: Celery, tmp_path: Path, bucket_clock: Callable[[Celery], FakeClock]
) -> None:
    clock = bucket_clock(worked)
    week = declare(worked, lambda: clock.now() // SECOND, name="week", bucket="week")
    plain = declare(worked, lambda: clock.now() // SECOND, name="plain")
    with start_worker(worked, perform_ping_check=False):
        first, second, third = (week.delay() for _ in range(3))
        later, now = plain.apply_async(countdown=60), plain.apply_async(eta=worked.now())
        assert first.get(timeout=30) == 0
        until(lambda: (second.state, third.state) == ("RETRY", "RETRY"), "both are sent back")
        assert second.info.wait == 604800
        assert now.get(timeout=30) == 0
        clock.advance(100 * SECOND)
        assert later.get(timeout=30) == 100
        clock.advance(604_800 * SECOND - 100 * SECOND)
        assert second.get(timeout=30) == 604_800
        clock.advance(604_800 * SECOND)
        assert third.get(timeout=30) == 2 * 604_800
    assert not (tmp_path / "state").exists()


def test_a_worker_in_this_process_holds_by_the_clock(
    worked: Celery, tmp_path: Path, bucket_clock: Callable[[Celery], FakeClock]
) -> None:
    clock = bucket_clock(worked)
    week = declare(worked, lambda: clock.now() // SECOND, name="week", bucket="week", on_reject="hold")
    with start_worker(worked, perform_ping_check=False):
        first, second = (week.delay() for _ in range(2))
        assert first.get(timeout=30) == 0
        clock.advance(604_800 * SECOND)
        assert second.get(timeout=30) == 604_800
    assert not (tmp_path / "state").exists()


def test_a_task_is_back_at_its_turn_exactly_and_in_hops_where_it_is_far(
    worked: Celery, bucket_clock: Callable[[Celery], FakeClock]
) -> None:
    clock = bucket_clock(worked)
    line = Line(worked, clock)
    near, far = declare(worked, name="near", bucket="one"), declare(worked, name="far", bucket="week")
    for task in (near, far):
        line.send_and_deliver(task)
        line.send_and_deliver(task)
    clock.advance(2 * SECOND - 1)
    assert line.pop() is None
    clock.advance(1)
    assert line.deliver().state == "SUCCESS"
    clock.advance(673 * SECOND)
    assert line.pop() is None
    clock.advance(225 * SECOND)
    assert line.deliver().countdown > 600


def test_the_clock_may_be_moved_before_the_copy_is_sent(
    worked: Celery, bucket_clock: Callable[[Celery], FakeClock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task's state, for which a test waits, is stored before that."""
    clock = bucket_clock(worked)
    line = Line(worked, clock)
    task = declare(worked, bucket="one")
    line.send_and_deliver(task)
    with monkeypatch.context() as patched:
        patched.setattr(task.backend, "store_result", lambda *_, **__: clock.advance(2 * SECOND))
        line.send_and_deliver(task)
    assert line.deliver().state == "SUCCESS"


def test_what_has_not_come_when_a_test_ends_never_does(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        from celery import Celery
        from celery.contrib.testing.worker import start_worker

        app = Celery("proj", broker="memory://", backend="cache+memory://")
        app.conf.broker_transport_options = {"polling_interval": 0.01}

        @app.task
        def add(x, y):
            return x + y

        def test_first(bucket_clock):
            bucket_clock(app)
            add.apply_async((1, 1), countdown=60, task_id="first")

        def test_second():
            with start_worker(app, perform_ping_check=False):
                assert add.delay(2, 2).get(timeout=30) == 4
                assert app.AsyncResult("first").state == "PENDING"
                assert add.apply_async((2, 3), countdown=0.01).get(timeout=30) == 5
    """)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_the_state_of_the_application_is_let_be(
    app: Celery, tmp_path: Path, bucket_clock: Callable[[Celery], FakeClock]
) -> None:
    bucket_clock(app)
    assert limiter_of(app).acquire("five", 5)
    with unlimited(app):
        assert limiter_of(app).acquire("five", 5)
    assert not limiter_of(app).acquire("five")
    assert list(tmp_path.iterdir()) == []


def test_the_fixture_gives_the_application_back(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        from celery import Celery
        from tb_celery import limiter_of

        app = Celery("proj", set_as_current=False)
        app.conf.tb_celery = {"store": "memory", "buckets": {"api": "1/h"}}

        def test_first(bucket_clock):
            clock = bucket_clock(app)
            assert limiter_of(app).acquire("api")
            assert not limiter_of(app).acquire("api")
            clock.advance(3600 * 10**9)
            assert limiter_of(app).acquire("api")

        def test_second():
            assert limiter_of(app).store.clock.now() > 0
            assert limiter_of(app).acquire("api")
    """)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_without_limits_everything_runs_at_once(app: Celery) -> None:
    task = declare(app, bucket=["week", "one"])
    with unlimited(app):
        assert [task.delay().get() for _ in range(100)] == ["ran"] * 100
        assert limiter_of(app).peek("week")
        assert limiter_of(app).wait("week").tokens == 1


def test_buckets_that_always_refuse_do(app: Celery) -> None:
    task = declare(app, bucket="five")
    with always_refuse(app):
        with pytest.raises(RateLimitExceeded, match="is over quota; ask again in 3601"):
            task.delay()
        assert limiter_of(app).peek("five").wait == 3601
        assert limiter_of(app).peek("five").tokens == 0
        assert not limiter_of(app).wait("five", timeout=60)
        with pytest.raises(pytest.fail.Exception, match="for a bucket that always refuses"):
            limiter_of(app).wait("five")
    assert task.delay().get() == "ran"


def test_what_is_within_passes_and_what_is_not_is_told() -> None:
    assert_within([(0, 2), (SECOND, 1)], API)
    with pytest.raises(AssertionError, match=r"OVER  api: 2 and 1 a second: .*; 3 tokens in the 0.999999999 s"):
        assert_within([(0, 2), (SECOND - 1, 1)], API)


def test_what_was_given_back_may_be_granted_again() -> None:
    assert_within([(0, 2), (1, -1), (2, 1)], API)
    with pytest.raises(AssertionError, match="OVER  api"):
        assert_within([(0, 2), (1, -1), (2, 1.1)], API)


def test_a_log_is_checked(app: Celery, tmp_path: Path) -> None:
    five = limiter_of(app).buckets["five"]
    assert five is not None
    task = declare(app, bucket="five")
    for _ in range(5):
        task.delay()
    log = tmp_path / "log"
    assert_within(log, five)
    log.write_text(log.read_text() * 2)
    with pytest.raises(AssertionError, match="OVER  five"):
        assert_within(str(log), five)
