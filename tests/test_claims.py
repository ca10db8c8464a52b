"""Processes that declare different numbers: the stricter ones count while anybody asks who declares them."""

from __future__ import annotations

import errno
import os
import uuid
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_redis import redis_store

from tb_celery.arithmetic import Place
from tb_celery.bucket import LONGEST_SPAN, SECOND, Bucket, Limit
from tb_celery.clock import FakeClock
from tb_celery.grantlog import LoggedStore, read_log
from tb_celery.limiter import Limiter
from tb_celery.report import told
from tb_celery.state import State
from tb_celery.stores import record, upkeep
from tb_celery.stores.claims import LASTS, RENEWED, Claim, claimed, is_news, look_again, name_of, narrowed
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore
from tb_celery.stores.orders import change
from tb_celery.stores.redis import RedisStore
from tb_celery.verify import first_violation, verify

if TYPE_CHECKING:
    from pathlib import Path

    from tb_celery.stores import Store

MS = SECOND // 1000
HOUR = 3600 * SECOND
SLOW, FAST = Limit(5, 0.5), Limit(50, 5)
"""Of a deploy that raises both numbers, or lowers them."""


class Processes:
    """Some that share a store, each of which has it open by itself where that can be."""

    def __init__(self, kind: str, folder: Path, server: str, clock: FakeClock) -> None:
        self.clock = clock
        self._kind = kind
        self._path = folder / "state"
        self._server = server
        self._first: Store | None = None

    def start(self, *limits: Limit, name: str = "api") -> Limiter:
        """One that declares a bucket so."""
        return Limiter([Bucket(name, limits)], self._open())

    def _open(self) -> Store:
        if self._kind == "file":
            return FileStore(self._path, self.clock)
        if self._kind == "memory":
            self._first = self._first or MemoryStore(self.clock)
            return self._first
        store = redis_store(self._server, self.clock)
        assert isinstance(store, RedisStore)
        first = self._first = self._first or store
        assert isinstance(first, RedisStore)
        store.prefix, store.marker = first.prefix, first.marker
        return store


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(17 * HOUR)


@pytest.fixture(params=["memory", "file", "redis"])
def processes(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Processes:
    server = request.getfixturevalue("server") if request.param == "redis" else ""
    return Processes(request.param, tmp_path, server, clock)


def drain(limiter: Limiter, cost: float = 1, key: str | None = None) -> int:
    """How many calls are granted at once."""
    granted = 0
    while limiter.acquire("api", cost, key=key):
        granted += 1
    return granted


def meet(*limiters: Limiter, key: str | None = None) -> None:
    """Each asks, and finds what the others have declared."""
    for limiter in (*limiters, *limiters):
        drain(limiter, key=key)


def counts(limiter: Limiter, key: str | None = None) -> Limit:
    """The limit that counts for one who asks."""
    limit = limiter.acquire("api", 0.001, key=key).limit
    assert limit is not None
    return limit


# -- whose numbers count


def test_the_slower_rate_counts_for_everybody_from_the_next_ask_of_who_declares_it(
    processes: Processes, clock: FakeClock
) -> None:
    slow, fast = processes.start(SLOW), processes.start(FAST)
    drain(slow)
    drain(fast)
    drain(slow)
    begun, grants = clock.now(), list[tuple[int, int]]()
    for _ in range(300):
        clock.advance(SECOND // 10)
        for limiter in (fast, slow):
            if decision := limiter.acquire("api"):
                assert decision.limit == SLOW
                grants.append((decision.now, 1))
    assert len(grants) == (clock.now() - begun) // SECOND // 2


@pytest.mark.parametrize("limits", [(Limit(5, 5), Limit(50, 0.5)), (Limit(50, 0.5), Limit(5, 5))])
def test_the_smaller_capacity_of_one_and_the_slower_rate_of_another_count_together(
    processes: Processes, limits: tuple[Limit, Limit]
) -> None:
    limiters = [processes.start(limit) for limit in limits]
    meet(*limiters)
    assert [counts(limiter) for limiter in limiters] == [SLOW, SLOW]


def test_of_three_the_strictest_counts(processes: Processes) -> None:
    limiters = [processes.start(Limit(10, rate)) for rate in (3, 1, 2)]
    meet(*limiters)
    assert {counts(limiter).refill_rate for limiter in limiters} == {1}


def test_all_keys_heed_it(processes: Processes, clock: FakeClock) -> None:
    slow, fast = processes.start(SLOW), processes.start(FAST)
    meet(slow, fast, key="a")
    clock.advance(10 * MS)
    assert counts(fast, key="b") == SLOW
    assert counts(fast) == SLOW


def test_the_slower_rate_counts_until_a_minute_after_its_last_ask(processes: Processes, clock: FakeClock) -> None:
    slow, fast = processes.start(SLOW), processes.start(FAST)
    meet(slow, fast)
    for _ in range(10):  # it goes on asking
        clock.advance(RENEWED)
        assert counts(fast) == SLOW
        slow.acquire("api")
    clock.advance(RENEWED - SECOND)
    assert counts(fast) == SLOW
    clock.advance(LASTS - RENEWED + SECOND)
    drain(fast)
    assert counts(fast) == FAST
    clock.advance(2 * SECOND)
    assert drain(fast) == 10


def test_each_number_counts_for_as_long_as_somebody_declares_it(processes: Processes, clock: FakeClock) -> None:
    small, slow, other = (processes.start(limit) for limit in (Limit(5, 5), Limit(50, 0.5), Limit(100, 10)))
    meet(small, slow, other)
    for _ in range(5):
        clock.advance(RENEWED)
        small.acquire("api")
    assert counts(other) == Limit(5, 5)
    for _ in range(5):
        clock.advance(RENEWED)
        slow.acquire("api")
    assert counts(other) == Limit(50, 0.5)


@pytest.mark.parametrize("gap", [7, 29])
def test_neither_who_keeps_up_one_number_takes_from_the_others_time(
    processes: Processes, clock: FakeClock, gap: int
) -> None:
    small, slow, other = (processes.start(limit) for limit in (Limit(5, 5), Limit(50, 0.5), Limit(100, 10)))
    meet(slow, other)
    clock.advance(gap * SECOND)
    slow.acquire("api")
    meet(small, other)
    for _ in range(60):
        for limiter in (slow, small):
            clock.advance(gap * SECOND // 2)
            limiter.acquire("api")
            assert counts(other) == SLOW


def test_who_asks_by_the_same_call_again_and_again_goes_on_claiming(processes: Processes, clock: FakeClock) -> None:
    """In a file that is a short way, on which nobody looks at what is claimed."""
    slow, fast = processes.start(Limit(5, 100)), processes.start(Limit(5, 1000))
    meet(slow, fast)
    for _ in range(200):
        clock.advance(SECOND)
        assert slow.acquire("api")
        assert fast.acquire("api").limit == Limit(5, 100)


def test_who_asks_for_another_key_each_time_goes_on_claiming(processes: Processes, clock: FakeClock) -> None:
    slow, fast = processes.start(SLOW), processes.start(FAST)
    meet(slow, fast)
    for number in range(200):
        clock.advance(SECOND)
        assert slow.acquire("api", key=f"{number}")
        assert fast.acquire("api", key=f"{number}").limit == SLOW


def test_one_that_starts_again_with_other_settings_is_not_held_to_its_old_ones(
    processes: Processes, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    for before, after in ((SLOW, FAST), (FAST, SLOW), (Limit(5, 5), Limit(50, 0.5))):
        for key in (None, "a", "b"):
            drain(processes.start(before), key=key)
        limiter = processes.start(after)
        for key in (None, "a", "b", "a"):
            assert counts(limiter, key) == after
            clock.advance(SECOND)
            drain(limiter, key=key)
        clock.advance(HOUR)
    assert not caplog.records


def test_a_raised_rate_counts_at_the_latest_a_minute_after_the_old_one_was_claimed(
    processes: Processes, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Who claimed it once goes on doing so. Then all are started again."""
    slow, other = processes.start(SLOW), processes.start(FAST)
    meet(slow, other)
    clock.advance(HOUR)
    meet(slow, other)
    caplog.clear()
    clock.advance(SECOND)
    fast = processes.start(FAST)
    for _ in range(60):
        drain(fast)
        clock.advance(SECOND)
    assert counts(fast) == FAST
    assert not caplog.records, "nobody else was there since it has started"


def test_a_call_that_costs_more_than_others_hold_has_to_find_its_tokens(processes: Processes, clock: FakeClock) -> None:
    """If it only had to find what others hold, and owed the rest, it would get more than it declares itself."""
    slow, fast = processes.start(SLOW), processes.start(FAST)
    assert fast.acquire("api", 50)
    meet(slow, fast)
    assert fast.acquire("api", 20).wait == 40.0
    clock.advance(20 * SECOND)
    assert slow.acquire("api").tokens == 4
    assert fast.acquire("api", 20).wait == 32.0
    clock.advance(32 * SECOND)
    assert fast.acquire("api", 20)
    assert slow.acquire("api").wait == 2.0


def test_what_is_settled_and_read_is_by_the_numbers_that_count(processes: Processes, clock: FakeClock) -> None:
    slow, fast = processes.start(SLOW), processes.start(FAST)
    meet(slow, fast)
    fast.settle("api", taken=2, actual=1)
    assert slow.peek("api").tokens == fast.peek("api").tokens == 1
    clock.advance(2 * SECOND)
    assert slow.peek("api").tokens == fast.peek("api").tokens == 2
    assert drain(fast) == 2


def test_turns_are_those_of_the_slower_rate(processes: Processes, clock: FakeClock) -> None:
    slow, fast = processes.start(SLOW), processes.start(FAST)
    meet(slow, fast)
    turns = [limiter.acquire("api", place=Place()).at - clock.now() for limiter in (fast, slow, fast, slow)]
    assert [turn // MS for turn in turns] == [2000, 4000, 6000, 8000]


def test_decimals_of_the_numbers_make_no_difference(processes: Processes, clock: FakeClock) -> None:
    """A capacity of 2.5 rounds the time that a token takes to another whole number."""
    limiters = [processes.start(limit) for limit in (Limit(2.5, Fraction(1, 3)), Limit(4, Fraction(1, 3)))]
    meet(*limiters)
    for _ in range(20):
        clock.advance(29 * SECOND)
        found = {counts(limiter) for limiter in limiters}
        assert len(found) == 1
        assert {limit.capacity for limit in found} == {2.5}


# -- of several limits


def test_each_of_as_many_limits_is_compared_with_its_like(processes: Processes) -> None:
    first = processes.start(Limit(10, 10), Limit(1000, Fraction(500, 86_400)))
    other = processes.start(Limit(10, 20), Limit(1000, Fraction(1000, 86_400)))
    meet(first, other)
    for limiter in (first, other):
        rates = [seen.limit.refill_rate for seen in limiter.status("api").limits]
        assert [float(rate) * 86_400 for rate in rates] == pytest.approx([864_000, 500])


def test_where_one_has_a_limit_more_each_goes_by_its_own(processes: Processes, clock: FakeClock) -> None:
    """The same number is another limit to the other: it must not be held to ten at a thousand a day."""
    one, two = processes.start(Limit(10, 10)), processes.start(Limit(10, 10), Limit(1000, Fraction(1000, 86_400)))
    for _ in range(20):
        meet(one, two)
        clock.advance(SECOND)
        assert [seen.declared for limiter in (one, two) for seen in limiter.status("api").limits] == [None] * 3


# -- what people set, and read


def test_what_somebody_has_set_counts_for_all(processes: Processes, clock: FakeClock) -> None:
    slow, fast = processes.start(SLOW), processes.start(FAST)
    meet(slow, fast)
    slow.set("api", refill_rate=10, duration=3600)
    for _ in range(70):
        assert {counts(slow), counts(fast)} == {Limit(5, 10)}
        clock.advance(SECOND)
    slow.unset("api")
    assert (counts(slow), counts(fast)) == (SLOW, FAST), "a claim is not renewed while that stands"
    clock.advance(SECOND)
    meet(slow, fast)
    assert counts(fast) == SLOW


def test_a_slower_rate_that_is_set_counts_for_records_by_what_was_claimed(
    processes: Processes, clock: FakeClock
) -> None:
    slow, fast = processes.start(SLOW), processes.start(FAST)
    meet(slow, fast)
    fast.set("api", refill_rate=0.001, duration=3600)
    clock.advance(10 * SECOND)
    assert fast.peek("api").tokens == pytest.approx(0.01, abs=0.02)


def test_status_tells_that_another_process_declares_less(processes: Processes) -> None:
    slow, fast = processes.start(SLOW), processes.start(FAST)
    meet(slow, fast)
    [seen] = fast.status("api").limits
    assert (seen.limit, seen.declared, seen.ends, seen.elsewhere) == (SLOW, FAST, None, True)
    assert told(fast.status("api"), None)["limits"][0]["set"] == {
        "declared_capacity": 50,
        "declared_refill_rate": 5.0,
        "ends_in_seconds": None,
        "reason": "differs",
    }
    [seen] = slow.status("api").limits
    assert (seen.declared, seen.elsewhere) == (None, False)
    fast.set("api", refill_rate=10)
    assert not fast.status("api").limits[0].elsewhere


@pytest.mark.parametrize("processes", ["file", "redis"], indirect=True)
def test_each_says_once_that_others_declare_other_numbers(
    processes: Processes, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    slow, fast = processes.start(SLOW), processes.start(FAST)
    meet(slow)
    for _ in range(100):
        clock.advance(SECOND)
        meet(fast, slow)
    assert sorted(each.getMessage() for each in caplog.records) == [
        f"bucket 'api': another process uses {used} where {declared} is declared here; declare the same everywhere, and"
        " restart what has old settings"
        for used, declared in (("5 at 0.5/s", "50 at 5/s"), ("50 at 5/s", "5 at 0.5/s"))
    ]


@pytest.mark.parametrize("processes", ["file", "redis"], indirect=True)
def test_a_difference_that_nobody_is_held_to_is_told_as_well(
    processes: Processes, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = processes.start(Limit(10, 10)), processes.start(Limit(10, 10), Limit(1000, Fraction(1000, 86_400)))
    for _ in range(100):
        clock.advance(SECOND)
        meet(one, two)
    assert {each.getMessage().split(";")[0] for each in caplog.records} >= {
        "bucket 'api': another process uses 10 at 10/s where 1000 at 0.0115741/s is declared here"
    }
    assert len(caplog.records) <= 2


def test_the_log_of_each_is_within_what_it_declares(processes: Processes, clock: FakeClock, tmp_path: Path) -> None:
    slow, fast = processes.start(SLOW), processes.start(FAST)
    for limiter in (slow, fast):
        limiter.store = LoggedStore(limiter.store, tmp_path / "grants")
    meet(slow, fast)
    clock.advance(200 * SECOND)
    meet(slow, fast)
    clock.advance(1)
    begun = clock.now()
    for second in range(300):
        drain(fast)
        if second < 100:
            drain(slow)
        clock.advance(SECOND)
    entries = list(read_log(tmp_path / "grants"))
    [found] = verify(entries, {"api": Bucket("api", (FAST,))})
    assert found.violation is None
    both = [entry for entry in entries if begun <= entry.at < begun + 120 * SECOND]
    assert len(both) > 50
    [found] = verify(both, {"api": Bucket("api", (SLOW,))})
    assert found.violation is None


# -- where it is kept


def test_what_is_claimed_again_is_no_news(tmp_path: Path, clock: FakeClock) -> None:
    """So it does not have everybody look at all that is ordered."""
    processes = Processes("file", tmp_path, "", clock)
    slow, fast = processes.start(SLOW), processes.start(FAST)
    meet(slow, fast)
    heading = (tmp_path / "state").read_bytes()[:64]
    for _ in range(20):
        clock.advance(RENEWED)
        meet(slow, fast)
    assert (tmp_path / "state").read_bytes()[:64] == heading


def test_a_process_that_has_not_looked_yet_heeds_a_claim_when_it_sees_the_record(
    tmp_path: Path, clock: FakeClock
) -> None:
    """It looks every 10 ms, and by then it might have written the record by its own numbers again and again."""
    processes = Processes("file", tmp_path, "", clock)
    slow, fast = processes.start(SLOW), processes.start(FAST)
    drain(slow)
    drain(fast)
    clock.advance(MS)
    fast.acquire("api")
    slow.acquire("api")
    clock.advance(MS)
    assert counts(fast) == SLOW


def test_a_claim_from_a_clock_that_was_wrong_counts_for_no_longer(tmp_path: Path, clock: FakeClock) -> None:
    """The wall clock was a year ahead, and was put right at the reboot."""
    processes = Processes("file", tmp_path, "", clock)
    meet(processes.start(SLOW), processes.start(FAST))
    processes.clock = FakeClock(5 * SECOND, clock.wall() - 365 * 24 * HOUR, identity=2)
    assert counts(processes.start(FAST)) == FAST


def test_a_claim_that_cannot_be_written_stops_nobody(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes("file", tmp_path, "", clock)
    slow, fast = processes.start(SLOW), processes.start(FAST)
    for limiter in (slow, fast):
        assert limiter.acquire("api")

    def write_at(fd: int, raw: bytes, offset: int) -> int:
        if offset == 0 or (len(raw) == record.SIZE and record.is_order(raw)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(fd, raw, offset)

    monkeypatch.setattr(upkeep, "write_at", write_at)
    assert slow.acquire("api")
    monkeypatch.undo()
    assert slow.acquire("api").limit == SLOW


def test_a_claim_takes_the_place_of_no_record_that_is_in_use(tmp_path: Path, clock: FakeClock) -> None:
    processes = Processes("file", tmp_path, "", clock)
    slow, fast = processes.start(SLOW), processes.start(FAST)
    for number in range(100):
        drain(slow, key=str(number))
        drain(fast, key=str(number))
        meet(slow, fast, key=str(number))
    assert [drain(fast, key=str(number)) for number in range(100)] == [0] * 100


def test_a_claim_and_a_new_record_of_the_same_ask_get_a_place_each(tmp_path: Path, clock: FakeClock) -> None:
    """Both look for room, one of eight times in the same block."""
    new = Bucket("new", (Limit(5, 1),))
    for number in range(60):
        path = tmp_path / str(number)
        slow, fast = (Limiter([Bucket("api", (limit,)), new], FileStore(path, clock)) for limit in (SLOW, FAST))
        assert slow.acquire("api")
        assert fast.acquire("api")
        assert slow.acquire({"api": 1, "new": 1})
        assert counts(Limiter([Bucket("api", (FAST,))], FileStore(path, clock))) == SLOW


def test_a_server_keeps_a_claim_until_a_day_after_its_end(server: str) -> None:
    store = RedisStore(server, prefix=uuid.uuid4().hex)
    meet(*(Limiter([Bucket("api", (limit,))], store) for limit in (SLOW, FAST)))
    key = store.key_of(store._identity[:16], *name_of("api", 1, 0))  # noqa: SLF001
    left = store.server.command("PTTL", key)
    assert 23 * 3600_000 < left <= 24 * 3600_000 + LASTS // MS


def test_a_claim_that_others_were_faster_to_make_is_looked_at_again(
    server: str, tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes("redis", tmp_path, server, clock)
    slow, slower, fast = (processes.start(Limit(5, rate)) for rate in (1, 0.5, 5))
    drain(slow)
    drain(fast)
    store = slow.store
    assert isinstance(store, RedisStore)
    put = store._put  # noqa: SLF001

    def late(*claim: object) -> None:
        monkeypatch.undo()
        meet(slower, fast)
        put(*claim)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(store, "_put", late)
    drain(slow)
    assert counts(slow) == counts(fast) == Limit(5, 0.5)


# -- the arithmetic


def test_a_name_is_nobody_elses() -> None:
    names = [name_of("api", count, number) for count in range(1, 9) for number in range(count)]
    names += [change("api", number, SLOW)[:3] for number in range(8)]
    assert len({*names}) == len(names) == 44
    assert name_of("api", 0, 3) == change("api", 3, SLOW)[:3]


@pytest.mark.parametrize("numbers", [(1, 0), (-1, -1), (LONGEST_SPAN, LONGEST_SPAN)])
def test_what_cannot_be_counts_for_nobody(numbers: tuple[int, int]) -> None:
    """Another program may have written it."""
    assert narrowed(FAST, Claim.of(State(30, 30, *numbers), 1), 1) is FAST


def test_a_claim_is_made_again_once_half_of_its_time_is_over() -> None:
    first = claimed(None, SLOW, 0)
    assert first is not None
    assert claimed(first, SLOW, LASTS - RENEWED - 1) is None
    again = claimed(first, SLOW, LASTS - RENEWED)
    assert again is not None
    assert not is_news(first, again)
    assert claimed(first, FAST, LASTS - RENEWED) is None
    assert look_again([first], 0) == [LASTS - RENEWED] * 2
    assert look_again([first], LASTS - RENEWED) == [LASTS] * 2


# -- whatever order they ask in


class Step(NamedTuple):
    """One of them asks, for as much as there is or for one call, and time passes."""

    slow: bool
    drains: bool
    queues: bool
    gap: int


steps = st.lists(
    st.builds(
        Step, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 1, MS, 300 * MS, SECOND, 9 * SECOND])
    ),
    max_size=40,
)
numbers = st.builds(
    Limit, st.sampled_from([1, 2.5, 5, 20]), st.sampled_from([0.05, 0.5, 0.7, Fraction(1, 3), 3.3, 10.0])
)
kinds = st.sampled_from(["memory", "file", "redis"])


@given(steps, numbers, numbers, kinds, st.sampled_from([None, "a"]))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=int(os.environ.get("TEST_EXAMPLES", "100")),
    derandomize="TEST_EXAMPLES" not in os.environ,
    deadline=None,
)
def test_every_window_is_within_the_smaller_capacity_and_the_slower_rate(
    server: str,
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[Step],
    one: Limit,
    other: Limit,
    kind: str,
    key: str | None,
) -> None:
    """From when they have met, while each asks every half minute; and verify says the same of their log."""
    clock = FakeClock(17 * HOUR)
    folder = tmp_path_factory.mktemp("claims")
    processes = Processes(kind, folder, server, clock)
    limiters = [processes.start(limit) for limit in (one, other)]
    meet(*limiters, key=key)
    clock.advance(1)
    for limiter in limiters:
        limiter.store = LoggedStore(limiter.store, folder / "grants")
    asked = dict.fromkeys(limiters, clock.now())

    def ask(limiter: Limiter, *, drains: bool = False, queues: bool = False) -> None:
        asked[limiter] = clock.now()
        while limiter.acquire("api", 0.125, key=key, place=Place() if queues else None) and drains:
            pass

    for step in steps:
        ask(limiters[step.slow], drains=step.drains, queues=step.queues)
        for limiter in limiters:
            if clock.now() + step.gap - asked[limiter] > LASTS - RENEWED:
                ask(limiter)
        clock.advance(step.gap)
    strict = Limit(min(one.capacity, other.capacity), min(one.refill_rate, other.refill_rate))
    entries = list(read_log(folder / "grants")) if (folder / "grants").exists() else []
    grants = [(entry.at, entry.cost or 0) for entry in entries]
    assert first_violation(grants, strict.capacity, strict.refill_rate) is None
    if entries:
        assert [each.violation for each in verify(entries, {"api": Bucket("api", (strict,))})] == [None]
    # The faster one's numbers count when the other has gone.
    clock.advance(LASTS + 1)
    assert counts(limiters[0], key) == one


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.sampled_from([0, MS, SECOND, 20 * SECOND])), max_size=40),
    numbers,
    numbers,
    kinds,
)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=int(os.environ.get("TEST_EXAMPLES", "100")),
    derandomize="TEST_EXAMPLES" not in os.environ,
    deadline=None,
)
def test_whatever_is_asked_in_whatever_order_nobody_gets_more_than_anybody_declares(
    server: str,
    tmp_path_factory: pytest.TempPathFactory,
    asks: list[tuple[bool, int, int]],
    one: Limit,
    other: Limit,
    kind: str,
) -> None:
    """Also by calls that cost more than one of them holds, and where they come and go."""
    clock = FakeClock(17 * HOUR)
    processes = Processes(kind, tmp_path_factory.mktemp("claims"), server, clock)
    limits = one, other
    limiters = [processes.start(limit) for limit in limits]
    grants = list[tuple[int, Fraction]]()
    for which, eighths, gap in asks:
        cost = Fraction(str(limits[which].capacity)) * eighths / 8
        if decision := limiters[which].acquire("api", float(cost)):
            grants.append((decision.now, cost))
        clock.advance(gap)
    largest, fastest = max(one.capacity, other.capacity), max(one.refill_rate, other.refill_rate)
    assert first_violation(grants, largest, fastest) is None
