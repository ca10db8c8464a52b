"""The state as a worker's own loop asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from celery import Celery
from filelock import lock_descriptor
from line import logged

from tb_celery.bucket import SECOND
from tb_celery.errors import StoreTimeoutError
from tb_celery.hasty import APART, HastyStore
from tb_celery.quota import Quota

if TYPE_CHECKING:
    from pathlib import Path

    from tb_celery.clock import FakeClock

LONGEST = 10


@pytest.mark.parametrize("on_store_error", ["defer", "allow"])
def test_it_fails_when_nobody_has_had_an_answer_for_too_long(
    clock: FakeClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    on_store_error: str,
) -> None:
    monkeypatch.setattr("tb_celery.hasty.time", SimpleNamespace(monotonic=lambda: clock.now() / SECOND))
    app, state = Celery("hasty", set_as_current=False), tmp_path / "buckets.state"
    app.conf.tb_celery = {
        "buckets": {"one": {"capacity": 1, "refill_rate": 1}},
        "state_file": str(state),
        "on_store_error": on_store_error,
        "lock_timeout": LONGEST,
    }
    quota = Quota(app)
    charges = quota.limiter.charges("one")
    store = HastyStore(quota)
    store.read(charges)

    def ask() -> None:
        with pytest.raises(StoreTimeoutError):
            store.read(charges)

    with state.open("r+b") as file:
        lock_descriptor(file.fileno())
        ask()
        clock.advance(2 * LONGEST * SECOND)
        ask()  # who knows how it was meanwhile
        assert not store.has_failed
        assert not logged(caplog)
        for _ in range(2 * LONGEST):
            clock.advance(round(APART * SECOND) // 5)
            ask()
        assert store.has_failed == (on_store_error == "allow")
        ((level, sentence),) = logged(caplog)
        assert level == "WARNING"
        assert str(state) in sentence
    clock.advance(1000)
    store.read(charges)
    assert not store.has_failed
