"""What every store promises, whatever it is made of."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from private_redis import redis_store

from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND, Bucket, Limit
from tb_celery.clock import Clock, FakeClock, SystemClock
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from pathlib import Path

    from tb_celery.arithmetic import Decision
    from tb_celery.bucket import Charge
    from tb_celery.stores import Store

MS = SECOND // 1000
HOUR = 3600 * SECOND
BOOT = 17 * HOUR

MakeStore = Callable[[Clock], "Store"]


@pytest.fixture(params=["memory", "file", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """A store with nothing in it yet."""
    makers: dict[str, MakeStore] = {
        "memory": MemoryStore,
        "file": lambda clock: FileStore(tmp_path / "state", clock),
        "redis": lambda clock: redis_store(request.getfixturevalue("server"), clock),
    }
    return makers[request.param]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(BOOT)


@pytest.fixture
def store(make_store: MakeStore, clock: FakeClock) -> Store:
    return make_store(clock)


def one(name: str, capacity: float = 5, rate: float | Fraction = 0.5) -> Bucket:
    return Bucket(name, (Limit(capacity, rate),))


def charges(*buckets: Bucket, cost: float = 1, key: str | None = None) -> list[Charge]:
    return [charge for bucket in buckets for charge in bucket.draw(key, bucket.charge(cost))]


def ask(
    store: Store, *buckets: Bucket, cost: float = 1, key: str | None = None, place: Place | None = None
) -> Decision:
    return store.acquire(charges(*buckets, cost=cost, key=key), place)


def tokens(store: Store, bucket: Bucket, key: str | None = None) -> float:
    now, _, [state] = store.read(charges(bucket, key=key))
    return bucket.limits[0].tokens(state.full_at, now)


API = one("api")
OTHER = one("other")


# -- one bucket


def test_a_burst_is_granted_and_then_refused_with_the_exact_wait(store: Store) -> None:
    burst = [ask(store, API) for _ in range(5)]
    assert all(burst)
    assert [decision.tokens for decision in burst] == [4, 3, 2, 1, 0]
    refusal = ask(store, API)
    assert not refusal
    assert (refusal.wait, refusal.tokens, refusal.bucket, refusal.limit) == (2.0, 0, "api", API.limits[0])


def test_a_refusal_changes_nothing(store: Store) -> None:
    ask(store, API, cost=5)
    refusals = [ask(store, API) for _ in range(50)]
    assert all(refusal == refusals[0] for refusal in refusals)


@pytest.mark.parametrize("rate", [Fraction(1, 604_800), 0.3, 7.3, 33.3, 1000, 1_000_000])
def test_whoever_waits_as_told_is_granted_and_a_nanosecond_sooner_is_not(
    store: Store, clock: FakeClock, rate: float | Fraction
) -> None:
    bucket = one("api", 1, rate)
    assert ask(store, bucket)
    for _ in range(20):
        refusal = ask(store, bucket)
        clock.advance(refusal.at - refusal.now - 1)
        assert not ask(store, bucket)
        clock.advance(1)
        assert ask(store, bucket)


def test_polling_loses_no_fraction(store: Store, clock: FakeClock) -> None:
    # Case 39.
    ask(store, API, cost=5)
    granted = []
    for ms in range(1, 10_001):
        clock.advance(MS)
        if ask(store, API):
            granted.append(ms)
    assert granted == [2000, 4000, 6000, 8000, 10_000]


# -- several limits, buckets and keys


def test_several_buckets_are_taken_from_together_or_not_at_all(store: Store) -> None:
    # Case 36.
    ask(store, OTHER, cost=5)
    refusal = ask(store, API, OTHER)
    assert not refusal
    assert refusal.bucket == "other"
    assert tokens(store, API) == 5
    assert (tokens(store, API), tokens(store, OTHER)) == (5, 0)


def test_of_several_limits_the_one_that_binds_refuses(store: Store, clock: FakeClock) -> None:
    bucket = Bucket("api", (Limit(2, 1), Limit(3, Fraction(3, 3600))))
    assert ask(store, bucket, cost=2)
    assert ask(store, bucket).limit == bucket.limits[0]
    clock.advance(SECOND)
    assert ask(store, bucket)
    clock.advance(10 * SECOND)
    refusal = ask(store, bucket)
    assert refusal.limit == bucket.limits[1]
    assert refusal.wait == 1200 - 11


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (("api", None), ("other", None)),
        (("api", "a"), ("api", "b")),
        (("api", None), ("api", "")),
        (("api", None), ("api", "None")),
        (("api", None), ("api", "-")),
        (("a", "b:c"), ("a:b", "c")),
        (("a1:b", None), ("a", "b")),
        (("1:a", "b"), ("1:a1:b", None)),
        (("api", "é"), ("api", "e\N{COMBINING ACUTE ACCENT}")),
        (("api", "\udcff"), ("api", "\ufffd")),
        (("api", "x" * 10_000), ("api", "x" * 10_001)),
        (("api", "\0"), ("api", "\0\0")),
    ],
)
def test_buckets_and_keys_are_independent(
    store: Store, mine: tuple[str, str | None], theirs: tuple[str, str | None]
) -> None:
    # Case 97.
    assert ask(store, one(mine[0]), cost=5, key=mine[1])
    assert tokens(store, one(theirs[0]), theirs[1]) == 5
    assert ask(store, one(theirs[0]), cost=5, key=theirs[1])
    assert not ask(store, one(mine[0]), key=mine[1])
    assert not ask(store, one(theirs[0]), key=theirs[1])


@pytest.mark.parametrize("seed", range(4))
def test_every_store_answers_as_a_dictionary_would(make_store: MakeStore, seed: int) -> None:
    """Thousands of asks over so many keys that full buckets are forgotten and what they left is used again."""
    dice, clock = random.Random(seed), FakeClock(BOOT)
    store, plain = make_store(clock), MemoryStore(clock)
    buckets = [
        one("slow", 2, 0.2),
        one("fast", 3, 7.3),
        Bucket("both", (Limit(2, 5), Limit(4, 0.5))),
    ]
    for _ in range(1500):
        clock.advance(dice.choice([0, 0, 1, MS, 50 * MS, SECOND]))
        asked = [
            charge
            for bucket in dice.sample(buckets, dice.randint(1, 3))
            for charge in charges(bucket, cost=dice.randint(1, 2), key=str(dice.randrange(60)))
        ]
        place = dice.choice([None, None, Place(), Place(clock.now())])
        assert store.acquire(asked, place) == plain.acquire(asked, place)


# -- turns


def test_the_refused_get_turns_of_their_own_and_run_at_them(store: Store, clock: FakeClock) -> None:
    line = [ask(store, API, place=Place()) for _ in range(9)]
    assert [decision.wait for decision in line] == [0, 0, 0, 0, 0, 2.0, 4.0, 6.0, 8.0]
    assert [decision.booked for decision in line[5:]] == [True] * 4
    for decision in line[5:]:
        clock.advance(decision.at - clock.now())
        assert ask(store, API, place=Place(decision.at))


def test_a_newcomer_does_not_overtake_the_line(store: Store, clock: FakeClock) -> None:
    ask(store, API, cost=5)
    first = ask(store, API, place=Place())
    clock.advance(2 * SECOND)
    assert ask(store, API, place=Place()).wait == 2.0
    assert ask(store, API, place=Place(first.at))


def test_who_asks_before_its_turn_keeps_it_and_moves_nobody(store: Store, clock: FakeClock) -> None:
    # Case 13.
    ask(store, API, cost=5)
    mine = ask(store, API, place=Place())
    for _ in range(50):
        clock.advance(MS)
        again = ask(store, API, place=Place(mine.at))
        assert (again.at, again.booked) == (mine.at, True)
    assert ask(store, API, place=Place()).at == mine.at + 2 * SECOND


def test_a_turn_is_no_token(store: Store, clock: FakeClock) -> None:
    ask(store, API, cost=5)
    mine = ask(store, API, place=Place())
    clock.advance(mine.at - clock.now())
    assert ask(store, API), "a plain caller takes what is there"
    late = ask(store, API, place=Place(mine.at))
    assert not late
    assert late.wait == 2.0


def test_a_turn_is_never_sooner_than_the_asker_can_be_back(store: Store) -> None:
    bucket = one("api", 5, 50)
    ask(store, bucket, cost=5)
    turns = [ask(store, bucket, place=Place(soonest=100 * MS)).at - BOOT for _ in range(7)]
    assert turns == [100 * MS] * 5 + [120 * MS, 140 * MS]


def test_a_turn_that_is_too_far_off_is_not_booked(store: Store) -> None:
    ask(store, API, cost=5)
    for _ in range(3):
        refusal = ask(store, API, place=Place(longest=SECOND))
        assert (refusal.wait, refusal.booked) == (2.0, False)
    assert ask(store, API, place=Place(longest=2 * SECOND)).booked


def test_one_turn_is_booked_over_all_buckets_of_a_call(store: Store, clock: FakeClock) -> None:
    slow = one("slow", 1, 0.1)
    ask(store, slow, API)
    mine = ask(store, slow, API, place=Place())
    assert (mine.wait, mine.bucket) == (10.0, "slow")
    clock.advance(mine.at - clock.now())
    assert ask(store, slow, API, place=Place(mine.at))


# -- looking


def test_looking_takes_nothing_and_leaves_nothing(store: Store) -> None:
    # Case 90.
    for _ in range(10):
        assert tokens(store, API) == 5
        assert store.survey([API])[1][API.name] == []
    assert store.reset(API) == 0
    ask(store, API, cost=2)
    for _ in range(10):
        assert tokens(store, API) == 3
        assert len(store.survey([API])[1][API.name]) == 1
    assert ask(store, API, cost=3)


def test_reading_tells_the_instant_and_the_state_of_each_limit(store: Store, clock: FakeClock) -> None:
    bucket = Bucket("api", (Limit(2, 1), Limit(30, 0.1)))
    ask(store, bucket)
    ask(store, bucket)
    clock.advance(SECOND)
    now, _, states = store.read(charges(bucket))
    assert now == BOOT + SECOND
    assert [(state.full_at, state.interval, state.span) for state in states] == [
        (BOOT + 2 * SECOND, SECOND, 2 * SECOND),
        (BOOT + 20 * SECOND, 10 * SECOND, 300 * SECOND),
    ]


def test_a_survey_shows_every_limit_and_key_of_the_buckets_that_are_asked_for(store: Store) -> None:
    both = Bucket("both", (Limit(2, 1), Limit(30, 0.1)))
    for key in [None, "a", "b", *map(str, range(200))]:
        ask(store, both, key=key)
        ask(store, OTHER, key=key)
        ask(store, API, key=key)
    now, states = store.survey([both, OTHER])
    assert now == BOOT
    assert {name: sorted(found) for name, found in states.items()} == {
        each.name: sorted(store.read(charges(each))[2] * 203) for each in (both, OTHER)
    }
    assert store.survey([API])[1].keys() == {"api"}
    assert store.survey([])[1] == {}


# -- reset


def test_a_reset_bucket_is_full_and_no_other_is(store: Store) -> None:
    for bucket in (API, OTHER):
        for key in (None, "a"):
            ask(store, bucket, cost=5, key=key)
    assert store.reset(API) == 2
    assert [tokens(store, API, key) for key in (None, "a")] == [5, 5]
    assert [tokens(store, OTHER, key) for key in (None, "a")] == [0, 0]
    assert ask(store, API, cost=5)
    assert store.reset(API) == 1


def test_one_key_can_be_reset(store: Store) -> None:
    bucket = Bucket("api", (Limit(5, 1), Limit(5, 0.1)))
    for key in (None, "a", "b"):
        ask(store, bucket, cost=5, key=key)
    assert store.reset(bucket, "a") == 2
    assert [bool(ask(store, bucket, key=key)) for key in (None, "a", "b")] == [False, True, False]


def test_a_reset_ends_the_line(store: Store) -> None:
    ask(store, API, cost=5)
    ask(store, API, place=Place())
    store.reset(API)
    assert ask(store, API, cost=5, place=Place())


# -- what changes underneath


def test_callers_that_disagree_on_the_numbers_make_no_tokens(store: Store, clock: FakeClock) -> None:
    # Case 93.
    small, large = one("api", 5, 2), one("api", 50, 3)
    grants = []
    for _ in range(1000):
        for bucket in (small, large):
            if decision := ask(store, bucket):
                grants.append((decision.now, 1))
                assert decision.tokens < bucket.limits[0].capacity
        clock.advance(10 * MS)
    assert first_violation(grants, 5, 2) is None
    assert len(grants) == int(5 + 9.99 * 2)


def test_a_limit_holds_when_a_slower_one_is_lowered_and_then_dropped(store: Store) -> None:
    second, daily, lowered = (
        Limit(capacity, Fraction(capacity, w)) for capacity, w in ((10, 10), (1000, 86_400), (9, 86_400))
    )
    assert ask(store, Bucket("api", (second, daily)), cost=10)
    assert not ask(store, Bucket("api", (second, lowered)))
    assert not ask(store, Bucket("api", (second,)))
    assert not ask(store, Bucket("api", (second, daily, lowered)))
    assert not ask(store, Bucket("api", (second,)))


def test_a_key_that_does_not_bind_is_not_held_up_by_one_that_does(store: Store) -> None:
    """One call draws from two keys of one bucket: the turn that it waits for is the one key's."""
    ask(store, API, cost=5, key="busy")
    both = charges(API, key="busy") + charges(API, key="idle")
    first, second = (store.acquire(both, Place()) for _ in range(2))
    assert (first.booked, second.booked) == (True, True)
    assert second.at - first.at == 2 * SECOND
    assert all(ask(store, API, key="idle", place=Place()) for _ in range(5))


def test_turns_booked_ahead_in_an_idle_bucket_are_not_taken_for_lost(store: Store, clock: FakeClock) -> None:
    ask(store, API)
    clock.advance(HOUR)
    many = [charge._replace(cost=10 * charge.cost) for charge in charges(API)]
    ends = [store.acquire(many, Place(ahead=10)).at for _ in range(2)]
    assert [at - clock.now() for at in ends] == [10 * SECOND, 30 * SECOND]


def test_what_is_full_by_other_numbers_is_not_forgotten(store: Store, clock: FakeClock) -> None:
    """One process counts a thousand a day, another five at ten a second; meanwhile others need room."""
    daily, quick = one("api", 1000, Fraction(1000, 86_400)), one("api", 5, 10)
    assert ask(store, daily, cost=1000)
    ask(store, quick)
    clock.advance(SECOND)
    for number in range(1100):
        ask(store, OTHER, key=str(number))
    clock.advance(60 * SECOND)  # by then nobody heeds the smaller capacity, and 615 tokens have come
    assert not ask(store, daily, cost=620)


@pytest.mark.parametrize("back", [1, SECOND, 12 * HOUR])
def test_a_clock_that_is_set_back_stops_nobody_for_longer_than_from_empty(
    store: Store, clock: FakeClock, back: int
) -> None:
    ask(store, API, cost=5)
    clock.advance(-back)
    refusal = ask(store, API)
    assert not refusal
    assert 2.0 <= refusal.wait < 4.0 + 1e-6
    clock.advance(refusal.at - refusal.now)
    assert ask(store, API)


def test_a_clock_that_jumps_ahead_fills_the_bucket_and_no_more(store: Store, clock: FakeClock) -> None:
    # Case 46.
    ask(store, API, cost=5)
    clock.advance(8 * HOUR)
    assert tokens(store, API) == 5
    assert ask(store, API, cost=5)
    assert not ask(store, API)


# -- threads


def test_threads_share_one_exact_quota(store: Store) -> None:
    bucket, threads = one("api", 100), 8
    together, granted = threading.Barrier(threads), []

    def hammer() -> None:
        together.wait()
        granted.append(sum(bool(ask(store, bucket)) for _ in range(50)))

    run_in_threads(hammer, threads)
    assert sum(granted) == 100


def test_threads_on_the_real_clock_keep_within_every_window(make_store: MakeStore) -> None:
    store, limit = make_store(SystemClock()), one("api", 7, 3333.3)
    grants: list[tuple[int, int]] = []

    def hammer() -> None:
        decisions = [ask(store, limit) for _ in range(400)]
        grants.extend((decision.now, 1) for decision in decisions if decision)

    run_in_threads(hammer, 4)
    assert len(grants) >= 7
    assert first_violation(grants, 7, 3333.3) is None


def run_in_threads(work: Callable[[], None], number: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
