"""Every store against a plain reference, whatever happens in whatever order, as hypothesis comes up with it.

Several processes, each with a store of its own, ask, take turns and give up, settle, pause, change and reset buckets,
and die; the clock is stepped, the host reboots, records are torn, the server restarts.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from private_redis import FakeTimeStore, private_server
from reference import SECOND, Answer, Numbers, Reference
from reference import Place as Told
from servers import PATIENCE

from tb_celery.arithmetic import Place, acquire, settle
from tb_celery.bucket import LONGEST_SPAN, Bucket, Limit
from tb_celery.clock import FakeClock
from tb_celery.limiter import Limiter
from tb_celery.state import fitted
from tb_celery.stores import file, record, upkeep
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore
from tb_celery.stores.redis_server import Server
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from private_redis import PrivateServer

    from tb_celery.arithmetic import Decision
    from tb_celery.bucket import Charge
    from tb_celery.state import State
    from tb_celery.stores import Store
    from tb_celery.stores.orders import Orders

MS = SECOND // 1000
BOOT = 4_000_000_000 * SECOND
"""So late that nothing is over for a server, which goes by its own clock where it forgets."""
PROCESSES = 3
EXAMPLES = int(os.environ.get("TEST_EXAMPLES", "0"))


def run(
    machine: Callable[[], RuleBasedStateMachine], examples: int, steps: int = 30, phases: Iterable[Phase] = Phase
) -> None:
    run_state_machine_as_test(
        machine,  # type: ignore[arg-type]  # whatever makes one will do
        settings=settings(
            max_examples=EXAMPLES or examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=not EXAMPLES,
            suppress_health_check=list(HealthCheck),
            phases=list(phases),
        ),
    )


# -- where the state lives, and what can happen to it there


class World:
    """A store, and its clock."""

    steps_back = True
    """Whether the clock may be set back."""
    reboots = restarts = tears = False
    resizes = True
    """Whether other numbers may be another capacity: what is full may be forgotten, and is full by any numbers then."""

    def __init__(self) -> None:
        self.clock = FakeClock(BOOT)

    def open(self) -> Store:
        """The store, as one process has it open."""
        raise NotImplementedError

    def reboot(self, now: int, passed: int) -> None:
        self.clock = FakeClock(now, self.clock.wall() + passed, self.clock.identity + 1)

    def restart(self) -> None:
        """Of the server, which keeps nothing."""
        raise NotImplementedError


class InMemory(World):
    def __init__(self) -> None:
        super().__init__()
        self._store = MemoryStore(self.clock)

    def open(self) -> Store:
        return self._store


class InFile(World):
    reboots = tears = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder / "state"
        # With a salt that is the same each time, so that what was found can be found again.
        header = record.Header(bytes(16), 1)
        self._path.write_bytes(header.pack() + record.FREE * (record.file_size(1) // record.SIZE - 1))

    def open(self) -> Store:
        return FileStore(self._path, self.clock)


class InRedis(World):
    restarts = True

    def __init__(self, server: PrivateServer) -> None:
        super().__init__()
        self._server = server
        self._first = FakeTimeStore(server.url, self.clock)

    def open(self) -> Store:
        store = FakeTimeStore(self._server.url, self.clock)
        store.prefix, store.marker = self._first.prefix, self._first.marker
        return store

    def restart(self) -> None:
        # As far as anybody can tell; test_redis_faults.py restarts it.
        server = Server(self._server.url)
        for command in ("FLUSHALL", "SCRIPT FLUSH", "CLIENT KILL TYPE normal SKIPME yes"):
            server.command(*command.split())


class Everywhere(World):
    """All of them at once, which must give the same answers to the nanosecond."""

    steps_back = resizes = False

    def __init__(self, folder: Path, server: PrivateServer) -> None:
        super().__init__()
        self._worlds = [InMemory(), InFile(folder), InRedis(server)]

    def open(self) -> Store:
        return cast("Store", Alike(self.clock, self._worlds))


Answers = TypeVar("Answers")


class Alike:
    """Several stores as one."""

    def __init__(self, clock: FakeClock, worlds: Sequence[World]) -> None:
        self.clock = clock
        self._clocks = [world.clock for world in worlds]
        self._stores = [world.open() for world in worlds]

    def _each(self, ask: Callable[[Store], Answers]) -> list[Answers]:
        for clock in self._clocks:
            clock.advance(self.clock.now() - clock.now())
        return [ask(store) for store in self._stores]

    def _same(self, ask: Callable[[Store], Answers]) -> Answers:
        first, *others = self._each(ask)
        assert all(other == first for other in others), [first, *others]
        return first

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        decisions = self._each(lambda store: store.acquire(charges, place))
        # Not when a full one became full: it may have been forgotten.
        told = [(one.now, one.at, one.booked, one.paused, one.bucket, one.limit, one.tokens) for one in decisions]
        assert told[0] == told[1] == told[2], told
        return decisions[0]

    def read(self, charges: Sequence[Charge]) -> tuple[int, Sequence[Charge], list[State]]:
        def look(store: Store) -> tuple[int, Sequence[Charge], list[State]]:
            now, heard, states = store.read(charges)
            return now, heard, [seen_at(state, now) for state in states]

        return self._same(look)

    def settle(self, charges: Sequence[Charge]) -> None:
        self._each(lambda store: store.settle(charges))

    def order(self, *told: Any) -> None:
        self._each(lambda store: store.order(*told))
        # The file's takes some time.
        self.clock.advance(max(clock.now() for clock in self._clocks) - self.clock.now())

    def orders(self, bucket: Bucket, key: str | None = None) -> tuple[int, Orders]:
        def look(store: Store) -> tuple[int, Orders]:
            now, orders = store.orders(bucket, key)
            return now, orders.at(now)

        return self._same(look)

    def survey(self, buckets: Collection[Bucket]) -> tuple[int, dict[str, list[State]]]:
        return self._stores[0].survey(buckets)

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        return self._each(lambda store: store.reset(bucket, key))[0]


def seen_at(state: State, now: int) -> State:
    """``state`` as everybody sees it at ``now``: of what is full, nobody can tell since when."""
    return state._replace(full_at=max(state.full_at, now), booked_at=max(state.booked_at, now))


# -- what happens


class Call(NamedTuple):
    """What is asked for."""

    buckets: tuple[str, ...]
    key: str | None
    tokens: Fraction | None
    """``None``: as many as the smallest limit holds."""


@dataclass
class Waiter:
    """Somebody who was sent away with a turn."""

    call: Call
    place: Told
    turn: int
    due: int
    """When it comes back, by the time that has passed."""


def exactly(number: float | Fraction) -> float:
    """``number`` for those who announce that they take floats: fractions are taken as they are."""
    return cast("float", number)


def several(costs: dict[str, Fraction]) -> dict[str, float]:
    return {bucket: exactly(tokens) for bucket, tokens in costs.items()}


class Killed(BaseException):
    """A process died at that instruction."""


limits = st.sampled_from(
    [
        Limit(1, 3),
        Limit(4, 3),
        Limit(5, 0.5),
        Limit(2.5, Fraction(1, 3)),
        Limit(10, 10),
        Limit(3, 1000),
        Limit(7, 7.3),
        Limit(1, 0.01),
        Limit(100, 33.3),
    ]
)
calls = st.builds(
    Call,
    st.sampled_from([*[("one",)] * 4, *[("many",)] * 2, ("other",), ("one", "other"), ("other", "many")]),
    st.sampled_from([None, None, None, "a"]),
    st.sampled_from([Fraction(1), Fraction(1), Fraction(2), Fraction(1, 3), Fraction(5, 2), None]),
)
quotas = st.tuples(st.sampled_from(["one", "one", "one", "many", "other"]), st.sampled_from([None, None, None, "a"]))
processes = st.integers(0, PROCESSES - 1)
gaps = st.sampled_from([1, 7, MS, 100 * MS, SECOND, SECOND + 1, 30 * SECOND, 3600 * SECOND])
soonest = st.sampled_from([0, 0, 100 * MS, 5 * SECOND])
patience = st.sampled_from([0, 0, 50 * MS, LONGEST_SPAN])
longest = st.sampled_from([None, None, None, 0, 3 * SECOND])


class Processes(RuleBasedStateMachine):
    """Some processes that share buckets."""

    world: World

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.waiting: list[Waiter] = []
        self.changed: set[str] = set()
        self.asked: set[int] = set()
        """Processes that have asked, and would notice if what they saw was gone."""

    @initialize(
        one=limits, other=limits, many=st.lists(limits, min_size=2, max_size=3, unique_by=lambda limit: limit.numbers)
    )
    def start(self, one: Limit, other: Limit, many: list[Limit]) -> None:
        self.buckets = {
            "one": Bucket("one", (one,)),
            "other": Bucket("other", (other,)),
            "many": Bucket("many", tuple(many)),
        }
        self.boot()
        declared = {
            name: [Numbers.of(limit.capacity, limit.refill_rate) for limit in bucket.limits]
            for name, bucket in self.buckets.items()
        }
        self.reference = Reference(declared, self.world.clock.now())

    def boot(self) -> None:
        self.processes = [self.limiter() for _ in range(PROCESSES)]
        # It looks and never asks, so that those who ask do so by what they have seen themselves.
        self.observer = self.limiter()

    def limiter(self) -> Limiter:
        return Limiter(self.buckets, self.world.open())

    # -- asks

    @rule(process=processes, call=calls)
    def ask(self, process: int, call: Call) -> None:
        self.acquire(process, call)

    @rule(process=processes, call=calls)
    def wait_as_told(self, process: int, call: Call) -> None:
        decision = self.acquire(process, call)
        if not decision and self.reference.numbers_stand(call.buckets, decision.at):
            self.advance(decision.at - 1 - decision.now)
            if decision.at - 1 > decision.now:
                assert not self.acquire((process + 1) % PROCESSES, call), "told too late an instant"
            self.advance(1)
            assert self.acquire(process, call), "told too early an instant"

    @rule(process=processes, call=calls, soonest=soonest, patience=patience, longest=longest)
    def queue(self, process: int, call: Call, soonest: int, patience: int, longest: int | None) -> None:
        place = Told(None, soonest, patience, longest)
        decision = self.acquire(process, call, place)
        if decision.booked:
            self.waiting.append(Waiter(call, place, decision.at, self.reference.elapsed + decision.at - decision.now))

    @rule(process=processes, call=calls, number=st.integers(2, 30))
    def many_queue(self, process: int, call: Call, number: int) -> None:
        for _ in range(number):
            self.queue(process, call, 0, 0, None)

    @precondition(lambda self: self.waiting)
    @rule(process=processes, which=st.integers(0, 20), late=st.sampled_from([0, 0, 0, -1, -SECOND, 1, SECOND]))
    def come_back(self, process: int, which: int, late: int) -> None:
        waiter = self.waiting[which % len(self.waiting)]
        self.advance(max(0, waiter.due + late - self.reference.elapsed))
        self.ask_again(process, waiter)

    def ask_again(self, process: int, waiter: Waiter) -> None:
        place = waiter.place._replace(turn=waiter.turn, longest=None)
        decision = self.acquire(process, waiter.call, place)
        if decision:
            self.waiting.remove(waiter)
        else:
            waiter.turn, waiter.due = decision.at, self.reference.elapsed + decision.at - decision.now

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 20), number=st.sampled_from([1, 1, 1, 20]))
    def give_up(self, which: int, number: int) -> None:
        which %= len(self.waiting)
        del self.waiting[which : which + number]

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 20))
    def nobody_comes(self, which: int) -> None:
        """The quota does not stay idle for them."""
        call = self.waiting[which % len(self.waiting)].call
        self.waiting.clear()
        self.nobody_is_waited_for(call.buckets[0], call.key)

    @precondition(lambda self: self.waiting)
    @rule(process=processes)
    def all_come_back(self, process: int) -> None:
        """The line drains, if nobody else comes, at the rate of its limits."""
        self.sync()
        line = [(self.costs(each.call), each.call.key, each.due, each.place.soonest) for each in self.waiting]
        deadline = self.reference.drained_by(line)
        buckets = {bucket for each in self.waiting for bucket in each.call.buckets}
        most = len(self.waiting) * (len(self.waiting) + 10)
        while self.waiting:
            waiter = min(self.waiting, key=lambda each: each.due)
            self.advance(max(0, waiter.due - self.reference.elapsed))
            self.ask_again(process, waiter)
            most -= 1
            assert most, "they are sent away again and again"
        # Who needs several buckets may find that of one of them too little is left, and goes to the end of each line.
        assert self.reference.elapsed <= deadline or len(buckets) > 1, "the line stood still"

    def costs(self, call: Call) -> dict[str, Fraction]:
        smallest = [Fraction(str(limit.capacity)) for name in call.buckets for limit in self.buckets[name].limits]
        return dict.fromkeys(call.buckets, min([*smallest, call.tokens or smallest[0]]))

    def acquire(self, process: int, call: Call, place: Told | None = None) -> Decision:
        self.sync()
        self.asked.add(process)
        costs = self.costs(call)
        limiter = self.processes[process]
        asked = several(costs) if len(costs) > 1 else call.buckets[0]
        cost = exactly(costs[call.buckets[0]])
        before = self.looks(call)
        if place is None:
            foreseen = self.observer.peek(asked, cost, key=call.key)
        decision = limiter.acquire(asked, cost, key=call.key, place=place and Place(*place))
        note(f"{self.world.clock.now()} {call} {place} -> {decision} {decision.at} {decision.booked}")
        told = Answer(bool(decision), decision.now, decision.at, decision.booked, decision.bucket)
        self.reference.asked(costs, call.key, place, told)
        if not decision and not decision.booked:
            assert self.looks(call) == before, "a refusal changed something"
        paused, perhaps = self.reference.paused(call.buckets, call.key)
        if place is None and paused == perhaps:
            assert foreseen.at == decision.at
        self.check_tokens(decision, call)
        return decision

    def looks(self, call: Call) -> list[State]:
        charges = self.observer.charges(dict.fromkeys(call.buckets, 0.001), key=call.key)
        now, _, states = self.observer.store.read(charges)
        return [seen_at(state, now) for state in states]

    def check_tokens(self, decision: Decision, call: Call) -> None:
        if decision.limit is None:
            assert decision.tokens == 0
            assert self.reference.paused(call.buckets, call.key)[1] > decision.now
        else:
            numbers = Numbers.of(decision.limit.capacity, decision.limit.refill_rate)
            meters = self.reference.meters[decision.bucket, call.key]
            ranges = [(meter.least, meter.most) for meter in meters if meter.numbers == numbers]
            assert any(
                least - 1e-6 <= decision.tokens <= float(max(most, Fraction(0))) + 1e-6 for least, most in ranges
            )

    # -- what is said afterwards, and from outside

    @rule(
        process=processes,
        quota=quotas,
        tokens=st.sampled_from([1, 3, 20, -1, -3, -20, Fraction(1, 3), Fraction(-2, 7)]),
    )
    def settle(self, process: int, quota: tuple[str, str | None], tokens: Fraction) -> None:
        self.sync()
        bucket, key = quota
        self.processes[process].settle(bucket, 50, exactly(50 + Fraction(tokens)), key=key)
        self.reference.settle(bucket, key, Fraction(tokens))

    @rule(process=processes, quota=quotas, span=st.sampled_from([1, MS, 100 * MS, SECOND, 20 * SECOND]))
    def pause(self, process: int, quota: tuple[str, str | None], span: int) -> None:
        self.sync()
        bucket, key = quota
        self.reference.pause(bucket, key, span)
        self.processes[process].pause(bucket, exactly(Fraction(span, SECOND)), key=key)
        self.ask((process + 1) % PROCESSES, Call((bucket,), key, None))

    @rule(process=processes, quota=quotas)
    def resume(self, process: int, quota: tuple[str, str | None]) -> None:
        self.sync()
        bucket, key = quota
        self.reference.resume(bucket, key)
        self.processes[process].resume(bucket, key=key)

    @rule(
        process=processes,
        bucket=st.sampled_from(["one", "many"]),
        which=st.integers(0, 2),
        limit=limits,
        span=st.sampled_from([None, SECOND, 60 * SECOND]),
        key=st.sampled_from([None, None, "a"]),
    )
    def change(self, process: int, bucket: str, which: int, limit: Limit, span: int | None, key: str | None) -> None:
        self.sync()
        place = which % len(self.buckets[bucket].limits)
        if not self.world.resizes:
            limit = Limit(self.buckets[bucket].limits[place].capacity, limit.refill_rate)
        numbers = Numbers.of(limit.capacity, limit.refill_rate)
        duration = None if span is None else exactly(Fraction(span, SECOND))
        self.reference.change(bucket, place, numbers, LONGEST_SPAN // 2 if span is None else span)
        self.processes[process].set(
            bucket, refill_rate=exactly(limit.refill_rate), capacity=limit.capacity, limit=place, duration=duration
        )
        self.changed.add(bucket)
        self.wait_as_told((process + 1) % PROCESSES, Call((bucket,), key, None))

    @rule(process=processes, bucket=st.sampled_from(["one", "many"]), which=st.integers(0, 2))
    def change_back(self, process: int, bucket: str, which: int) -> None:
        self.sync()
        place = which % len(self.buckets[bucket].limits)
        self.reference.unchange(bucket, place)
        self.processes[process].unset(bucket, limit=place)

    @rule(process=processes, quota=quotas)
    def reset(self, process: int, quota: tuple[str, str | None]) -> None:
        self.sync()
        bucket, key = quota
        self.processes[process].reset(bucket, key=key)
        self.reference.reset(bucket, key)

    # -- time

    @rule(gap=gaps)
    def time_passes(self, gap: int) -> None:
        self.advance(gap)

    @rule(which=st.integers(0, 30), late=st.sampled_from([0, 0, -1, 1]))
    def time_passes_until_something_changes(self, which: int, late: int) -> None:
        self.sync()
        instants = self.reference.instants()
        if instants:
            self.advance(max(0, instants[which % len(instants)] + late - self.reference.now))

    @precondition(lambda self: self.world.steps_back)
    @rule(gap=gaps)
    def the_clock_is_set_back(self, gap: int) -> None:
        self.sync()
        gap = min(gap, self.reference.now - 1)
        # Whether numbers that have ended stand again, not all processes would say alike.
        if self.reference.numbers_stand(self.buckets, self.reference.now - gap):
            self.advance(-gap)
            for limiter in self.processes:
                # A file's clock never is. If it was, orders since are heeded by those who have looked since.
                limiter.peek("one")

    def advance(self, gap: int) -> None:
        self.world.clock.advance(gap)
        self.sync()

    def sync(self) -> None:
        """What the stores let pass has passed."""
        self.reference.elapse(self.world.clock.now())

    # -- what goes wrong

    @rule(process=processes)
    def a_process_dies(self, process: int) -> None:
        self.processes[process] = self.limiter()
        self.asked.discard(process)

    @rule(limit=limits, down=st.sampled_from([60 * SECOND, 3600 * SECOND]))
    def all_start_again_with_other_settings(self, limit: Limit, down: int) -> None:
        """By then nobody is held to what those declared who were there before."""
        self.advance(down)
        self.buckets["other"] = Bucket("other", (limit,))
        self.changed.add("other")
        self.reference.redeclare("other", [Numbers.of(limit.capacity, limit.refill_rate)])
        self.boot()
        self.asked.clear()

    @precondition(lambda self: self.world.tears)
    @rule(
        process=processes,
        call=calls,
        place=st.none() | st.just(Place()),
        writes=st.integers(1, 3),
        length=st.sampled_from([0, 8, 24, 40, 56, record.SIZE]),
    )
    def a_process_dies_while_it_writes(
        self, process: int, call: Call, place: Place | None, writes: int, length: int
    ) -> None:
        """Before, after, or amid one of them, as where the power fails."""
        self.sync()
        self.reference.lost_answer(self.costs(call), call.key)
        died = False

        def write_at(fd: int, raw: bytes, offset: int) -> int:
            nonlocal writes, died
            writes -= 1
            if writes:
                return os.pwrite(fd, raw, offset)
            os.pwrite(fd, raw[:length], offset)
            died = True
            raise Killed

        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            patch.setattr(file, "write_at", write_at)
            patch.setattr(upkeep, "write_at", write_at)
            self.processes[process].acquire(several(self.costs(call)), key=call.key, place=place)
        self.a_process_dies(process)
        if died and 0 < length < record.SIZE:
            self.processes[process].peek(several(self.costs(call)), key=call.key)
            self.reference.lose_records()
            self.forget_lost_orders(self.processes[process])

    def forget_lost_orders(self, limiter: Limiter) -> None:
        paused, changed = set(), set()
        for (name, bucket), key in product(self.buckets.items(), (None, "a")):
            _, orders = limiter.store.orders(bucket, key)
            paused |= {(name, each) for each in orders.paused}
            changed |= {(name, len(bucket.limits) - 1 - number) for number in orders.limits}
        self.reference.keep_orders(paused, changed)

    @precondition(lambda self: self.world.reboots)
    @rule(
        now=st.sampled_from([1, 5 * SECOND, 2 * BOOT]),
        down=gaps,
        error=st.sampled_from([0, 0, 1, -1, 3600 * SECOND, -3600 * SECOND]),
    )
    def the_host_reboots(self, now: int, down: int, error: int) -> None:
        self.sync()
        if not self.reference.numbers_stand(self.buckets, self.reference.now + down + error):
            error = 0
        self.reference.reboot(now, down, error)
        self.world.reboot(now, down + error)
        self.boot()
        self.asked.clear()

    @precondition(lambda self: self.world.restarts and self.asked)
    @rule()
    def the_server_restarts(self) -> None:
        self.sync()
        self.world.restart()
        self.reference.lose_everything()
        # A newcomer would take it for another store, which was never used.
        self.processes[min(self.asked)].peek("one")

    # -- in the end

    def teardown(self) -> None:
        if hasattr(self, "reference") and sys.exc_info()[0] is None:
            self.in_the_end_all_is_full_and_nobody_waits()
            self.check_all_windows()

    def in_the_end_all_is_full_and_nobody_waits(self) -> None:
        self.sync()
        for bucket, key in sorted(self.reference.meters, key=lambda quota: self.reference.quiet_from(*quota)):
            self.nobody_is_waited_for(bucket, key)
            self.wait_as_told(1, Call((bucket,), key, None))

    def nobody_is_waited_for(self, bucket: str, key: str | None) -> None:
        self.sync()
        for _ in range(3):  # numbers that end meanwhile put it off
            self.advance(max(0, self.reference.quiet_from(bucket, key) - self.reference.now))
            if self.acquire(0, Call((bucket,), key, None), Told(longest=0)):
                return
        raise AssertionError(bucket, key, "they wait for nobody")

    def check_all_windows(self) -> None:
        for (bucket, key), grants in self.reference.grants.items():
            for limit in () if bucket in self.changed else self.buckets[bucket].limits:
                for since_full in grants:
                    assert first_violation(since_full, limit.capacity, limit.refill_rate) is None, (bucket, key, limit)


def test_in_memory() -> None:
    run(lambda: Processes(InMemory()), 50)


def test_in_a_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    run(lambda: Processes(InFile(tmp_path_factory.mktemp("model"))), 50)


@pytest.fixture(scope="module")
def own_server() -> Iterator[PrivateServer]:
    with private_server() as server:
        yield server


@pytest.mark.server
def test_on_a_server(own_server: PrivateServer) -> None:
    run(lambda: Processes(InRedis(own_server)), 30)


@pytest.mark.server
def test_all_stores_answer_alike(own_server: PrivateServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    run(lambda: Processes(Everywhere(tmp_path_factory.mktemp("model"), own_server)), 25)


# -- true processes, at the same time


class Step(NamedTuple):
    """One call of a process: an ask with a place in line or without, or (with a cost below 0, say) a settlement."""

    charges: tuple[Charge, ...]
    place: Place | None
    settles: bool = False


States = dict[tuple[str, str | None, int], "State"]
Result = tuple[int, bool, float] | None


def told(decision: Decision) -> Result:
    return decision.at, decision.booked, decision.tokens


def serve(pipe: Connection) -> None:
    """A process that does as it is told, and answers each step."""
    clock = FakeClock()
    store = None
    while message := pipe.recv():
        if isinstance(message, Path):
            store = FileStore(message, clock)
            continue
        now, steps = message
        clock.advance(now - clock.now())
        assert store is not None
        for charges, place, settles in steps:
            if settles:
                store.settle(charges)
                pipe.send(None)
            else:
                pipe.send(told(store.acquire(charges, place)))


class Child:
    """The other end of :func:`serve`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def answers(self, number: int) -> list[Result]:
        """The next ones."""
        answers = []
        for _ in range(number):
            assert self.pipe.poll(PATIENCE), "a process stands still"
            answers.append(self.pipe.recv())
        return answers

    def kill(self) -> list[Result]:
        """The answers that it has given and nobody has heard yet."""
        self._process.kill()
        self._process.join()
        answers = []
        with suppress(EOFError, ConnectionError):
            while self.pipe.poll():
                answers.append(self.pipe.recv())
        self.pipe.close()
        return answers


API = Bucket("api", (Limit(3, 2), Limit(5, 0.5)))
QUICK = Bucket("quick", (Limit(2, 10),))
asks = st.builds(
    Step,
    st.builds(
        lambda buckets, key, cost: tuple(charge for each in buckets for charge in each.draw(key, each.charge(cost))),
        st.sampled_from([(API,), (QUICK,), (API, QUICK)]),
        st.sampled_from([None, "a"]),
        st.sampled_from([1, 1, 2, 0.5]),
    ),
    st.sampled_from([None, None, Place(), Place(patience=LONGEST_SPAN)]),
)
settlements = st.builds(
    lambda bucket, tokens: Step(
        tuple(charge._replace(cost=tokens * charge.limit.interval) for charge in bucket.draw(None)), None, settles=True
    ),
    st.sampled_from([API, QUICK]),
    st.sampled_from([-2, -1, 1, 4]),
)
batches = st.lists(
    st.lists(st.one_of(asks, asks, asks, settlements), min_size=1, max_size=5), min_size=PROCESSES, max_size=PROCESSES
)


def after(states: States, step: Step, now: int) -> tuple[Result, list[States]]:
    """What one step alone answers, and leaves behind: after each of its limits was written, one after the other."""
    known = fitted(step.charges, states.get, now)
    if step.settles:
        answer, new = None, settle(step.charges, known, now)
    else:
        decision, changed = acquire(step.charges, known, now, step.place)
        answer, new = told(decision), known if changed is None else changed
    written = accumulate(
        zip(step.charges, new, strict=True), lambda left, each: left | {each[0][:3]: each[1]}, initial=states
    )
    return answer, [*written][1:]


class AtOnce(RuleBasedStateMachine):
    """Processes take steps at the same time, and some are killed: some order of the steps explains every answer."""

    def __init__(self, children: list[Child], path: Path) -> None:
        super().__init__()
        self.children = children
        self.path = path
        self.clock = FakeClock(BOOT)
        self.looker = FileStore(path, self.clock)
        self.states: States = {}
        for child in children:
            child.pipe.send(path)

    @rule(batch=batches)
    def all_at_once(self, batch: list[list[Step]]) -> None:
        self._send(batch)
        answers = [child.answers(len(steps)) for child, steps in zip(self.children, batch, strict=True)]
        self.explain(batch, answers, None)

    @rule(batch=batches, victim=st.integers(0, PROCESSES - 1), heard=st.integers(0, 3))
    def one_is_killed(self, batch: list[list[Step]], victim: int, heard: int) -> None:
        self._send(batch)
        known = self.children[victim].answers(min(heard, len(batch[victim])))
        known += self.children[victim].kill()
        answers = [
            known if number == victim else child.answers(len(batch[number]))
            for number, child in enumerate(self.children)
        ]
        self.children[victim] = Child()
        self.children[victim].pipe.send(self.path)
        self.explain(batch, answers, victim)

    @rule(gap=st.sampled_from([1, MS, 100 * MS, SECOND, 10 * SECOND]))
    def time_passes(self, gap: int) -> None:
        self.clock.advance(gap)

    def _send(self, batch: list[list[Step]]) -> None:
        for child, steps in zip(self.children, batch, strict=True):
            child.pipe.send((self.clock.now(), steps))

    def explain(self, batch: list[list[Step]], answers: list[list[Result]], dead: int | None) -> None:
        """Look for the order: of the steps that were answered, and perhaps more of one who is dead.

        Of several limits that one step charges, the dead may have written only the first ones: nobody is given more.
        """
        now = self.clock.now()
        charges = tuple({charge[:3]: charge for steps in batch for step in steps for charge in step.charges}.values())
        _, _, left = self.looker.read(charges)
        left = [seen_at(state, now) for state in left]
        tried = set()
        agenda = [((0,) * len(batch), self.states)]
        while agenda:
            done, states = agenda.pop()
            if (done, frozenset(states.items())) in tried:
                continue
            tried.add((done, frozenset(states.items())))
            if all(number >= len(heard) for number, heard in zip(done, answers, strict=True)) and left == [
                seen_at(state, now) for state in fitted(charges, states.get, now)
            ]:
                self.states = states
                return
            for i, steps in enumerate(batch):
                if done[i] < len(steps):
                    answer, (*partly, then) = after(states, steps[done[i]], now)
                    is_heard = done[i] < len(answers[i])
                    if not is_heard or answer == answers[i][done[i]]:
                        agenda.append(((*done[:i], done[i] + 1, *done[i + 1 :]), then))
                    if i == dead and not is_heard:
                        agenda += [((*done[:i], len(steps), *done[i + 1 :]), left) for left in partly]
        raise AssertionError(batch, answers)


def test_a_debt_that_was_paid_is_none_where_nobody_looked_since(tmp_path: Path) -> None:
    machine = AtOnce([], tmp_path / "state")
    draw = Step(tuple(charge._replace(cost=SECOND) for charge in QUICK.draw(None)), None, settles=True)
    machine.looker.settle(draw.charges)
    machine.explain([[draw]], [[None]], None)
    machine.clock.advance(SECOND - 100 * MS)
    # Who would have looked next is killed before.
    machine.explain([[draw]], [[]], 0)


@pytest.fixture
def children() -> Iterator[list[Child]]:
    found = [Child() for _ in range(PROCESSES)]
    yield found
    for child in found:
        child.kill()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_some_order_of_the_steps_explains_what_processes_are_told(
    children: list[Child], tmp_path_factory: pytest.TempPathFactory
) -> None:
    # What happened once at the same time, or in the middle of a step, need not happen again: nothing to make smaller.
    run(lambda: AtOnce(children, tmp_path_factory.mktemp("model") / "state"), 20, steps=15, phases=[Phase.generate])
