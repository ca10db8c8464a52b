"""The log of grants of buckets that are steered meanwhile, and what may be in it."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_redis import redis_store

from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND, Bucket, Limit
from tb_celery.clock import FakeClock
from tb_celery.grantlog import Entry, LoggedStore, read_log
from tb_celery.limiter import Limiter
from tb_celery.periods import END, SLACK, START, Period, exact, periods
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore
from tb_celery.verify import Verdict, Violation, first_over, verify

if TYPE_CHECKING:
    from pathlib import Path

    from tb_celery.stores import Store

MS = SECOND // 1000
API = Bucket("api", (Limit(5, 0.5),))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(17 * 3600 * SECOND)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "grants"


@pytest.fixture(params=["memory", "file", "redis"])
def limiter(request: pytest.FixtureRequest, tmp_path: Path, log: Path, clock: FakeClock) -> Limiter:
    store: Store = MemoryStore(clock)
    if request.param == "file":
        store = FileStore(tmp_path / "state", clock)
    elif request.param == "redis":
        store = redis_store(request.getfixturevalue("server"), clock)
    return Limiter([API], LoggedStore(store, log))


def verdict(log: Path, bucket: Bucket = API) -> Verdict:
    [found] = verify(read_log(log), {"api": bucket})
    return found


def drain(limiter: Limiter, clock: FakeClock, seconds: int) -> int:
    """Ask ten times a second; how many tokens there were."""
    taken = 0
    for _ in range(seconds * 10):
        while limiter.acquire("api"):
            taken += 1
        clock.advance(100 * MS)
    return taken


def leave_out(log: Path, what: str) -> None:
    """Drop the lines that have ``what`` in them."""
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if what not in line))


def test_a_faster_rate_is_no_violation_while_it_counts(limiter: Limiter, log: Path, clock: FakeClock) -> None:
    assert drain(limiter, clock, 10) == 9
    limiter.set("api", refill_rate=5)
    assert 48 <= drain(limiter, clock, 10) <= 50
    limiter.unset("api")
    assert 4 <= drain(limiter, clock, 10) <= 6
    assert verdict(log).violation is None
    assert "(other numbers ordered: 2)" in str(verdict(log))
    whole = log.read_text()
    leave_out(log, "stands")
    assert verdict(log).violation is not None
    # One grant more than that in each of the periods is one too many.
    grants = [json.loads(line) for line in whole.splitlines() if '"stands"' not in line]
    for added in grants[8::12]:
        log.write_text(whole + json.dumps(added | {"at": added["at"] + MS}) + "\n")
        assert verdict(log).violation is not None


def test_what_the_declared_rate_would_allow_is_a_violation_while_a_slower_one_counts(
    limiter: Limiter, log: Path, clock: FakeClock
) -> None:
    assert drain(limiter, clock, 10) == 9
    limiter.set("api", refill_rate=0.01)
    assert drain(limiter, clock, 100) <= 1
    assert verdict(log).violation is None
    lines = log.read_text().splitlines()
    granted = json.loads(lines[0]) | {"at": clock.now()}
    log.write_text("\n".join([*lines, *[json.dumps(granted)] * 3]) + "\n")
    violation = verdict(log).violation
    assert violation is not None
    assert violation.end == clock.now()


def test_numbers_that_end_by_themselves_do_so_for_the_log(limiter: Limiter, log: Path, clock: FakeClock) -> None:
    limiter.set("api", refill_rate=10, duration=20)
    drain(limiter, clock, 60)
    assert verdict(log).violation is None
    granted = json.loads(log.read_text().splitlines()[-1])
    with log.open("a") as file:
        file.writelines(json.dumps(granted | {"at": clock.now() + number}) + "\n" for number in range(20))
    assert verdict(log).violation is not None


def test_when_an_order_is_ended_what_is_declared_here_counts_and_not_what_its_giver_declares(
    limiter: Limiter, log: Path, clock: FakeClock
) -> None:
    limiter.set("api", refill_rate=0.1)
    faster = Limiter([Bucket("api", (Limit(5, 5),))], limiter.store)
    faster.unset("api")
    drain(limiter, clock, 10)
    assert verdict(log).violation is None
    drain(faster, clock, 10)
    assert verdict(log).violation is not None


@pytest.mark.parametrize("key", [None, "a"])
def test_what_is_granted_in_a_pause_is_a_violation(
    limiter: Limiter, log: Path, clock: FakeClock, key: str | None
) -> None:
    assert limiter.acquire("api", key="a")
    granted = json.loads(log.read_text().splitlines()[-1])
    limiter.pause("api", 100, key=key)
    limiter.pause("api", 10, key=key)
    drain(limiter, clock, 50)
    in_pause = clock.now()
    limiter.resume("api", key=key)
    assert limiter.acquire("api", key="a")
    assert verdict(log).violation is None
    with log.open("a") as file:
        file.write(json.dumps(granted | {"at": in_pause - SECOND}) + "\n")
    violation = verdict(log).violation
    assert violation is not None
    assert violation == Violation(in_pause - SECOND, in_pause - SECOND, Fraction(1), Fraction(0))


def test_a_call_that_costs_more_than_a_bucket_then_holds_needs_a_full_one_and_no_more(
    limiter: Limiter, log: Path, clock: FakeClock
) -> None:
    limiter.set("api", capacity=2)
    assert limiter.acquire("api", 4)
    clock.advance(8 * SECOND)
    assert limiter.acquire("api", 4)
    assert verdict(log).violation is None
    granted = json.loads(log.read_text().splitlines()[-1])
    with log.open("a") as file:
        file.write(json.dumps(granted | {"at": clock.now() + 7 * SECOND}) + "\n")
    assert verdict(log).violation is not None


@pytest.mark.parametrize("then", ["reset", "raised"])
def test_what_a_call_owes_is_no_violation_once_it_is_forgiven(
    limiter: Limiter, log: Path, clock: FakeClock, then: str
) -> None:
    limiter.set("api", capacity=1)
    clock.advance(SECOND)
    assert limiter.acquire("api", cost=3)
    if then == "reset":
        limiter.reset("api")
        clock.advance(MS)
        assert limiter.acquire("api", cost=3)
    else:
        limiter.set("api", capacity=2)
    assert verdict(log).violation is None


def test_after_a_reset_a_bucket_is_full_and_no_more(limiter: Limiter, log: Path, clock: FakeClock) -> None:
    while limiter.acquire("api"):
        clock.advance(MS)
    limiter.reset("api")
    clock.advance(MS)
    while limiter.acquire("api"):
        clock.advance(MS)
    whole = log.read_text().splitlines(keepends=True)
    assert verdict(log).violation is None
    for added in (whole[0], whole[-1]):
        log.write_text("".join([*whole, added]))
        assert verdict(log).violation is not None


@pytest.mark.parametrize("latest", [0, 1])
def test_of_orders_that_were_given_at_once_each_may_count(
    limiter: Limiter, log: Path, clock: FakeClock, latest: int
) -> None:
    limiter.set("api", refill_rate=5)
    order = json.loads(log.read_text())
    order |= {"since": order["at"] - MS}
    slow = order | {"interval": 100 * SECOND, "span": 500 * SECOND}
    drain(limiter, clock, 10)
    grants = log.read_text().splitlines(keepends=True)[1:]
    both = [order, slow] if latest else [slow, order]
    log.write_text("".join([*(json.dumps(each) + "\n" for each in both), *grants]))
    assert verdict(log).violation is None
    # One that was given after the other had been takes its place.
    late = slow | {"since": order["at"] + 1, "at": order["at"] + 1}
    log.write_text("".join([*(json.dumps(each) + "\n" for each in (order, late)), *grants]))
    assert verdict(log).violation is not None


def test_a_pause_that_was_ended_while_it_was_given_shows_nothing(limiter: Limiter, log: Path) -> None:
    assert limiter.acquire("api")
    granted = log.read_text()
    limiter.pause("api", 100)
    order = json.loads(log.read_text().splitlines()[-1])
    grant = json.dumps(json.loads(granted) | {"at": order["at"] + SECOND}) + "\n"
    pause, end = json.dumps(order) + "\n", json.dumps(order | {"stands": 0}) + "\n"
    for lines, is_over in ((pause, True), (end + pause, False), (pause + end, False)):
        log.write_text(granted + lines + grant)
        assert (verdict(log).violation is not None) is is_over


@pytest.mark.parametrize("duration", [None, 3600])
def test_numbers_from_before_a_reboot_may_count_after_it(
    tmp_path: Path, log: Path, clock: FakeClock, duration: float | None
) -> None:
    path = tmp_path / "state"
    limiter = Limiter([API], LoggedStore(FileStore(path, clock), log))
    limiter.set("api", refill_rate=5, duration=duration)
    drain(limiter, clock, 10)
    booted = FakeClock(5 * SECOND, clock.wall() + 60 * SECOND, identity=2)
    drain(Limiter([API], LoggedStore(FileStore(path, booted), log)), booted, 10)
    assert verdict(log).violation is None
    leave_out(log, "stands")
    assert verdict(log).violation is not None


def test_numbers_from_before_a_reboot_may_count_for_as_long_as_they_were_to_stand() -> None:
    faster = Limit(5, 5)
    order = Entry("api", None, 1, 17 * SECOND, None, 17 * SECOND, 60 * SECOND, 0, *faster.numbers)
    grant = Entry("api", None, 2, 3 * SECOND, 1)
    last = periods(API.limits[0], 0, 2, [order, grant])[-1]
    assert (last.begin, last.refill_rate) == (63 * SECOND + SLACK + 1, Fraction(1, 2))


def test_each_limit_is_judged_by_its_own_numbers(tmp_path: Path, log: Path, clock: FakeClock) -> None:
    bucket = Bucket("api", (Limit(10, 10), Limit(100, 0.1)))
    limiter = Limiter([bucket], LoggedStore(FileStore(tmp_path / "state", clock), log))
    limiter.set("api", refill_rate=20, limit=0)
    drain(limiter, clock, 10)
    assert [(each.orders, each.violation) for each in verify(read_log(log), {"api": bucket})] == [(1, None), (0, None)]
    entries = list(read_log(log))
    limits = {charge.number: charge.limit for charge in bucket.draw(None)}
    assert [len(periods(limits[number], number, 1, entries)) for number in (0, 1)] == [1, 3]


def test_a_limit_that_is_raised_may_have_the_difference_at_once(log: Path, clock: FakeClock) -> None:
    """It may have been full by its old numbers, and forgotten as one that is full by its new ones."""
    limiter = Limiter([Bucket("api", (Limit(2, 0.1),))], LoggedStore(MemoryStore(clock), log))
    assert limiter.acquire("api", 2)
    clock.advance(20 * SECOND)
    limiter.set("api", capacity=5)
    [granted, raised] = map(json.loads, log.read_text().splitlines())
    for costs, is_over in (([5], False), ([5, 0.1], True)):
        lines = [granted, raised, *(granted | {"at": clock.now() + 1, "cost": cost} for cost in costs)]
        log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        assert (verdict(log, Bucket("api", (Limit(2, 0.1),))).violation is not None) == is_over


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 3), st.integers(1, 9)), max_size=5),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3)), min_size=1, max_size=12),
)
def test_it_finds_what_trying_every_window_finds(
    changes: list[tuple[int, int, int, int]], grants: list[tuple[int, int]]
) -> None:
    counted, begin = [Period(START, Fraction(5), Fraction(1))], 0
    for capacity, rate, more, lasts in changes:
        begin += lasts
        counted.append(Period(begin * SECOND, Fraction(capacity), Fraction(rate, 4), given=Fraction(more)))
    ends = [*(period.begin for period in counted[1:]), END]

    def allowed(first: int, last: int) -> Fraction:
        [capacity] = [one.capacity for one, end in zip(counted, ends, strict=True) if one.begin <= first < end]
        given = sum((one.given for one in counted if first < one.begin <= last), Fraction(0))
        refilled = [
            one.refill_rate * max(0, min(last, end) - max(first, one.begin)) / SECOND
            for one, end in zip(counted, ends, strict=True)
        ]
        return capacity + given + sum(refilled)

    given_at = [(at * SECOND, Fraction(cost)) for at, cost in grants]
    instants = sorted({at for at, _ in given_at})
    too_full = [
        (first, last)
        for first, last in combinations_with_replacement(instants, 2)
        if sum(cost for at, cost in given_at if first <= at <= last) > allowed(first, last)
    ]
    found = first_over(given_at, counted)
    assert (found is None) == (not too_full)
    if found is not None:
        assert (found.begin, found.end) in too_full
        assert found.end == min(last for _, last in too_full)
        assert found.granted > found.allowed


moves = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["drain", "drain", "ask"]), st.integers(1, 5), st.booleans()),
        st.tuples(st.just("set"), st.integers(1, 8), st.booleans()),
        st.tuples(st.sampled_from(["unset", "reset", "resume", "pause"]), st.integers(1, 4), st.booleans()),
        st.tuples(st.sampled_from(["back", "more"]), st.integers(1, 6), st.booleans()),
        st.tuples(st.just("wait"), st.integers(1, 12_000), st.booleans()),
    ),
    min_size=5,
    max_size=40,
)
RATES = [0.05, 0.5, 0.7, 3.3, 10.0]


def logged(kind: str, server: str, folder: Path, clock: FakeClock) -> Limiter:
    store: Store = MemoryStore(clock)
    if kind == "file":
        store = FileStore(folder / "state", clock)
    elif kind == "redis":
        store = redis_store(server, clock)
    return Limiter([API], LoggedStore(store, folder / "grants"))


@given(moves, st.sampled_from(["memory", "file", "redis"]))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=int(os.environ.get("TEST_EXAMPLES", "100")),
    derandomize="TEST_EXAMPLES" not in os.environ,
    deadline=None,
)
def test_whatever_is_ordered_every_window_is_within_what_counted(
    server: str, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bool]], kind: str
) -> None:
    """The bound that ``verify`` checks holds for the arithmetic, in every store."""
    clock = FakeClock(17 * 3600 * SECOND)
    folder = tmp_path_factory.mktemp("periods")
    limiter = logged(kind, server, folder, clock)
    for step, number, other in steps:
        if step == "wait":
            clock.advance(number * MS)
        else:
            carry_out(limiter, step, number, "a" if other else None)
    entries = list(read_log(folder / "grants")) if (folder / "grants").exists() else []
    if any(entry.is_grant for entry in entries):
        [found] = verify(entries, {"api": API})
        assert found.violation is None


def carry_out(limiter: Limiter, step: str, number: int, key: str | None) -> None:
    """A step but waiting."""
    match step:
        case "ask":
            limiter.acquire("api", number, key=key, place=Place() if number % 2 else None)
        case "drain":
            while limiter.acquire("api", 0.125, key=key):
                pass
        case "set":
            duration = number if number % 3 == 0 else None
            limiter.set("api", capacity=number if key else None, refill_rate=RATES[number % 5], duration=duration)
        case "unset":
            limiter.unset("api")
        case "pause":
            limiter.pause("api", number, key=key)
        case "resume":
            limiter.resume("api", key=key)
        case "reset":
            limiter.reset("api", key=key)
        case "back" | "more":
            limiter.settle("api", 1 if step == "more" else number, number if step == "more" else 0.3, key=key)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["ask", "back", "more"]), st.integers(1, 5)),
            st.tuples(st.just("wait"), st.integers(1, 9_000)),
        ),
        max_size=30,
    ),
    st.sampled_from(["memory", "file", "redis"]),
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=int(os.environ.get("TEST_EXAMPLES", "100")),
    derandomize="TEST_EXAMPLES" not in os.environ,
    deadline=None,
)
def test_whatever_is_settled_no_more_may_be_granted_than_the_bucket_holds(
    server: str, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], kind: str
) -> None:
    """The bound is exact: the log lets pass what the bucket still grants, and not a thousandth of a token more."""
    clock = FakeClock(17 * 3600 * SECOND)
    folder = tmp_path_factory.mktemp("settled")
    limiter = logged(kind, server, folder, clock)
    limiter.acquire("api")
    for step, number in steps:
        clock.advance(1)  # of what is done at one instant nobody knows the order
        if step == "wait":
            clock.advance(number * MS)
        else:
            carry_out(limiter, step, number, None)
    clock.advance(1)
    log = folder / "grants"
    assert verdict(log).violation is None
    now, _, [state] = limiter.store.read(API.draw(None))
    left = Fraction(state.span - max(0, state.full_at - now), state.interval)
    entries = list(read_log(log))
    for tokens, is_over in ((left, False), (max(left, Fraction(0)) + Fraction(1, 1000), True)):
        if tokens > 0:
            [found] = verify([*entries, entries[0]._replace(at=now, cost=tokens)], {"api": API})
            assert (found.violation is not None) == is_over


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 3_000)), max_size=40),
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from(RATES)), min_size=2, max_size=2),
    st.sampled_from(["memory", "file", "redis"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_those_who_disagree_get_no_more_than_the_one_declares_who_asked_last(
    server: str,
    tmp_path_factory: pytest.TempPathFactory,
    asks: list[tuple[bool, int, int]],
    numbers: list[tuple[int, float]],
    kind: str,
) -> None:
    """A rolling deploy: the capacity of whoever asks first in a window, and the rate of whoever was the last to ask."""
    clock = FakeClock(17 * 3600 * SECOND)
    store: Store = MemoryStore(clock)
    if kind == "file":
        store = FileStore(tmp_path_factory.mktemp("disagree") / "state", clock)
    elif kind == "redis":
        store = redis_store(server, clock)
    limiters = [Limiter([Bucket("api", (Limit(*each),))], store) for each in numbers]
    grants, counted = list[tuple[int, Fraction]](), list[Period]()
    for other, most, pause in asks:
        capacity, rate = numbers[other]
        counted.append(Period(clock.now() if counted else START, Fraction(capacity), exact(rate)))
        for _ in range(1 + 8 * most):
            if decision := limiters[other].acquire("api", 0.125):
                grants.append((decision.now, Fraction(1, 8)))
        clock.advance(1 + pause * MS)
    assert first_over(grants, counted) is None
