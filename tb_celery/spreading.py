"""Spread many tasks over the time that their buckets need: each is published with a turn of its own."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from celery import group
from celery.canvas import Signature, _chain

from tb_celery.arithmetic import Place
from tb_celery.bucket import SECOND, Charge
from tb_celery.errors import ConfigurationError, shown
from tb_celery.quota import CALL_HEADER, CALL_OPTIONS, LimitedTask, Quota, quota_of
from tb_celery.reschedule import HEADER, Ticket
from tb_celery.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from celery import Celery
    from celery.result import GroupResult

JUST_NOW = 1000
"""Nanoseconds that are no wait."""


class Spread(NamedTuple):
    """Many tasks under way.

    Attributes:
        result: of the group of them.
        last: when the last one starts, if all goes well.
    """

    result: GroupResult
    last: dt.datetime


def spread(
    signatures: group | Iterable[Signature[Any]],
    bucket: str | Sequence[str] | Mapping[str, float] | None = None,
    *,
    cost: float = 1,
    key: str | None = None,
) -> Spread:
    """Publish tasks with an ETA each at which its tokens are there, so that none is refused.

    The turns of all tasks with the same buckets and keys are booked at once, behind those who wait already. A turn
    further away than ``max_countdown`` is reached in hops, as for any other task.

    Args:
        signatures: a group, or signatures; a chain counts by its first task.
        bucket: what each task draws from; unless given, what the rules of each say.
        cost: tokens each takes, where ``bucket`` is given.
        key: which of the bucket's independent quotas, where ``bucket`` is given.

    Raises:
        ConfigurationError: there is nothing to spread, one is neither task nor chain, a bucket is unknown, or a cost
            could never be met.
        StoreError: the state cannot be read or written; nothing was published.
    """
    members = list(cast("Any", signatures).tasks if isinstance(signatures, group) else signatures)
    if not members:
        message = "there is nothing to spread: give a group, or signatures"
        raise ConfigurationError(message)
    app: Celery = members[0].app
    quota = quota_of(app)
    rule = None if bucket is None else Rule(bucket, cost)
    lines: dict[tuple[object, ...], list[tuple[Signature[Any], tuple[Charge, ...]]]] = defaultdict(list)
    members = [each.clone() for each in members]
    for member in members:
        first = _first(member)
        charges = _charges(quota, first, rule, key)
        lines[tuple(charge[:3] for charge in charges)].append((first, charges))
    wall = quota.limiter.store.clock.wall()
    last = max(_book(quota, line, wall) for name, line in lines.items() if name) if any(lines) else wall
    return Spread(group(members, app=app).apply_async(), _instant(last))


def _first(member: object) -> Signature[Any]:
    """The task of ``member`` that starts first."""
    first = member.tasks[0] if isinstance(member, _chain) else member
    if not isinstance(first, Signature) or first.get("subtask_type"):
        message = f"only tasks and chains of tasks can be spread, not {shown(member)}"
        raise ConfigurationError(message)
    return first


def _charges(quota: Quota, signature: Signature[Any], rule: Rule | None, key: str | None) -> tuple[Charge, ...]:
    task: LimitedTask = signature.type
    if rule is not None:
        call = {} if key is None else {"key": key}
        return quota.charges(task, [rule], call, signature.args, signature.kwargs)[0]
    options = signature.options
    call = {**((options.get("headers") or {}).get(CALL_HEADER) or {})}
    call |= {name: options[name] for name in CALL_OPTIONS if name in options}
    rules = quota.rules(task, {"routing_key": options.get("queue")} if options.get("queue") else {})
    return quota.charges(task, rules, call or None, signature.args, signature.kwargs)[0]


def _book(quota: Quota, line: list[tuple[Signature[Any], tuple[Charge, ...]]], wall: int) -> int:
    """Give each signature of ``line`` its turn; when the last one is, in nanoseconds since 1970."""
    store = quota.limiter.store
    totals = [sum(costs) for costs in zip(*[[charge.cost for charge in charges] for _, charges in line], strict=True)]
    all_charges = [charge._replace(cost=total) for charge, total in zip(line[0][1], totals, strict=True)]
    store.acquire(all_charges, Place(ahead=len(line)))
    # Whoever is booked between the two looks only makes these turns a little later than they could be.
    now, states = store.read(all_charges)
    ends = [max(state.booked_at, now + total) - total for state, total in zip(states, totals, strict=True)]
    after = 0
    for signature, charges in line:
        ends = [end + charge.cost for end, charge in zip(ends, charges, strict=True)]
        turn = max(now, *(end - charge.limit.span for end, charge in zip(ends, charges, strict=True)))
        after = turn - now
        if after > JUST_NOW:
            # A full bucket begins to refill when the first ones arrive and take their tokens, and not before.
            after += int(quota.soonest * SECOND)
        ticket = Ticket(turn, store.clock.identity, 0, wall)
        headers = {**(signature.options.get("headers") or {}), HEADER: list(ticket)}
        longest = int(quota.settings.max_countdown * SECOND)
        signature.set(eta=_instant(wall + min(after, longest)), headers=headers)
    return wall + after


def _instant(nanoseconds: int) -> dt.datetime:
    """``nanoseconds`` since 1970, to the microsecond."""
    epoch = dt.datetime.fromtimestamp(0, dt.UTC)
    return epoch + dt.timedelta(microseconds=nanoseconds // 1000)
