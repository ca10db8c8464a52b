"""State in this process alone: for tests, notebooks and single-process programs."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from tb_celery.arithmetic import State, acquire, fit
from tb_celery.clock import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tb_celery.arithmetic import Decision, Place
    from tb_celery.bucket import Bucket, Charge


class MemoryStore:
    """Threads and tasks of one process share it; nothing outlives the process.

    Args:
        clock: where "now" comes from.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or SystemClock()
        self._states: dict[tuple[str, str | None, int], State] = {}
        self._kept: set[tuple[str, str | None, int]] = set()
        """Those that were used with several numbers: full by these, they may not be so by others."""
        self._mutex = threading.Lock()
        self._roomy = 1024
        _stores.add(self)

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        with self._mutex:
            now, states = self._look(charges)
            decision, new = acquire(charges, states, now, place)
            for charge, state in zip(charges, states if new is None else new, strict=True):
                self._states[charge[:3]] = state
            if len(self._states) > self._roomy:
                self._states = {
                    name: state
                    for name, state in self._states.items()
                    if max(state.full_at, state.booked_at) > now or name in self._kept
                }
                self._roomy = max(1024, 2 * len(self._states))
            return decision

    def read(self, charges: Sequence[Charge]) -> tuple[int, list[State]]:
        with self._mutex:
            return self._look(charges)

    def survey(self, bucket: Bucket) -> tuple[int, list[State]]:
        with self._mutex:
            return self.clock.now(), [state for name, state in self._states.items() if name[0] == bucket.name]

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        with self._mutex:
            gone = [name for name in self._states if name[0] == bucket.name and key in {None, name[1]}]
            for name in gone:
                del self._states[name]
            return len(gone)

    def _look(self, charges: Sequence[Charge]) -> tuple[int, list[State]]:
        now, states = self.clock.now(), []
        for charge in charges:
            known = self._states.get(charge[:3])
            if known is not None and (known.interval, known.span) != (charge.limit.interval, charge.limit.span):
                self._kept.add(charge[:3])
            states.append(fit(known, charge.limit, now))
        return now, states

    def _after_fork(self) -> None:
        # The thread that held it in the parent does not live here.
        self._mutex = threading.Lock()


_stores: weakref.WeakSet[MemoryStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in _stores:
        store._after_fork()  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
