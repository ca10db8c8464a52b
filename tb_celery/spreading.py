"""Spread many tasks over the time that their buckets need: each is published with a turn of its own."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from celery import group
from celery.canvas import Signature, _chain
from celery.utils import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware

from tb_celery.admission import MAPS
from tb_celery.arithmetic import Place, lost
from tb_celery.bucket import SECOND, Charge
from tb_celery.errors import ConfigurationError, shown
from tb_celery.quota import Quota, quota_of
from tb_celery.reschedule import HEADER, Ticket
from tb_celery.rules import Rule
from tb_celery.stores.orders import rated
from tb_celery.terms import CALL_HEADER, CALL_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from celery import Celery
    from celery.result import GroupResult

    from tb_celery.state import State

JUST_NOW = 1000
"""Nanoseconds that are no wait."""
DESTINATION = ("queue", "exchange", "exchange_type", "routing_key")
SETTLED = frozenset({"eta", "countdown", "expires", "headers", *DESTINATION, *CALL_OPTIONS})
"""Options that are looked at or changed here. Those of a chain or group win over those of the tasks that start it."""
EPOCH = dt.datetime.fromtimestamp(0, dt.UTC)


class Spread(NamedTuple):
    """Many tasks under way.

    Attributes:
        result: of the group of them.
        last: when the last one starts, if all goes well; those that expire before their turn never do.
    """

    result: GroupResult
    last: dt.datetime


def spread(
    signatures: Iterable[Signature[Any]] | Signature[Any],
    bucket: str | Sequence[str] | Mapping[str, float] | None = None,
    *,
    cost: float | None = None,
    key: str | None = None,
) -> Spread:
    """Publish tasks with an ETA each at which its tokens are there, so that none is refused.

    The turns of all tasks with the same buckets and keys are booked at once, behind those who wait already. Each task
    draws what its rules and the options of its call say, as on any delivery; one that draws nothing is only published.
    A turn further away than ``max_countdown`` is reached in hops, as for any other task. Where tasks run eagerly, or
    the setting ``enabled`` is off, nothing is booked; eager tasks wait in line one by one.

    A task keeps an ETA or countdown of its own that is later than its turn. One that would expire before its turn is
    given none. ``max_wait`` counts from a task's first refusal, as always, and not from here.

    Args:
        signatures: a group, signatures, or one. Of a chain the first task gets a turn, and the later ones ask when they
            are delivered. A chord, a map, or a group inside the group is refused.
        bucket: what those tasks draw from that are not registered here; the others are checked to draw from it.
        cost: tokens each takes, unless its signature says; as for ``apply_async``.
        key: which of the bucket's independent quotas, unless a signature says; as for ``apply_async``.

    Raises:
        ConfigurationError: one is neither task nor chain, or not registered here while no ``bucket`` is given; a bucket
            is unknown, or not what a task draws from; a cost could never be met. Nothing was booked or published.
        StoreError: the state cannot be read or written; nothing was published.
        kombu.exceptions.OperationalError: the broker cannot be reached. If it fails later, while messages are on their
            way, the turns of those that it did not take pass unused.
    """
    whole = _whole(signatures)
    members = [_signature(each, whole._app) for each in whole.tasks]  # noqa: SLF001
    # Celery drops empty chains, too.
    whole.tasks = members = [each for each in members if not isinstance(each, _chain) or each.tasks]
    app: Celery = whole.app
    outer = _taken(whole)
    call = {name: value for name, value in (("cost", cost), ("key", key)) if value is not None}
    firsts = [_first(member, outer, call) for member in members]
    if not firsts or app.conf.task_always_eager:
        return Spread(whole.apply_async(), app.now())
    quota = quota_of(app)
    rule = None
    if bucket is not None and quota.settings.enabled:
        rule = Rule(bucket)
        rule.check("spread")
        rule.check_buckets("spread", quota.limiter)
    lines: dict[tuple[object, ...], list[_Waiting]] = defaultdict(list)
    for first in firsts:
        waiting = _waiting(app, quota, first, rule)
        lines[tuple(charge[:3] for charge in waiting.charges)].append(waiting)
    with app.producer_or_acquire() as producer:
        # Turns that are booked for messages which cannot leave would hold up everybody else.
        producer.connection.ensure_connection(max_retries=1, interval_start=0)
        last = max((each.start for each in lines.pop((), [])), default=_nanoseconds(app.now()))
        last = max([last, *(_book(app, quota, line) for line in lines.values())])
        return Spread(whole.apply_async(producer=producer), _instant(last))


class _Waiting(NamedTuple):
    """A task and what it draws; instants are in nanoseconds since 1970.

    Attributes:
        first: the task.
        charges: what it draws.
        start: before when its sender does not want it to start.
        expires: when it is too late for it.
    """

    first: Signature[Any]
    charges: tuple[Charge, ...]
    start: int
    expires: int | None


def _whole(signatures: object) -> Any:  # noqa: ANN401
    """A group of the caller's signatures that can be changed."""
    if isinstance(signatures, dict):
        one = _signature(signatures)
        return one if isinstance(one, group) else group([one])
    if not isinstance(signatures, Iterable) or isinstance(signatures, str | bytes):
        raise _no_signature(signatures)
    return group(list(signatures))


def _signature(value: object, app: Celery | None = None) -> Signature[Any]:
    """A copy of a signature, which may have come as plain data."""
    if not isinstance(value, dict) or not {"task", "args", "kwargs", "options"} <= value.keys():
        raise _no_signature(value)
    return (value if isinstance(value, Signature) else Signature.from_dict(value, app=app)).clone()


def _no_signature(value: object) -> ConfigurationError:
    return ConfigurationError(f"spread takes a group, signatures, or one such as post.s('hi'), not {shown(value)}")


def _taken(signature: Signature[Any]) -> dict[str, Any]:
    """The options of ``signature`` that are settled here, out of it."""
    options = signature.options
    taken = {name: options.pop(name) for name in SETTLED & options.keys()}
    return {name: value for name, value in taken.items() if value is not None}


def _first(member: Signature[Any], outer: Mapping[str, Any], call: Mapping[str, Any]) -> Signature[Any]:
    """The task of ``member`` that starts first, with the options of what it is in and of the call made its own."""
    if isinstance(member, _chain) and member.tasks:
        return _first(member.tasks[0], {**_taken(member), **outer}, call)
    if member.subtask_type or member.task in MAPS:
        message = (
            f"only tasks and chains of tasks can be spread, not {shown(member)}: send that by itself, and its tasks"
            " wait for their turns as always"
        )
        raise ConfigurationError(message)
    options = member.options
    options.update(outer)
    # As a RateLimitedTask's apply_async does; of a task that is not registered here Celery would not know.
    own = {name: options.pop(name) for name in CALL_OPTIONS if name in options}
    headers = options.get("headers") or {}
    if call := {**call, **(own or headers.get(CALL_HEADER) or {})}:
        options["headers"] = {**headers, CALL_HEADER: call}
    return member


def _waiting(app: Celery, quota: Quota, first: Signature[Any], given: Rule | None) -> _Waiting:
    """What ``first`` will draw when it is delivered, and the times that its sender has set."""
    try:
        task = first.type
    except KeyError:
        task = None
    options = first.options if task is None else {**task._get_exec_options(), **first.options}  # noqa: SLF001
    rules = [given] if given else []
    if task is not None:
        rules = quota.rules(task, _delivered(app, first, options, task))
        names = {name for rule in rules for name in rule.names}
        for name in given.names if given else ():
            if name not in names:
                message = (
                    f"task {task.name!r} does not draw from bucket {name!r} when it runs; give it that bucket, or a"
                    " route"
                )
                raise ConfigurationError(message)
    elif given is None and quota.settings.enabled:
        message = (
            f"task {first.name!r} is not registered here, so what it draws is not known; import its module, or give"
            " spread its bucket"
        )
        raise ConfigurationError(message)
    call = (options.get("headers") or {}).get(CALL_HEADER)
    charges, _ = quota.terms_of(rules).charges(task or first, call, first.args, first.kwargs)
    if quota.settings.enforce is not True:
        # Its id, by which it may be let through, would else be made when it is published.
        charges = quota.held_to(charges, options.get("task_id") or first.options.setdefault("task_id", uuid()))
    if call and "cost" in call and rules and isinstance(rules[0].bucket, Mapping):
        message = f"task {first.name!r}: its bucket gives the costs, so a call cannot"
        raise ConfigurationError(message)
    now = app.now()
    start = _time(app, options.get("countdown") or options.get("eta"), now) or _nanoseconds(now)
    return _Waiting(first, charges, start, _time(app, options.get("expires"), now))


def _delivered(app: Celery, first: Signature[Any], options: Mapping[str, Any], task: Any) -> dict[str, str]:  # noqa: ANN401
    """Where ``first`` will come from, as its delivery will tell: what Celery makes of ``options`` when it publishes."""
    routed = app.amqp.router.route(dict(options), first.name, first.args, first.kwargs, task)
    queue, exchange, kind, key = (routed.get(name) for name in DESTINATION)
    if queue is None and exchange is None:
        queue = app.amqp.default_queue
    if queue is not None and (kind or queue.exchange.type) == "direct" and not (exchange and key):
        return {"exchange": "", "routing_key": queue.name}
    if exchange is None:
        exchange = queue.exchange.name or app.amqp.default_exchange
        key = key or queue.routing_key or app.conf.task_default_routing_key
    return {"exchange": getattr(exchange, "name", exchange), "routing_key": key or ""}


def _book(app: Celery, quota: Quota, line: list[_Waiting]) -> int:
    """Give each of ``line``, who draw from the same limits, its turn, unless it would expire; when the last starts."""
    store, charges = quota.limiter.store, line[0].charges
    if any(each.expires is not None for each in line):
        now, heard, states = store.read(charges)
        states, line, paused = states[: len(charges)], _heard(line, heard), _paused(heard, states)
        ends = [now if lost(state, now, paused) else max(state.booked_at, state.full_at, now) for state in states]
        line = [each for each, start in _stamped(app, line, ends, max(now, paused), now) if start]
    if not line:
        return 0
    totals = [sum(costs) for costs in zip(*[[charge.cost for charge in each.charges] for each in line], strict=True)]
    charges = tuple(charge._replace(cost=total) for charge, total in zip(charges, totals, strict=True))
    store.acquire(charges, Place(ahead=len(line), lot=0.0))
    # Whoever is booked between the two looks only makes these turns a little later than they could be.
    now, heard, states = store.read(charges)
    line, paused = _heard(line, heard), _paused(heard, states)
    totals = [sum(costs) for costs in zip(*[[charge.cost for charge in each.charges] for each in line], strict=True)]
    ends = [max(state.booked_at, now + total) - total for state, total in zip(states, totals, strict=False)]
    return max(start for _, start in _stamped(app, line, ends, max(now, paused), now))


def _heard(line: list[_Waiting], heard: Sequence[Charge]) -> list[_Waiting]:
    """``line`` by the limits that count now."""
    return [
        each._replace(charges=tuple(rated(old, new.limit) for old, new in zip(each.charges, heard, strict=False)))
        for each in line
    ]


def _paused(heard: Sequence[Charge], states: Sequence[State]) -> int:
    """The instant at which the last pause ends; 0 where there is none."""
    return max((state.full_at for charge, state in zip(heard, states, strict=True) if charge.is_pause), default=0)


def _stamped(
    app: Celery, line: Iterable[_Waiting], ends: Sequence[int], earliest: int, now: int
) -> Iterator[tuple[_Waiting, int]]:
    """Each of ``line`` with its ETA, and its ticket and when it starts; 0 where it would expire before that.

    Args:
        app: theirs.
        line: who come one after the other.
        ends: until when the limits are booked before them, on the store's clock.
        earliest: before when nobody's turn is, on the same.
        now: the instant of that look.
    """
    # Celery's clock and not the store's, which may be a server's: ETAs are told by it. Read after the store's, so that
    # no ETA is sooner than its turn.
    wall = _nanoseconds(app.now())
    quota = quota_of(app)
    identity, longest = quota.limiter.store.clock.identity, int(quota.settings.max_countdown * SECOND)
    for each in line:
        turn = max(
            earliest, *(end + charge.need - charge.limit.span for end, charge in zip(ends, each.charges, strict=True))
        )
        after = turn - now
        if after > JUST_NOW:
            # A full bucket begins to refill when the first ones arrive and take their tokens, and not before.
            after += int(quota.soonest * SECOND)
        options = each.first.options
        options.pop("countdown", None)
        options["eta"] = _instant(max(wall + min(after, longest), each.start))
        start = max(wall + after, each.start)
        if each.expires is not None and each.expires <= start:
            yield each, 0
            continue
        # A limit that is full again before the turn fills no further until then.
        ends = [max(end, turn) + charge.cost for end, charge in zip(ends, each.charges, strict=True)]
        options["headers"] = {**(options.get("headers") or {}), HEADER: list(Ticket(turn, identity))}
        yield each, start


def _time(app: Celery, value: Any, now: dt.datetime) -> int | None:  # noqa: ANN401
    """The instant that ``value`` means to Celery: seconds from ``now``, or a date."""
    if isinstance(value, Real):
        return _nanoseconds(now) + int(float(value) * SECOND)
    return None if value is None else _nanoseconds(maybe_make_aware(maybe_iso8601(value), app.timezone))


def _nanoseconds(instant: dt.datetime) -> int:
    """``instant`` since 1970."""
    return (instant - EPOCH) // dt.timedelta(microseconds=1) * 1000


def _instant(nanoseconds: int) -> dt.datetime:
    """``nanoseconds`` since 1970, to the microsecond."""
    return EPOCH + dt.timedelta(microseconds=nanoseconds // 1000)
