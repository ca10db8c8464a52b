"""One caller in line, step by step, and the thread that asks for coroutines."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tb_celery.arithmetic import Place
from tb_celery.bucket import LONGEST_SPAN, SECOND
from tb_celery.errors import ConfigurationError, shown

if TYPE_CHECKING:
    import asyncio

    from tb_celery.bucket import Charge
    from tb_celery.stores import Store

_askers: WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor] = WeakKeyDictionary()


def asker_of(loop: asyncio.AbstractEventLoop) -> ThreadPoolExecutor:
    """The thread in which coroutines of ``loop`` ask: others may hold the lock. One, so that order is kept."""
    if loop not in _askers:
        _askers[loop] = ThreadPoolExecutor(1, "tb_celery")
    return _askers[loop]


class Waiting:
    """The steps of one caller in line, without the sleeping."""

    def __init__(self, store: Store, charges: tuple[Charge, ...], timeout: float | None, lot: float = 100.0) -> None:
        self._store = store
        self._charges = charges
        self._lot = lot
        number = isinstance(timeout, int | float | Fraction) and not isinstance(timeout, bool)
        if timeout is not None and (not number or timeout != timeout):  # noqa: PLR0124 - nan differs from itself
            message = f"timeout must be a number of seconds, not {shown(timeout)}"
            raise ConfigurationError(message)
        if timeout is None or timeout >= LONGEST_SPAN / SECOND:
            self._deadline = None
        else:
            self._deadline = store.clock.now() + math.ceil(timeout * SECOND)
        self._turn: int | None = None

    def ask(self) -> float | None:
        """Ask once; the seconds to sleep before the next ask, or ``None`` when :attr:`decision` is final."""
        longest = None if self._deadline is None else max(0, self._deadline - self._store.clock.now())
        # Patience without end: this caller stays here, so its turn may be as soon as the tokens are.
        place = Place(turn=self._turn, patience=LONGEST_SPAN, longest=longest, lot=self._lot)
        self.decision = self._store.acquire(self._charges, place)
        if self.decision or (longest is not None and self.decision.at - self.decision.now > longest):
            return None
        self._turn = self.decision.at
        return self.decision.wait
