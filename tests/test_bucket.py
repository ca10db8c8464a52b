"""The promises of the arithmetic, against whatever hypothesis comes up with.

Bounds are checked in exact rationals against the numbers as the user wrote them, whatever they are rounded to inside.
"""

from __future__ import annotations

import copy
import heapq
import math
import pickle
from fractions import Fraction
from itertools import count, pairwise
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from tb_celery.arithmetic import UNCLAIMED, UNCLAIMED_TURNS, Decision, Place, acquire, lost, seconds, settle
from tb_celery.bucket import LONGEST_SPAN, PAUSE, SECOND, Bucket, Charge, Limit, pause
from tb_celery.clock import FakeClock
from tb_celery.errors import (
    ConfigurationError,
    RateLimitExceeded,
    StoreError,
    StoreTimeoutError,
    TBCeleryError,
    shown,
)
from tb_celery.limiter import Limiter
from tb_celery.state import State, fit, fitted
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tb_celery.stores import Store

exact = settings(
    max_examples=100, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)

MS = SECOND // 1000
WEEKLY = Fraction(1, 7 * 24 * 3600)
RATES = (WEEKLY, 0.001, 0.3, Fraction(1, 3), 0.5, 1, 7.3, 33.3, 1000, Fraction(10_000, 3), 1_000_000)
CLOCKS = (0, 1, 1_800_000_000 * SECOND, 1 << 62)
HUGE = 10**400
BACK = "comes back at the turn it was given"

rates = st.sampled_from(RATES) | st.floats(1e-6, 1e6) | st.fractions(Fraction(1, 10**6), 10**6, max_denominator=10**6)
capacities = st.integers(1, 1000) | st.integers(1, 20_000).map(lambda thousandths: thousandths / 1000)
limits = st.builds(Limit, capacities, rates)
several_limits = st.lists(limits, min_size=1, max_size=3)
instants = st.integers(0, 1 << 62)
costs = st.integers(1, 5) | st.floats(0.001, 5) | st.fractions(Fraction(1, 1000), 5)
# Time between two asks: as long as the last one was told to wait, so many nanoseconds, or tokens of the first limit.
gaps = st.none() | st.integers(0, 2) | st.fractions(0, 4, max_denominator=64)
spans = st.sampled_from((0, MS, SECOND, LONGEST_SPAN))
places = st.builds(
    Place,
    turn=st.none() | st.integers(-1, 1 << 63),
    soonest=spans,
    patience=spans,
    longest=st.none() | spans,
    ahead=st.sampled_from((0, 0, 0, 1, 3)),
)
callers = st.none() | st.just(BACK) | st.just(Place()) | places


def brief(value: object) -> str:
    """A name for one case of a test."""
    return str(value)[:30]


class Grant(NamedTuple):
    """Tokens that were given away."""

    at: int
    cost: Fraction


def written(number: float | Fraction) -> Fraction:
    """``number`` as people write it: 0.3 is three tenths."""
    return Fraction(str(number))


def excess(capacity: Fraction, rate: Fraction, grants: Iterable[Grant]) -> Fraction:
    """Tokens granted beyond ``capacity + rate * w``, in the worst of all windows."""
    worst = least = total = Fraction(0)
    for at, cost in grants:
        refilled = rate * Fraction(at, SECOND)
        least = min(least, total - refilled) if total else -refilled
        total += cost
        worst = max(worst, total - refilled - least)
    return worst - capacity


class Quota:
    """Buckets between asks, kept as a store keeps them; each answer is checked as it comes.

    Args:
        keeps_refusals: whether what a refused ask saw is written down, too, as some stores do.
    """

    def __init__(self, *, keeps_refusals: bool = False) -> None:
        self.states: dict[tuple[str, str | None, int], State] = {}
        self.grants: dict[str, list[Grant]] = {}
        self._keeps_refusals = keeps_refusals

    def ask(
        self, now: int, buckets: Bucket | Sequence[Bucket], cost: float = 1, place: Place | None = None
    ) -> Decision:
        buckets = [buckets] if isinstance(buckets, Bucket) else buckets
        charges = [charge for bucket in buckets for charge in bucket.draw(None, bucket.charge(cost))]
        states = fitted(charges, self.states.get, now)
        decision, new = acquire(charges, states, now, place)

        assert decision.now == now
        assert decision.limit in next(bucket.limits for bucket in buckets if bucket.name == decision.bucket)
        assert decision.limit is not None
        assert 0 <= decision.tokens <= decision.limit.capacity
        if decision:
            assert (decision.allowed, decision.at, decision.wait, decision.booked) == (True, now, 0.0, False)
            for bucket in buckets:
                self.grants.setdefault(bucket.name, []).append(Grant(now, written(cost)))
        else:
            assert not decision.allowed
            assert decision.at > now
            assert decision.wait > 0
            assert new is None or place is not None, "the refusal of a plain caller changed something"
        kept = states if new is None and self._keeps_refusals else new
        for charge, state in zip(charges, kept or (), strict=kept is not None):
            assert all(-(1 << 63) <= number < 1 << 63 for number in state)
            self.states[charge[:3]] = state
        return decision

    def empty(self, now: int, bucket: Bucket) -> None:
        while self.ask(now, bucket, min(limit.capacity for limit in bucket.limits)):
            pass

    def worst_excess(self, bucket: Bucket) -> Fraction:
        grants = self.grants.get(bucket.name, ())
        return max(excess(written(limit.capacity), written(limit.refill_rate), grants) for limit in bucket.limits)


def one(capacity: float, refill_rate: float | Fraction) -> Bucket:
    return Bucket("api", (Limit(capacity, refill_rate),))


# -- never over the bound


@exact
@given(
    instants,
    st.lists(several_limits, min_size=1, max_size=3),
    st.lists(st.tuples(gaps, callers, costs, st.integers(1, 7)), max_size=80),
)
def test_no_window_holds_more_than_the_bound(
    now: int,
    limits: list[list[Limit]],
    asks: list[tuple[int | Fraction | None, Place | str | None, float, int]],
) -> None:
    quota = Quota()
    declared = [Bucket(f"bucket {index}", tuple(those)) for index, those in enumerate(limits)]
    turns: list[int] = []
    told = now
    for gap, caller, cost, mask in asks:
        if gap is None:
            now = max(now, min(told, 1 << 62))
        else:
            now += gap if isinstance(gap, int) else int(gap * SECOND / written(limits[0][0].refill_rate))
        buckets = [bucket for index, bucket in enumerate(declared) if mask >> index & 1] or declared
        smallest = min(limit.capacity for bucket in buckets for limit in bucket.limits)
        place = Place(turns.pop(0) if turns else None) if isinstance(caller, str) else caller
        decision = quota.ask(now, buckets, min(cost, smallest), place)
        told = decision.at
        if decision.booked:
            turns.append(decision.at)
    for bucket in declared:
        assert quota.worst_excess(bucket) <= 0


@pytest.mark.parametrize("rate", RATES)
def test_a_greedy_caller_gets_all_of_the_quota_and_no_more(rate: float | Fraction) -> None:
    quota, bucket, now = Quota(), one(5, rate), 0
    for _ in range(500):
        while not (decision := quota.ask(now, bucket)):
            now = decision.at
    assert quota.worst_excess(bucket) <= 0
    # Rounding to nanoseconds costs at most one nanosecond a token.
    assert now <= 495 * (SECOND / written(rate) + 1)


def test_n_in_a_window_takes_a_capacity_of_1() -> None:
    # Case 40: ten a minute with a burst of ten admits nearly twenty in the first minute.
    for capacity, admitted in (10, 19), (1, 10):
        quota, bucket = Quota(), one(capacity, Fraction(10, 60))
        assert sum(bool(quota.ask(second * SECOND, bucket)) for second in range(60)) == admitted
        for second in range(60, 600):
            quota.ask(second * SECOND, bucket)
        ats = [at for at, _ in quota.grants["api"]]
        busiest = max(sum(start <= at < start + 60 * SECOND for at in ats) for start in ats)
        assert busiest == admitted


def test_all_or_nothing() -> None:
    # Case 36.
    quota = Quota()
    some, none = Bucket("some", (Limit(5, 1),)), Bucket("none", (Limit(5, 0.001),))
    quota.empty(0, none)
    decision = quota.ask(0, (some, none))
    assert (bool(decision), decision.bucket, decision.wait) == (False, "none", 1000.0)
    assert sum(bool(quota.ask(0, some)) for _ in range(6)) == 5


def test_the_decision_names_the_limit_that_binds() -> None:
    second, day = Limit(10, 10), Limit(12, Fraction(12, 24 * 3600))
    bucket = Bucket("api", (day, second))
    assert bucket == Bucket("api", (second, day)), "the order of limits has no meaning"
    quota = Quota()
    quota.empty(0, bucket)
    assert quota.ask(0, bucket).limit == second
    assert [bool(quota.ask(SECOND, bucket)) for _ in range(3)] == [True, True, False]
    decision = quota.ask(SECOND, bucket)
    assert (decision.limit, decision.wait) == (day, 7199.0)


def test_a_granted_call_names_the_bucket_that_is_nearest_to_refusing() -> None:
    quota = Quota()
    small, large = Bucket("small", (Limit(2, 1),)), Bucket("large", (Limit(5, 1),))
    quota.ask(0, small)
    assert quota.ask(1000 * SECOND, (large, small)).bucket == "small"


# -- waits


@pytest.mark.parametrize("now", CLOCKS)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("capacity", [1, 2.5])
def test_sleeping_what_was_told_is_enough_at_every_rate_and_clock(capacity: float, rate: float, now: int) -> None:
    # Facts 9: with floats, such callers are refused for ever at 0.3, 7.3 and 33.3 a second.
    quota, bucket = Quota(), one(capacity, rate)
    quota.empty(now, bucket)
    for _ in range(100):
        decision = quota.ask(now, bucket)
        assert round(decision.wait * 1e9) >= decision.at - now
        assert Fraction(decision.wait) * SECOND >= decision.at - now
        now += math.ceil(Fraction(decision.wait) * SECOND)
        assert quota.ask(now, bucket)


@exact
@given(instants, several_limits, st.lists(costs, min_size=1, max_size=20))
def test_a_plain_caller_is_told_the_very_instant(now: int, limits: list[Limit], costs: list[float]) -> None:
    quota, bucket = Quota(), Bucket("api", tuple(limits))
    smallest = min(limit.capacity for limit in limits)
    for cost in costs:
        decision = quota.ask(now, bucket, min(cost, smallest))
        if not decision:
            assert not quota.ask(decision.at - 1, bucket, min(cost, smallest))
            now = decision.at
            assert quota.ask(now, bucket, min(cost, smallest))


@exact
@given(
    instants,
    several_limits,
    st.lists(st.tuples(st.fractions(0, 3, max_denominator=64), costs, st.sampled_from((0, MS, SECOND))), min_size=1),
)
def test_everyone_runs_at_its_turn_when_all_before_come(
    start: int, limits: list[Limit], arrivals: list[tuple[Fraction, float, int]]
) -> None:
    quota, bucket = Quota(), Bucket("api", tuple(limits))
    smallest = min(limit.capacity for limit in limits)
    order = count()
    agenda: list[tuple[int, int, float, Place]] = []
    for gap, cost, soonest in arrivals:
        start += int(gap * SECOND / written(limits[0].refill_rate))
        agenda.append((start, next(order), min(cost, smallest), Place(soonest=soonest)))
    heapq.heapify(agenda)
    while agenda:
        now, _, cost, place = heapq.heappop(agenda)
        decision = quota.ask(now, bucket, cost, place)
        assert decision or place.turn is None, "refused on its turn"
        if not decision:
            assert decision.booked
            assert decision.at >= now + place.soonest
            heapq.heappush(agenda, (decision.at, next(order), cost, Place(decision.at)))
    assert len(quota.grants["api"]) == len(arrivals)


@pytest.mark.parametrize(("rate", "wait"), [(100, 0.01), (50, 0.02), (1e6, 1e-6), (0.001, 1000.0), (WEEKLY, 604_800.0)])
def test_a_wait_is_never_rounded_away(rate: float, wait: float) -> None:
    # Cases 22, 37 and 56.
    quota, bucket = Quota(), one(1, rate)
    assert quota.ask(0, bucket)
    decision = quota.ask(0, bucket)
    assert decision.wait == pytest.approx(wait, rel=1e-12)
    assert quota.ask(decision.at, bucket)


@exact
@given(st.integers(0, 1 << 64))
@example(0)
@example(1)
def test_seconds_are_enough_and_not_more_than_they_need_be(nanoseconds: int) -> None:
    value = seconds(nanoseconds)
    assert Fraction(value) * SECOND >= nanoseconds
    assert value == 0 or Fraction(math.nextafter(value, 0)) * SECOND < nanoseconds


# -- nothing is lost


@exact
@given(instants, several_limits, st.integers(0, 10**9))
def test_fifty_refusals_at_one_instant_are_one(now: int, limits: list[Limit], later: int) -> None:
    quota, bucket = Quota(), Bucket("api", tuple(limits))
    cost = min(limit.capacity for limit in limits)
    quota.empty(now, bucket)
    before = dict(quota.states)
    answers = [quota.ask(now + later, bucket, cost) for _ in range(50)]
    assume(not answers[0])
    assert all(answer == answers[0] for answer in answers)
    assert quota.states == before


def test_polling_loses_no_fraction() -> None:
    # Case 39.
    quota, bucket = Quota(), one(5, 0.5)
    quota.empty(0, bucket)
    assert [ms for ms in range(1, 10_001) if quota.ask(ms * MS, bucket)] == [2000, 4000, 6000, 8000, 10_000]


# -- the numbers change between asks


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    clock = FakeClock(1000 * SECOND)
    return MemoryStore(clock) if request.param == "memory" else FileStore(tmp_path / "state", clock)


def sleep_as_told(store: Store, decision: Decision) -> int:
    """Sleep as long as ``decision`` said; the nanoseconds that took."""
    before = store.clock.now()
    store.clock.sleep(decision.wait)
    return store.clock.now() - before


@exact
@given(limits, limits, st.fractions(0, 1), instants)
def test_a_change_makes_no_tokens_and_the_new_rate_counts_from_now(
    old: Limit, new: Limit, level: Fraction, now: int
) -> None:
    quota = Quota(keeps_refusals=True)
    before, after = Bucket("api", (old,)), Bucket("api", (new,))
    quota.empty(now, before)
    now += int(level * old.span)
    assume(quota.states["api", None, 0].full_at > now)
    tokens = Fraction(old.span - (quota.states["api", None, 0].full_at - now), old.interval)
    state = fit(quota.states["api", None, 0], new, now)
    carried = Fraction(new.span - max(state.full_at - now, 0), new.interval)
    most = min(tokens, written(new.capacity))
    assert carried <= most
    faster_and_smaller = new.interval < old.interval and new.capacity < old.capacity
    if faster_and_smaller:
        # It may be another limit, so as many tokens are missing as before.
        most = max(Fraction(0), tokens - written(old.capacity) + written(new.capacity))
    assert carried > most - Fraction(2, new.interval)
    assert fit(state, new, now + SECOND) == state
    quota.ask(now, after, new.capacity)
    assert quota.ask(now + new.span, after, new.capacity), "what is missing is refilled at the new rate"


@pytest.mark.parametrize("place", [None, Place(patience=LONGEST_SPAN)])
@pytest.mark.parametrize(("old", "new"), [((1, 0.01), (1, 100)), ((1, 100), (1, 0.01)), ((5, 0.3), (50, 33.3))])
def test_a_refusal_does_not_hold_on_to_the_old_numbers(
    old: tuple[int, float], new: tuple[int, float], place: Place | None, store: Store
) -> None:
    assert Limiter([one(*old)], store).acquire("api", old[0])
    limiter = Limiter([one(*new)], store)
    decision = limiter.acquire("api", place=place)
    assert decision.wait == pytest.approx(1 / new[1])
    assert all(limiter.acquire("api").at == decision.at for _ in range(5))
    sleep_as_told(store, decision)
    assert limiter.acquire("api", place=place and Place(decision.at))


def test_a_lower_capacity_clamps_and_a_higher_one_fills_up(store: Store) -> None:
    small, large = Limiter([one(5, 1)], store), Limiter([one(50, 1)], store)
    assert large.acquire("api", 10).tokens == 40
    assert small.acquire("api").tokens == 4
    assert large.acquire("api").tokens == 3
    assert small.acquire("api", 3).tokens == 0
    decision = large.acquire("api", 5)
    assert (bool(decision), decision.tokens, decision.wait) == (False, 0, 5.0)


@exact
@given(
    st.lists(limits, min_size=2, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), gaps, callers, costs), max_size=60),
    st.booleans(),
)
def test_processes_that_disagree_make_no_tokens_by_taking_turns(
    limits: list[Limit],
    asks: list[tuple[int, int | Fraction | None, Place | str | None, float]],
    keeps_refusals: bool,  # noqa: FBT001
) -> None:
    quota, now, told = Quota(keeps_refusals=keeps_refusals), 0, 0
    for which, gap, caller, cost in asks:
        limit = limits[which % len(limits)]
        if gap is None:
            now = max(now, min(told, 1 << 62))
        else:
            now += gap if isinstance(gap, int) else int(gap * SECOND / written(limit.refill_rate))
        place = Place(told) if isinstance(caller, str) else caller
        told = quota.ask(now, Bucket("api", (limit,)), min(cost, limit.capacity), place).at
    capacity = max(written(limit.capacity) for limit in limits)
    rate = max(written(limit.refill_rate) for limit in limits)
    assert excess(capacity, rate, quota.grants.get("api", ())) <= 0


def test_what_is_owed_is_owed_where_its_limit_gets_another_number() -> None:
    limit = Limit(5, 0.5)
    owed = State(3 * limit.span, 3 * limit.span, *limit.numbers, in_debt=True)
    slower_added = Bucket("api", (limit, Limit(100, 0.01)))
    known: dict[tuple[str, str | None, int], State] = {("api", None, 0): owed}
    assert fitted(slower_added.draw(None), known.get, 0)[0] == owed


@exact
@given(
    st.lists(limits, min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 15), gaps, callers, costs), max_size=60),
    st.booleans(),
)
@example(  # the slowest is dropped when the fast one has been emptied
    [Limit(10, 1), Limit(1000, 0.01)],
    [(2, 0, None, 5)] * 2 + [(0, 0, None, 5)] * 2,
    False,  # noqa: FBT003
)
@example(  # the slowest is lowered, which forgets what was drawn of it, and then dropped
    [Limit(10, 1), Limit(1000, Fraction(1000, 86_400)), Limit(10, Fraction(10, 86_400))],
    [(2, 0, None, 5)] * 2 + [(4, 0, Place(), 5), (0, 0, None, 5)],
    False,  # noqa: FBT003
)
@example(  # the same, while another one is there for a moment
    [Limit(10, 1), Limit(1000, Fraction(1000, 86_400)), Limit(10, Fraction(10, 86_400)), Limit(10, 0.5)],
    [(2, 0, None, 5)] * 2 + [(4, 0, Place(), 5), (12, 0, None, 5), (0, 0, None, 5)],
    True,  # noqa: FBT003
)
def test_a_limit_that_stays_declared_holds_whichever_others_come_and_go(
    limits: list[Limit],
    asks: list[tuple[int, int | Fraction | None, Place | str | None, float]],
    keeps_refusals: bool,  # noqa: FBT001
) -> None:
    quota, now, told = Quota(keeps_refusals=keeps_refusals), 0, 0
    stays = limits[0]
    for others, gap, caller, cost in asks:
        declared = [stays] + [limit for place, limit in enumerate(limits) if place and others >> place & 1]
        if gap is None:
            now = max(now, min(told, 1 << 62))
        else:
            now += gap if isinstance(gap, int) else int(gap * SECOND / written(stays.refill_rate))
        place = Place(told) if isinstance(caller, str) else caller
        told = quota.ask(
            now, Bucket("api", tuple(declared)), min(cost, *(limit.capacity for limit in declared)), place
        ).at
    assert quota.worst_excess(Bucket("api", (stays,))) <= 0


def test_a_rolling_deploy_from_5_to_50(store: Store) -> None:
    # Case 93.
    limiters = [Limiter([one(5, 2)], store), Limiter([one(50, 3)], store)]
    admitted = 0
    for _ in range(1000):
        admitted += sum(bool(limiter.acquire("api")) for limiter in limiters)
        store.clock.sleep(0.01)
    assert 50 + 10 * 2 <= admitted + 50 <= 50 + 10 * 3 + 50
    assert admitted <= 50 + 10 * 3


# -- the clock is moved


@exact
@given(
    limits,
    st.lists(st.tuples(gaps, st.sampled_from((0, 0, 1, SECOND, 1 << 50)), callers, costs), max_size=60),
    st.booleans(),
)
def test_a_clock_set_back_makes_no_tokens(
    limit: Limit,
    asks: list[tuple[int | Fraction | None, int, Place | str | None, float]],
    keeps_refusals: bool,  # noqa: FBT001
) -> None:
    quota, bucket = Quota(keeps_refusals=keeps_refusals), Bucket("api", (limit,))
    elapsed = told = 0
    reading = 1 << 61
    grants = []
    for gap, back, caller, cost in asks:
        if gap is None:
            passed = max(0, min(told, 1 << 62) - reading)
        else:
            passed = gap if isinstance(gap, int) else int(gap * SECOND / written(limit.refill_rate))
        elapsed += passed
        reading = max(0, reading + passed - back)
        place = Place(told) if isinstance(caller, str) else caller
        amount = min(cost, limit.capacity)
        decision = quota.ask(reading, bucket, amount, place)
        told = decision.at
        if decision:
            grants.append(Grant(elapsed, written(amount)))
    assert excess(written(limit.capacity), written(limit.refill_rate), grants) <= 0


@pytest.mark.parametrize("back", [1, SECOND, 3600 * SECOND])
@pytest.mark.parametrize("place", [None, Place(patience=LONGEST_SPAN)])
def test_after_a_clock_was_set_back_the_bucket_is_empty_at_worst(back: int, place: Place | None, store: Store) -> None:
    assert isinstance(store.clock, FakeClock)
    store.clock.advance(3600 * SECOND)
    limiter = Limiter([one(5, 1)], store)
    assert limiter.acquire("api", 5)
    store.clock.advance(-back)
    decision = limiter.acquire("api", place=place)
    assert 1.0 <= decision.wait <= 2.0
    sleep_as_told(store, decision)
    assert limiter.acquire("api", place=place and Place(decision.at))


def test_a_line_moves_along_with_a_clock_that_was_set_back(store: Store) -> None:
    assert isinstance(store.clock, FakeClock)
    store.clock.advance(3600 * SECOND)
    limiter = Limiter([one(1, 1)], store)
    waits = [limiter.acquire("api", place=Place()).wait for _ in range(4)]
    assert waits == [0, 1, 2, 3]
    store.clock.advance(-3600 * SECOND)
    assert limiter.acquire("api", place=Place()).wait == 4


def test_a_clock_that_jumps_far_ahead_fills_the_bucket_and_no_more(store: Store) -> None:
    # Case 46: eight hours asleep; then a century, and back again.
    assert isinstance(store.clock, FakeClock)
    limiter = Limiter([one(5, 0.5)], store)
    assert limiter.acquire("api", 5)
    store.clock.advance(8 * 3600 * SECOND)
    assert limiter.peek("api").tokens == 5
    store.clock.advance(100 * 365 * 86_400 * SECOND)
    assert limiter.acquire("api").tokens == 4
    store.clock.advance(-100 * 365 * 86_400 * SECOND)
    assert limiter.acquire("api").wait == 2.0


# -- turns


@exact
@given(instants, capacities, rates, st.integers(1, 40), st.sampled_from((0, MS, SECOND)), st.booleans())
def test_askers_at_one_instant_get_turns_of_their_own(
    now: int,
    capacity: float,
    rate: float,
    askers: int,
    soonest: int,
    empty: bool,  # noqa: FBT001
) -> None:
    quota, bucket = Quota(), one(capacity, rate)
    cost = min(1, capacity)
    if empty:
        quota.empty(now, bucket)
    decisions = [quota.ask(now, bucket, cost, Place(soonest=soonest)) for _ in range(askers)]
    turns = [decision.at for decision in decisions if not decision]
    granted = len(decisions) - len(turns)
    assert not any(decisions[granted:]), "nobody overtakes"
    assert turns == sorted(turns)
    assert excess(written(capacity), written(rate), [Grant(turn, written(cost)) for turn in turns]) <= 0
    worth = bucket.limits[0].charge(cost)
    alone = [turn for turn in turns if turn > now + soonest]
    # The lowest bit says what kind of a line it is.
    assert all(worth <= later - earlier <= worth + 1 for earlier, later in pairwise(alone))


def test_a_hundred_at_once() -> None:
    # Case 8.
    quota, bucket = Quota(), one(5, 1)
    turns = [quota.ask(0, bucket, 1, Place()).at for _ in range(100)]
    assert turns == [0] * 5 + [second * SECOND for second in range(1, 96)]
    assert all(quota.ask(turn, bucket, 1, Place(turn)) for turn in turns[5:])


def test_newcomers_queue_behind_turns_but_plain_callers_do_not() -> None:
    quota, bucket = Quota(), one(1, 1)
    turns = [quota.ask(0, bucket, 1, Place()).at for _ in range(3)]
    assert turns == [0, SECOND, 2 * SECOND]
    assert quota.ask(SECOND, bucket, 1, Place()).at == 3 * SECOND
    assert quota.ask(SECOND, bucket)
    decision = quota.ask(SECOND, bucket, 1, Place(SECOND))
    assert not decision, "a turn is not a token: somebody else has taken it"
    assert decision.at > SECOND


def test_what_no_turn_needs_is_open_to_newcomers() -> None:
    quota, bucket = Quota(), one(5, 1)
    quota.empty(0, bucket)
    turn = quota.ask(0, bucket, 1, Place()).at
    late = turn + 2 * SECOND
    assert [bool(quota.ask(late, bucket, 1, Place(longest=0))) for _ in range(3)] == [True, True, False]
    assert quota.ask(late, bucket, 1, Place(turn))


@exact
@given(
    instants,
    several_limits,
    st.lists(st.tuples(st.integers(-10, 10) | st.integers(-SECOND, SECOND), several_limits | st.none(), st.booleans())),
)
def test_a_line_of_those_who_want_one_token_is_never_taken_for_one_that_has_to_save(
    now: int, declared: list[Limit], asks: list[tuple[int, list[Limit] | None, bool]]
) -> None:
    quota = Quota(keeps_refusals=True)
    for gap, changed, comes_back in asks:
        now = max(0, now + gap)
        declared = changed or declared
        cost = min(1, *(limit.capacity for limit in declared))
        decision = quota.ask(now, Bucket("api", tuple(declared)), cost, Place())
        if comes_back and decision.at < 1 << 62:
            quota.ask(decision.at, Bucket("api", tuple(declared)), cost, Place(decision.at))
        assert not any(
            state.booked_at & 1 for state in quota.states.values() if state.booked_at > max(state.full_at, now)
        )


@pytest.mark.parametrize("rate", [50, 30, 7])
@pytest.mark.parametrize("begin", [SECOND, SECOND + 1])
def test_newcomers_use_up_the_tokens_of_those_who_are_late(begin: int, rate: int) -> None:
    """Those who were sent away return behind the whole backlog; at some instants a burst ran at 60 % of its rate."""
    quota, bucket = Quota(), one(5, rate)
    asks = [bool(quota.ask(begin + number * MS, bucket, 1, Place(soonest=100 * MS))) for number in range(2001)]
    assert sum(asks) >= 5 + 2 * rate - 2, "two tokens are kept for those in line"


@pytest.mark.parametrize("large", [2, 1])
def test_a_line_is_known_for_what_it_waits_for_as_long_as_it_stands(large: int) -> None:
    quota, bucket = Quota(), one(5, Fraction(SECOND, 20_000_001))
    quota.empty(0, bucket)
    second = quota.ask(0, bucket, large, Place()).at
    for number in range(50):  # they come and go, in a line that is never empty
        first, second = second, quota.ask(second, bucket, 1, Place()).at
        assert quota.ask(first, bucket, large if number == 0 else 1, Place(first))
        [state] = quota.states.values()
        assert state.booked_at & 1 == (large > 1)


def test_a_line_stands_where_it_waits_and_nowhere_else() -> None:
    quota = Quota()
    fast, slow, twin = (Bucket(name, (Limit(1, rate),)) for name, rate in (("fast", 50), ("slow", 1), ("twin", 1)))
    for bucket in slow, twin:
        quota.empty(0, bucket)
    assert [quota.ask(0, (fast, slow, twin), 1, Place()).at for _ in range(2)] == [SECOND, 2 * SECOND]
    assert quota.ask(0, fast, 1, Place()), "full again long before the turns of the others"
    for bucket in slow, twin:
        assert quota.ask(0, bucket, 1, Place()).at == 3 * SECOND


@pytest.mark.parametrize(("patience", "wait", "booked"), [(SECOND, 1.0, False), (SECOND - 1, 3.0, True)])
def test_who_is_refused_on_its_turn_is_patient_or_gets_another(patience: int, wait: float, booked: bool) -> None:  # noqa: FBT001
    quota, bucket = Quota(), one(1, 1)
    turns = [quota.ask(0, bucket, 1, Place()).at for _ in range(4)]
    assert quota.ask(turns[1], bucket)
    decision = quota.ask(turns[1], bucket, 1, Place(turns[1], patience=patience))
    assert (decision.wait, decision.booked) == (wait, booked)


def test_the_limits_of_one_bucket_have_one_line() -> None:
    quota, bucket, now = Quota(), Bucket("api", (Limit(1, 10), Limit(3, 5))), 0
    for _ in range(20):
        while not (decision := quota.ask(now, bucket)):
            now = decision.at
    # The slow limit will have three tokens by then, which the fast one will not let through at once.
    turns = [quota.ask(now, bucket, 1, Place(soonest=SECOND)).at for _ in range(10)]
    assert all(quota.ask(turn, bucket, 1, Place(turn)) for turn in turns)


def test_asking_again_before_its_turn_books_nothing() -> None:
    # Case 13.
    quota, bucket = Quota(), one(1, 1)
    turns = [quota.ask(0, bucket, 1, Place()).at for _ in range(3)]
    before = dict(quota.states)
    again = [quota.ask(attempt * MS, bucket, 1, Place(turns[1])) for attempt in range(50)]
    assert {(decision.at, decision.booked) for decision in again} == {(turns[1], True)}
    assert quota.states == before


def test_a_turn_too_far_off_is_not_booked() -> None:
    quota, bucket = Quota(), one(1, 1)
    quota.ask(0, bucket)
    for _ in range(5):
        decision = quota.ask(0, bucket, 1, Place(longest=SECOND - 1))
        assert (decision.at, decision.booked) == (SECOND, False)
    assert quota.ask(0, bucket, 1, Place(longest=SECOND)).booked


@pytest.mark.parametrize("turn", [SECOND, 30 * 86_400 * SECOND, 1 << 64, HUGE], ids=brief)
def test_a_turn_that_was_not_given_out_here_is_not_waited_for(turn: int) -> None:
    # Forged, or from before a reboot: the clock began anew.
    quota, bucket = Quota(), one(1, 1)
    for _ in range(3):
        quota.ask(0, bucket, 1, Place())
    assert quota.ask(0, bucket, 1, Place(turn)).wait <= 3.0


@pytest.mark.parametrize("turn", [-(1 << 64), -1, 0, 1])
def test_a_turn_grants_nothing(turn: int) -> None:
    quota, bucket = Quota(), one(1, 1)
    quota.empty(0, bucket)
    assert not any(quota.ask(1, bucket, 1, Place(turn)) for _ in range(20))


@exact
@given(limits, st.integers(1, 500), st.integers(0, 10 * SECOND))
def test_a_bucket_that_stays_full_has_no_queue(limit: Limit, gone: int, later: int) -> None:
    quota, bucket = Quota(), Bucket("api", (limit,))
    cost = min(1, limit.capacity)
    quota.empty(0, bucket)
    for _ in range(gone):
        quota.ask(0, bucket, cost, Place())
    now = limit.span + UNCLAIMED + UNCLAIMED_TURNS * limit.interval + later
    for _ in range(int(written(limit.capacity) / written(cost))):
        assert quota.ask(now, bucket, cost, Place())
    decision = quota.ask(now, bucket, cost, Place())
    assert decision.at - now <= limit.charge(cost), "the line begins anew"


@exact
@given(limits, instants, st.integers(0, UNCLAIMED - 1))
def test_no_turn_is_lost_while_a_pause_keeps_everybody_away(limit: Limit, until: int, soon: int) -> None:
    state = State(0, until + limit.span, *limit.numbers)
    assert not lost(state, until - 1, until)
    assert not lost(state, until + soon, until)
    assert lost(state, until + UNCLAIMED + UNCLAIMED_TURNS * limit.interval, until)


def test_a_token_more_than_the_next_turn_needs_is_open_at_that_instant() -> None:
    quota, bucket = Quota(), one(2, 1)
    quota.empty(0, bucket)
    for _ in range(4):
        quota.ask(0, bucket, 1, Place())
    assert not quota.ask(2 * SECOND - 1, bucket, 1, Place(longest=0))
    assert quota.ask(2 * SECOND, bucket, 1, Place(longest=0))


@pytest.mark.parametrize(("patience", "at"), [(SECOND, SECOND), (SECOND - 1, 5 * SECOND)])
def test_who_is_patient_enough_need_not_be_back(patience: int, at: int) -> None:
    quota, bucket = Quota(), one(1, 1)
    quota.empty(0, bucket)
    assert quota.ask(0, bucket, 1, Place(soonest=5 * SECOND, patience=patience)).at == at


@pytest.mark.parametrize(("turns", "at"), [(3, 11 * SECOND), (1, 10 * SECOND + 1)])
@pytest.mark.parametrize("full_at", [0, 9 * SECOND + 1])
def test_turns_are_booked_ahead_from_now_on(turns: int, at: int, full_at: int) -> None:
    charges = one(2, 1).draw(None, [turns * SECOND])
    [limit] = [charge.limit for charge in charges]
    decision, new = acquire(charges, [State(full_at, full_at, *limit.numbers)], 10 * SECOND, Place(ahead=turns))
    assert (decision.at, decision.booked) == (at, True)
    assert new == [State(10 * SECOND, (10 + turns) * SECOND, *limit.numbers)], "each wants one, so none has to save"


def test_a_line_is_as_long_after_a_pause_as_it_was_before() -> None:
    charges = one(5, 1).draw(None, [SECOND])
    numbers = charges[0].limit.numbers
    decision, new = acquire(charges, [State(0, 20 * SECOND, *numbers)], 10 * SECOND, Place(), paused=10 * SECOND)
    assert decision, "tokens run over"
    assert new == [State(11 * SECOND, 20 * SECOND, *numbers)], "that of one who is late"


def test_who_waits_for_the_end_of_a_pause_is_in_the_line_of_the_bucket() -> None:
    charges = (*one(1, 1).draw(None, [SECOND]), pause("api", None))
    paused = State(10 * SECOND, 10 * SECOND, *PAUSE.numbers)
    states = [State(0, 0, *charges[0].limit.numbers), paused]
    for turn in 10, 11:
        decision, new = acquire(charges, states, 0, Place(), paused=paused.full_at)
        assert (decision.at, decision.booked) == (turn * SECOND, True)
        assert new is not None
        assert new[1] == paused
        states = new


@pytest.mark.parametrize(
    ("before", "cost", "after"),
    [
        ((0, 0), 2 * SECOND, (12 * SECOND, 12 * SECOND)),
        ((0, 0), 3 * SECOND, (13 * SECOND, 13 * SECOND, True)),
        ((12 * SECOND, 12 * SECOND), -5 * SECOND, (10 * SECOND, 10 * SECOND)),
        ((12 * SECOND, 15 * SECOND), SECOND, (13 * SECOND, 16 * SECOND, True)),
        ((0, 10 * SECOND), 3, (10 * SECOND + 3, 10 * SECOND + 3)),
    ],
    ids=["all of it", "more than there is", "more than was taken", "the line moves along", "no line"],
)
def test_what_a_call_cost_besides_counts_from_now_on(
    before: tuple[int, int], cost: int, after: tuple[int, int] | tuple[int, int, bool]
) -> None:
    charges = one(2, 1).draw(None, [cost])
    full_at, booked_at, *in_debt = after
    numbers = charges[0].limit.numbers
    assert settle(charges, [State(*before, *numbers)], 10 * SECOND) == [State(full_at, booked_at, *numbers, *in_debt)]


def test_the_last_turns_are_lost_a_second_after_they_have_come() -> None:
    limit = Limit(2, 1)
    state = State(0, limit.span + UNCLAIMED, *limit.numbers)
    assert lost(state, UNCLAIMED)
    assert not lost(state, UNCLAIMED - 1)
    assert not lost(state._replace(booked_at=state.booked_at + 2), UNCLAIMED), "one is still to come"


def test_nobody_waits_for_a_last_turn_that_is_not_claimed() -> None:
    quota, bucket = Quota(), one(1, 0.001)
    quota.empty(0, bucket)
    turn = quota.ask(0, bucket, 1, Place()).at
    assert not quota.ask(turn, bucket, 1, Place(longest=0)), "its holder may be a little late"
    assert quota.ask(turn + UNCLAIMED, bucket, 1, Place(longest=0))


# -- 64 bits


@exact
@given(
    st.lists(
        st.tuples(
            st.sampled_from((0.001, 0.999, 1, 7, 1000, 10**6, 10**9, LONGEST_SPAN)),
            st.sampled_from((1e-300, 1e-12, 1e-11, 1e-9, WEEKLY, 1, 1e6, 999_999_999, SECOND)),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(
        st.tuples(
            st.sampled_from((0, 1, 1 << 32, (1 << 62) - 1, 1 << 62)),
            st.none()
            | st.builds(
                Place,
                turn=st.sampled_from((None, -(1 << 80), 0, 1 << 62, 1 << 80)),
                soonest=st.sampled_from((0, 1 << 62, 1 << 80)),
                patience=st.sampled_from((0, 1 << 62, 1 << 80)),
            ),
            st.booleans(),
        ),
        max_size=30,
    ),
)
def test_every_number_fits_64_bits(
    numbers: list[tuple[float, float]], asks: list[tuple[int, Place | None, bool]]
) -> None:
    buckets = []
    for capacity, rate in numbers:
        try:
            buckets.append(one(capacity, rate))
        except ConfigurationError:
            continue
    assume(buckets)
    quota = Quota(keeps_refusals=True)
    for index, (now, place, all_of_it) in enumerate(asks):
        bucket = buckets[index % len(buckets)]
        capacity = bucket.limits[0].capacity
        # Quota.ask looks at each number.
        quota.ask(now, bucket, capacity if all_of_it else min(1, capacity), place)


def test_no_line_and_no_debt_is_longer_than_the_longest_span() -> None:
    numbers = LONGEST_SPAN, LONGEST_SPAN
    charges = [Charge("api", None, 0, Limit.of(*numbers), LONGEST_SPAN)]
    states = [State(SECOND, SECOND, *numbers)]
    for _ in range(3):
        _, new = acquire(charges, states, SECOND - 1, Place())
        assert new is not None
        states = new
        assert states[0].booked_at <= SECOND + LONGEST_SPAN
    for _ in range(3):
        states = settle(charges, states, SECOND)
        assert states[0].full_at <= SECOND + LONGEST_SPAN


# -- what is refused, and how


@pytest.mark.parametrize("bad", [True, False, math.nan, math.inf, -math.inf, 0, -1, 0.0, -0.5, "5", None, [5], 1j])
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("capacity", lambda bad: Limit(bad, 0.5)),
        ("refill_rate", lambda bad: Limit(5, bad)),
        ("cost", Limit(5, 0.5).charge),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(name: str, use: Callable[[float], object], bad: float) -> None:
    with pytest.raises(ConfigurationError) as caught:
        use(bad)
    assert str(caught.value).startswith(f"{name} must be a ")
    assert repr(bad) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("capacity", "rate", "sentence"),
    [
        (2.0005, 1, "capacity may have at most three decimals, not 2.0005"),
        (Fraction(1, 1001), 1, "capacity may have at most three decimals"),
        (5e-324, 1, "capacity may have at most three decimals"),
        (1, 1e9 + 1, "refill_rate must be at most 1000000000 tokens a second, not 1000000001.0"),
        (1, HUGE, "refill_rate must be at most 1000000000 tokens a second"),
        (1, 5e-324, "takes over 73 years"),
        (0.001, 1e-12, "takes over 73 years"),
        (HUGE, 1, "takes over 73 years"),
        (1e308, 1, "takes over 73 years"),
    ],
    ids=brief,
)
def test_too_fine_too_fast_or_too_slow(capacity: float, rate: float, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        Limit(capacity, rate)
    assert "\n" not in str(caught.value)


def test_numbers_are_taken_as_written() -> None:
    assert Limit(1, 0.3).interval == math.ceil(SECOND / Fraction(3, 10))
    assert Limit(2.5, Fraction(1, 3)).span == 7_500_000_000
    assert Limit(5, 0.5) == Limit(5.0, Fraction(1, 2))
    assert Limit(5, 0.5).charge(0.1) == 200_000_000


@pytest.mark.parametrize("cost", [6, 5.000001, Fraction(51, 10), HUGE], ids=brief)
def test_a_cost_above_the_capacity_names_both(cost: float) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Bucket("api", (Limit(5, 1), Limit(1000, 0.5))).charge(cost)
    assert str(caught.value) == f"bucket 'api': cost {shown(cost)} is above capacity 5 and could never be met"


@exact
@given(limits)
def test_the_whole_capacity_can_be_asked_for(limit: Limit) -> None:
    assert limit.charge(limit.capacity) == limit.span
    with pytest.raises(ConfigurationError):
        limit.charge(math.nextafter(limit.capacity, math.inf))


@pytest.mark.parametrize("limits", [(), [], None, Limit(5, 1), "10/s", (5, 0.5), ("10/s",)])
def test_a_bucket_is_made_of_limits(limits: tuple[Limit, ...]) -> None:
    with pytest.raises(ConfigurationError, match="bucket 'api' "):
        Bucket("api", limits)


# -- the objects


def test_who_is_let_through_is_told_the_wait() -> None:
    quota, bucket = Quota(), one(1, 1)
    quota.empty(0, bucket)
    decision = quota.ask(0, bucket).let_through("copy")
    assert (decision.allowed, decision.wait, decision.would_wait, decision.bucket) == (True, 0.0, 1.0, "copy")


def test_a_decision_is_a_truth_value_and_more() -> None:
    quota, bucket = Quota(), one(2, 0.5)
    yes, no = quota.ask(0, bucket, 2), quota.ask(0, bucket)
    assert yes
    assert not no
    assert (yes.tokens, no.tokens, no.wait) == (0.0, 0.0, 2.0)
    rest = "tokens=0.0, bucket='api', limit=Limit(capacity=2, refill_rate=0.5))"
    assert repr(yes) == "Decision(allowed=True, wait=0.0, " + rest
    assert repr(no) == "Decision(allowed=False, wait=2.0, " + rest
    assert no == quota.ask(0, bucket)
    assert no != quota.ask(1, bucket)
    assert no != yes
    assert no != False  # noqa: E712
    with pytest.raises(TypeError):
        hash(yes)


@pytest.mark.parametrize(
    "thing",
    [
        Limit(2.5, Fraction(1, 3)),
        Bucket("api", (Limit(5, 0.5), Limit(1000, 0.01))),
        Place(turn=1, soonest=2, patience=3, longest=4),
        Charge("api", "key", 0, Limit(5, 0.5), 2_000_000_000),
        fit(None, Limit(5, 0.5), 7),
        Quota().ask(0, one(5, 0.5), 5),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_everything_can_be_pickled_and_copied(thing: object) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(thing, protocol)) == thing  # noqa: S301
    assert copy.deepcopy(thing) == thing
    assert repr(pickle.loads(pickle.dumps(thing))) == repr(thing)  # noqa: S301


@pytest.mark.parametrize(
    "error",
    [
        TBCeleryError("sentence"),
        ConfigurationError("sentence"),
        StoreError("sentence"),
        StoreTimeoutError("sentence"),
        RateLimitExceeded("api", 1.5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_can_be_pickled(error: TBCeleryError) -> None:
    same = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(same) is type(error)
    assert (str(same), same.args, vars(same)) == (str(error), error.args, vars(error))
    assert isinstance(same, TBCeleryError)
