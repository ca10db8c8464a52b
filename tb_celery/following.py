"""What follows from what the other side says: buckets are paused or drained for everybody, and drift is told."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tb_celery.bucket import SECOND, pause
from tb_celery.feedback import observe, read_response

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tb_celery.bucket import Bucket, Charge
    from tb_celery.feedback import Feedback
    from tb_celery.stores import Store

UNSAID = 60.0
"""Seconds for which a bucket is paused where the other side turned a call down and did not say for how long."""
SHORTEST = 1.0
"""Seconds for which it is paused at least, or who is told "now" would be turned down as fast as calls can be made."""
SLACK = 1.01
"""How much faster or slower than it may be a bucket has to be for that to be told: numbers are rounded."""


def read(
    response: object,
    status: int | None = None,
    rejected: Callable[[Mapping[str, str], int | None], bool | None] | None = None,
    *,
    now: float | None = None,
) -> Feedback:
    """What a response says, or headers by themselves; see :func:`tb_celery.feedback.observe`."""
    headers: Any = response
    if not isinstance(response, Mapping) or "ResponseMetadata" in response:
        found, told = read_response(response)
        # Headers that are no mapping have no headers themselves.
        headers = response if not found and hasattr(response, "items") else found
        status = told if status is None else status
    return observe(headers, status, now=time.time() if now is None else now, rejected=rejected)


def follow(store: Store, charges: Sequence[Charge], feedback: Feedback) -> float:
    """Pause or drain the buckets of ``charges``.

    A pause without a stated time prolongs none that stands. Where calls are left, but fewer than there are tokens for,
    the tokens beyond are taken away; none are ever added.

    Args:
        store: where their state lives.
        charges: what one call draws.
        feedback: what the other side said.

    Returns:
        For how many seconds they are paused then, which is longer where a longer pause stood; 0 where none was paused.

    Raises:
        StoreError: the state cannot be read or written.
    """
    span = math.ceil(pause_after(feedback) * SECOND)
    if span:
        quotas = {charge[:2] for charge in charges}
        if feedback.pause is None:
            standing = {charge[:2] for charge in store.read(charges)[1] if charge.is_pause}
            quotas = {quota for quota in quotas if not {quota, (quota[0], None)} & standing}
        for bucket, key in quotas:
            store.order(pause(bucket, key), span)
        if not quotas:
            return 0.0
        now, heard, states = store.read(charges)
        pauses = (state.full_at - now for charge, state in zip(heard, states, strict=True) if charge.is_pause)
        return max((span, *pauses)) / SECOND
    if feedback.remaining is not None:
        _drain(store, charges, feedback.remaining)
    return 0.0


class Drift(NamedTuple):
    """That a bucket allows more than the other side does, or less.

    Attributes:
        level: of logging; it is a warning where calls will be turned down.
        bucket: its name.
        limit: calls that the other side allows.
    """

    level: int
    bucket: str
    limit: int
    sentence: str

    def __eq__(self, other: object) -> bool:
        """Whether it was told already, in whatever words."""
        return isinstance(other, Drift) and self[:3] == other[:3]

    def __hash__(self) -> int:
        return hash(self[:3])


def drift(bucket: Bucket, tokens: float, feedback: Feedback) -> Drift | None:
    """How a bucket, of which a call takes so many ``tokens``, differs from what the other side allows.

    Without a window only too much is known: the window is no shorter than the time until its reset. Of several limits
    of a bucket another one may be what the other side speaks of, so of those it is not told that they allow less.
    """
    limit, window = feedback.limit, feedback.window or feedback.resets_in
    if not limit or not window:
        return None
    calls = float(min(each.refill_rate for each in bucket.limits)) * window / tokens
    if calls > limit * SLACK:
        level, difference = logging.WARNING, "more"
    elif feedback.window and len(bucket.limits) == 1 and calls * SLACK < limit:
        level, difference = logging.INFO, "less"
    else:
        return None
    declared = ", ".join(f"{each.capacity} at {float(each.refill_rate):g}/s" for each in bucket.limits)
    span = f"in {window:g} s" if feedback.window else f"until a reset in {window:g} s"
    sentence = (
        f"bucket {bucket.name!r} is declared in the setting buckets as {declared}, which is {difference} than the"
        f" {limit} calls {span} that the other side allows"
    )
    return Drift(level, bucket.name, limit, sentence)


def pause_after(feedback: Feedback) -> float:
    """For how many seconds nobody should call; 0 where it is not said that anybody should not."""
    if not feedback.rejected:
        return feedback.pause or 0.0
    return UNSAID if feedback.pause is None else max(feedback.pause, SHORTEST)


def _drain(store: Store, charges: Sequence[Charge], calls: int) -> None:
    now, heard, states = store.read(charges)
    surplus = [
        charge._replace(cost=(charge.limit.span - max(0, state.full_at - now)) - calls * charge.cost)
        for charge, state in zip(heard, states, strict=True)
        if not charge.is_pause
    ]
    # By the numbers that are declared: what is ordered, the store heeds anew.
    more = [
        charge._replace(cost=max(0, each.cost) * charge.limit.interval // each.limit.interval)
        for charge, each in zip(charges, surplus, strict=True)
    ]
    if any(charge.cost for charge in more):
        store.settle(more)
