"""Where the state of the buckets lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tb_celery.arithmetic import Decision, Place
    from tb_celery.bucket import Bucket, Charge, Limit
    from tb_celery.clock import Clock
    from tb_celery.state import State
    from tb_celery.stores.orders import Orders


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

    def read(self, charges: Sequence[Charge]) -> tuple[int, Sequence[Charge], list[State]]:
        """The instant of the look, ``charges`` by what is ordered, and where each one's limit stands: nothing is taken.

        Behind ``charges`` come those of pauses (see :func:`~tb_celery.bucket.pause`), if there are any.
        """

    def settle(self, charges: Sequence[Charge]) -> int:
        """Draw what a call cost more than was taken, below empty if need be; or give it back, where that is below 0.

        Returns:
            The instant at which that was done.
        """

    def order(self, charge: Charge, span: int, declared: Limit | None = None) -> None:
        """Have everybody heed an order from their next decision on: a pause, or other numbers for a limit.

        Other numbers count for what is drawn already, too, and turns that a pause had put off come sooner when it is
        ended.

        Args:
            charge: see :func:`~tb_celery.bucket.pause` and :func:`~tb_celery.stores.orders.change`.
            span: nanoseconds that it stands for; a pause is never made shorter. 0 ends it.
            declared: the limit in whose place another comes.
        """

    def orders(self, bucket: Bucket, key: str | None = None) -> tuple[int, Orders]:
        """The instant of the look, and what stands about ``bucket``, or one key of it."""

    def survey(self, buckets: Collection[Bucket]) -> tuple[int, dict[str, list[State]]]:
        """The instant of the look and, by bucket, the states of all the limits and keys that it is remembered for."""

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        """Forget ``bucket``, or one key of it, so that it is full again; the number of limits forgotten."""
