"""The store in a Redis or Valkey server: the same decisions as everywhere, on one clock for all hosts."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
import uuid
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from private_redis import FakeTimeStore, binaries, private_server, wait_until

from tb_celery.arithmetic import UNCLAIMED, UNCLAIMED_TURNS, Place, acquire, runs_over
from tb_celery.bucket import LONGEST_SPAN, SECOND, Bucket, Limit
from tb_celery.clock import FakeClock
from tb_celery.errors import ConfigurationError
from tb_celery.limiter import Limiter
from tb_celery.state import State, fit, fitted
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore
from tb_celery.stores.redis import RedisStore
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tb_celery.arithmetic import Decision
    from tb_celery.bucket import Charge
    from tb_celery.clock import Clock
    from tb_celery.stores import Store

pytestmark = pytest.mark.server

MS = SECOND // 1000
BACK = "comes back at the turn it was given"


@pytest.fixture(scope="session", params=["valkey-server", "redis-server"])
def each_server(request: pytest.FixtureRequest) -> Iterator[str]:
    """Valkey and Redis, as far as they are installed: one of them must be."""
    binary = binaries().get(request.param)
    if binary is None:
        pytest.skip(f"there is no {request.param}")
    with private_server(binary=binary) as server:
        yield server.url


@pytest.fixture
def store(each_server: str) -> RedisStore:
    return new_store(each_server)


def new_store(url: str, prefix: str | None = None) -> RedisStore:
    return RedisStore(url, prefix=prefix or uuid.uuid4().hex)


def one(name: str, capacity: float = 5, rate: float | Fraction = 0.5) -> Bucket:
    return Bucket(name, (Limit(capacity, rate),))


def charges(*buckets: Bucket, cost: float = 1, key: str | None = None) -> list[Charge]:
    return [charge for bucket in buckets for charge in bucket.draw(key, bucket.charge(cost))]


# -- the script decides as the functions do


class Ask(NamedTuple):
    """One call of a history."""

    gap: int | Fraction | tuple[int, int] | None
    """Nanoseconds since the call before, or tokens of the first limit; ``None``: as long as that was told to wait; or
    until one of the instants at which the first limit's answers change, and so many nanoseconds after it."""
    caller: Place | str | int | None
    """A number is one who would wait for so much more than the last one was told."""
    cost: float
    mask: int
    """Which buckets."""
    other: bool
    """Whether it declares other numbers than its neighbours."""


rates = (
    st.sampled_from((Fraction(1, 604_800), 0.3, 0.5, 1, 2, 4, 7.3, 1000, Fraction(10_000, 3), 1_000_000))
    | st.floats(1e-6, 1e6)
    | st.fractions(Fraction(1, 10**6), 10**6, max_denominator=10**6)
)
capacities = st.integers(1, 1000) | st.integers(1, 20_000).map(lambda thousandths: thousandths / 1000)
limits = st.builds(Limit, capacities, rates)
declarations = st.lists(limits, min_size=1, max_size=3)
instants = st.sampled_from((0, 1_800_000_000 * SECOND, 1_800_000_000 * SECOND + 999_999_999)) | st.integers(0, 1 << 62)
edges = st.tuples(st.integers(0, 3), st.integers(-1, 1))
gaps = (
    edges
    | st.none()
    | st.integers(-2 * SECOND, 2 * SECOND)
    | st.integers(-1, 2)
    | st.fractions(-4, 4, max_denominator=64)
)
spans = st.sampled_from((0, 1, MS, SECOND, 10 * SECOND, LONGEST_SPAN))
seldom = st.integers(0, 9).map(lambda digit: digit == 0)
places = st.builds(
    Place,
    turn=st.none() | st.integers(-1, 1 << 63),
    soonest=spans,
    patience=spans,
    longest=st.none() | spans,
    ahead=st.sampled_from((0, 0, 0, 1, 7)),
)
callers = st.none() | st.just(BACK) | st.just(Place()) | st.integers(-1, 1) | places
costs = st.integers(1, 5) | st.floats(0.001, 5)
histories = st.lists(
    st.builds(Ask, gaps, callers, costs, st.integers(1, 3), seldom),
    max_size=50,
)


class Unheard(FakeTimeStore):
    """Others never hear of the numbers that are declared here: what is done by each is to be seen."""

    def _claim(self, *_: object) -> bool:
        return False


class Pure:
    """The functions and a dictionary."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.states: dict[tuple[str, str | None, int], State] = {}

    def acquire(self, asked: list[Charge], place: Place | None) -> Decision:
        now = self.clock.now()
        states = fitted(asked, self.states.get, now)
        decision, new = acquire(asked, states, now, place)
        for charge, state in zip(asked, new or states, strict=True):
            # What is full and was never drawn from stays unseen, with no numbers that others must respect.
            if charge[:3] in self.states or state.booked_at > now:
                self.states[charge[:3]] = state
        return decision

    def edges(self, bucket: Bucket) -> tuple[int, int, int, int]:
        """The instants at which tokens run over, or turns count as lost."""
        [charge, *_] = bucket.draw(None)
        state = fit(self.states.get(charge[:3]), charge.limit, self.clock.now())
        late = runs_over(state.interval)
        idle = state.full_at + UNCLAIMED
        return state.full_at + late, idle, idle + UNCLAIMED_TURNS * state.interval, state.booked_at - state.span


@settings(
    max_examples=int(os.environ.get("TEST_EXAMPLES", "200")),
    deadline=None,
    database=None,
    derandomize="TEST_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
@given(
    start=instants,
    declared=st.tuples(declarations, declarations),
    others=st.tuples(declarations, declarations),
    history=histories,
)
def test_the_script_decides_to_the_nanosecond_as_the_functions_do(
    each_server: str,
    tmp_path_factory: pytest.TempPathFactory,
    start: int,
    declared: tuple[list[Limit], list[Limit]],
    others: tuple[list[Limit], list[Limit]],
    history: list[Ask],
) -> None:
    clock = FakeClock(start)
    script = Unheard(each_server, clock)
    pure = Pure(clock)
    rivals: list[Store] = []
    if not any(ask.other or (isinstance(ask.gap, int | Fraction) and ask.gap < 0) for ask in history):
        # These two keep a bucket that was refused before anything was drawn from it: with its numbers, full by then.
        rivals = [MemoryStore(clock), FileStore(tmp_path_factory.mktemp("file") / "state", clock)]
    turns: list[int] = []
    wait = 0
    for gap, caller, cost, mask, other in history:
        if gap is None:
            clock.advance(min(wait, (1 << 62) - clock.now()))
        elif isinstance(gap, tuple):
            edge = pure.edges(Bucket("bucket 0", tuple(declared[0])))[gap[0]] + gap[1]
            clock.advance(min(max(edge, clock.now()), 1 << 62) - clock.now())
        else:
            step = gap if isinstance(gap, int) else int(gap * declared[0][0].interval)
            clock.advance(max(step, -clock.now()))
        buckets = [
            Bucket(f"bucket {index}", tuple((others if other else declared)[index]))
            for index in (0, 1)
            if mask >> index & 1
        ]
        smallest = min(limit.capacity for bucket in buckets for limit in bucket.limits)
        asked = charges(*buckets, cost=min(cost, smallest))
        place = caller if isinstance(caller, Place) else None
        if isinstance(caller, str):
            place = Place(turns.pop(0) if turns else None)
        elif isinstance(caller, int):
            place = Place(
                turns.pop(0) if turns else None, patience=max(0, wait + caller), longest=max(0, wait + caller)
            )
        if place and place.ahead:  # several turns, which may be more than the limit can hold at once
            asked = [charge._replace(cost=charge.cost * place.ahead) for charge in asked]
        decision = pure.acquire(asked, place)
        found = script.acquire(asked, place)
        assert found == decision
        for rival in rivals:
            assert rival.acquire(asked, place) == decision
        now, _, states = script.read(asked)
        assert now == clock.now()
        assert states == fitted(asked, pure.states.get, now)
        wait = found.at - found.now
        if found.booked:
            turns.append(found.at)


@pytest.mark.parametrize("limit", [Limit(5, 2), Limit(5, 0.05), Limit(3, 1000), Limit(4, Fraction(1, 3))], ids=str)
@pytest.mark.parametrize("costs", [[1] * 16, [2, 1, 2]], ids=str)
def test_the_script_draws_the_line_at_the_same_nanosecond(each_server: str, limit: Limit, costs: list[int]) -> None:
    """At the instants at which answers change, and a nanosecond to each side; and for who would wait just so long."""
    bucket = Bucket("bucket 0", (limit,))
    for edge, late in itertools.product(range(5), (-1, 0, 1)):
        for turn, more in itertools.product((None, 0, 1), (-1, 0, 1)):
            clock = FakeClock(1_800_000_000 * SECOND)
            stores = Pure(clock), FakeTimeStore(each_server, clock)
            for _ in range(int(limit.capacity)):
                assert all(store.acquire(charges(bucket), None) for store in stores)
            for cost in costs:
                first, second = (store.acquire(charges(bucket, cost=cost), Place()) for store in stores)
                assert first == second
            clock.advance(max((*stores[0].edges(bucket), clock.now())[edge] + late - clock.now(), 0))
            place = Place(turn and clock.now() + turn - 1)
            if turn == 0:
                place = Place(clock.now(), soonest=MS)
            told = [store.acquire(charges(bucket, cost=2), place) for store in stores]
            assert told[0] == told[1]
            plain = [store.acquire(charges(bucket), None) for store in stores]
            assert plain[0] == plain[1]
            waits = [max(0, decision.at - decision.now + more) for decision in (plain[0], told[0])]
            for patient in (place._replace(patience=waits[0]), place._replace(longest=waits[1])):
                told = [store.acquire(charges(bucket), patient) for store in stores]
                assert told[0] == told[1]


# -- on the server's clock


def test_an_instant_is_the_servers(store: RedisStore) -> None:
    sent = time.time_ns()
    decision = store.acquire(charges(one("api")))
    assert sent - MS <= decision.now <= time.time_ns() + MS
    assert decision.now % 1000 == 0


def test_the_stores_clock_is_near_the_servers_even_before_the_first_call(store: RedisStore) -> None:
    before = store.clock.now()
    assert before > 1_600_000_000 * SECOND
    decision = store.acquire(charges(one("api")))
    after = store.clock.now()
    assert before <= decision.now + MS
    assert decision.now <= after + MS
    assert store.clock.identity == RedisStore("redis://elsewhere.example:1/3").clock.identity
    assert store.clock.wall() >= after


def test_whoever_comes_while_a_bucket_is_paused_heeds_it(store: RedisStore, each_server: str) -> None:
    bucket = one("api")
    Limiter([bucket], store).pause("api", 60)
    newcomer = Limiter([bucket], new_store(each_server, store.prefix))
    assert 0 < newcomer.acquire("api").wait <= 60


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_window_holds_over_all_processes(each_server: str) -> None:
    """Forked processes with the parent's store, and one more of their own, as fast as they can."""
    bucket, prefix = one("api", 7, 3333.3), uuid.uuid4().hex
    store = new_store(each_server, prefix)
    store.acquire(charges(bucket))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def hammer(number: int) -> None:
        mine = store if number % 2 else new_store(each_server, prefix)
        answers.put([now for now in (grant(mine, bucket) for _ in range(500)) if now])

    processes = [context.Process(target=hammer, args=(number,)) for number in range(4)]
    for process in processes:
        process.start()
    grants = [(now, 1) for _ in processes for now in answers.get()]
    for process in processes:
        process.join()
    assert len(grants) > 100
    assert first_violation(grants, 7, 3333.3) is None


def grant(store: Store, bucket: Bucket) -> int | None:
    decision = store.acquire(charges(bucket))
    return decision.now if decision else None


def test_whoever_waits_in_line_is_served_in_time(store: RedisStore) -> None:
    limiter = Limiter([one("api", 1, 20)], store)
    line = [limiter.wait("api") for _ in range(6)]
    assert all(line)
    assert first_violation([(decision.now, 1) for decision in line], 1, 20) is None
    assert not limiter.wait("api", timeout=0.001)


# -- what is stored


def keys_of(store: RedisStore) -> dict[bytes, int]:
    """The keys with the milliseconds since 1970 at which they expire; -1 for never."""
    keys = store.server.command("KEYS", f"{{{store.prefix}}}:*")
    return {key: store.server.command("PEXPIRETIME", key) for key in keys}


def test_a_record_is_kept_until_its_limit_is_full_and_its_line_empty(store: RedisStore) -> None:
    both = Bucket("both", (Limit(2, 10), Limit(30, 0.1)))
    store.acquire(charges(both, cost=2))
    turn = store.acquire(charges(both), Place())
    assert turn.booked
    now, _, states = store.read(charges(both))
    assert all(state.booked_at > state.full_at > now for state in states)
    found = keys_of(store)
    assert found.pop(f"{{{store.prefix}}}:store".encode()) == -1
    assert sorted(found.values()) == sorted(-(-state.booked_at // MS) for state in states)
    assert all(b"}:both:" in key for key in found)


def test_a_record_is_gone_once_its_limit_is_full(store: RedisStore) -> None:
    quick = one("quick", 2, 50)
    store.acquire(charges(quick, cost=2))
    _, _, [state] = store.read(charges(quick))
    wait_until(store.server, state.full_at + 2 * MS)
    assert len(keys_of(store)) == 1
    assert store.survey([quick])[1] == {quick.name: []}
    decision = store.acquire(charges(quick))
    assert decision.tokens == 1


def test_numbers_that_differ_keep_a_record_for_those_for_whom_it_is_not_full(store: RedisStore) -> None:
    large, small = one("api", 1000, 1), one("api", 1, 1000)
    store.acquire(charges(large, cost=1000))
    before = store.clock.now()
    store.acquire(charges(small))
    [(_, name, _)] = store.records(["api"])
    assert keys_of(store)[name] * MS >= before + 1000 * SECOND - MS
    assert not store.acquire(charges(large, cost=500))


def test_no_key_is_stored_as_text(store: RedisStore) -> None:
    store.acquire(charges(one("api"), key="sk-secret"))
    other = new_store("redis://" + store.server.place.removeprefix("redis://"))
    other.acquire(charges(one("api"), key="sk-secret"))
    names = [set(keys_of(each)) for each in (store, other)]
    dumps = [store.server.command("GET", name) for each in names for name in each]
    assert not any(b"secret" in text for text in [*dumps, *names[0], *names[1]])
    # Nor as what is the same in two stores.
    hashes = [{name.split(b":")[-1] for name in each} - {b"store"} for each in names]
    assert hashes[0].isdisjoint(hashes[1])


def test_many_keys_are_surveyed_and_reset(store: RedisStore) -> None:
    bucket, other = one("api", 5, 0.01), one("ap", 5, 0.01)
    for number in range(1500):
        store.acquire(charges(bucket, cost=2, key=str(number)))
    store.acquire(charges(other))
    now, found = store.survey([bucket])
    states = found[bucket.name]
    assert len(states) == 1500
    assert all(state.full_at > now for state in states)
    limiter = Limiter([bucket, other], store)
    assert limiter.status("api").keys == 1500
    scans, command = list[object](), store.server.command

    def counted(*words: str | bytes | int) -> object:
        scans.extend(words[:1] if words[0] == "SCAN" else ())
        return command(*words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.server, "command", counted)
        store.survey([bucket])
        once = len(scans)
        both = store.survey([bucket, other])[1]
        assert (len(both["api"]), len(both["ap"])) == (1500, 1)
        assert len(scans) == 2 * once, "one pass for both"
    assert limiter.reset("api", key="7") == 1
    assert limiter.reset("api") == 1499
    assert limiter.status("api").keys == 0
    assert limiter.status("ap").limits[0].tokens < 5


def test_two_prefixes_are_two_stores(each_server: str) -> None:
    first, second = new_store(each_server), new_store(each_server)
    assert first.acquire(charges(one("api"), cost=5))
    assert second.acquire(charges(one("api"), cost=5))
    with pytest.raises(ConfigurationError, match="setting key_prefix"):
        RedisStore(each_server, prefix="a}b")


# -- addresses


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("redis://host", "redis://host/"),
        ("redis://:s3cret@host:6380/3", "redis://host:6380/3"),
        ("redis://user:s3%40cret@host/3?socket_timeout=2", "redis://host/3"),
        ("rediss://:s3cret@host:6380/0?ssl_cert_reqs=CERT_NONE", "rediss://host:6380/0"),
        ("valkey://:s3cret@[::1]:6380/0", "valkey://[::1]:6380/0"),
        ("valkeys://:s3cret@host/0", "valkeys://host/0"),
        ("unix://:s3cret@/run/redis.sock?db=1", "unix:///run/redis.sock"),
        ("redis+socket:///run/redis.sock", "redis+socket:///run/redis.sock"),
        ("redis+sentinel://:s3cret@one:26379,two/mymaster/2", "redis+sentinel://one:26379,two/mymaster/2"),
        ("sentinel://one:26379;sentinel://two:26379/mymaster", "sentinel://one:26379,two:26379/mymaster/"),
        ("redis+cluster://:s3cret@one:7000,two:7001", "redis+cluster://one:7000,two:7001/"),
    ],
)
def test_an_address_is_shown_without_its_password(address: str, place: str) -> None:
    store = RedisStore(address)
    assert store.server.place == place
    assert repr(store) == f"RedisStore({place!r}, prefix='tb_celery')"
    assert "s3cret" not in f"{store.server} {store.server!r}"


@pytest.mark.parametrize(
    "address",
    [
        "redis://:s3/cret@host:6379/0",
        "redis://:12/s3cret@host",
        "redis://:12#s3cret@host:6379/0",
        "redis://:a?s3cret@host:6379/0",
        "redis://host:s3cret",
        "redis://:s3cret@host/0?no_such_option=1",
        "redis://:s3cret@host/0?socket_timeout=soon",
        "redis://:s3cret@host/0?socket_timeout=0",
        "redis://:s3cret@host/0?socket_connect_timeout=-1",
        "redis+sentinel://:s3cret@host:26379",
        "sentinel://:s3cret@one:26379;sentinel://:s3cret@two:26379/mymaster/0",
        "redis+cluster://:s3cret@one:7000,:s3cret@two:7001",
        "http://:s3cret@host",
        "s3cret",
    ],
)
def test_an_address_that_cannot_be_understood_is_refused_in_one_sentence_without_it(address: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^setting store \(TB_CELERY_STORE\) must be an address such as"
    ) as info:
        RedisStore(address)
    assert "s3cret" not in str(info.value)
    assert info.value.__context__ is None or info.value.__suppress_context__
