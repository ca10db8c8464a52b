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
from tb_celery.state import State, moved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tb_celery.bucket import Charge, Limit

UNCLAIMED = SECOND
"""Nanoseconds that a limit stays full before the turns that have come and gone are taken to be lost."""
LATE = 10_000_000
"""Nanoseconds that a task on its turn is late by as a rule."""
UNCLAIMED_TURNS = 4
"""How many more tokens' time it stays full before the turns still to come are taken to be lost, too."""


class Place(NamedTuple):
    """How an asker stands in line; a plain caller has no place at all.

    Args:
        turn: the instant it was given, in nanoseconds, or ``None`` on its first ask.
        soonest: nanoseconds from now before which it cannot be back, when it is sent away.
        patience: nanoseconds that it is ready to wait without being sent away.
        longest: nanoseconds from now after which it does not want a turn at all; ``None`` for any.
        ahead: among how many turns the cost is shared, if it only wants those and comes for the tokens then; else 0.
        lot: of a task, for limits that are not enforced for everybody (see :func:`~tb_celery.shadow.lot_of`).
    """

    turn: int | None = None
    soonest: int = 0
    patience: int = 0
    longest: int | None = None
    ahead: int = 0
    lot: float = 100.0


class Decision:
    """The answer to one ask; true when the tokens were taken, or the bucket is not enforced.

    Attributes:
        now: the instant of the decision, in nanoseconds of the store's clock.
        at: the instant to ask again at, in the same; ``now`` when the tokens were taken.
        booked: whether ``at`` is a turn of the asker's own.
    """

    __slots__ = ("_charge", "_full_at", "_overlooked", "at", "booked", "now")

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        now: int,
        at: int,
        charge: Charge,
        full_at: int,
        booked: bool = False,  # noqa: FBT001, FBT002
        overlooked: int = 0,
    ) -> None:
        self.now = now
        self.at = at
        self.booked = booked
        self._charge = charge
        self._full_at = full_at
        self._overlooked = overlooked

    def __bool__(self) -> bool:
        return self.at <= self.now

    @property
    def allowed(self) -> bool:
        """Whether the tokens were taken, or the bucket is not enforced, so that the caller may go on."""
        return self.at <= self.now

    @property
    def wait(self) -> float:
        """Seconds until it is worth asking again, rounded up; 0.0 when allowed."""
        return seconds(self.at - self.now)

    @property
    def would_wait(self) -> float:
        """Seconds that a call would have waited which was let through, as the bucket is not enforced; else 0.0."""
        return seconds(self._overlooked) if self._overlooked else 0.0

    @property
    def bucket(self) -> str:
        """The bucket that binds, which refuses or is nearest to refusing."""
        return self._charge.bucket

    @property
    def paused(self) -> bool:
        """Whether the bucket that binds is paused."""
        return self._charge.is_pause

    @property
    def limit(self) -> Limit | None:
        """The limit of that bucket that binds; ``None`` where the bucket is paused, or declared unlimited."""
        return None if self.paused else self._charge.limit

    @property
    def tokens(self) -> float:
        """Tokens left in the limit that binds; 0.0 where the bucket is paused."""
        limit = self._charge.limit
        if self.paused:
            return 0.0
        return math.inf if limit is None else limit.tokens(self._full_at, self.now)

    def let_through(self, bucket: str) -> Decision:
        """This answer of a copy of ``bucket`` to those whom that must not keep waiting."""
        charge = self._charge._replace(bucket=bucket)
        return Decision(self.now, self.now, charge, self._full_at, overlooked=self.at - self.now)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Decision):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"Decision(allowed={self.allowed}, wait={self.wait!r}, tokens={self.tokens!r}, "
            f"bucket={self.bucket!r}, limit={self.limit!r}"
            f"{f', would_wait={self.would_wait!r}' if self._overlooked else ''})"
        )


def seconds(nanoseconds: int) -> float:
    """``nanoseconds`` as seconds, never less than they were: a caller who sleeps them has slept enough."""
    value = nanoseconds / SECOND
    if Fraction(value) * SECOND < nanoseconds:
        value = math.nextafter(value, math.inf)
    return value


def acquire(
    charges: Sequence[Charge], states: Sequence[State], now: int, place: Place | None = None, paused: int = 0
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
        paused: the instant at which the last pause has ended, or will, if there was one.

    Returns:
        The decision, and the new states, or ``None`` where nothing changed.
    """
    ready, binding = _ready(charges, states, now)
    on_turn = place is not None and place.turn is not None and place.turn <= now
    if ready <= now and (place is None or on_turn):
        return _grant(charges, states, now, binding)
    if place is None or (on_turn and ready - now <= place.patience):
        return _refusal(charges, states, now, binding, ready), None
    return _queue(charges, states, now, place, paused, binding)


def _queue(  # noqa: PLR0913, PLR0917
    charges: Sequence[Charge], states: Sequence[State], now: int, place: Place, paused: int, binding: int
) -> tuple[Decision, list[State] | None]:
    """:func:`acquire` for those who leave tokens to whoever has a turn for them."""
    line = [now if lost(state, now, paused) else max(state.booked_at, state.full_at, now) for state in states]
    needs = [charge.cost if place.ahead else charge.need for charge in charges]
    turns = [at + need - charge.limit.span for at, need, charge in zip(line, needs, charges, strict=True)]
    turn = max(turns)
    if place.ahead:
        # Full from now on, or turns in a bucket that has been full for a while would count as lost.
        states = [state._replace(full_at=max(state.full_at, now)) for state in states]
        new = [
            _booked(charge, state, at, at + charge.cost, now, place.ahead)
            for charge, state, at in zip(charges, states, line, strict=True)
        ]
        return _refusal(charges, states, now, turns.index(turn), max(turn, now + 1), booked=True), new
    if all(at <= now or _surplus(charge, state, now) for at, charge, state in zip(turns, charges, states, strict=True)):
        # Nobody else's, or more than those at hand need: those whom such tokens were meant for are late.
        booked = [
            # An odd cost is one more where somebody is in line, whose mark stays.
            at if own > now else at + charge.cost + (charge.cost & _in_line(state, at, now))
            for at, charge, state, own in zip(line, charges, states, turns, strict=True)
        ]
        return _grant(charges, states, now, binding, booked)
    if place.turn is not None and place.turn > now:
        # No turn is later than a new one would be: this one was forged, or the line is shorter than it was.
        return _refusal(charges, states, now, binding, min(place.turn, turn), booked=True), None

    binding = turns.index(turn)
    if turn - now > place.patience:
        turn = max(turn, now + place.soonest)
    if place.longest is not None and turn - now > place.longest:
        return _refusal(charges, states, now, binding, turn), None
    binds = charges[binding]
    # A bucket, or key of one, that will be full again before the turn is no part of what the asker waits for: to book
    # it there would hold up those who need it alone.
    new = [
        _booked(charge, state, at, max(at, turn) + charge.cost, now)
        if at >= turn or charge[: 1 if binds.is_pause else 2] == binds[: 1 if binds.is_pause else 2]
        else state
        for charge, state, at in zip(charges, states, line, strict=True)
    ]
    return _refusal(charges, states, now, binding, turn, booked=True), new


def settle(charges: Sequence[Charge], states: Sequence[State], now: int) -> list[State]:
    """The new states when a call turns out to cost more than was taken for it, or less (a cost below 0).

    What is owed is drawn below empty if need be, and what is given back fills up to full at most; whoever is in line
    moves along.
    """
    new = []
    for charge, state in zip(charges, states, strict=True):
        before = max(state.full_at, now)
        full_at = min(max(before + charge.cost, now), now + LONGEST_SPAN)
        ahead = state.booked_at - before
        booked_at = moved(state, full_at, full_at + ahead).booked_at if ahead > 0 else full_at
        new.append(State(full_at, booked_at, state.interval, state.span, full_at - state.span > now))
    return new


def look(charges: Sequence[Charge], states: Sequence[State], now: int) -> Decision:
    """What :func:`acquire` would tell a plain caller, with the tokens as they are before anything is taken."""
    ready, binding = _ready(charges, states, now)
    return _refusal(charges, states, now, binding, max(ready, now))


def _ready(charges: Sequence[Charge], states: Sequence[State], now: int) -> tuple[int, int]:
    """The instant at which the tokens are or were there for every charge, and which charge's limit makes it so late."""
    instants = [
        max(state.full_at, now) + charge.need - charge.limit.span for charge, state in zip(charges, states, strict=True)
    ]
    ready = max(instants)
    return ready, instants.index(ready)


def _surplus(charge: Charge, state: State, now: int) -> bool:
    """Whether there are tokens that no turn needs now: they run over, or one is left for whoever comes next.

    Those in line who want more than one token have to be able to save them up: as long as there are any, which the
    lowest bit of ``booked_at`` tells, tokens have to run over for a while.
    """
    left = state.span - charge.cost
    if state.booked_at & 1 or left < state.interval:
        return state.full_at + runs_over(state.interval) <= now
    return max(state.full_at, now) + state.interval - left <= now


def runs_over(interval: int) -> int:
    """Nanoseconds for which tokens run over before they are taken to be needed by no turn.

    A tenth of the time that one takes to refill, from :data:`LATE` to a second; of fast limits a quarter, for each
    token that runs over is lost.
    """
    return min(max(interval // 10, min(LATE, interval // 4)), UNCLAIMED)


def _booked(charge: Charge, state: State, line: int, until: int, now: int, turns: int = 1) -> State:  # noqa: PLR0913, PLR0917
    """``state`` with the tokens until ``until`` booked for so many turns, marked as :func:`_surplus` has it."""
    if charge.is_pause:
        return state
    large = charge.cost > state.interval * turns or (_in_line(state, line, now) and state.booked_at & 1)
    until = min(until, now + LONGEST_SPAN)
    return state._replace(booked_at=until + (until & 1 != large))


def _in_line(state: State, line: int, now: int) -> bool:
    """Whether anybody is in the line that ends at ``line``: where nobody is, the bit that marks it says nothing."""
    return line == state.booked_at > max(state.full_at, now)


def lost(state: State, now: int, paused: int = 0) -> bool:
    """Whether nobody will come for the turns that were handed out; until a pause ends nobody can."""
    idle = now - max(state.full_at, paused) - UNCLAIMED
    return idle >= 0 and (state.booked_at - state.span <= now or idle >= UNCLAIMED_TURNS * state.interval)


def waiting(state: State, now: int, paused: int = 0) -> int:
    """Nanoseconds that the tokens take to refill which those in line have turns for; none is before a pause ends."""
    if lost(state, now, paused):
        return 0
    return max(0, state.booked_at - max(state.full_at, now, paused))


def _grant(
    charges: Sequence[Charge], states: Sequence[State], now: int, binding: int, booked: Sequence[int] | None = None
) -> tuple[Decision, list[State]]:
    new = []
    for i, (charge, state) in enumerate(zip(charges, states, strict=True)):
        if charge.is_pause:
            new.append(state)
            continue
        full_at = max(now, state.full_at) + charge.cost
        booked_at = state.booked_at if booked is None else booked[i]
        new.append(State(full_at, max(full_at, booked_at), *state.numbers, full_at - state.span > now))
    return Decision(now, now, charges[binding], new[binding].full_at), new


def _refusal(  # noqa: PLR0913
    charges: Sequence[Charge], states: Sequence[State], now: int, binding: int, at: int, *, booked: bool = False
) -> Decision:
    return Decision(now, at, charges[binding], states[binding].full_at, booked)
