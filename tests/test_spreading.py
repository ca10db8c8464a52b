"""Many tasks published with a turn each: with deliveries made by hand, and with real workers."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import app as tasks
import pytest
from celery import Celery, Task, chain, chord, group
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError
from line import START, Line, declare, draw, make_app
from private_redis import redis_store
from servers import Site

from tb_celery import ConfigurationError, spread
from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND, Bucket, Limit
from tb_celery.clock import FakeClock
from tb_celery.limiter import Limiter
from tb_celery.quota import Quota, quota_of
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EPOCH = datetime.fromtimestamp(0, UTC)
SOON = 0.1
"""Seconds, the shortest countdown."""


def timed_app(clock: FakeClock, **settings: object) -> Celery:
    """An application that tells ETAs by ``clock``, too."""
    app = make_app(clock, **settings)
    app.now = lambda: EPOCH + timedelta(microseconds=clock.wall() // 1000)
    return app


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.server)])
def app(clock: FakeClock, request: pytest.FixtureRequest) -> Celery:
    app = timed_app(clock)
    if request.param == "redis":
        quota_of(app).limiter.store = redis_store(request.getfixturevalue("server"), clock)
    return app


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


def waits_of(line: Line, count: int) -> list[float]:
    """Seconds from now until the ETAs of the next messages."""
    etas = [datetime.fromisoformat(line.take().headers["eta"]) for _ in range(count)]
    return [(eta - line.app.now()).total_seconds() for eta in etas]


def waiting(app: Celery, bucket: str, key: str | None = None) -> float:
    return quota_of(app).limiter.status(bucket, key=key).limits[0].waiting


def test_a_task_that_is_not_registered_here_draws_from_the_bucket_that_is_given(app: Celery, line: Line) -> None:
    unknown = app.signature("unknown", args=("hi",))
    spread([unknown] * 3, {"five": 5, "one": 1})
    assert waits_of(line, 3) == pytest.approx([0, 5 + SOON, 10 + SOON])
    spread(app.signature("unknown").set(max_wait=9), "five", cost=2, key="k")
    assert line.take().headers["tb_celery_call"] == {"cost": 2, "key": "k", "max_wait": 9}
    assert waiting(app, "five", "k") == 2
    with pytest.raises(ConfigurationError, match=r"task 'unknown' is not registered here, .* give spread its bucket"):
        spread(unknown)
    assert line.pop() is None


def test_a_task_that_is_registered_draws_what_its_rules_say(app: Celery, line: Line) -> None:
    task = declare(app, bucket=["five", "one"], cost=lambda size: size, name="both")
    plain = declare(app, base=Task, name="plain")
    spread([task.s(1)], "one")
    assert [waiting(app, bucket) for bucket in ("five", "one")] == [1, 1]
    for wrong in (plain, declare(app, bucket="other", name="another")):
        with pytest.raises(ConfigurationError, match=f"task '{wrong.name}' does not draw from bucket 'one' when it"):
            spread([task.s(1), wrong.s()], "one")
    assert [waiting(app, bucket) for bucket in ("five", "one")] == [1, 1]
    line.take()
    assert line.pop() is None


def test_cost_and_key_are_options_of_each_call(app: Celery, line: Line) -> None:
    task = declare(app, bucket="five")
    spread([task.s(), task.s().set(cost=3), task.s().set(key="own")], cost=2, key="k")
    calls = [{"cost": 2, "key": "k"}, {"cost": 3, "key": "k"}, {"cost": 2, "key": "own"}]
    messages = [line.take() for _ in calls]
    assert [message.headers["tb_celery_call"] for message in messages] == calls
    assert [waiting(app, "five", key) for key in ("k", "own", None)] == [5, 2, 0]
    assert [line.deliver(message).state for message in messages] == ["SUCCESS"] * 3
    costly = declare(app, bucket={"five": 1}, name="costly")
    for wrong in ({"cost": 2}, {"key": 5}, {"cost": "x"}):
        with pytest.raises(ConfigurationError, match="'costly'"):
            spread(costly.s(), **wrong)
    assert line.pop() is None


def test_a_turn_beyond_the_longest_countdown_is_reached_in_hops(clock: FakeClock) -> None:
    app = timed_app(clock, max_countdown=3)
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


@pytest.mark.parametrize("wrong", ["chord", "group", "map", "chunks", "chain"])
def test_what_cannot_be_spread_is_named(app: Celery, line: Line, wrong: str) -> None:
    task = declare(app, bucket="five", name="t")
    made = {
        "chord": chord([task.s()], task.si()),
        "group": group(task.s(), task.s()),
        "map": task.map([1]),
        "chunks": task.chunks([(1,)], 1),
        "chain": chain(group(task.s(), task.s()), task.si(), task.si()),
    }[wrong]
    with pytest.raises(ConfigurationError, match="only tasks and chains of tasks can be spread, not "):
        spread([task.s(), made])
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


def test_a_task_keeps_an_eta_that_is_later_than_its_turn(app: Celery, line: Line) -> None:
    task = declare(app, bucket="one")
    eta = app.now() + timedelta(seconds=50)
    late = [task.s().set(countdown=40), task.s().set(eta=eta), task.s().set(eta=eta.isoformat()), task.s()]
    early = [task.s().set(eta=app.now()), task.s().set(countdown=1)]
    assert spread([task.s().set(countdown=1), *late, *early]).last == eta
    assert waits_of(line, 7) == pytest.approx([1, 40, 50, 50, 8 + SOON, 10 + SOON, 12 + SOON])
    spread(group(task.s(), chain(task.s().set(countdown=1), task.s())).set(countdown=60))
    assert waits_of(line, 2) == [60, 60]


def test_no_turn_is_booked_for_a_task_that_would_expire_before_it(app: Celery, line: Line) -> None:
    task = declare(app, bucket="one")
    short = task.s().set(expires=3)
    gone = task.s().set(expires=app.now() - timedelta(seconds=1))
    spreading = spread([task.s(), gone, short, short, task.s().set(countdown=9, expires=9), task.s()])
    assert waiting(app, "one") == 3
    messages = [line.take() for _ in range(6)]
    assert ["tb_celery" in message.headers for message in messages] == [True, False, True, False, False, True]
    etas = [datetime.fromisoformat(message.headers["eta"]) for message in messages]
    starts = [(eta - app.now()).total_seconds() for eta in etas]
    assert starts == pytest.approx([0, 2 + SOON, 2 + SOON, 4 + SOON, 9, 4 + SOON])
    assert spreading.last == etas[-1]
    assert spread([gone, short]).last == app.now()
    assert waiting(app, "one") == 3
    assert not any("tb_celery" in line.take().headers for _ in range(2))
    spread([task.s()] * 20)
    # Nobody comes for those turns, so they are lost.
    line.clock.advance(12 * SECOND)
    spread(short)
    assert ["tb_celery" in line.take().headers for _ in range(21)] == [True] * 21


ROUTES = {"queue:mail": "one", "queue:topics": "five", "named": "other"}


@pytest.mark.parametrize(
    ("options", "settled", "bucket"),
    [
        ({}, {}, None),
        ({}, {"queue": "mail"}, "one"),
        ({"queue": "mail"}, {}, "one"),
        ({"queue": "mail"}, {"queue": "topics"}, "five"),
        ({}, {"exchange": "news", "routing_key": "a.b"}, "five"),
        ({}, {"queue": "topics", "routing_key": "a.c"}, "five"),
        ({"name": "routed"}, {}, "one"),
        ({"name": "named"}, {"queue": "mail"}, "one"),
        ({"name": "named"}, {}, "other"),
    ],
)
@pytest.mark.parametrize("inside", ["signature", "chain", "group"])
@pytest.mark.filterwarnings(r"ignore:\s*The 'queue' task attribute")
def test_what_a_task_draws_depends_on_where_it_is_sent(
    clock: FakeClock,
    options: dict[str, Any],
    settled: dict[str, object],
    bucket: str | None,
    inside: str,
) -> None:
    app = timed_app(clock, routes=ROUTES)
    topics = Queue("topics", Exchange("news", type="topic"), routing_key="a.*")
    app.conf.task_queues = [Queue(app.main), Queue("mail"), topics]
    app.conf.task_routes = {"routed": "mail"}
    task = declare(app, base=Task, **options)
    signature = task.si().set(**settled) if inside == "signature" else task.si()
    if inside == "chain":
        signature = chain(task.si(), task.si()).set(**settled)
    signatures = group(signature)
    spread(group([signature]).set(**settled) if inside == "group" else signatures)
    drawn = {"one", "five", "other"} if options.get("name") == "named" and settled else {bucket}
    for name in ("one", "five", "other"):
        assert (waiting(app, name) == 1) == (name in drawn & {bucket, "other"})


def test_what_the_group_has_reaches_its_tasks(app: Celery, line: Line) -> None:
    task = declare(app, bucket="one", name="t")
    done, failed = declare(app, base=Task, name="done"), declare(app, base=Task, name="failed")
    whole = group(task.s(number).set(headers={"own": 1}) for number in range(2))
    whole.link_error(failed.si())
    whole.set(priority=4, cost=1)
    spreading = spread(whole)
    first, second = line.take(), line.take()
    assert [message.headers["own"] for message in (first, second)] == [1, 1]
    assert {message.headers["group"] for message in (first, second)} == {spreading.result.id}
    assert first.properties["priority"] == 4
    assert [each["task"] for each in second.decode()[2]["errbacks"]] == ["failed"]
    spread(group(task.s().set(headers={"own": 1}, link=done.si())).set(headers={"common": 2}, task_id="g"))
    message = line.take()
    # As in Celery, the group's headers take the place of the task's.
    assert "own" not in message.headers
    assert message.headers["common"] == 2
    assert message.headers["group"] == "g"
    assert message.headers["tb_celery"]
    assert [each["task"] for each in message.decode()[2]["callbacks"]] == ["done"]
    assert "tb_celery" not in str(whole)


def test_one_signature_a_generator_plain_data_and_nothing_can_be_spread(app: Celery, line: Line) -> None:
    task = declare(app, bucket="one")
    plain_data = json.loads(json.dumps([task.s(1), chain(task.s(2), task.s())]))
    one = task.s()
    for signatures, count in [
        (one, 1),
        (chain(task.s(), task.s()), 1),
        ((task.s(number) for number in range(3)), 3),
        (group(task.s(number) for number in range(3)), 3),
        (group(plain_data, app=app), 2),
        ([chain(), task.s()], 1),
    ]:
        before = waiting(app, "one")
        assert len(spread(signatures).result) == count
        assert waiting(app, "one") == before + count
        assert all("tb_celery" in line.take().headers for _ in range(count))
    assert one.options == {}
    nothing: list[Any] = [[], group(), iter(()), group(iter(()))]
    for each in nothing:
        spreading = spread(each)
        assert len(spreading.result) == 0
        assert spreading.result.ready()
    assert line.pop() is None


@pytest.mark.parametrize("wrong", ["x", ["x"], 5, None, [None], {"a": 1}, [{"task": "t"}]], ids=repr)
def test_what_is_no_signature_is_named(wrong: Any) -> None:  # noqa: ANN401
    with pytest.raises(
        ConfigurationError, match=r"spread takes a group, signatures, or one such as post.s\('hi'\), not"
    ):
        spread(wrong)


def test_where_the_quota_is_off_tasks_are_only_sent(clock: FakeClock) -> None:
    app = timed_app(clock, enabled=False)
    line = Line(app, clock)
    task = declare(app, bucket="one")
    spreading = spread([task.s(), task.s().set(countdown=5), app.signature("unknown")], "one")
    assert spreading.last == app.now() + timedelta(seconds=5)
    messages = [line.take() for _ in range(3)]
    assert not any("tb_celery" in message.headers for message in messages)
    assert [message.headers["eta"] is None for message in messages] == [True, False, True]
    assert waiting(app, "one") == 0


def test_eager_tasks_wait_in_line_one_by_one(app: Celery, clock: FakeClock) -> None:
    app.conf.task_always_eager = True
    ran = []
    task = declare(app, lambda: ran.append(clock.now()), bucket="five")
    spreading = spread([task.s() for _ in range(3)], cost=5)
    assert spreading.last == app.now()
    assert [(at - START) / SECOND for at in ran] == pytest.approx([0, 5, 10])
    assert spreading.result.successful()
    assert waiting(app, "five") == 0


def test_nothing_is_booked_while_the_broker_cannot_be_reached(app: Celery) -> None:
    task = declare(app, bucket="one")
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        app.conf.broker_url = f"redis://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(OperationalError):
            spread(task.s())
    assert waiting(app, "one") == 0


def test_a_task_that_comes_early_or_late_has_one_turn(app: Celery, line: Line) -> None:
    task = declare(app, bucket="one")
    spread([task.s() for _ in range(4)])
    first, second, third, _ = (line.take() for _ in range(4))
    assert line.deliver(first).state == "SUCCESS"
    for _ in range(3):
        # It keeps its turn, however often it asks before.
        assert line.deliver(second).countdown == 2.0
        line.take()
        assert waiting(app, "one") == 3
    for message, left in ((second, 2), (third, 1)):
        line.clock.advance(int(2.1 * SECOND))
        assert line.deliver(message).state == "SUCCESS"
        assert waiting(app, "one") == pytest.approx(left, abs=0.1)
    assert line.pop() is None


@pytest.mark.parametrize("on_reject", ["fail", "drop"])
def test_one_that_comes_early_is_on_its_way_and_not_refused(app: Celery, line: Line, on_reject: str) -> None:
    task = declare(app, bucket="one", on_reject=on_reject)
    spread([task.s() for _ in range(2)])
    first, second = (line.take() for _ in range(2))
    assert line.deliver(first).state == "SUCCESS"
    assert line.deliver(second).countdown == 2.0
    line.clock.advance(int(2.1 * SECOND))
    assert line.deliver(line.take()).state == "SUCCESS"


@settings(deadline=None, max_examples=60)
@given(
    capacity=st.integers(3, 8),
    rate=st.sampled_from([0.3, 1, 7.3, 50]),
    slow=st.none() | st.tuples(st.integers(3, 20), st.sampled_from([0.1, 1.0])),
    costs=st.lists(st.integers(1, 3), min_size=1, max_size=30),
    taken=st.integers(0, 3),
    booked=st.lists(st.integers(1, 20), max_size=2),
)
def test_whatever_they_cost_none_is_refused_and_the_quota_is_kept(
    capacity: int, rate: float, slow: tuple[int, float] | None, costs: list[int], taken: int, booked: list[int]
) -> None:
    clock = FakeClock(START)
    numbers = [(capacity, rate), slow] if slow else [(capacity, rate)]
    names = ["a", "b"][: len(numbers)]
    buckets = {name: {"capacity": most, "refill_rate": rate} for name, (most, rate) in zip(names, numbers, strict=True)}
    app = timed_app(clock, buckets=buckets, max_countdown=1e6)
    line = Line(app, clock)
    limiter = quota_of(app).limiter
    for name in names:
        limiter.acquire(name, taken or 1)
    for name, cost in zip(names, booked, strict=False):
        # Turns of tasks that come and go elsewhere.
        charges = limiter.charges(name, 1)
        limiter.store.acquire([charge._replace(cost=charge.cost * cost) for charge in charges], Place(ahead=cost))
    before = [waiting(app, name) for name in names]
    granted = []
    task = declare(app, lambda cost: granted.append((clock.now(), cost)), bucket=names, cost=lambda cost: cost)
    spreading = spread([task.s(cost) for cost in costs])
    booked_now = [waiting(app, name) - earlier for name, earlier in zip(names, before, strict=True)]
    assert booked_now == pytest.approx([sum(costs)] * len(names), abs=0.002)
    ran, sent_back = deliver_all(line)
    assert (len(ran), sent_back) == (len(costs), 0)
    assert sorted(cost for _, cost in granted) == sorted(costs)
    assert (spreading.last - app.now()).total_seconds() == pytest.approx(0, abs=1e-5)
    for most, refill_rate in numbers:
        assert first_violation(granted, most, refill_rate) is None


@pytest.mark.server
def test_turns_are_on_the_servers_clock_and_etas_on_celerys(app: Celery, server: str, line: Line) -> None:
    clock = FakeClock(5 * START, wall=9 * START)
    quota_of(app).limiter.store = store = redis_store(server, clock)
    task = declare(app, bucket="five")
    spreading = spread([task.s() for _ in range(7)] + [task.s().set(expires=2)])
    assert spreading.last == app.now() + timedelta(seconds=2 + SOON)
    messages = [line.take() for _ in range(8)]
    tickets = [message.headers["tb_celery"] for message in messages[:7]]
    after = [0] * 5 + [1, 2]
    assert tickets == [[5 * START + wait * SECOND, store.clock.identity, 0, 0] for wait in after]
    assert "tb_celery" not in messages[7].headers
    assert waiting(app, "five") == 7


@pytest.fixture
def site(client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A node whose quota is on the server, of which the tests' own end of the application knows, too."""
    buckets = {**tasks.BUCKETS, "fast": {"capacity": 5, "refill_rate": 50}}
    conf = {"buckets": buckets, "routes": {"app.routed": "fast"}, "store": client}
    monkeypatch.setitem(tasks.app.conf, "tb_celery", conf)
    monkeypatch.setattr(tasks.app, "tb_celery_quota", Quota(tasks.app), raising=False)
    site = Site(tmp_path, client, settings=conf)
    try:
        site.start("node", "-c", "2", "-Q", "spread").ready()
        yield site
    finally:
        site.stop()


@pytest.mark.server
def test_workers_that_are_in_time_send_none_back(site: Site) -> None:
    # Each process has asked the server before.
    site.bodies([tasks.routed.apply_async((number,), queue="spread").id for number in range(4)])
    count = 100
    spreading = spread(group(tasks.routed.si(number) for number in range(count)).set(queue="spread"))
    ids = [result.id for result in spreading.result]
    bodies = site.bodies(ids)
    assert [len(runs) for runs in bodies.values()] == [1] * count
    granted = {task: runs[0]["granted"] / SECOND for task, runs in bodies.items()}
    assert first_violation(sorted((runs[0]["granted"], 1) for runs in bodies.values()), 5, 50) is None
    late, sent_back = 0.0, 0
    for task, (first, *more) in site.of(ids, "delivery").items():
        sent_back += len(more)
        ran = first["at"] if more else granted[task]
        late = max(late, ran - datetime.fromisoformat(first["request"]["eta"]).timestamp())
    # A bucket that is full goes on refilling when the first ones come: if that is late, so are those behind.
    assert sent_back == 0 or late > SOON
