"""What is ordered about a bucket while it runs, and what is settled afterwards: the same in every store."""

from __future__ import annotations

from fractions import Fraction
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from private_redis import redis_store

from tb_celery.arithmetic import Place
from tb_celery.bucket import LONGEST_PAUSE, SECOND, Bucket, Charge, Limit, pause
from tb_celery.clock import FakeClock
from tb_celery.errors import StoreError
from tb_celery.limiter import Limiter
from tb_celery.state import State
from tb_celery.stores import finding, record, table, upkeep
from tb_celery.stores.file import FileStore
from tb_celery.stores.hosting import read_at, write_at
from tb_celery.stores.memory import MemoryStore
from tb_celery.stores.orders import NONE, change, since
from tb_celery.stores.redis import RedisStore
from tb_celery.stores.upkeep import StateFile
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tb_celery.arithmetic import Decision
    from tb_celery.stores import Store

MS = SECOND // 1000
MINUTE, HOUR = 60 * SECOND, 3600 * SECOND
API = Bucket("api", (Limit(5, 0.5),))
OTHER = Bucket("other", (Limit(5, 0.5),))
FASTER = Limit(5, 5)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(17 * HOUR)


@pytest.fixture(params=["memory", "file", "redis"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> list[Store]:
    """The same store as two processes have it open, or one where only one can."""
    if request.param == "memory":
        return [MemoryStore(clock)] * 2
    if request.param == "file":
        return [FileStore(tmp_path / "state", clock) for _ in range(2)]
    first, second = (redis_store(request.getfixturevalue("server"), clock) for _ in range(2))
    second.prefix, second.marker = first.prefix, first.marker
    return [first, second]


@pytest.fixture
def store(stores: list[Store]) -> Store:
    return stores[0]


def charges(*buckets: Bucket, cost: float = 1, key: str | None = None) -> tuple[Charge, ...]:
    return tuple(charge for bucket in buckets for charge in bucket.draw(key, bucket.charge(cost)))


def ask(
    store: Store, *buckets: Bucket, cost: float = 1, key: str | None = None, place: Place | None = None
) -> Decision:
    return store.acquire(charges(*buckets, cost=cost, key=key), place)


def tokens(store: Store, bucket: Bucket = API, key: str | None = None) -> float:
    now, [charge], [state] = store.read(charges(bucket, key=key))
    return charge.limit.tokens(state.full_at, now)


# -- pauses


def test_a_paused_bucket_refuses_everybody_until_it_ends(stores: list[Store], clock: FakeClock) -> None:
    giver, asker = stores
    known = charges(API)
    assert asker.acquire(known)
    giver.order(pause("api", None), 120 * SECOND)
    until = giver.orders(API)[1].paused[None]
    for key in (None, "a"):
        refusal = ask(asker, API, key=key)
        assert (bool(refusal), refusal.paused, refusal.limit, refusal.tokens) == (False, True, None, 0.0)
        assert refusal.at == until
    assert not asker.acquire(known)
    assert ask(asker, OTHER)
    assert not ask(asker, OTHER, API)
    clock.advance(until - clock.now() - 1)
    assert not asker.acquire(known)
    clock.advance(1)
    assert asker.acquire(known)
    assert [bool(ask(asker, API)) for _ in range(5)] == [True] * 4 + [False]
    assert asker.orders(API)[1].paused == {}


def test_one_key_can_be_paused(store: Store) -> None:
    store.order(pause("api", "a"), SECOND)
    assert [bool(ask(store, API, key=key)) for key in (None, "a", "b")] == [True, False, True]
    assert set(store.orders(API, "a")[1].paused) == {"a"}
    assert store.orders(API)[1].paused == {}


def test_a_pause_is_never_shortened_but_ended(stores: list[Store], clock: FakeClock) -> None:
    giver, asker = stores
    giver.order(pause("api", None), 60 * SECOND)
    until = asker.orders(API)[1].paused[None]
    giver.order(pause("api", None), 10 * SECOND)
    assert asker.orders(API)[1].paused[None] == until
    giver.order(pause("api", None), 90 * SECOND)
    assert asker.orders(API)[1].paused[None] > until
    giver.order(pause("api", None), 0)
    assert ask(asker, API)
    clock.advance(HOUR)
    giver.order(pause("api", None), SECOND)
    assert not ask(asker, API)


def test_a_pause_that_was_ended_does_not_stand_again_when_the_clock_is_set_back(
    stores: list[Store], clock: FakeClock
) -> None:
    giver, asker = stores
    giver.order(pause("api", None), HOUR)
    clock.advance(HOUR // 2)
    giver.order(pause("api", None), 0)
    assert ask(asker, OTHER)
    clock.advance(-HOUR // 4)
    assert all(store.orders(API)[1].paused == {} for store in stores)
    assert ask(asker, API)


def test_turns_that_are_given_in_a_pause_begin_at_its_end_and_are_spaced(store: Store, clock: FakeClock) -> None:
    """Whoever waits comes back once: the tokens that are there by then first, then at the rate."""
    store.order(pause("api", None), 60 * SECOND)
    until = store.orders(API)[1].paused[None]
    turns = [ask(store, API, place=Place()) for _ in range(8)]
    assert all(turn.booked for turn in turns)
    assert [turn.at - until for turn in turns] == [0] * 5 + [2 * SECOND, 4 * SECOND, 6 * SECOND]
    for turn in turns:
        clock.advance(max(0, turn.at - clock.now()))
        assert ask(store, API, place=Place(turn.at))


def test_a_pause_of_all_keys_spaces_the_turns_of_each(store: Store) -> None:
    store.order(pause("api", None), 60 * SECOND)
    until = store.orders(API)[1].paused[None]
    for key in ("a", "b"):
        turns = [ask(store, API, key=key, place=Place()).at - until for _ in range(7)]
        assert turns == [0] * 5 + [2 * SECOND, 4 * SECOND]


def test_turns_that_are_given_all_through_a_pause_are_spaced(store: Store, clock: FakeClock) -> None:
    """The bucket is full for a long time, and yet nobody has lost a turn."""
    store.order(pause("api", None), 600 * SECOND)
    until = store.orders(API)[1].paused[None]
    turns = []
    for _ in range(10):
        turns.append(ask(store, API, place=Place()).at - until)
        clock.advance(30 * SECOND)
    assert turns == [0] * 5 + [2 * SECOND * number for number in range(1, 6)]


@pytest.mark.parametrize("late", [0, MS, 2 * SECOND])
def test_who_asks_first_after_a_pause_does_not_lose_those_in_line_theirs(
    stores: list[Store], clock: FakeClock, late: int
) -> None:
    """The bucket was full for long, but nobody could claim a turn before the pause ended by itself."""
    giver, asker = stores
    giver.order(pause("api", None), 600 * SECOND)
    until = giver.orders(API)[1].paused[None]
    given = [ask(giver, API, place=Place()).at for _ in range(8)]
    clock.advance(until + late - clock.now())
    # One token is left for whoever comes next, and the line goes on where it was.
    answers = [ask(asker, API, place=Place()) for _ in range(5)]
    assert [bool(each) for each in answers] == [True] * 4 + [False]
    assert answers[-1].at == given[-1] + 2 * SECOND


def test_turns_that_nobody_takes_up_after_a_pause_are_lost_in_the_end(store: Store, clock: FakeClock) -> None:
    store.order(pause("api", None), 60 * SECOND)
    until = store.orders(API)[1].paused[None]
    for _ in range(20):
        ask(store, API, place=Place())
    clock.advance(until + SECOND + 4 * 2 * SECOND - clock.now())
    assert all(ask(store, API, place=Place()) for _ in range(5))


def test_a_turn_in_a_pause_goes_to_the_end_of_the_line(store: Store, clock: FakeClock) -> None:
    ask(store, API, cost=5)
    turn = ask(store, API, place=Place()).at
    store.order(pause("api", None), 60 * SECOND)
    until = store.orders(API)[1].paused[None]
    clock.advance(turn - clock.now())
    again = ask(store, API, place=Place(turn))
    assert (bool(again), again.booked) == (False, True)
    assert again.at >= until
    clock.advance(again.at - clock.now())
    assert ask(store, API, place=Place(again.at))


def test_a_longest_pause_ends(store: Store, clock: FakeClock) -> None:
    store.order(pause("api", None), LONGEST_PAUSE)
    clock.advance(LONGEST_PAUSE - SECOND)
    assert not ask(store, API)
    clock.advance(SECOND)
    assert ask(store, API)


def test_a_reset_leaves_a_pause_and_is_no_bucket_more(store: Store) -> None:
    ask(store, API)
    store.order(pause("api", None), SECOND)
    assert len(store.survey([API])[1][API.name]) == 1
    assert store.reset(API) == 1
    assert ask(store, API).paused


# -- a pause that is ended before its time


def turns(store: Store, *asked: int, bucket: Bucket = API, key: str | None = None) -> list[int]:
    """Of tasks that cost so much each, in whole milliseconds: a turn may be nanoseconds later than it has to be."""
    return [ask(store, bucket, cost=cost, key=key, place=Place()).at // MS for cost in asked]


@pytest.mark.parametrize("key", [None, "a"])
def test_after_an_early_end_turns_are_those_of_a_pause_that_was_no_longer(
    stores: list[Store], clock: FakeClock, key: str | None
) -> None:
    """The bucket was empty, so that its line begins when it fills, as if there had been no pause."""
    giver, asker = stores
    drained = clock.now() // MS
    for each in (None, "a", "b"):
        ask(asker, API, cost=5, key=each)
    giver.order(pause("api", key), 600 * SECOND)
    assert min(turns(asker, *[1] * 8, key="a")) >= drained + 600_000
    clock.advance(SECOND)
    giver.order(pause("api", key), 0)
    assert turns(asker, 1, 2, key="a") == [drained + 2000 * 9, drained + 2000 * 11]
    assert turns(asker, 1, key="b") == [drained + 2000]


def test_after_an_early_end_those_who_wait_have_what_a_full_bucket_holds_first(store: Store, clock: FakeClock) -> None:
    store.order(pause("api", None), 600 * SECOND)
    given = turns(store, 1, 1, 1)
    clock.advance(30 * SECOND)
    ended = clock.now()
    store.order(pause("api", None), 0)
    # Two tokens are nobody's, and two are for those who are not there yet: one is left for the first that comes.
    assert all(ask(store, API, place=Place()) for _ in range(4))
    assert turns(store, 1, 1) == [ended // MS + 2000, ended // MS + 4000]
    assert all(ask(store, API, place=Place(turn * MS)).booked for turn in given), "who asks early keeps a turn"
    clock.advance(given[0] * MS - clock.now())
    assert all(ask(store, API, place=Place(turn * MS)) for turn in given), "who comes at it has the tokens"


def test_who_holds_a_turn_and_asks_sooner_moves_along_with_the_line(store: Store, clock: FakeClock) -> None:
    """As what a worker holds does, every second."""
    drained = clock.now()
    ask(store, API, cost=5)
    store.order(pause("api", None), 600 * SECOND)
    told = ask(store, API, place=Place()).at
    store.order(pause("api", None), 0)
    again = ask(store, API, place=Place(told))
    assert drained < again.at < drained + 5 * SECOND
    clock.advance(again.at - clock.now())
    assert ask(store, API, place=Place(again.at))


def test_no_quota_lies_idle_after_an_early_end(clock: FakeClock) -> None:
    """Until those come who were told to come at the old end, it is for those who ask after the new one."""
    bucket = Bucket("api", (Limit(5, 1),))
    store = MemoryStore(clock)
    begun = clock.now()
    waiting: list[int] = []
    ran: list[float] = []

    def come(turn: int | None = None) -> None:
        decision = ask(store, bucket, place=Place(turn))
        if decision:
            ran.append((clock.now() - begun) / SECOND)
        else:
            heappush(waiting, decision.at)

    ask(store, bucket, cost=5)
    store.order(pause("api", None), 300 * SECOND)
    for _ in range(20):
        come()
    store.order(pause("api", None), 0)
    for _ in range(200):
        come()
    while waiting:
        turn = heappop(waiting)
        clock.advance(max(0, turn - clock.now()))
        come(turn)
    assert sum(at < 300 for at in ran) >= 200
    assert max(ran) < 320


def test_every_limit_of_a_bucket_moves_along(store: Store, clock: FakeClock) -> None:
    bucket = Bucket("api", (Limit(2, 2), Limit(10, 0.1)))
    store.order(pause("api", None), 60 * SECOND)
    turns(store, *[1] * 6, bucket=bucket)
    ended = clock.now()
    store.order(pause("api", None), 0)
    assert ask(store, bucket, place=Place()), "one of two tokens is left for the first who comes"
    # Of the fast limit the line is three seconds long, and of the slow one four tokens are nobody's.
    found = [turn - ended // MS for turn in turns(store, *[1] * 5, bucket=bucket)]
    assert found == [2500, 3000, 3500, 10_000, 20_000]


def test_turns_from_before_a_pause_stay_where_they_are(store: Store, clock: FakeClock) -> None:
    drained = clock.now() // MS
    ask(store, API, cost=5)
    before = turns(store, 1, 1)
    store.order(pause("api", None), 600 * SECOND)
    store.order(pause("api", None), 0)
    assert [*before, *turns(store, 1)] == [drained + 2000, drained + 4000, drained + 6000]


@pytest.mark.parametrize("span", [10 * SECOND, 90 * SECOND])
def test_a_pause_in_a_pause_leaves_the_turns_that_were_given(store: Store, span: int) -> None:
    store.order(pause("api", None), 60 * SECOND)
    given = turns(store, *[1] * 7)
    store.order(pause("api", None), span)
    assert turns(store, 1) >= [given[-1] + 2000]


def test_the_end_of_one_pause_leaves_another(store: Store) -> None:
    ask(store, API, cost=5, key="a")
    store.order(pause("api", None), 60 * SECOND)
    store.order(pause("api", "a"), 600 * SECOND)
    until = store.orders(API)[1].paused[None] // MS
    turns(store, 1, 1, key="a")
    store.order(pause("api", "a"), 0)
    # The tokens that there are when the other pause ends are those of the first five.
    assert turns(store, 1, 1, 1, 1, key="a") == [until, until, until, until + 2000]
    store.order(pause("api", "b"), 600 * SECOND)
    store.order(pause("api", None), 0)
    assert not ask(store, API, key="b")
    assert ask(store, API)


# -- other numbers


def test_other_numbers_hold_for_everybody_at_once_and_make_no_tokens(stores: list[Store], clock: FakeClock) -> None:
    giver, asker = stores
    known = charges(API, cost=5)
    assert asker.acquire(known)
    refusal = asker.acquire(known)
    assert refusal.wait == 10.0
    giver.order(change("api", 0, FASTER), HOUR)
    refusal = asker.acquire(known)
    assert refusal.limit == FASTER
    assert refusal.wait == pytest.approx(1.0, abs=0.01)
    clock.advance(refusal.at - clock.now())
    for _ in range(3):
        assert asker.acquire(known)
        clock.advance(SECOND)
    assert asker.orders(API)[1].limits[0][0] == FASTER


def test_other_numbers_end_by_themselves_and_when_told(stores: list[Store], clock: FakeClock) -> None:
    giver, asker = stores
    known = charges(API)
    giver.order(change("api", 0, FASTER), HOUR)
    for _ in range(3):  # by the short way, from the second one on
        assert asker.acquire(known).limit == FASTER
    clock.advance(HOUR - SECOND)
    assert asker.acquire(known).limit == FASTER
    clock.advance(SECOND)
    assert asker.acquire(known).limit == API.limits[0]
    giver.order(change("api", 0, FASTER), HOUR)
    assert asker.acquire(known).limit == FASTER
    giver.order(change("api", 0, FASTER), 0)
    assert asker.acquire(known).limit == API.limits[0]
    assert asker.orders(API)[1].limits == {}


@pytest.mark.parametrize("order", [pause("api", None), change("api", 0, FASTER)])
def test_an_order_ends_at_its_very_instant(stores: list[Store], clock: FakeClock, order: Charge) -> None:
    giver, asker = stores
    giver.order(order, SECOND)
    now, standing = asker.orders(API)
    [until] = [*standing.paused.values(), *(until for _, until in standing.limits.values())]
    clock.advance(until - 1 - now)
    assert asker.orders(API)[1] == standing
    clock.advance(1)
    assert asker.orders(API)[1] == NONE
    assert ask(asker, API).limit == API.limits[0]


@pytest.mark.parametrize("key", [None, "a"])
def test_looks_tell_what_the_next_decision_would_without_anybody_asking_before(
    stores: list[Store], clock: FakeClock, key: str | None
) -> None:
    giver, asker = (Limiter([API], store) for store in stores)
    assert asker.acquire("api", 5, key=key)
    given = clock.now()
    giver.set("api", refill_rate=5, duration=3600)
    status = asker.status("api", key=key)
    assert (status.keys, status.limits[0].limit.refill_rate) == (1, 5)
    clock.advance(given + SECOND - clock.now())
    assert asker.peek("api", 5, key=key).allowed
    assert asker.status("api", key=key).limits[0].tokens == 5
    assert asker.acquire("api", 5, key=key)


def test_numbers_that_were_there_meanwhile_count_for_those_who_did_not_ask(
    stores: list[Store], clock: FakeClock
) -> None:
    giver, asker = (Limiter([API], store) for store in stores)
    assert asker.acquire("api", 5)
    giver.set("api", refill_rate=0.001)
    clock.advance(100 * SECOND)
    giver.unset("api")
    assert asker.peek("api").tokens == pytest.approx(0.1, abs=0.02)
    giver.set("api", refill_rate=5)
    giver.set("api", refill_rate=0.001)
    clock.advance(100 * SECOND)
    assert asker.peek("api").tokens == pytest.approx(0.2, abs=0.1)


@pytest.mark.parametrize("meanwhile", [None, Limit(5, 0.25)])
def test_when_numbers_end_by_themselves_the_declared_ones_count_from_then_on(
    stores: list[Store], clock: FakeClock, meanwhile: Limit | None
) -> None:
    """And not from the first look after that, nor from the next order."""
    giver, asker = stores
    giver.order(change("api", 0, Limit(5, 0.001)), 100 * SECOND, API.limits[0])
    until = giver.orders(API)[1].limits[0][1]
    assert ask(asker, API, cost=5, key="a")
    clock.advance(until + SECOND - clock.now())
    looks = [(asker.read(charges(API, key="a"))[2], asker.survey([API])[1][API.name])]
    if meanwhile:
        giver.order(change("api", 0, meanwhile), HOUR, API.limits[0])
    clock.advance(until + 2 * SECOND - clock.now())
    looks.append((asker.read(charges(API, key="a"))[2], asker.survey([API])[1][API.name]))
    for [read], [surveyed] in looks:
        assert read == surveyed
        assert read.numbers == (API.limits[0] if read is looks[0][0][0] or not meanwhile else meanwhile).numbers
    assert tokens(asker, key="a") == pytest.approx(0.1 + (0.75 if meanwhile else 1), abs=0.01)


def test_other_numbers_are_no_disagreement(
    stores: list[Store], clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    giver, asker = stores
    ask(asker, API)
    giver.order(change("api", 0, FASTER), HOUR)
    ask(asker, API)
    ask(giver, API)
    clock.advance(HOUR + SECOND)
    ask(asker, API)
    ask(giver, API)
    assert not caplog.records


@pytest.mark.parametrize("place", [None, Place()])
def test_a_call_that_costs_more_than_a_bucket_now_holds_needs_a_full_one_and_owes_the_rest(
    store: Store, clock: FakeClock, place: Place | None
) -> None:
    store.order(change("api", 0, Limit(2, 1)), HOUR)
    for _ in range(3):
        assert ask(store, API, cost=4, place=place)
        refusal = ask(store, API, cost=4, place=place)
        assert refusal.wait == 4.0
        clock.advance(4 * SECOND)
        place = place and Place(refusal.at)
        assert ask(store, API, cost=4, place=place)
        clock.advance(4 * SECOND)
    ask(store, API)
    assert ask(store, API, cost=4).wait == 1.0


def test_what_was_drawn_after_other_numbers_began_to_count_was_drawn_from_them(clock: FakeClock) -> None:
    emptied = clock.now() + SECOND
    state = State(emptied + FASTER.span, emptied + FASTER.span, *FASTER.numbers)
    assert since(clock.now(), state, API.limits[0], emptied).full_at == emptied + API.limits[0].span


def test_one_of_several_limits_can_be_changed(store: Store) -> None:
    bucket = Bucket("api", (Limit(10, 10), Limit(1000, Fraction(1000, 86_400))))
    store.order(change("api", 0, Limit(3, Fraction(1, 3600))), HOUR)
    assert [bool(ask(store, bucket)) for _ in range(4)] == [True] * 3 + [False]


@pytest.mark.parametrize("stores", ["file", "redis"], indirect=True)
@pytest.mark.parametrize(("last", "span"), [(Limit(5, 0.05), HOUR), (API.limits[0], 0)])
def test_of_orders_that_are_given_at_once_the_last_one_counts_for_what_is_drawn_already(
    stores: list[Store], clock: FakeClock, monkeypatch: pytest.MonkeyPatch, last: Limit, span: int
) -> None:
    """Whoever gives it is done with the records before the one who gave the other has begun."""
    giver, other = stores
    carry = giver._carry  # type: ignore[attr-defined]  # noqa: SLF001 - both have one

    def overtaken(*args: object, **options: object) -> object:
        monkeypatch.undo()
        other.order(change("api", 0, last), span, API.limits[0])
        return carry(*args, **options)

    ask(giver, API, cost=5, key="a")
    monkeypatch.setattr(giver, "_carry", overtaken)
    giver.order(change("api", 0, FASTER), HOUR, API.limits[0])
    [written] = giver.survey([API])[1][API.name]
    assert written.numbers == last.numbers
    clock.advance(SECOND)
    assert tokens(other, key="a") == pytest.approx(float(last.refill_rate), abs=0.15)


def test_a_limit_that_has_the_numbers_of_another_one_is_left_alone_when_they_end(
    store: Store, clock: FakeClock
) -> None:
    fast, slow = Limit(100, 33.3), Limit(5, 0.5)
    bucket = Bucket("api", (fast, slow))
    store.order(change("api", 1, slow), HOUR, fast)
    assert ask(store, bucket, cost=5)
    store.order(change("api", 1, fast), 0, fast)
    clock.advance(2 * SECOND)
    assert [bool(ask(store, bucket)) for _ in range(3)] == [True, False, False]


def test_the_end_of_other_numbers_is_not_missed_by_asks_that_were_made_before(
    stores: list[Store], clock: FakeClock
) -> None:
    giver, asker = stores
    bucket = Bucket("api", (Limit(1, 1),))
    known = charges(bucket)
    giver.order(change("api", 0, Limit(1000, 1000)), SECOND)
    until = giver.orders(bucket)[1].limits[0][1]
    for _ in range(3):
        assert asker.acquire(known)
    clock.advance(until - MS - clock.now())
    assert asker.acquire(known)
    clock.advance(2 * MS)
    assert asker.acquire(known).limit == bucket.limits[0]
    assert not asker.acquire(known)


def order_what_cannot_be(store: Store) -> None:
    """As another program might: that the bucket holds no token at all."""
    store.order(change("api", 0, FASTER), HOUR)
    if isinstance(store, FileStore):
        whole = store.path.read_bytes()
        [offset] = [at for at in range(64, len(whole), 64) if record.is_order(whole[at : at + 64])]
        words = whole[offset : offset + 24] + bytes(8) + whole[offset + 32 : offset + 56]
        store.path.write_bytes(
            whole[:offset] + words + record.missing(words).to_bytes(8, "little") + whole[offset + 64 :]
        )
    else:
        assert isinstance(store, RedisStore)
        [key] = [key for piece in store.scan(store.named("api")) for key in piece]
        written = store.server.command("GET", key)
        store.server.command("SET", key, written[:8] + bytes(8) + written[16:])


@pytest.mark.parametrize("stores", ["file", "redis"], indirect=True)
def test_numbers_that_cannot_be_name_the_bucket_and_what_to_do_and_harm_no_other(stores: list[Store]) -> None:
    order_what_cannot_be(stores[0])
    limiter = Limiter([API, OTHER], stores[1])
    asks: list[Callable[[str], object]] = [limiter.acquire, limiter.peek, limiter.status]
    for decide in asks:
        with pytest.raises(StoreError, match=r"bucket 'api' .* cannot be.* 'tb-celery unset api'"):
            decide("api")
        assert decide("other")
    limiter.unset("api")
    assert limiter.acquire("api", 5)
    assert limiter.status("api").limits[0].declared is None


@pytest.mark.parametrize("stores", ["file", "redis"], indirect=True)
def test_others_can_take_the_place_of_numbers_that_cannot_be(stores: list[Store]) -> None:
    order_what_cannot_be(stores[0])
    limiter = Limiter([API], stores[1])
    limiter.set("api", refill_rate=5, duration=10)
    assert limiter.acquire("api").limit == FASTER


# -- in a file


def test_to_carry_records_under_other_numbers_takes_no_read_for_each(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "state", clock)
    for number in range(400):
        ask(store, API, key=f"{number}")
    reads = 0

    def counted(fd: int, length: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        return read_at(fd, length, offset)

    for module in (finding, table, upkeep):
        monkeypatch.setattr(module, "read_at", counted)
    store.order(change("api", 0, FASTER), HOUR, API.limits[0])
    assert {state.numbers for state in store.survey([API])[1][API.name]} == {FASTER.numbers}
    assert reads < 400


class EarlyRiser(FakeClock):
    """A clock whose sleep ends early, as that of gevent may."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds * 0.9 if seconds > 1e-6 else seconds)


class Meanwhile(FakeClock):
    """A clock during the first sleep on which something happens."""

    meanwhile: Callable[[], object] | None = None

    def sleep(self, seconds: float) -> None:
        happens, self.meanwhile = self.meanwhile, None
        if happens:
            happens()
        super().sleep(seconds)


def test_records_of_what_is_full_are_left_to_whoever_needs_room(tmp_path: Path, clock: FakeClock) -> None:
    """Written with several numbers they would be kept for a year."""
    store = FileStore(tmp_path / "state", clock)
    ask(store, API)
    clock.advance(HOUR)
    store.order(change("api", 0, FASTER), HOUR, API.limits[0])
    assert [state.numbers for state in store.survey([API])[1][API.name]] == [API.limits[0].numbers]


def test_whoever_gives_an_order_does_not_go_on_before_everybody_heeds_it(tmp_path: Path) -> None:
    clock = EarlyRiser(17 * HOUR)
    giver, asker = (FileStore(tmp_path / "state", clock) for _ in range(2))
    known = charges(API)
    assert asker.acquire(known)
    assert asker.acquire(known)
    giver.order(pause("api", None), SECOND)
    assert not asker.acquire(known)


def test_the_first_order_in_a_file_is_no_disagreement_for_those_who_hear_of_it_by_a_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Meanwhile(17 * HOUR)
    giver, late, early = (FileStore(tmp_path / "state", clock) for _ in range(3))
    ask(late, API)

    def heed() -> None:
        assert ask(early, API).limit == FASTER
        assert ask(late, API).limit == FASTER

    clock.meanwhile = heed
    giver.order(change("api", 0, FASTER), HOUR, API.limits[0])
    assert clock.meanwhile is None
    assert not caplog.records


def test_numbers_that_have_ended_before_everybody_looked_are_no_disagreement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Meanwhile(17 * HOUR)
    giver, asker = (FileStore(tmp_path / "state", clock) for _ in range(2))
    ask(asker, API)
    giver.order(change("api", 0, FASTER), MS, API.limits[0])

    def ended() -> None:
        clock.advance(2 * MS)
        assert ask(asker, API).limit == API.limits[0]

    clock.meanwhile = ended
    giver.order(change("api", 0, Limit(5, 50)), MS, API.limits[0])
    assert clock.meanwhile is None
    assert not caplog.records


def test_the_same_numbers_again_make_no_tokens_for_those_who_heed_them_at_once(tmp_path: Path) -> None:
    """What an earlier order like it has left in the file is not taken for theirs."""
    clock = Meanwhile(17 * HOUR)
    giver, asker = (FileStore(tmp_path / "state", clock) for _ in range(2))
    order = change("api", 0, Limit(5, 0.05))
    giver.order(order, MINUTE, API.limits[0])
    clock.advance(HOUR)

    def heed() -> None:
        clock.advance(20 * MS)
        assert ask(asker, API, cost=3)

    clock.meanwhile = heed
    giver.order(order, MINUTE, API.limits[0])
    assert clock.meanwhile is None
    assert tokens(asker) == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("rate", [0.001, 5])
def test_what_is_left_from_the_same_numbers_is_carried_on_by_the_slower(
    stores: list[Store], clock: FakeClock, rate: float
) -> None:
    giver, asker = stores
    order = change("api", 0, Limit(5, rate))
    giver.order(order, 10 * SECOND, API.limits[0])
    assert ask(asker, API, cost=5)
    clock.advance(14 * SECOND)  # of which four by the declared rate
    giver.order(order, HOUR, API.limits[0])
    assert tokens(asker) <= min(5, 10 * rate + 4 * 0.5) + 0.1


@pytest.mark.parametrize("write", [1, 2])
def test_an_order_that_was_cut_off_never_comes_to_life(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    """Its giver was killed before one of its writes; later somebody orders something else."""
    giver, asker = (FileStore(tmp_path / "state", clock) for _ in range(2))
    known = charges(API)
    assert asker.acquire(known)
    writes: list[bytes] = []

    def dying(table: StateFile, raw: bytes, offset: int) -> None:
        writes.append(raw)
        if len(writes) == write:
            raise KeyboardInterrupt
        assert write_at(table.fd, raw, offset) == len(raw)

    monkeypatch.setattr(StateFile, "_write", dying)
    with pytest.raises(KeyboardInterrupt):
        giver.order(pause("api", None), HOUR)
    monkeypatch.undo()
    asker.order(pause("other", None), HOUR)
    assert asker.acquire(known)


@pytest.mark.parametrize("wall", [0, 1_900_000_000 * SECOND])
def test_a_wrong_clock_at_a_reboot_holds_a_pause_only_until_it_is_put_right(
    tmp_path: Path, clock: FakeClock, wall: int
) -> None:
    """As on a host without a battery for its clock, which begins in 1970."""
    path = tmp_path / "state"
    known = charges(API)
    FileStore(path, clock).order(pause("api", None), 60 * SECOND)
    true = clock.wall()
    booted = FakeClock(5 * SECOND, wall, identity=2)
    store = FileStore(path, booted)
    store.acquire(known)
    booted.step_wall(true + SECOND - booted.wall())
    booted.advance(10 * MS)
    assert 58 < store.acquire(known).wait < 60
    booted.advance(60 * SECOND)
    assert store.acquire(known)


def full_of_orders(path: Path, clock: FakeClock) -> FileStore:
    """A file all of whose records are pauses that a wrong clock after a reboot takes to have ended long ago."""
    before = FileStore(path, clock)
    for number in range(60):
        before.order(pause("api", f"{number}"), LONGEST_PAUSE)
    return FileStore(path, FakeClock(5 * SECOND, clock.wall() + 1000 * LONGEST_PAUSE, identity=2))


def test_no_pause_is_given_to_others_because_of_a_wrong_clock_at_a_reboot(tmp_path: Path, clock: FakeClock) -> None:
    store = full_of_orders(tmp_path / "state", clock)
    booted = store.clock
    assert isinstance(booted, FakeClock)
    for number in range(200):
        assert ask(store, OTHER, key=f"{number}")
    booted.step_wall(clock.wall() + SECOND - booted.wall())
    booted.advance(10 * MS)
    assert not any(ask(store, API, key=f"{number}") for number in range(60))


def test_a_pause_from_before_a_reboot_is_kept_for_no_longer_than_the_longest(tmp_path: Path, clock: FakeClock) -> None:
    store = full_of_orders(tmp_path / "state", clock)
    booted = store.clock
    assert isinstance(booted, FakeClock)
    booted.advance(LONGEST_PAUSE)
    for number in range(200):
        assert ask(store, OTHER, key=f"{number}")
    whole = store.path.read_bytes()
    assert sum(record.is_order(whole[at : at + 64]) for at in range(64, len(whole), 64)) < 60


def test_a_pause_that_is_given_while_the_clock_is_wrong_is_no_longer_than_the_longest(
    tmp_path: Path, clock: FakeClock
) -> None:
    path = tmp_path / "state"
    FileStore(path, clock).order(pause("api", None), 60 * SECOND)
    store = FileStore(path, FakeClock(5 * SECOND, 0, identity=2))
    store.order(pause("api", None), 60 * SECOND)
    assert ask(store, API).wait <= LONGEST_PAUSE / SECOND


# -- what a call cost after all


def settle(store: Store, tokens: float, bucket: Bucket = API) -> None:
    store.settle([charge._replace(cost=round(tokens * charge.limit.interval)) for charge in charges(bucket)])


def test_what_was_not_used_is_given_back_up_to_full(store: Store, clock: FakeClock) -> None:
    ask(store, API, cost=5)
    settle(store, -3)
    assert tokens(store) == 3
    settle(store, -3)
    assert tokens(store) == 5
    clock.advance(HOUR)
    settle(store, -1)
    assert tokens(store) == 5
    assert [bool(ask(store, API)) for _ in range(6)] == [True] * 5 + [False]


def test_what_is_owed_is_drawn_below_empty(store: Store, clock: FakeClock) -> None:
    assert ask(store, API, cost=5)
    settle(store, 20)
    refusal = ask(store, API)
    assert refusal.wait == 42.0
    assert tokens(store) == 0
    clock.advance(41 * SECOND)
    assert not ask(store, API)
    clock.advance(SECOND)
    assert ask(store, API)
    assert ask(store, API).wait == 2.0


def test_a_debt_is_not_forgotten_when_the_numbers_change(store: Store) -> None:
    ask(store, API, cost=5)
    settle(store, 20)
    faster = Bucket("api", (Limit(5, 5),))
    assert ask(store, faster).wait == pytest.approx(21 / 5)


def test_a_clock_that_is_set_back_once_a_debt_is_paid_stops_nobody(store: Store, clock: FakeClock) -> None:
    ask(store, API, cost=5)
    settle(store, 5)
    clock.advance(18 * SECOND)
    assert not ask(store, API, cost=5)
    ask(store, API)
    clock.advance(-HOUR)
    assert ask(store, API).wait <= 4.0


def test_a_debt_that_was_paid_is_none_after_a_reboot(tmp_path: Path, clock: FakeClock) -> None:
    """The wall clock was an hour too late: no more than what the bucket holds may be missing."""
    path = tmp_path / "state"
    store = FileStore(path, clock)
    known = charges(API)
    assert store.acquire(known)
    settle(store, 10)
    for _ in range(3):
        assert not store.acquire(known)
    clock.advance(25 * SECOND)
    assert store.acquire(known)
    booted = FakeClock(5 * SECOND, clock.wall() - HOUR, identity=2)
    assert ask(FileStore(path, booted), API).wait <= 2.0


def test_those_in_line_move_along(store: Store, clock: FakeClock) -> None:
    """Those behind come later by what was owed, and earlier by what was given back."""
    ask(store, API, cost=5)
    turns = [ask(store, API, place=Place()).at for _ in range(2)]
    settle(store, 3)
    late = ask(store, API, place=Place())
    assert late.at - turns[1] == 2 * SECOND + 6 * SECOND
    settle(store, -3)
    assert ask(store, API, place=Place()).at - late.at == 2 * SECOND - 6 * SECOND
    clock.advance(HOUR)
    assert tokens(store) == 5


# -- one after another, in any order

moves = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 5), st.booleans()),
        st.tuples(st.just("ask a"), st.integers(1, 5), st.booleans()),
        st.tuples(st.just("settle"), st.integers(-8, 12), st.booleans()),
        st.tuples(st.just("pause"), st.integers(0, 20), st.booleans()),
        st.tuples(st.just("resume"), st.just(0), st.booleans()),
        st.tuples(st.just("change"), st.integers(0, 20), st.booleans()),
        st.tuples(st.just("wait"), st.integers(0, 15_000), st.booleans()),
    ),
    max_size=30,
)


@pytest.mark.server
@given(moves)
@example([("pause", 2, False), ("change", 1, False), ("ask", 1, True), ("wait", 991, False), ("resume", 0, False)])
@example([("pause", 1, False), ("change", 1, True), ("ask", 1, False), ("change", 0, False)])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_all_stores_answer_alike(
    server: str, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bool]]
) -> None:
    clock = FakeClock(17 * HOUR)
    stores: list[Store] = [
        MemoryStore(clock),
        FileStore(tmp_path_factory.mktemp("orders") / "state", clock),
        redis_store(server, clock),
    ]
    turn: int | None = None
    for step, number, other in steps:
        if step.startswith("ask"):
            place = Place(turn) if other else None
            decisions = [ask(store, API, cost=number, key=step[4:] or None, place=place) for store in stores]
            # Not when a full one became full: it may have been forgotten.
            told = [(one.now, one.at, one.booked, one.paused, one.limit, one.tokens) for one in decisions]
            assert told[0] == told[1] == told[2]
            turn = decisions[0].at if decisions[0].booked else None
        elif step == "settle":
            for store in stores:
                settle(store, number / 2)
        elif step == "wait":
            clock.advance(number * MS)
        else:
            order = change("api", 0, Limit(3, 2) if other else FASTER)
            order = order if step == "change" else pause("api", "a" if other else None)
            now = clock.now()
            for store in stores:
                clock.advance(now - clock.now())  # the file store lets some time pass
                store.order(order, number * SECOND, API.limits[0])
            clock.advance(now + 10 * MS - clock.now())
        looks = [store.read(charges(API, key="a" if other else None)) for store in stores]
        # A limit that is full may be forgotten.
        seen = [
            (now, heard, [(max(state.full_at, now), max(state.booked_at, now)) for state in states])
            for now, heard, states in looks
        ]
        assert seen[0] == seen[1] == seen[2]


@given(moves)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_is_ordered_nobody_gets_more_than_is_declared(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, bool]]
) -> None:
    """Two processes, whose asks take the short way where they can; pauses, fewer tokens, and debts come and go."""
    clock = FakeClock(17 * HOUR)
    path = tmp_path_factory.mktemp("orders") / "state"
    giver, asker = (FileStore(path, clock) for _ in range(2))
    asks = [charges(API, cost=cost) for cost in (1, 2)]
    grants: list[tuple[int, int]] = []
    paused_until = 0
    for step, number, other in steps:
        if step == "ask":
            for store in (giver, asker, asker):
                decision = store.acquire(asks[number % 2], Place() if other else None)
                if decision:
                    assert decision.now >= paused_until
                    grants.append((decision.now, 1 + number % 2))
        elif step == "settle":
            settle(giver, abs(number) / 2)
        elif step == "wait":
            clock.advance(number * MS if other else number)
        elif step in {"pause", "resume"}:
            giver.order(pause("api", None), number * SECOND)
            paused_until = giver.orders(API)[1].paused.get(None, 0)
        else:
            giver.order(change("api", 0, Limit(3, 0.25)), number * SECOND // 10)
    assert first_violation(grants, 5, 0.5) is None
    clock.advance(max(0, paused_until - clock.now()) + HOUR)
    assert asker.acquire(asks[0])
