"""The state as a worker's own loop asks for it: no answer is waited for that would hold up everything else."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeVar

from tb_celery.errors import StoreTimeoutError
from tb_celery.settings import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tb_celery.arithmetic import Decision, Place
    from tb_celery.bucket import Charge
    from tb_celery.quota import Quota
    from tb_celery.state import State
    from tb_celery.stores import Store

logger = logging.getLogger("tb_celery")
Answer = TypeVar("Answer")

BUSY = 0.005
"""Seconds after which to ask again when others hold the store's lock."""
ANSWER = 0.25
"""Seconds for which a server's answer is waited for; then nobody asks it again for four times as long."""
APART = 5.0
"""Seconds between two that ask in vain beyond which the first says nothing of how long there has been no answer."""


class HastyStore:
    """A connection or descriptor of its own, and hardly any patience. Where one asks in vain, the others need not try.

    Args:
        quota: whose state it is.

    Attributes:
        clock: the store's.
    """

    def __init__(self, quota: Quota) -> None:
        settings = quota.settings
        self._store: Store = quota.limiter.store
        self._rest = 0.0
        if settings.store != "memory":
            patience = 1e-9 if settings.store == "file" else min(ANSWER, settings.lock_timeout)
            self._store = open_store(settings.model_copy(update={"lock_timeout": patience}))
            self._rest = 4 * patience
            if quota.metrics:
                self._store = quota.metrics.of(self._store, hasty=True)
        self.clock = self._store.clock
        self._longest = settings.lock_timeout
        self._waits = settings.on_store_error == "defer"
        self._asks_at = 0.0
        self._silent_since: float | None = None
        self._failed_at = 0.0
        self._has_told = False

    @property
    def pause(self) -> float:
        """Seconds after which to ask again."""
        return max(BUSY, self._asks_at - time.monotonic())

    @property
    def has_failed(self) -> bool:
        """Whether it has been silent for so long that the setting ``on_store_error`` has more to say than to wait."""
        return not self._waits and self._silent > self._longest

    def read(self, charges: Sequence[Charge]) -> tuple[int, Sequence[Charge], list[State]]:
        """As a store's.

        Raises:
            StoreTimeoutError: there is no answer in time, or there was none a moment ago.
            StoreError: it failed.
        """
        return self._answer(lambda: self._store.read(charges))

    def acquire(self, charges: Sequence[Charge], place: Place) -> Decision:
        """As a store's; what it raises as for :meth:`read`."""
        return self._answer(lambda: self._store.acquire(charges, place))

    @property
    def _silent(self) -> float:
        """Seconds for which nobody has had an answer."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    def _answer(self, ask: Callable[[], Answer]) -> Answer:
        if self._asks_at > time.monotonic():
            raise StoreTimeoutError
        try:
            answer = ask()
        except StoreTimeoutError:
            now = time.monotonic()
            self._asks_at = now + self._rest
            if self._silent_since is None or now - self._failed_at > APART:
                self._silent_since = now
            self._failed_at = now
            if self._silent > self._longest and not self._has_told:
                self._has_told = True
                logger.warning("tb_celery: no answer from %r for %.3g s; held tasks wait", self._store, self._silent)
            raise
        self._silent_since, self._has_told = None, False
        return answer
