"""The arithmetic of token buckets: pure functions over whole nanoseconds.

The state of one limit is two instants. ``full_at`` is when it will be full again if nobody else asks (the theoretical
arrival time of the generic cell rate algorithm, ITU-T I.371). ``booked_at`` is when it will be full again if, besides,
everyone who was sent away with a turn comes back and takes the tokens. A limit whose ``full_at`` has passed is
indistinguishable from one never seen.

Time is an argument. Nothing here knows where it comes from, or where the state is kept.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from tb_celery.bucket import LONGEST_SPAN, SECOND

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tb_celery.bucket import Charge, Limit

UNCLAIMED = SECOND
"""Nanoseconds that a limit stays full before the turns that have come and gone are taken to be lost."""
LATE = 10_000_000
"""Nanoseconds that a task on its turn is late by as a rule."""
UNCLAIMED_TURNS = 4
"""How many more tokens' time it stays full before the turns still to come are taken to be lost, too."""


class State(NamedTuple):
    """Where one limit stands, and the numbers it was written with."""

    full_at: int
    booked_at: int
    interval: int
    span: int


class Place(NamedTuple):
    """How an asker stands in line; a plain caller has no place at all.

    Args:
        turn: the instant it was given, in nanoseconds, or ``None`` on its first ask.
        soonest: nanoseconds from now before which it cannot be back, when it is sent away.
        patience: nanoseconds that it is ready to wait without being sent away.
        longest: nanoseconds from now after which it does not want a turn at all; ``None`` for any.
        ahead: among how many turns the cost is shared, if it only wants those and comes for the tokens then; else 0.
    """

    turn: int | None = None
    soonest: int = 0
    patience: int = 0
    longest: int | None = None
    ahead: int = 0


class Decision:
    """The answer to one ask; true when the tokens were taken.

    Attributes:
        now: the instant of the decision, in nanoseconds of the store's clock.
        at: the instant to ask again at, in the same; ``now`` when the tokens were taken.
        booked: whether ``at`` is a turn of the asker's own.
    """

    __slots__ = ("_charge", "_full_at", "at", "booked", "now")

    def __init__(self, now: int, at: int, charge: Charge, full_at: int, booked: bool = False) -> None:  # noqa: FBT001, FBT002
        self.now = now
        self.at = at
        self.booked = booked
        self._charge = charge
        self._full_at = full_at

    def __bool__(self) -> bool:
        return self.at <= self.now

    @property
    def allowed(self) -> bool:
        """Whether the tokens were taken."""
        return self.at <= self.now

    @property
    def wait(self) -> float:
        """Seconds until it is worth asking again, rounded up; 0.0 when allowed."""
        return seconds(self.at - self.now)

    @property
    def bucket(self) -> str:
        """The bucket that binds: that refuses, or is nearest to refusing."""
        return self._charge.bucket

    @property
    def limit(self) -> Limit | None:
        """The limit of that bucket that binds; ``None`` where the bucket is declared unlimited."""
        return self._charge.limit

    @property
    def tokens(self) -> float:
        """Tokens left in the limit that binds."""
        limit = self._charge.limit
        return math.inf if limit is None else limit.tokens(self._full_at, self.now)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decision):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Decision(allowed={self.allowed}, wait={self.wait!r}, tokens={self.tokens!r}, "
            f"bucket={self.bucket!r}, limit={self.limit!r})"
        )


def seconds(nanoseconds: int) -> float:
    """``nanoseconds`` as seconds, never less than they were: a caller who sleeps them has slept enough."""
    value = nanoseconds / SECOND
    if Fraction(value) * SECOND < nanoseconds:
        value = math.nextafter(value, math.inf)
    return value


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

    overdrawn = min(held(state.full_at), 0)  # it is empty at worst, and the line behind that moves along

    def moved(instant: int) -> int:
        return now + min(limit.span - min(held(instant) - overdrawn, limit.span), LONGEST_SPAN)

    full_at = moved(state.full_at)
    return State(full_at, max(full_at, moved(state.booked_at)), limit.interval, limit.span)


def fit(state: State | None, limit: Limit, now: int) -> State:
    """``state`` as ``limit`` sees it at ``now``: unseen is full, a clock that was set back makes it empty at worst."""
    if state is None:
        return State(now, now, limit.interval, limit.span)
    ahead = state.full_at - state.span - now
    if ahead > 0:
        # The line moves along, or newcomers would wait for turns that are as far off as the clock was set back.
        state = state._replace(full_at=state.full_at - ahead, booked_at=state.booked_at - ahead)
    if state.interval != limit.interval or state.span != limit.span:
        state = carry(state, limit, now)
    return state


def acquire(
    charges: Sequence[Charge], states: Sequence[State], now: int, place: Place | None = None
) -> tuple[Decision, list[State] | None]:
    """Ask every charge's limit at ``now``: all or nothing.

    A plain caller, and an asker whose turn has come, takes tokens that are there, whoever waits for them; a plain
    caller's refusal changes nothing. Any other asker takes only tokens that no turn is meant for. Sent away, it gets
    the instant at which its tokens will be there if everyone before it comes.

    Args:
        charges: what is asked, at least one.
        states: where each limit stands, written with the same numbers as the charge's limit (see :func:`carry`).
        now: the instant of the decision, in nanoseconds.
        place: how the asker stands in line; ``None`` for a plain caller.

    Returns:
        The decision, and the new states, or ``None`` where nothing changed.
    """
    ready, binding = _ready(charges, states, now)
    on_turn = place is not None and place.turn is not None and place.turn <= now
    if ready <= now and (place is None or on_turn):
        return _grant(charges, states, now, binding)
    if place is None or (on_turn and ready - now <= place.patience):
        return _refusal(charges, states, now, binding, ready), None
    return _queue(charges, states, now, place, binding)


def _queue(
    charges: Sequence[Charge], states: Sequence[State], now: int, place: Place, binding: int
) -> tuple[Decision, list[State] | None]:
    """:func:`acquire` for those who leave tokens to whoever has a turn for them."""
    line = [now if lost(state, now) else max(state.booked_at, state.full_at, now) for state in states]
    turns = [at + charge.cost - charge.limit.span for at, charge in zip(line, charges, strict=True)]
    turn = max(turns)
    if place.ahead:
        new = [
            _booked(charge, state, at, at + charge.cost, now, place.ahead)
            for charge, state, at in zip(charges, states, line, strict=True)
        ]
        return _refusal(charges, states, now, turns.index(turn), max(turn, now + 1), booked=True), new
    if all(at <= now or _surplus(charge, state, now) for at, charge, state in zip(turns, charges, states, strict=True)):
        # Nobody else's, or more than those at hand need: those whom such tokens were meant for are late.
        booked = [at + charge.cost if own <= now else at for at, charge, own in zip(line, charges, turns, strict=True)]
        return _grant(charges, states, now, binding, booked)
    if place.turn is not None and place.turn > now:
        # No turn is later than a new one would be: this one was forged, or the line is shorter than it was.
        return _refusal(charges, states, now, binding, min(place.turn, turn), booked=True), None

    binding = turns.index(turn)
    if turn - now > place.patience:
        turn = max(turn, now + place.soonest)
    if place.longest is not None and turn - now > place.longest:
        return _refusal(charges, states, now, binding, turn), None
    # A bucket that will be full again before the turn is no part of what the asker waits for: booking it there would
    # hold up those who need it alone.
    new = [
        _booked(charge, state, at, max(at, turn) + charge.cost, now)
        if at >= turn or charge.bucket == charges[binding].bucket
        else state
        for charge, state, at in zip(charges, states, line, strict=True)
    ]
    return _refusal(charges, states, now, binding, turn, booked=True), new


def look(charges: Sequence[Charge], states: Sequence[State], now: int) -> Decision:
    """What :func:`acquire` would tell a plain caller, with the tokens as they are before anything is taken."""
    ready, binding = _ready(charges, states, now)
    return _refusal(charges, states, now, binding, max(ready, now))


def _ready(charges: Sequence[Charge], states: Sequence[State], now: int) -> tuple[int, int]:
    """The instant at which the tokens are or were there for every charge, and which charge's limit makes it so late."""
    instants = [
        max(state.full_at, now) + charge.cost - charge.limit.span for charge, state in zip(charges, states, strict=True)
    ]
    ready = max(instants)
    return ready, instants.index(ready)


def _surplus(charge: Charge, state: State, now: int) -> bool:
    """Whether there are tokens that no turn needs now: they run over, or one is left for whoever comes next.

    Those in line who want more than one token have to be able to save them up: as long as there are any, which the
    lowest bit of ``booked_at`` tells, tokens have to run over for a tenth of the time that one takes.
    """
    left = state.span - charge.cost
    if state.booked_at & 1 or left < state.interval:
        return state.full_at + min(max(state.interval // 10, LATE), UNCLAIMED) <= now
    return max(state.full_at, now) + state.interval - left <= now


def _booked(charge: Charge, state: State, line: int, until: int, now: int, turns: int = 1) -> State:  # noqa: PLR0913, PLR0917
    """``state`` with the tokens until ``until`` booked for so many turns, marked as :func:`_surplus` has it."""
    large = charge.cost > state.interval * turns or (line > now and state.booked_at & 1)
    until = min(until, now + LONGEST_SPAN)
    return state._replace(booked_at=until + (until & 1 != large))


def lost(state: State, now: int) -> bool:
    """Whether nobody will come for the turns that were handed out."""
    idle = now - state.full_at - UNCLAIMED
    return idle >= 0 and (state.booked_at - state.span <= now or idle >= UNCLAIMED_TURNS * state.interval)


def _grant(
    charges: Sequence[Charge], states: Sequence[State], now: int, binding: int, booked: Sequence[int] | None = None
) -> tuple[Decision, list[State]]:
    new = []
    for i, (charge, state) in enumerate(zip(charges, states, strict=True)):
        full_at = max(now, state.full_at) + charge.cost
        booked_at = state.booked_at if booked is None else booked[i]
        new.append(State(full_at, max(full_at, booked_at), state.interval, state.span))
    return Decision(now, now, charges[binding], new[binding].full_at), new


def _refusal(  # noqa: PLR0913
    charges: Sequence[Charge], states: Sequence[State], now: int, binding: int, at: int, *, booked: bool = False
) -> Decision:
    return Decision(now, at, charges[binding], states[binding].full_at, booked)
