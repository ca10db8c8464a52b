"""The places in a worker's pool: tokens are taken when one is free, or they lapse meanwhile."""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


STARTING = 0.01
"""Seconds after which to look again whether a new process of the pool has started."""


class Slots(Protocol):
    """What a pool has room for."""

    def take(self, call: Callable[..., object], *args: object) -> bool:
        """Whether there is one, which is the caller's until :meth:`give_back`; else ``call`` gets one later."""

    def give_back(self, *, used: bool) -> None:
        """End what ``take`` began; ``used`` tells whether a request was handed over to the pool meanwhile."""

    def in_turn(self, call: Callable[..., object], *args: object) -> None:
        """Call at once, but not before those who wait for a slot."""

    def look(self) -> None:
        """See whether there are more than there were."""

    def clear(self) -> None:
        """Nobody waits any more."""


class GuardedSlots:
    """Those of a pool that Celery guards with a semaphore, which is released when a request ends.

    Args:
        semaphore: the worker's.
        pool: the worker's, of processes.
        later: calls a function so many seconds later in the consumer's loop.
    """

    def __init__(self, semaphore: Any, pool: Any, later: Callable[[float, Callable[[], None]], object]) -> None:
        self._semaphore = semaphore
        self._pool = pool
        self._later = later
        self._coming = 0
        # Its own counts each new place twice, and lets so many more requests than there are processes into the pool.
        semaphore.grow = self._grow

    def _grow(self, n: int = 1) -> None:
        self._semaphore.initial_value += n
        if not self._coming:
            self._later(STARTING, self._await)
        self._coming += n

    def take(self, call: Callable[..., object], *args: object) -> bool:
        if self._semaphore.value > 0:
            return bool(self._semaphore.acquire(_nothing))
        self._semaphore.acquire(call, *args)
        return False

    def give_back(self, *, used: bool) -> None:
        if not used:
            self._semaphore.release()

    def in_turn(self, call: Callable[..., object], *args: object) -> None:
        call(*args)

    def look(self) -> None:
        """See whether processes that the pool grows by have started: tokens lapse in less than that takes."""
        ready = len(self._pool._pool._fileno_to_inq)  # noqa: SLF001 - those that can be written to
        while self._coming and self._semaphore.initial_value - self._coming < ready:
            self._coming -= 1
            self._semaphore.release()

    def _await(self) -> None:
        self.look()
        if self._coming:
            self._later(STARTING, self._await)

    def clear(self) -> None:
        # Celery does the rest, together with its own that wait.
        self._coming = 0


def _nothing() -> None:
    pass


class CountedSlots:
    """Those of a pool that takes whatever it is given: counted here, from the call that gives it to the end.

    Args:
        pool: the worker's; strategies made later keep the call of it that counts.
        soon: calls a function in the consumer's loop or timer, from any thread.
    """

    def __init__(self, pool: Any, soon: Callable[[Callable[[], None]], object]) -> None:
        self._pool = pool
        self._soon = soon
        self._inside: set[object] = set()
        self._taken = 0
        self._waiting: deque[Callable[[], object]] = deque()
        self._mutex = threading.Lock()
        self._apply_async = pool.apply_async
        pool.apply_async = self._counted

    def take(self, call: Callable[..., object], *args: object) -> bool:
        with self._mutex:
            if self._has_room and not self._waiting:
                self._taken += 1
                return True
            self._waiting.append(functools.partial(call, *args))
            return False

    def give_back(self, *, used: bool) -> None:  # noqa: ARG002
        # A request that is in the pool counts by itself.
        with self._mutex:
            self._taken -= 1
            wakes = bool(self._waiting) and self._has_room
        if wakes:
            self._soon(self.look)

    def in_turn(self, call: Callable[..., object], *args: object) -> None:
        with self._mutex:
            waits = bool(self._waiting)
            if waits:
                self._waiting.append(functools.partial(self._pass, call, *args))
        if not waits:
            call(*args)

    def look(self) -> None:
        while True:
            with self._mutex:
                if not self._waiting or not self._has_room:
                    return
                self._taken += 1
                call = self._waiting.popleft()
            call()

    def clear(self) -> None:
        with self._mutex:
            self._waiting.clear()

    @property
    def _has_room(self) -> bool:
        return len(self._inside) + self._taken < int(self._pool.num_processes)

    def _pass(self, call: Callable[..., object], *args: object) -> None:
        call(*args)
        self.give_back(used=True)

    def _counted(self, target: Callable[..., object], args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        """The pool's ``apply_async``; when what it was given ends, others get the slot."""
        token = object()
        ended = functools.partial(self._end, token)
        if self._pool.is_green or self._pool.body_can_be_buffer:
            target = _followed(target, ended)
        else:
            # It runs in another process: all that is seen here of its end is the answer.
            options |= {name: _followed(options[name], ended) for name in ("callback", "error_callback")}
        with self._mutex:
            self._inside.add(token)
        try:
            return self._apply_async(target, args, kwargs, **options)
        except BaseException:
            ended()
            raise

    def _end(self, token: object) -> None:
        with self._mutex:
            self._inside.discard(token)
            wakes = bool(self._waiting)
        if wakes:
            self._soon(self.look)


def _followed(call: Callable[..., object], ended: Callable[[], None]) -> Callable[..., object]:
    def followed(*args: Any, **kwargs: Any) -> object:
        try:
            return call(*args, **kwargs)
        finally:
            ended()

    return followed
