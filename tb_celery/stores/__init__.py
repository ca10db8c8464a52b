"""Where the state of the buckets lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tb_celery.arithmetic import Decision, Place, State
    from tb_celery.bucket import Bucket, Charge
    from tb_celery.clock import Clock


class Store(Protocol):
    """State of limits, shared by everyone who opens the same store.

    All methods are atomic against each other, over threads, processes and greenlets. They raise
    :class:`~tb_celery.errors.StoreError`, never a bare ``OSError``.
    """

    clock: Clock

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        """Ask every charge's limit now, all or nothing, and keep what follows from the answer.

        Raises:
            StoreTimeoutError: the store stayed busy for longer than its timeout.
            StoreError: the state cannot be read or written.
        """

    def read(self, charges: Sequence[Charge]) -> tuple[int, list[State]]:
        """The instant of the look and where each charge's limit stands at it, without taking anything."""

    def survey(self, bucket: Bucket) -> tuple[int, list[State]]:
        """The instant of the look and the states of all the limits and keys that ``bucket`` is remembered for."""

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        """Forget ``bucket``, or one key of it, so that it is full again; the number of limits forgotten."""
