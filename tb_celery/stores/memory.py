"""State in this process alone: for tests, notebooks and single-process programs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tb_celery.arithmetic import acquire, settle
from tb_celery.bucket import FOREVER, PAUSED, Name
from tb_celery.clock import Clock, SystemClock
from tb_celery.state import State, fitted
from tb_celery.stores.claims import Others, claims_of
from tb_celery.stores.forks import tell_after_fork
from tb_celery.stores.orders import NONE, change, collect, consequence, heeded, last_pause, late

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tb_celery.arithmetic import Decision, Place
    from tb_celery.bucket import Bucket, Charge, Limit
    from tb_celery.stores.claims import Claims
    from tb_celery.stores.orders import Orders


class MemoryStore:
    """Threads and tasks of one process share it; nothing outlives the process.

    Args:
        clock: where "now" comes from.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._states: dict[Name, State] = {}
        self._kept: set[Name] = set()
        """Those that were used with several numbers: full by these, they may not be so by others."""
        self._orders: dict[Name, State] = {}
        self._others = Others(FOREVER)
        self._mutex = threading.Lock()
        self._roomy = 1024
        tell_after_fork(self)

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        with self._mutex:
            charges = self._heard(charges)
            now, states = self._look(charges)
            decision, new = acquire(charges, states, now, place, last_pause(charges, self._standing))
            for charge, state in zip(charges, states if new is None else new, strict=True):
                if not charge.is_pause and (new is not None or charge[:3] in self._states):
                    self._states[charge[:3]] = state
            if len(self._states) > self._roomy:
                self._states = {
                    name: state
                    for name, state in self._states.items()
                    if max(state.full_at, state.booked_at) > now or name in self._kept
                }
                self._roomy = max(1024, 2 * len(self._states))
            return decision

    def read(self, charges: Sequence[Charge]) -> tuple[int, Sequence[Charge], list[State]]:
        with self._mutex:
            charges = self._heeded(charges)
            now, states = self._look(charges)
            return now, charges, states

    def settle(self, charges: Sequence[Charge]) -> int:
        with self._mutex:
            charges = self._heeded(charges, asks=False)
            now, states = self._look(charges)
            for charge, state in zip(charges, settle(charges, states, now), strict=True):
                self._states[charge[:3]] = state
            return now

    def order(self, charge: Charge, span: int, declared: Limit | None = None) -> None:
        with self._mutex:
            now, known = self.clock.now(), self._orders.get(charge[:3])
            step = consequence(charge, span, self._known, declared, now)
            until = now + span
            if known and charge.is_pause:
                until = max(until, known.full_at)
            self._orders[charge[:3]] = State(until, until, *charge.limit.numbers)
            if charge.is_pause and not span:
                del self._orders[charge[:3]]  # or it stood again if the clock were set back
            for name, state in [*self._states.items()] if step else ():
                if step and name[0] == charge.bucket and charge.key in {None, name[1]}:
                    self._states[name] = step(name[2], state, now)
                    if self._states[name].numbers != state.numbers:
                        self._kept.add(name)

    def orders(self, bucket: Bucket, key: str | None = None) -> tuple[int, Orders]:
        with self._mutex:
            now = self.clock.now()
            return now, self._standing(bucket.name, key).at(now)

    def survey(self, buckets: Collection[Bucket]) -> tuple[int, dict[str, list[State]]]:
        with self._mutex:
            now = self.clock.now()
            drawn = {each.name: each.draw(None) for each in buckets}
            orders = {name: [(self._about(each), each.limit) for each in charges] for name, charges in drawn.items()}
            found = {name: list[State]() for name in orders}
            for (name, *_), state in self._states.items():
                if name in found:
                    found[name].append(late(state, orders[name], now))
            return now, found

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        with self._mutex:
            gone = [name for name in self._states if name[0] == bucket.name and key in {None, name[1]}]
            for name in gone:
                del self._states[name]
            return len(gone)

    def _look(self, charges: Sequence[Charge]) -> tuple[int, list[State]]:
        now = self.clock.now()
        outlived = dict[Name, State]()
        for charge in charges:
            known = self._states.get(charge[:3])
            if known is not None and known.numbers != charge.limit.numbers:
                self._kept.add(charge[:3])
                outlived[charge[:3]] = late(known, [(self._about(charge), charge.limit)], now)
        return now, fitted(charges, lambda name: outlived.get(name) or self._known(name), now)

    def _heeded(self, charges: Sequence[Charge], *, asks: bool = True) -> Sequence[Charge]:
        """``charges`` by the numbers that count."""
        if not self._orders:
            return charges
        return heeded(charges, self._standing, self._claims, self.clock.now(), asks=asks)

    def _heard(self, asked: Sequence[Charge]) -> Sequence[Charge]:
        """``asked`` by the numbers that count; others hear of those that are declared here."""
        charges = self._heeded(asked)
        written = [self._states.get(charge[:3]) for charge in asked]
        if self._orders or any(
            known and known.numbers != charge.limit.numbers for known, charge in zip(written, asked, strict=True)
        ):
            now = self.clock.now()
            met = self._others.meet(asked, charges, written, self._known, now)
            for name, _, claim in [*self._others.due(asked, met, self._standing, self._claims, now)]:
                self._orders[name] = claim.state()
            charges = self._heeded(asked)
        return charges

    def _claims(self, bucket: str, count: int) -> Claims:
        return claims_of(bucket, count, self._known, self.clock.now()) if self._orders else {}

    def _about(self, charge: Charge) -> State | None:
        """The order about the limit of ``charge``, also one that has ended."""
        return self._orders.get(change(charge.bucket, charge.number, charge.limit)[:3])

    def _known(self, name: Name) -> State | None:
        return (self._states if name[2] >= 0 else self._orders).get(name)

    def _standing(self, bucket: str, key: str | None) -> Orders:
        if not self._orders:
            return NONE
        found = collect(bucket, self._known, self.clock.now())
        return found if key is None else found.with_pause(key, self._known((bucket, key, PAUSED)))

    def _after_fork(self) -> None:
        # The thread that held it in the parent does not live here.
        self._mutex = threading.Lock()
