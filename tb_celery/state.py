"""Where one limit of a bucket stands: what becomes of that under another clock, or other numbers.

Pure functions over whole nanoseconds, as in :mod:`tb_celery.arithmetic`, which says what the two instants mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tb_celery.bucket import LONGEST_SPAN, MOST_LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tb_celery.bucket import Charge, Limit, Name


class State(NamedTuple):
    """Where one limit stands, and the numbers it was written with.

    ``in_debt`` tells that more was drawn than there was, so that it is not the clock that makes ``full_at`` so late.
    """

    full_at: int
    booked_at: int
    interval: int
    span: int
    in_debt: bool = False

    @property
    def numbers(self) -> tuple[int, int]:
        return self.interval, self.span


def moved(state: State, full_at: int, booked_at: int) -> State:
    """``state`` at other instants: the lowest bit of ``booked_at`` tells of those in line, and stays as it is."""
    if state.booked_at > state.full_at:
        booked_at += (booked_at ^ state.booked_at) & 1
    return state._replace(full_at=full_at, booked_at=max(full_at, booked_at))


def carry(state: State, limit: Limit, now: int) -> State:
    """``state`` under another capacity or rate: the tokens stay what they are, the new rate counts from ``now``.

    No token is made by the change: a larger capacity fills up from the old level, a smaller one is full at most. A
    bucket that was full for a while under the old numbers goes on filling from there, so two processes that disagree
    about the numbers cannot make tokens by taking turns.

    A limit that is both faster and smaller may be another one of the bucket, whose slowest limit was dropped: then it
    is the tokens missing that stay what they are. From a slower limit at least as many are missing, after the same
    calls, so a limit that stays declared holds over every window whichever others come and go.
    """
    kept = state.span
    if limit.interval < state.interval:
        kept = min(kept, limit.span * state.interval // limit.interval)

    def held(instant: int) -> int:
        return (kept - (instant - now)) * limit.interval // state.interval

    # It is empty at worst, and the line behind that moves along; only what is owed stays owed.
    overdrawn = 0 if state.in_debt else min(held(state.full_at), 0)

    def carried(instant: int) -> int:
        return now + min(limit.span - min(held(instant) - overdrawn, limit.span), LONGEST_SPAN)

    full_at, booked_at, *_ = moved(state, carried(state.full_at), carried(state.booked_at))
    return State(full_at, booked_at, limit.interval, limit.span, full_at - limit.span > now)


def fit(state: State | None, limit: Limit, now: int) -> State:
    """``state`` as ``limit`` sees it at ``now``: unseen is full, a clock that was set back makes it empty at worst."""
    if state is None:
        return State(now, now, limit.interval, limit.span)
    ahead = state.full_at - state.span - now
    if ahead > 0 and not state.in_debt:
        # The line moves along, or newcomers would wait for turns that are as far off as the clock was set back.
        state = moved(state, state.full_at - ahead, state.booked_at - ahead)
    elif ahead <= 0 and state.in_debt:
        state = state._replace(in_debt=False)
    if state.interval != limit.interval or state.span != limit.span:
        state = carry(state, limit, now)
    return state


def strictest(state: State, limit: Limit, others: Iterable[State], now: int) -> State:
    """``state`` of ``limit``, or a stricter one that the bucket's ``others`` have of a limit with the same numbers.

    A bucket numbers its limits. Where some came or went, what is known of one may be under another number: better
    than what was carried over from another limit.
    """
    for other in others:
        if (other.interval, other.span) == (limit.interval, limit.span):
            other = fit(other, limit, now)  # noqa: PLW2901
            full_at, booked_at = max(state.full_at, other.full_at), max(state.booked_at, other.booked_at)
            state = State(full_at, booked_at, limit.interval, limit.span, state.in_debt or other.in_debt)
    return state


def fitted(charges: Sequence[Charge], known: Callable[[Name], State | None], now: int) -> list[State]:
    """Where each charge's limit stands at ``now``, by what is ``known`` under a bucket's name, key and number."""
    states, others = [], dict[tuple[str, str | None], list[State]]()
    for charge in charges:
        state, quota = known(charge[:3]), charge[:2]
        states.append(fit(state, charge.limit, now))
        if state and state.numbers != charge.limit.numbers and not charge.is_pause and quota not in others:
            numbered = [known((*quota, number)) for number in range(MOST_LIMITS)]
            others[quota] = [each for each in numbered if each]
    return [
        strictest(state, charge.limit, () if charge.is_pause else others.get(charge[:2], ()), now)
        for charge, state in zip(charges, states, strict=True)
    ]
