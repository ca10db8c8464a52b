"""Whether the turns that ``acquire`` hands out are any good: a fleet of Celery workers, simulated event by event.

Nothing sleeps and nothing is random: the clock is a fake one and the dice are seeded. What is modelled is what makes
turns hard in practice: an ask costs processor time, a message that is sent back returns a few milliseconds late and now
and then 300 (or early, under gevent), it then needs a free process, and whoever waits in place keeps that process busy.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from typing import TYPE_CHECKING

import pytest

from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND, Charge, Limit
from tb_celery.clock import FakeClock
from tb_celery.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MS = SECOND // 1000
PROCESSES = 8
CORES = 2
PREFETCH = 4 * PROCESSES
ASK = MS
PUBLISH = 2 * MS
MIN_COUNTDOWN = 100 * MS


@dataclass(eq=False)
class Message:
    """One task's message, through all the times it is sent back."""

    charges: tuple[Charge, ...]
    cost: int
    sent: int
    newcomer: bool
    turn: int | None = None
    publishes: int = 0
    eta: int = 0
    started: int | None = None
    revoked: bool = False

    @property
    def waited(self) -> float:
        assert self.started is not None, "this task has starved"
        return (self.started - self.sent) / SECOND


@dataclass(eq=False)
class Fleet:
    """Workers, their broker and their quotas. An actor yields the instant to go on at, or ``None`` for "when woken"."""

    limits: Mapping[str, Limit]
    seed: int = 1
    patience: int = 50 * MS
    longest: int = 900 * SECOND
    early: int = 0
    body: int = 0
    stall: tuple[int, int] = (0, 0)
    messages: list[Message] = field(default_factory=list)
    grants: list[tuple[int, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.clock = FakeClock(1)
        self.store = MemoryStore(self.clock)
        self._broker: deque[Message] = deque()
        self._reserved: deque[Message] = deque()
        self._idle: deque[Iterator[int | None]] = deque()
        self._cores = [0] * CORES
        self._agenda: list[tuple[int, int, bool, Iterator[int | None]]] = []
        self._order = count()
        for _ in range(PROCESSES):
            self.schedule(0, self._process(), worker=True)

    def send(self, *names: str, cost: int = 1, newcomer: bool = False) -> Message:
        message = Message(self._charges(names, cost), cost, self.clock.now(), newcomer)
        self.messages.append(message)
        self._broker.append(message)
        self._wake()
        return message

    def arrive(self, name: str, share: float, start: int, stop: int) -> None:
        """Newcomers, at ``share`` of the rate of the bucket ``name``."""

        def actor() -> Iterator[int]:
            yield start
            while self.clock.now() < stop:
                self.send(name, newcomer=True)
                yield self.clock.now() + self._gap(name, share)

        self.schedule(0, actor())

    def steal(self, name: str, share: float, stop: int) -> None:
        """Plain callers (scripts, cron jobs) that ask for ``share`` of the quota and wait for it."""

        def actor() -> Iterator[int]:
            charges = self._charges((name,), 1)
            while self.clock.now() < stop:
                yield self.clock.now() + self._gap(name, share)
                while not (decision := self.store.acquire(charges)):
                    yield decision.at + self.dice.randint(0, 2 * MS)
                self.grants.append((self.clock.now(), name, 1))

        self.schedule(0, actor())

    def revoke(self, share: float, at: int) -> None:
        """At ``at``, ``share`` of those who hold turns turn out never to come back."""

        def actor() -> Iterator[int]:
            yield at
            for message in self.messages:
                waits = message.turn is not None and message.started is None
                message.revoked = waits and self.dice.random() < share

        self.schedule(0, actor())

    def schedule(self, at: int, actor: Iterator[int | None], *, worker: bool = False) -> None:
        heapq.heappush(self._agenda, (at, next(self._order), worker, actor))

    def run(self) -> None:
        while self._agenda:
            at, _, worker, actor = heapq.heappop(self._agenda)
            begin, end = self.stall
            if worker and begin <= at < end:
                self.schedule(end, actor, worker=True)
                continue
            self.clock.advance(at - self.clock.now())
            try:
                then = next(actor)
            except StopIteration:
                continue
            if then is None:
                self._idle.append(actor)
            else:
                self.schedule(then, actor, worker=worker)

    @property
    def ran(self) -> list[Message]:
        """Every message that was not revoked, in the order sent; all of them have run."""
        ran = [message for message in self.messages if not message.revoked]
        assert all(message.started is not None for message in ran)
        return ran

    def used(self, name: str) -> float:
        """Share of the quota used while there was a backlog: until all but the last twentieth had their tokens."""
        grants = [(at, cost) for at, bucket, cost in self.grants if bucket == name]
        grants = grants[: len(grants) * 19 // 20]
        begin, end = self.stall
        elapsed = (grants[-1][0] - (end - begin)) / SECOND
        limit = self.limits[name]
        return sum(cost for _, cost in grants) / (limit.capacity + float(limit.refill_rate) * elapsed)

    def excess(self, name: str) -> Fraction:
        """Tokens granted beyond ``capacity + refill_rate * w``, in the worst of all windows."""
        rate = Fraction(str(self.limits[name].refill_rate)) / SECOND
        worst = least = granted = Fraction(0)
        for at, cost in ((at, cost) for at, bucket, cost in self.grants if bucket == name):
            least = min(least, granted - rate * at)
            granted += cost
            worst = max(worst, granted - rate * at - least)
        return worst - Fraction(str(self.limits[name].capacity))

    def _charges(self, names: tuple[str, ...], cost: int) -> tuple[Charge, ...]:
        return tuple(Charge(name, None, 0, self.limits[name], self.limits[name].charge(cost)) for name in names)

    def _gap(self, name: str, share: float) -> int:
        return int(self.dice.expovariate(share * float(self.limits[name].refill_rate)) * SECOND)

    def _wake(self) -> None:
        if self._idle:
            self.schedule(self.clock.now(), self._idle.popleft(), worker=True)

    def _computed(self, nanoseconds: int) -> int:
        core = self._cores.index(min(self._cores))
        self._cores[core] = max(self._cores[core], self.clock.now()) + nanoseconds
        return self._cores[core]

    def _next(self) -> Message | None:
        while self._broker and len(self._reserved) < PREFETCH:
            message = self._broker.popleft()
            if message.eta > self.clock.now():
                self.schedule(message.eta + self._lateness(), self._return(message), worker=True)
            else:
                self._reserved.append(message)
        return self._reserved.popleft() if self._reserved else None

    def _process(self) -> Iterator[int | None]:
        while True:
            if (message := self._next()) is None:
                yield None
            elif not message.revoked:
                yield from self._deliver(message)

    def _deliver(self, message: Message) -> Iterator[int]:
        patience = self.patience
        yield self._computed(ASK)
        while True:
            decision = self.store.acquire(message.charges, Place(message.turn, MIN_COUNTDOWN, patience))
            now = self.clock.now()
            if decision:
                message.started = now
                self.grants += [(now, charge.bucket, message.cost) for charge in message.charges]
                yield now + self.body
                return
            if decision.booked:
                message.turn = decision.at
            if decision.at - now > patience:
                break
            patience -= decision.at - now
            yield decision.at + self.dice.randint(MS // 20, MS // 2)
        message.eta = min(max(decision.at, now + MIN_COUNTDOWN), now + self.longest)
        yield self._computed(PUBLISH)
        message.publishes += 1
        self._broker.append(message)  # behind all that are there
        self._wake()

    def _return(self, message: Message) -> Iterator[int]:
        self._reserved.append(message)
        self._wake()
        return
        yield

    def _lateness(self) -> int:
        if self.early:
            return self.dice.randint(-self.early, 2 * MS)
        return self.dice.randint(2 * MS, 10 * MS) if self.dice.random() < 0.98 else self.dice.randint(10 * MS, 300 * MS)


@dataclass(frozen=True)
class Scenario:
    """A backlog and what befalls it; then what may come of it: publishes a task, and the share of the quota used."""

    backlog: int
    capacity: int
    rate: float
    costs: tuple[int, ...] = (1,)
    newcomers: float = 0
    stolen: float = 0
    stall: int = 0
    revoked: float = 0
    early: int = 0
    longest: int = 900
    body: float = 0
    mean: float = 1.1
    worst: int = 3
    used: float = 0.99

    def play(self) -> Fleet:
        fleet = Fleet(
            {"api": Limit(self.capacity, self.rate)},
            longest=self.longest * SECOND,
            early=self.early * MS,
            body=int(self.body * SECOND),
            stall=(5 * SECOND, (5 + self.stall) * SECOND),
        )
        length = int(self.backlog / self.rate * SECOND)
        for i in range(self.backlog):
            fleet.send("api", cost=self.costs[i % len(self.costs)])
        if self.newcomers:
            fleet.arrive("api", self.newcomers, length // 10, 2 * length)
        if self.stolen:
            fleet.steal("api", self.stolen, int(length / (1 - self.stolen)))
        if self.revoked:
            fleet.revoke(self.revoked, 3 * SECOND)
        fleet.run()
        return fleet


# The aim is the default: 1.1, 3 and 0.99. Where a scenario allows for more, the cause is not the order of the line: a
# limit of capacity 1 has nothing to bridge a late arrival with; each token that is stolen, or lost to a stall, sends
# one holder of a turn away; a revoked turn goes to waste unless the whole line does; a hop is a publish; a pool can be
# slow.
SCENARIOS = {
    "1 every 2 s": Scenario(200, 5, 0.5),
    "1/s": Scenario(200, 5, 1),
    "10/s": Scenario(200, 5, 10),
    "50/s": Scenario(1000, 5, 50),
    "50/s, capacity 50": Scenario(1000, 50, 50),
    "50/s, capacity 1": Scenario(1000, 1, 50, used=0.96),
    "100/s, capacity 1": Scenario(1000, 1, 100, used=0.94),
    "1/s, capacity 1": Scenario(200, 1, 1, used=0.96),
    "200/s": Scenario(200, 5, 200),
    "1000/s": Scenario(200, 5, 1000),
    "newcomers at the rate": Scenario(200, 5, 10, newcomers=1),
    "newcomers at the rate, fast": Scenario(300, 5, 50, newcomers=1),
    "more newcomers than quota": Scenario(200, 5, 10, newcomers=1.5),
    "more newcomers than quota, fast": Scenario(300, 5, 50, newcomers=1.5),
    "more newcomers than quota, capacity 1": Scenario(100, 1, 0.5, newcomers=1.5, used=0.95),
    "a tenth stolen": Scenario(300, 5, 10, stolen=0.1, mean=1.15, worst=4),
    "a tenth stolen, capacity 1": Scenario(300, 1, 1, stolen=0.1, mean=1.15, worst=4, used=0.96),
    "a third stolen": Scenario(300, 5, 10, stolen=0.3, mean=1.45, worst=6),
    "stalled for 10 s": Scenario(600, 5, 10, stall=10, mean=1.2),
    "stalled for 60 s": Scenario(600, 5, 10, stall=60, mean=1.95),
    "a tenth revoked": Scenario(600, 5, 10, revoked=0.1, used=0.89),
    "a tenth revoked, newcomers": Scenario(600, 5, 10, revoked=0.1, newcomers=1.5, used=0.95),
    "a tenth revoked, newcomers, capacity 1": Scenario(60, 1, 0.5, revoked=0.1, newcomers=0.8, used=0.85),
    "costs 1 and 5": Scenario(150, 5, 10, costs=(5, 1, 1), used=0.96),
    "costs 1 and 5, slow, newcomers": Scenario(150, 5, 1, costs=(5, 1, 1), newcomers=0.5, used=0.97),
    "gevent": Scenario(200, 5, 10, early=32),
    "gevent, fast": Scenario(200, 5, 50, early=32),
    "hopping": Scenario(600, 5, 10, longest=10, mean=3.5, worst=7),
    "pool of 40/s": Scenario(300, 5, 50, body=0.2, used=0.75),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_everyone_runs_soon_and_is_seldom_sent_back(scenario: Scenario) -> None:
    fleet = scenario.play()
    publishes = [message.publishes for message in fleet.ran]
    assert fleet.excess("api") <= 0
    assert sum(publishes) / len(publishes) <= scenario.mean
    assert max(publishes) <= scenario.worst
    assert fleet.used("api") >= scenario.used


@pytest.mark.parametrize(("capacity", "rate"), [(5, 10), (5, 50), (1, 10), (50, 50)])
def test_newcomers_do_not_wait_for_turns_that_are_lost(capacity: int, rate: float) -> None:
    """Once the limit has been full for a second and four turns more; who came before that keeps the turn it was given.

    At 80 % of the rate, where newcomers among themselves hardly wait.
    """
    fleet = Fleet({"api": Limit(capacity, rate)})
    for _ in range(600):
        fleet.send("api")
    fleet.revoke(1, 3 * SECOND)
    lost = 3 * SECOND + fleet.limits["api"].span + 2 * SECOND
    fleet.arrive("api", 0.8, lost, lost + 20 * SECOND)
    fleet.run()
    waits = sorted(message.waited for message in fleet.ran if message.newcomer)
    assert fleet.excess("api") <= 0
    assert waits[0] < 0.01
    assert waits[-1] < 2


def test_a_lost_turn_is_not_waited_for_however_slow_the_limit() -> None:
    hour = 3600 * SECOND
    fleet = Fleet({"api": Limit(1, Fraction(1, 3600))}, longest=4 * hour)
    fleet.send("api")
    fleet.send("api")
    fleet.revoke(1, SECOND)
    fleet.arrive("api", 1, hour + 2 * SECOND, hour + 3 * SECOND)
    fleet.run()
    assert [message.waited < 0.01 for message in fleet.ran] == [True, True]


@pytest.mark.parametrize("seed", range(5))
def test_a_large_cost_is_not_starved_by_small_ones(seed: int) -> None:
    fleet = Fleet({"api": Limit(5, 1)}, seed)
    fleet.arrive("api", 2, 0, 120 * SECOND)

    def large() -> Iterator[int]:
        yield 10 * SECOND
        sent.append(fleet.send("api", cost=5))

    sent: list[Message] = []
    fleet.schedule(0, large())
    fleet.run()
    assert sent[0].waited < 60
    assert sent[0].publishes <= 2


def test_a_line_for_one_bucket_does_not_hold_up_those_who_need_another() -> None:
    fleet = Fleet({"fast": Limit(5, 50), "slow": Limit(5, 1)})
    for i in range(200):
        fleet.send(*(("fast", "slow"), ("fast",), ("slow",))[i % 3])
    fleet.arrive("fast", 0.3, 5 * SECOND, 20 * SECOND)
    fleet.run()
    assert max(message.waited for message in fleet.ran if message.newcomer) < 1
    assert max(message.publishes for message in fleet.ran) <= 3
    assert fleet.used("slow") >= 0.99
    assert fleet.excess("fast") <= 0
    assert fleet.excess("slow") <= 0


def test_two_buckets_of_one_rate_are_both_used_up() -> None:
    fleet = Fleet({"one": Limit(5, 10), "other": Limit(5, 10)})
    for i in range(300):
        fleet.send(*(("one", "other"), ("one",), ("other",))[i % 3])
    fleet.run()
    publishes = [message.publishes for message in fleet.ran]
    assert sum(publishes) / len(publishes) <= 1.1
    assert max(publishes) <= 3
    for name in fleet.limits:
        assert fleet.used(name) >= 0.99
        assert fleet.excess(name) <= 0


def test_a_backlog_runs_in_the_order_it_was_sent() -> None:
    ran = Scenario(100, 5, 1).play().ran
    assert max(message.publishes for message in ran) == 1
    assert all(message.waited <= max(i - 5, 0) + 1.5 for i, message in enumerate(ran, 1))
    assert len({int(message.waited) for message in ran}) >= 90
