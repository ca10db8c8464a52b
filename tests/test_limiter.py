"""The library's face: buckets by name, keys, costs, waiting in line, and what may go wrong with them."""

from __future__ import annotations

import asyncio
import heapq
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import Mock

import pytest

import tb_celery
from tb_celery import limiter as limiter_module
from tb_celery.arithmetic import UNCLAIMED, UNCLAIMED_TURNS, Decision, Place
from tb_celery.bucket import SECOND, Bucket, Charge, Limit
from tb_celery.clock import FakeClock, SystemClock
from tb_celery.errors import ConfigurationError
from tb_celery.limiter import Limiter
from tb_celery.status import LimitStatus, Status
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

START = 1_000_000 * SECOND
API = Bucket("api", (Limit(5, 0.5),))
OTHER = Bucket("other", (Limit(5, 1),))
SLOW = Bucket("slow", (Limit(1, 0.001),))
TWICE = Bucket("twice", (Limit(10, 10), Limit(12, 0.001)))
BUCKETS = {"api": API, "other": OTHER, "slow": SLOW, "twice": TWICE, "off": None}


class Alarm(FakeClock):
    """A fake clock that sleepers share: it goes on to the next alarm when everybody sleeps, and remembers who slept.

    ``meanwhile`` is what others do while a thread sleeps.
    """

    def __init__(self) -> None:
        super().__init__(START)
        self.naps: list[float] = []
        self.meanwhile: Callable[[], object] = bool
        self._alarms: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.meanwhile()
        super().sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        alarm = (self.now() + round(seconds * SECOND), next(self._order), asyncio.get_running_loop().create_future())
        heapq.heappush(self._alarms, alarm)
        try:
            await alarm[-1]
        except asyncio.CancelledError:
            self._alarms.remove(alarm)
            heapq.heapify(self._alarms)
            raise

    async def settle(self, tasks: Sequence[asyncio.Task[Decision]]) -> None:
        """Come back when each of ``tasks`` sleeps or is done: until then it is asking, in another thread."""
        while len(self._alarms) < sum(not task.done() for task in tasks):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.0001)

    async def run(self, *waiters: Coroutine[Any, Any, Decision]) -> list[Decision]:
        """Start ``waiters`` one after the other and let time pass until all have their answer."""
        tasks = [asyncio.create_task(waiter) for waiter in waiters]
        await self.settle(tasks)
        while self._alarms:
            at, _, alarm = heapq.heappop(self._alarms)
            self.advance(max(0, at - self.now()))
            alarm.set_result(None)
            await self.settle(tasks)
        return [task.result() for task in tasks]


@pytest.fixture
def clock() -> Alarm:
    return Alarm()


@pytest.fixture(params=["memory", "file"])
def limiter(request: pytest.FixtureRequest, clock: Alarm, tmp_path: Path) -> Limiter:
    return Limiter(BUCKETS, MemoryStore(clock) if request.param == "memory" else FileStore(tmp_path / "state", clock))


def passed(clock: FakeClock) -> float:
    return (clock.now() - START) / SECOND


# -- acquire


def test_five_at_once_and_then_one_every_two_seconds(limiter: Limiter, clock: Alarm) -> None:
    decisions = [limiter.acquire("api") for _ in range(6)]
    assert [bool(decision) for decision in decisions] == [True] * 5 + [False]
    assert [decision.tokens for decision in decisions] == [4, 3, 2, 1, 0, 0]
    assert (decisions[-1].wait, decisions[-1].bucket, decisions[-1].limit) == (2.0, "api", API.limits[0])
    clock.advance(2 * SECOND - 1)
    assert not limiter.acquire("api")
    clock.advance(1)
    assert limiter.acquire("api")
    assert not clock.naps


def test_a_web_view_needs_nothing_more(limiter: Limiter) -> None:
    def view(client_ip: str) -> int:
        if limiter.acquire("api", key=client_ip, cost=3):
            return 200
        return 429

    assert [view(address) for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2")] == [200, 429, 200]


def test_fifty_refusals_change_nothing(limiter: Limiter, clock: Alarm) -> None:
    limiter.acquire("slow")
    decisions = [limiter.acquire("slow") for _ in range(50)]
    assert all(decision == decisions[0] for decision in decisions)
    clock.sleep(decisions[0].wait)
    assert limiter.acquire("slow")


def test_several_buckets_are_all_or_nothing(limiter: Limiter) -> None:
    # Case 36.
    assert limiter.acquire({"api": 2, "slow": 1})
    decision = limiter.acquire({"api": 2, "slow": 1})
    assert (bool(decision), decision.bucket, decision.wait) == (False, "slow", 1000.0)
    assert limiter.acquire("api", 3)
    assert limiter.acquire({"other": 5, "off": 1})
    assert limiter.acquire({"other": 1, "off": 1}).bucket == "other"


def test_several_limits_are_all_or_nothing(limiter: Limiter, clock: Alarm) -> None:
    assert limiter.acquire("twice", 10)
    decision = limiter.acquire("twice", 3)
    assert (decision.limit, decision.wait) == (Limit(12, 0.001), 1000.0)
    clock.advance(SECOND)
    assert limiter.acquire("twice", 2)
    assert limiter.status("twice").limits[0].tokens == 8


def test_keys_split_a_bucket(limiter: Limiter) -> None:
    for key in (None, "", "None", "api", "-", "a" * 10_000, "日本", "\ud800"):
        assert limiter.acquire("slow", key=key)
        assert not limiter.acquire("slow", key=key)
    assert limiter.acquire({"api": 1, "slow": 1}, key="tenant")
    assert not limiter.acquire("slow", key="tenant")


@pytest.mark.parametrize(("cost", "times"), [(1, 5), (2.5, 2), (0.1, 50), (Fraction(1, 4), 20), (5, 1), (4, 1)])
def test_a_call_may_cost_more_or_less_than_a_token(limiter: Limiter, cost: float, times: int) -> None:
    assert sum(bool(limiter.acquire("api", cost)) for _ in range(60)) == times


@pytest.mark.parametrize("cost", [0, -1, True, math.nan, math.inf, "1", None, 5.001, 10**30])
def test_a_cost_that_makes_no_sense_is_refused_each_time(limiter: Limiter, cost: float) -> None:
    assert limiter.acquire("api", 1)
    for _ in range(2):
        for ask in limiter.acquire, limiter.peek, limiter.wait:
            with pytest.raises(ConfigurationError, match=r"^bucket 'api': cost "):
                ask("api", cost)
            with pytest.raises(ConfigurationError, match=r"^bucket 'api': cost "):
                ask({"slow": 1, "api": cost})
    assert limiter.status("api").limits[0].tokens == 4
    assert limiter.status("slow").limits[0].tokens == 1


HUGE = 10**5000  # more digits than Python prints


@pytest.mark.parametrize(
    "number", [HUGE, -HUGE, Fraction(HUGE, 3), Fraction(1, HUGE)], ids=["huge", "low", "broad", "fine"]
)
def test_numbers_with_too_many_digits_to_print(limiter: Limiter, number: float) -> None:
    if number != Fraction(1, HUGE):  # which costs a nanosecond of refill, rounded up
        with pytest.raises(ConfigurationError, match=r"^bucket 'api': cost "):
            limiter.acquire("api", number)
    for name, numbers in ("capacity", (number, 1)), ("r", (1, number)):
        with pytest.raises(ConfigurationError, match=name):
            Limit(*numbers)


# -- names


@pytest.mark.parametrize("bucket", [None, 1, ["api"], ("api",), {1: 1}, {"api": 1, None: 1}, {("api",): 1}, b"api", {}])
def test_what_names_no_bucket_is_a_sentence(limiter: Limiter, bucket: str) -> None:
    asks: list[Callable[[str], object]] = [limiter.acquire, limiter.peek, limiter.wait]
    asks += [lambda name: asyncio.run(limiter.wait_async(name)), *([limiter.status, limiter.reset] if bucket else [])]
    for ask in asks:
        with pytest.raises(
            ConfigurationError, match=r"^bucket must be a name such as |^nothing is asked: name a bucket"
        ):
            ask(bucket)
    assert limiter.status("api").limits[0].tokens == 5


@pytest.mark.parametrize("key", [1, b"k", ["k"], True])
def test_a_key_that_is_no_string_is_a_sentence(limiter: Limiter, key: str) -> None:
    asks: list[Callable[..., object]] = [limiter.acquire, limiter.peek, limiter.status, limiter.reset, limiter.resume]
    asks += [partial(limiter.pause, duration=1), partial(limiter.settle, taken=1, actual=2)]
    for ask in asks:
        with pytest.raises(ConfigurationError, match=r"^bucket 'api': key must be a string, not "):
            ask("api", key=key)


@pytest.mark.parametrize(
    "buckets",
    [
        [Bucket(cast("str", ["x"]), API.limits)],
        {1: None},
        {None: API},
        {"api": 5},
        {"api": API.limits[0]},
        ["api"],
        [None],
    ],
)
def test_what_is_no_bucket_is_a_sentence(buckets: list[Bucket]) -> None:
    with pytest.raises(ConfigurationError, match=r"^buckets must be Bucket objects by name "):
        Limiter(buckets, MemoryStore())


def test_a_huge_name_is_told_shortly(limiter: Limiter) -> None:
    with pytest.raises(ConfigurationError) as caught:
        limiter.acquire("x" * 10_000_000)
    assert len(str(caught.value)) < 300
    limiter.buckets.update((f"bucket{number}", None) for number in range(10_000))
    with pytest.raises(ConfigurationError, match=r"declared are: api, .*, bucket14, \.\.\.$"):
        limiter.acquire("nothing like it")


@pytest.mark.parametrize("method", ["acquire", "peek", "wait", "wait_async", "status", "reset", "charges"])
def test_an_unknown_bucket_is_a_sentence(limiter: Limiter, method: str) -> None:
    def ask(name: str) -> str:
        with pytest.raises(ConfigurationError) as caught:
            asyncio.run(limiter.wait_async(name)) if method == "wait_async" else getattr(limiter, method)(name)
        return str(caught.value)

    assert ask("opi") == "bucket 'opi' is not declared in the setting buckets; did you mean 'api'?"
    assert ask("x" * 9) == (
        "bucket 'xxxxxxxxx' is not declared in the setting buckets; declared are: api, other, slow, twice, off"
    )
    limiter.buckets.clear()
    assert ask("api") == "bucket 'api' is not declared in the setting buckets; declared are: none"


def test_one_unknown_bucket_among_others_takes_nothing(limiter: Limiter) -> None:
    with pytest.raises(ConfigurationError, match=r"'slaw' .* did you mean 'slow'"):
        limiter.acquire({"api": 1, "slaw": 1})
    assert limiter.status("api").limits[0].tokens == 5


def test_buckets_may_be_a_mapping_or_a_list() -> None:
    assert Limiter([API, SLOW], MemoryStore()).buckets == Limiter({"api": API, "slow": SLOW}, MemoryStore()).buckets


@pytest.mark.parametrize("buckets", [[API, OTHER, Bucket("api", (Limit(1, 1),))], {"api": API, "alias": API}])
def test_a_bucket_has_one_name_and_a_name_one_bucket(buckets: Mapping[str, Bucket | None]) -> None:
    with pytest.raises(ConfigurationError, match=r"^bucket 'api' is declared "):
        Limiter(buckets, MemoryStore())


def test_a_faster_limit_that_is_added_gives_the_slow_one_no_tokens(limiter: Limiter) -> None:
    daily = Limit(1000, 0.01)
    assert Limiter([Bucket("new", (daily,))], limiter.store).acquire("new", 1000)
    both = Limiter([Bucket("new", (Limit(10, 10), daily))], limiter.store)
    decision = both.acquire("new")
    assert (bool(decision), decision.limit, decision.wait) == (False, daily, 100.0)


# -- what is not limited


def test_what_is_not_limited_asks_no_store() -> None:
    limiter = Limiter({"off": None, "out": None}, Mock(spec=["clock"], clock=FakeClock(7)))
    for ask in limiter.acquire, limiter.peek, limiter.wait, lambda bucket: asyncio.run(limiter.wait_async(bucket)):
        for bucket in "off", {"off": 1e9, "out": 1}:
            decision = ask(bucket)
            assert decision
            assert (decision.wait, decision.tokens, decision.limit, decision.now) == (0.0, math.inf, None, 7)
        assert ask("off").bucket == "off"
        assert pickle.loads(pickle.dumps(ask("off"))) == ask("off")  # noqa: S301
        assert repr(ask("off")) == "Decision(allowed=True, wait=0.0, tokens=inf, bucket='off', limit=None)"
    assert limiter.charges("off") == ()
    assert limiter.status("off") == Status("off", (), 0)
    assert limiter.reset("off") == 0


# -- looking without taking


def test_peek_answers_as_acquire_would_and_takes_nothing(limiter: Limiter) -> None:
    for tokens in range(5, -1, -1):
        for cost in range(1, 6):
            peeks = [limiter.peek("api", cost) for _ in range(10)]
            assert {(bool(peek), peek.tokens, peek.wait) for peek in peeks} == {
                (cost <= tokens, tokens, 2.0 * max(0, cost - tokens))
            }
        assert limiter.acquire("api") == limiter.peek("api") or tokens > 0
    assert limiter.peek({"other": 1, "api": 1}).bucket == "api"
    assert limiter.peek({"other": 1, "api": 1}) == limiter.acquire({"other": 1, "api": 1})
    assert limiter.status("other").keys == 0


def test_status_shows_a_bucket_that_was_never_used(limiter: Limiter) -> None:
    # Case 90.
    expected = Status("api", (LimitStatus(API.limits[0], tokens=5.0, wait=0.0, waiting=0.0),), keys=0)
    assert limiter.status("api") == expected
    assert limiter.status("api", key="somebody") == expected
    assert limiter.store.survey([API])[1][API.name] == []


def test_status_shows_tokens_turns_and_keys(limiter: Limiter, clock: Alarm) -> None:
    assert limiter.acquire("api", 4.5)
    assert limiter.acquire("api", key="somebody")
    clock.advance(SECOND // 2)
    (limit,) = limiter.status("api").limits
    assert (limit.limit, limit.tokens, limit.wait, limit.waiting) == (API.limits[0], 0.75, 0.5, 0.0)
    assert limiter.status("api").keys == 2
    assert not limiter.acquire("api", 2, place=Place())
    assert limiter.status("api").limits[0].waiting == 2.0
    clock.advance(3 * SECOND)
    assert limiter.status("api").keys == 1
    assert pickle.loads(pickle.dumps(limiter.status("api"))) == limiter.status("api")  # noqa: S301


def test_status_of_several_limits_and_small_capacities() -> None:
    limiter = Limiter([TWICE, Bucket("half", (Limit(0.5, 1),))], MemoryStore(FakeClock()))
    limiter.acquire("twice", 10)
    assert [(each.limit, each.tokens, each.wait) for each in limiter.status("twice").limits] == [
        (Limit(10, 10), 0.0, 0.1),
        (Limit(12, 0.001), 2.0, 0.0),
    ]
    limiter.acquire("half", 0.5)
    assert limiter.status("half").limits[0].wait == 0.5


# -- reset


def test_reset_fills_a_bucket_with_all_its_keys_or_one(limiter: Limiter) -> None:
    for key in None, "a", "b":
        assert limiter.acquire("slow", key=key)
    assert limiter.acquire("api", 5)
    assert limiter.reset("slow", key="a") == 1
    assert [bool(limiter.acquire("slow", key=key)) for key in ("a", "b", None)] == [True, False, False]
    assert limiter.reset("slow") == 3
    assert [bool(limiter.acquire("slow", key=key)) for key in ("a", "b", None)] == [True, True, True]
    assert not limiter.acquire("api")
    assert limiter.reset("twice") == 0
    limiter.acquire("twice")
    assert limiter.reset("twice") == 2


def test_reset_ends_the_line(limiter: Limiter) -> None:
    assert [limiter.acquire("slow", place=Place()).wait for _ in range(4)] == [0, 1000, 2000, 3000]
    limiter.reset("slow")
    assert limiter.acquire("slow", place=Place())


# -- charges


def test_charges_are_what_a_call_draws(limiter: Limiter) -> None:
    assert limiter.charges("api", 3, key="k") == (Charge("api", "k", 0, API.limits[0], 6 * SECOND),)
    assert limiter.charges({"twice": 0.5, "off": 1, "slow": 1}) == (
        Charge("twice", None, 1, Limit(10, 10), SECOND // 20),
        Charge("twice", None, 0, Limit(12, 0.001), 500 * SECOND),
        Charge("slow", None, 0, SLOW.limits[0], 1000 * SECOND),
    )


def test_a_limiter_remembers_a_bounded_number_of_calls(monkeypatch: pytest.MonkeyPatch, clock: Alarm) -> None:
    monkeypatch.setattr(limiter_module, "REMEMBERED", 10)
    limiter = Limiter(BUCKETS, MemoryStore(clock))
    assert sum(bool(limiter.acquire("slow", key=str(number % 25))) for number in range(100)) == 25
    assert len(limiter._charges) <= 10  # noqa: SLF001


def test_keys_that_are_full_again_are_forgotten(limiter: Limiter, clock: Alarm) -> None:
    # Case 100.
    for number in range(30_000):
        assert limiter.acquire("other", key=str(number))
        clock.advance(SECOND // 10)
    assert len(limiter.store.survey([OTHER])[1][OTHER.name]) < 10_000
    assert limiter.status("other").keys <= 10


# -- waiting


def test_waiting_sleeps_until_the_turn_and_no_longer(limiter: Limiter, clock: Alarm) -> None:
    instants = []
    for _ in range(8):
        assert limiter.wait("api")
        instants.append(passed(clock))
    assert instants == [0, 0, 0, 0, 0, 2, 4, 6]
    assert clock.naps == [2, 2, 2]
    assert limiter.wait({"api": 2, "other": 5})
    assert passed(clock) == 10


def test_waiting_with_a_clock_that_wakes_too_early(limiter: Limiter, clock: Alarm) -> None:
    limiter.acquire("api", 5)
    clock.meanwhile = lambda: clock.advance(-SECOND // 2 if len(clock.naps) == 1 else 0)
    assert limiter.wait("api")
    assert (clock.naps, passed(clock)) == ([2.0, 0.5], 2.0)


@pytest.mark.parametrize("timeout", [0, 0.5, 1.999999999, -1, -0.0])
def test_a_timeout_too_short_is_told_at_once_and_leaves_the_line_alone(
    timeout: float, limiter: Limiter, clock: Alarm
) -> None:
    limiter.acquire("api", 5)
    for decision in (
        limiter.wait("api", timeout=timeout),
        asyncio.run(limiter.wait_async("api", timeout=timeout)),
        limiter.wait({"other": 1, "api": 1}, timeout=timeout),
    ):
        assert (bool(decision), decision.wait, decision.bucket) == (False, 2.0, "api")
    assert (clock.naps, passed(clock)) == ([], 0.0)
    assert limiter.status("api").limits[0].waiting == 0
    assert limiter.wait("api", timeout=2)
    assert passed(clock) == 2.0


@pytest.mark.parametrize("timeout", [None, math.inf, 1e300, 10**30, 1000])
def test_a_timeout_that_is_long_enough(timeout: float | None, limiter: Limiter, clock: Alarm) -> None:
    limiter.acquire("slow")
    assert limiter.wait("slow", timeout=timeout)
    assert clock.naps == [1000.0]


@pytest.mark.parametrize("timeout", [math.nan, "x", "1", True, False, [], 1j])
def test_a_timeout_that_is_no_number(limiter: Limiter, timeout: float) -> None:
    for wait in limiter.wait, lambda *args, **options: asyncio.run(limiter.wait_async(*args, **options)):
        with pytest.raises(ConfigurationError, match=r"^timeout must be a number of seconds, not "):
            wait("slow", timeout=timeout)
    assert limiter.acquire("slow")


def test_a_timeout_of_nothing_takes_what_is_there(limiter: Limiter) -> None:
    assert [bool(limiter.wait("api", timeout=0)) for _ in range(6)] == [True] * 5 + [False]


def test_who_loses_the_token_to_a_plain_caller_waits_on(limiter: Limiter, clock: Alarm) -> None:
    limiter.acquire("slow")

    def steal() -> None:
        if len(clock.naps) == 1:
            clock.advance(1000 * SECOND)
            assert limiter.acquire("slow")
            clock.advance(-1000 * SECOND)

    clock.meanwhile = steal
    assert limiter.wait("slow")
    assert passed(clock) == 2000


def test_who_loses_the_token_does_not_wait_beyond_its_timeout(limiter: Limiter, clock: Alarm) -> None:
    limiter.acquire("slow")

    def steal() -> None:
        clock.advance(1000 * SECOND)
        assert limiter.acquire("slow")
        clock.advance(-1000 * SECOND)

    clock.meanwhile = steal
    decision = limiter.wait("slow", timeout=1999)
    assert (bool(decision), passed(clock), clock.naps) == (False, 1000.0, [1000.0])
    assert 0 < decision.wait <= 2000


# -- asyncio


@pytest.mark.parametrize(("capacity", "rate"), [(1, 10), (5, 10), (50, 1000), (5, 0.001)])
def test_many_coroutines_come_in_order(capacity: int, rate: float, clock: Alarm) -> None:
    limiter = Limiter([Bucket("api", (Limit(capacity, rate),))], MemoryStore(clock))
    order: list[int] = []

    async def waiter(number: int) -> Decision:
        decision = await limiter.wait_async("api")
        order.append(number)
        return decision

    decisions = asyncio.run(clock.run(*(waiter(number) for number in range(200))))
    assert all(decisions)
    assert order == list(range(200))
    at_once = [START] * capacity
    assert [decision.now for decision in decisions] == at_once + [
        START + turn * round(SECOND / rate) for turn in range(1, 201 - capacity)
    ]
    assert not clock.naps, "the loop was held"


def test_coroutines_of_several_buckets_use_all_of_the_scarce_one(limiter: Limiter, clock: Alarm) -> None:
    decisions = asyncio.run(clock.run(*(limiter.wait_async({"api": 1, "other": 1}) for _ in range(50))))
    assert all(decisions)
    assert passed(clock) == 90


def test_a_coroutine_that_is_cancelled_holds_nobody_up(limiter: Limiter, clock: Alarm) -> None:
    async def scene() -> None:
        limiter.acquire("other", 5)
        gone = [asyncio.create_task(limiter.wait_async("other")) for _ in range(20)]
        await clock.settle(gone)
        for task in gone:
            task.cancel()
        await asyncio.wait(gone)
        clock.advance(OTHER.limits[0].span + UNCLAIMED + UNCLAIMED_TURNS * SECOND)
        before = clock.now()
        assert all(await clock.run(*(limiter.wait_async("other") for _ in range(5))))
        assert clock.now() == before

    asyncio.run(scene())


def test_the_loop_goes_on_while_a_coroutine_waits() -> None:
    limiter = Limiter([Bucket("api", (Limit(1, 20),))], MemoryStore(SystemClock()))

    async def scene() -> tuple[int, list[Decision]]:
        ticks = 0
        waiters = asyncio.gather(*(limiter.wait_async("api") for _ in range(4)))
        while not waiters.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return ticks, await waiters

    ticks, decisions = asyncio.run(scene())
    assert ticks >= 4
    assert all(decisions)
    assert decisions[-1].now - decisions[0].now >= 3 * SECOND // 20


# -- threads


@pytest.mark.usefixtures("restless")
def test_threads_take_each_token_once(clock: Alarm) -> None:
    limiter = Limiter([Bucket("api", (Limit(100, 0.001),)), OTHER], MemoryStore(clock))

    def work(number: int) -> int:
        return sum(bool(limiter.acquire("api", key=f"{number % 2}-{attempt % 5}")) for attempt in range(500))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(16))) == 10 * 100


def test_threads_that_wait_stay_within_the_bound() -> None:
    capacity, rate = 2, 200
    limiter = Limiter([Bucket("api", (Limit(capacity, rate),))], MemoryStore(SystemClock()))
    with ThreadPoolExecutor(8) as pool:
        decisions = list(pool.map(lambda _: limiter.wait("api"), range(40)))
    assert all(decisions)
    instants = sorted(decision.now for decision in decisions)
    for first, start in enumerate(instants):
        for last, end in enumerate(instants[first:], first):
            assert last - first + 1 <= capacity + rate * Fraction(end - start, SECOND)


# -- forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_is_inside_the_memory_store() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Inside(SystemClock):
        """A clock at which one thread lingers: the store reads it while it holds its lock."""

        def __init__(self) -> None:
            super().__init__()
            look = self.now

            def now() -> int:
                if threading.current_thread() is thread:
                    entered.set()
                    assert leave.wait(60)
                return look()

            self.now = now

    limiter = Limiter([SLOW], MemoryStore(Inside()))
    thread = threading.Thread(target=limiter.acquire, args=("slow",))
    thread.start()
    assert entered.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(30)  # ends a child that waits for a thread that it does not have
        os._exit(0 if limiter.acquire("slow") else 1)
    _, status = os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert not limiter.acquire("slow"), "the parent's thread got the token of the parent's store"


# -- what it takes to import it


def test_asking_a_bucket_imports_neither_celery_nor_pydantic() -> None:
    code = """
import sys
from tb_celery import Bucket, Limit, Limiter
from tb_celery.stores.memory import MemoryStore
assert Limiter([Bucket("api", (Limit(5, 0.5),))], MemoryStore()).acquire("api")
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"celery", "kombu", "pydantic", "filelock", "redis"}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(tb_celery.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
