"""What wraps a store: it does as that does, but for what its own class says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tb_celery.arithmetic import Decision, Place
    from tb_celery.bucket import Bucket, Charge, Limit
    from tb_celery.clock import Clock
    from tb_celery.state import State
    from tb_celery.stores import Store
    from tb_celery.stores.orders import Orders


class StoreWrapper:
    """Passes every call on.

    Args:
        store: where the state lives.
    """

    def __init__(self, store: Store) -> None:
        self.clock: Clock = store.clock
        self.wrapped = store
        self.enforce: Any = getattr(store, "enforce", True)

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        return self.wrapped.acquire(charges, place)

    def read(self, charges: Sequence[Charge]) -> tuple[int, Sequence[Charge], list[State]]:
        return self.wrapped.read(charges)

    def settle(self, charges: Sequence[Charge]) -> int:
        return self.wrapped.settle(charges)

    def order(self, charge: Charge, span: int, declared: Limit | None = None) -> None:
        self.wrapped.order(charge, span, declared)

    def orders(self, bucket: Bucket, key: str | None = None) -> tuple[int, Orders]:
        return self.wrapped.orders(bucket, key)

    def survey(self, buckets: Collection[Bucket]) -> tuple[int, dict[str, list[State]]]:
        return self.wrapped.survey(buckets)

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        return self.wrapped.reset(bucket, key)

    # What some kinds of store have besides. No __getattr__ for all of it: that makes every other access slow, too.

    @property
    def path(self) -> Any:  # noqa: ANN401
        return self.wrapped.path  # type: ignore[attr-defined]

    @property
    def server(self) -> Any:  # noqa: ANN401
        return self.wrapped.server  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return repr(self.wrapped)
