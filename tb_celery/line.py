"""Requests that a worker holds, in the order in which they came."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tb_celery.bucket import Charge, Limit, Name
    from tb_celery.reschedule import LimitedRequest


class Held(NamedTuple):
    """A request in a line, what it draws, since when it is held (monotonic), and until when the broker bears that."""

    request: LimitedRequest
    charges: tuple[Charge, ...]
    since: float
    until: float

    @property
    def worth(self) -> int:
        """Nanoseconds that its tokens take to refill."""
        return max(charge.cost for charge in self.charges)


class Line:
    """Requests that wait for the same buckets and keys, in the order in which they came."""

    def __init__(self, key: tuple[Name, ...]) -> None:
        self.key = key
        self.waiting: deque[Held] = deque()
        self.worth = 0
        """Nanoseconds that the tokens of all who wait take to refill."""
        self.limits: list[Limit] = []
        """Those that counted for the head at the last look, pauses among them; none before."""
        self.turns: list[int] = []
        """Turns that are this line's, in order: whoever is its head takes the first."""
        self.timer: Any = None
        self.due = 0.0
        self.asking = False
        self.paused: set[str] = set()
        """Queues that are not consumed from for as long as there are enough of theirs here."""

    @property
    def left(self) -> float:
        """Seconds until the head has to be seen to."""
        return min(self.due, self.waiting[0].until) - time.monotonic()
