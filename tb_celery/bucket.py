"""The arithmetic of token buckets: pure functions over whole nanoseconds.

The state of one limit is two instants. ``full_at`` is when it will be full again if nobody else asks (the theoretical
arrival time of the generic cell rate algorithm, ITU-T I.371). ``booked_at`` is when it will be full again if, besides,
everyone who was sent away with a turn comes back and takes the tokens. A limit whose ``full_at`` has passed is
indistinguishable from one never seen.

Time is an argument. Nothing here knows where it comes from, or where the state is kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from tb_celery.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SECOND = 1_000_000_000
LONGEST_SPAN = 1 << 61
"""Nanoseconds (73 years) that a limit may take to fill: an instant plus a span always fits 64 bits."""
FINEST = 1000
"""Parts of a token that a capacity is counted in."""
UNCLAIMED = SECOND
"""Nanoseconds that a limit stays full before the turns that have come and gone are taken to be lost."""
LATE = 10_000_000
"""Nanoseconds that a task on its turn is late by as a rule."""
UNCLAIMED_TURNS = 4
"""How many more tokens' time it stays full before the turns still to come are taken to be lost, too."""


def positive(name: str, number: float | Fraction) -> Fraction:
    """``number`` as written: 0.3 is three tenths, not the binary fraction next to it."""
    if isinstance(number, bool) or not isinstance(number, int | float | Fraction):
        message = f"{name} must be a number, not {number!r}"
        raise ConfigurationError(message)
    if number <= 0 or (isinstance(number, float) and not math.isfinite(number)):
        message = f"{name} must be a finite number above 0, not {number!r}"
        raise ConfigurationError(message)
    return number if isinstance(number, Fraction) else Fraction(str(number))


@dataclass(frozen=True, slots=True)
class Limit:
    """One quota: at most ``capacity`` tokens at once, refilled at ``refill_rate`` tokens a second.

    Both are rounded once, on the strict side, to a whole number of nanoseconds a token such that the capacity, too, is
    a whole number of nanoseconds; in every window of ``w`` seconds at most ``capacity + refill_rate * w`` go out.

    Args:
        capacity: most tokens it holds, so the largest burst and the largest cost.
        refill_rate: tokens a second; a ``Fraction`` is taken exactly.

    Raises:
        ConfigurationError: a number is not positive and finite, the capacity has more than three decimals, or filling
            takes less than a nanosecond a token or more than 73 years.
    """

    capacity: float
    refill_rate: float | Fraction
    interval: int = field(init=False, repr=False, compare=False)
    """Nanoseconds that one token takes to refill."""
    span: int = field(init=False, repr=False, compare=False)
    """Nanoseconds from empty to full."""

    def __post_init__(self) -> None:
        capacity = positive("capacity", self.capacity)
        rate = positive("refill_rate", self.refill_rate)
        parts = capacity.denominator
        if parts > FINEST:
            message = f"capacity may have at most three decimals, not {self.capacity!r}"
            raise ConfigurationError(message)
        if rate > SECOND:
            message = f"refill_rate must be at most {SECOND} tokens a second, not {self.refill_rate!r}"
            raise ConfigurationError(message)
        interval = parts * math.ceil(SECOND / (rate * parts))
        span = int(capacity * interval)
        if max(interval, span) > LONGEST_SPAN:
            message = f"capacity {self.capacity!r} at refill_rate {self.refill_rate!r} takes over 73 years to fill"
            raise ConfigurationError(message)
        object.__setattr__(self, "interval", interval)
        object.__setattr__(self, "span", span)

    def charge(self, cost: float) -> int:
        """Nanoseconds of refill that ``cost`` tokens are worth, rounded up.

        Raises:
            ConfigurationError: ``cost`` is not a positive number, or is above the capacity and so could never be met.
        """
        if type(cost) is int and cost > 0:
            nanoseconds = cost * self.interval
        else:
            nanoseconds = math.ceil(positive("cost", cost) * self.interval)
        if nanoseconds > self.span:
            message = f"cost {cost!r} is above capacity {self.capacity!r} and could never be met"
            raise ConfigurationError(message)
        return nanoseconds

    def tokens(self, full_at: int, now: int) -> float:
        """Tokens at hand at ``now``, from 0 to ``capacity``; for people to read."""
        missing = min(max(full_at - now, 0), self.span)
        return (self.span - missing) / self.interval


@dataclass(frozen=True, slots=True)
class Bucket:
    """A named quota of one or several limits, drawn from all or nothing.

    Args:
        name: what tasks, scripts and people call it.
        limits: at least one. Their order has no meaning: they are kept from the fastest to the slowest to fill.
    """

    name: str
    limits: tuple[Limit, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.limits, tuple | list) or not all(isinstance(limit, Limit) for limit in self.limits):
            message = f"bucket {self.name!r} must be made of Limit objects, not {self.limits!r}"
            raise ConfigurationError(message)
        if not self.limits:
            message = f"bucket {self.name!r} needs at least one limit"
            raise ConfigurationError(message)
        object.__setattr__(self, "limits", tuple(sorted(self.limits, key=lambda limit: (limit.span, limit.interval))))

    def charge(self, cost: float) -> tuple[int, ...]:
        """What ``cost`` tokens are worth for each limit, in nanoseconds.

        Raises:
            ConfigurationError: the cost is not a positive number or is above the capacity of one limit.
        """
        try:
            return tuple(limit.charge(cost) for limit in self.limits)
        except ConfigurationError as error:
            message = f"bucket {self.name!r}: {error}"
            raise ConfigurationError(message) from None

    def draw(self, key: str | None, costs: Iterable[int] | None = None) -> tuple[Charge, ...]:
        """What a call draws from each limit.

        Args:
            key: which of the bucket's independent quotas.
            costs: in nanoseconds of refill, as :meth:`charge` tells; ``None`` for nothing.
        """
        # Numbered from the slowest: when a faster limit is added the slower ones go on where they stood, and no long
        # quota is full again. A slower one that is added starts with the tokens that the slowest had.
        last = len(self.limits) - 1
        pairs = zip(self.limits, repeat(0) if costs is None else costs, strict=False)
        return tuple(Charge(self.name, key, last - place, limit, cost) for place, (limit, cost) in enumerate(pairs))


class Charge(NamedTuple):
    """What one call draws from one limit of one bucket."""

    bucket: str
    key: str | None
    number: int
    """Which of the bucket's limits, from the slowest to fill."""
    limit: Limit
    cost: int
    """In nanoseconds of refill."""


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
    """

    turn: int | None = None
    soonest: int = 0
    patience: int = 0
    longest: int | None = None


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
    """

    def moved(instant: int) -> int:
        held = (state.span - (instant - now)) * limit.interval // state.interval
        return now + min(limit.span - min(held, limit.span), LONGEST_SPAN)

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

    line = [now if lost(state, now) else max(state.booked_at, state.full_at, now) for state in states]
    turns = [at + charge.cost - charge.limit.span for at, charge in zip(line, charges, strict=True)]
    turn = max(turns)
    if all(at <= now or state.full_at + _lateness(state) <= now for at, state in zip(turns, states, strict=True)):
        # Nobody else's, or running over: those whom such tokens were meant for are late, and will find others.
        booked = [at + charge.cost if own <= now else at for at, charge, own in zip(line, charges, turns, strict=True)]
        return _grant(charges, states, now, binding, booked)
    if place.turn is not None and not on_turn:
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
        state._replace(booked_at=min(max(at, turn) + charge.cost, now + LONGEST_SPAN))
        if at >= turn or charge.bucket == charges[binding].bucket
        else state
        for charge, state, at in zip(charges, states, line, strict=True)
    ]
    return _refusal(charges, states, now, binding, turn, booked=True), new


def look(charges: Sequence[Charge], states: Sequence[State], now: int) -> Decision:
    """What :func:`acquire` would tell a plain caller, with the tokens as they are before anything is taken."""
    ready, binding = _ready(charges, states, now)
    return _refusal(charges, states, now, binding, max(ready, now))


def acquire_one(charge: Charge, full_at: int, booked_at: int, now: int) -> tuple[Decision, int, int]:
    """:func:`acquire` for one limit and a plain caller: what nearly every call is, without the general case's cost.

    Returns:
        The decision and the new ``full_at`` and ``booked_at``; they are the old ones when it was refused.
    """
    filled = (full_at if full_at > now else now) + charge.cost  # noqa: FURB136 - the call costs as much as the rest
    at = filled - charge.limit.span
    if at > now:
        return Decision(now, at, charge, full_at), full_at, booked_at
    return Decision(now, now, charge, filled), filled, max(filled, booked_at)


def _ready(charges: Sequence[Charge], states: Sequence[State], now: int) -> tuple[int, int]:
    """The instant at which the tokens are or were there for every charge, and which charge's limit makes it so late."""
    instants = [
        max(state.full_at, now) + charge.cost - charge.limit.span for charge, state in zip(charges, states, strict=True)
    ]
    ready = max(instants)
    return ready, instants.index(ready)


def _lateness(state: State) -> int:
    """Nanoseconds that tokens may run over before they are given to newcomers: a tenth of the time that one takes."""
    return min(max(state.interval // 10, LATE), UNCLAIMED)


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
