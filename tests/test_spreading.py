"""Many tasks published with a turn each, with deliveries made by hand."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from celery import Celery, Task, chain, chord, group
from line import START, Line, declare, draw, make_app

from tb_celery import ConfigurationError, spread
from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND, Bucket, Limit
from tb_celery.clock import FakeClock
from tb_celery.limiter import Limiter
from tb_celery.quota import quota_of
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from pathlib import Path

SOON = 0.1
"""Seconds, the shortest countdown."""


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in [name for name in os.environ if name.startswith("TB_CELERY_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(START)


@pytest.fixture
def app(clock: FakeClock) -> Celery:
    return make_app(clock)


@pytest.fixture
def line(app: Celery, clock: FakeClock) -> Line:
    return Line(app, clock)


def deliver_all(line: Line) -> tuple[list[int], int]:
    """Deliver each message when its ETA has come; the instants at which tasks ran, and how often one was sent back."""
    ran: list[int] = []
    sent_back = 0
    waiting = []
    while True:
        while message := line.pop():
            eta = message.headers["eta"]
            due = line.clock.wall() if eta is None else round(datetime.fromisoformat(eta).timestamp() * 1e6) * 1000
            waiting.append((due, message.headers["id"], message))
        if not waiting:
            return ran, sent_back
        waiting.sort(key=lambda each: each[:2])
        due, _, message = waiting.pop(0)
        line.clock.advance(max(0, due - line.clock.wall()))
        outcome = line.deliver(message)
        if outcome.retry is None:
            ran.append(line.clock.now())
        else:
            # Its ETA is on the machine's own clock.
            copy = line.take()
            waiting.append((line.clock.wall() + round(outcome.countdown * SECOND), copy.headers["id"], copy))
            sent_back += 1


def test_every_task_comes_at_a_turn_of_its_own_and_none_is_refused(app: Celery, line: Line, clock: FakeClock) -> None:
    task = declare(app, lambda number: number, bucket="five")
    spreading = spread(group(task.s(number) for number in range(200)))
    assert spreading.last == datetime.fromtimestamp((clock.wall() + 195 * SECOND) / SECOND + SOON, UTC)
    ran, sent_back = deliver_all(line)
    assert (len(ran), sent_back) == (200, 0)
    assert ran[:6] == [START] * 5 + [START + int((1 + SOON) * SECOND)]
    assert ran[-1] == START + int((195 + SOON) * SECOND)
    assert first_violation([(at, 1) for at in ran], 5, 1) is None
    assert [result.get(disable_sync_subtasks=False) for result in spreading.result] == list(range(200))


def test_it_queues_behind_those_who_wait_and_others_behind_it(app: Celery, line: Line) -> None:
    task = declare(app, bucket="one")
    draw(app, "one")
    assert line.send_and_deliver(task).countdown == 2.0
    before = line.take()
    spread([task.s() for _ in range(3)])
    spread_out = [line.take() for _ in range(3)]
    assert line.send_and_deliver(task).countdown == pytest.approx(10)
    etas = [datetime.fromisoformat(message.headers["eta"]).timestamp() for message in spread_out]
    base = line.clock.wall() / SECOND
    assert [eta - base for eta in etas] == pytest.approx([4 + SOON, 6 + SOON, 8 + SOON])
    line.clock.advance(2 * SECOND)
    assert line.deliver(before).state == "SUCCESS"


def test_several_limits_cost_key_and_bucket_are_those_of_each_task(app: Celery, line: Line) -> None:
    quota_of(app).limiter = Limiter([Bucket("both", (Limit(2, 1), Limit(4, 0.25)))], quota_of(app).limiter.store)
    task = declare(app, lambda user, **_: user, bucket="both", key="user", cost=lambda user, size: size * len(user))
    spread([task.s("a", size=1) for _ in range(6)] + [task.s("b", size=2), task.s("b", size=2), task.s("b", size=1)])
    ran, sent_back = deliver_all(line)
    assert sent_back == 0
    assert [(at - START) / SECOND for at in ran] == pytest.approx(
        [0, 0, 0, 1 + SOON, 2 + SOON, 2 + SOON, 4 + SOON, 4 + SOON, 8 + SOON], abs=1e-8
    )


def test_a_bucket_may_be_given(app: Celery, line: Line) -> None:
    task = declare(app, base=Task)
    spread([task.s()] * 3, {"five": 5, "one": 1})
    etas = [datetime.fromisoformat(line.take().headers["eta"]).timestamp() for _ in range(3)]
    assert [eta - line.clock.wall() / SECOND for eta in etas] == pytest.approx([0, 5 + SOON, 10 + SOON])
    spread([task.s()], "five", cost=2, key="k")
    assert quota_of(app).limiter.status("five", key="k").limits[0].waiting == 2


def test_a_turn_beyond_the_longest_countdown_is_reached_in_hops(clock: FakeClock) -> None:
    app = make_app(clock, max_countdown=3)
    line = Line(app, clock)
    task = declare(app, bucket="one")
    spread([task.s() for _ in range(5)])
    ran, sent_back = deliver_all(line)
    assert [(at - START) / SECOND for at in ran] == pytest.approx([0, 2, 4, 6, 8], abs=SOON + 1e-6)
    assert 0 < sent_back < 12


def test_options_and_headers_of_the_signatures_stay(app: Celery, line: Line) -> None:
    task = declare(app, bucket="five")
    signature = task.s().set(headers={"mine": 1}, priority=3, cost=2)
    spread([signature, signature])
    assert signature.options == {"headers": {"mine": 1}, "priority": 3, "cost": 2}
    message = line.take()
    assert message.headers["mine"] == 1
    assert message.headers["tb_celery_call"] == {"cost": 2}


def test_a_chain_counts_by_its_first_task(app: Celery, line: Line) -> None:
    task, plain = declare(app, lambda: 1, bucket="one"), declare(app, lambda number: number, base=Task, name="plain")
    spread([chain(task.s(), plain.s()) for _ in range(3)])
    ran, sent_back = deliver_all(line)
    assert ([(at - START) / SECOND for at in ran], sent_back) == ([0, 0, 2 + SOON, 2 + SOON, 4 + SOON, 4 + SOON], 0)


def test_tasks_without_a_bucket_are_only_sent(app: Celery, line: Line, clock: FakeClock) -> None:
    task = declare(app, base=Task)
    spreading = spread([task.s(), task.s()])
    assert spreading.last == datetime.fromtimestamp(clock.wall() / SECOND, UTC)
    assert deliver_all(line) == ([START] * 2, 0)


@pytest.mark.parametrize("wrong", ["chord", "group"])
def test_what_cannot_be_spread_is_named(app: Celery, line: Line, wrong: str) -> None:
    task = declare(app, bucket="five", name="t")
    made = {"chord": chord([task.s()], task.si()), "group": group(task.s(), task.s())}[wrong]
    with pytest.raises(ConfigurationError, match="only tasks and chains of tasks can be spread, not "):
        spread([task.s(), made])
    with pytest.raises(ConfigurationError, match="nothing to spread"):
        spread([])
    with pytest.raises(ConfigurationError, match="bucket 'fvie' is not declared"):
        spread([task.s()], "fvie")
    assert line.pop() is None


def test_booking_ahead_takes_no_token_even_where_there_are_some(app: Celery) -> None:
    limiter = quota_of(app).limiter
    decision = limiter.acquire("five", 2, place=Place(ahead=1))
    assert not decision
    assert decision.booked
    status = limiter.status("five").limits[0]
    assert (status.tokens, status.waiting) == (5, 2)
