"""Why something waits, and for how long: from the state, the result backend, and the worker nodes that hold it."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from celery.worker import state
from kombu.exceptions import OperationalError

from tb_celery.arithmetic import look
from tb_celery.bucket import SECOND
from tb_celery.doctor import onlooker, seconds_up, survey
from tb_celery.errors import RateLimitExceeded
from tb_celery.gate import Gate
from tb_celery.limiter import Limiter
from tb_celery.quota import CALL_HEADER, Quota, quota_of
from tb_celery.reschedule import HEADER, Ticket
from tb_celery.settings import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from celery import Celery

    from tb_celery.bucket import Charge

PATIENCE = 0.5
"""Seconds that a node waits for the state file's lock: its consumer does nothing else meanwhile."""


# -- what one node knows


def limiter_of_node(quota: Quota) -> Limiter:
    """A limiter for a node's remote control: it does not hold up the consumer's loop for long."""
    if quota.settings.store != "file":
        return quota.limiter
    hasty = quota.settings.model_copy(update={"lock_timeout": min(PATIENCE, quota.settings.lock_timeout)})
    return Limiter(quota.limiter.buckets, open_store(hasty))


def node(consumer: Any, name: str | None = None, key: str | None = None) -> dict[str, Any]:
    """How one bucket or all of them stand, and what a node holds for them, as JSON has it.

    Each has besides what :func:`survey` tells ``held``: the ``tasks`` held, whatever their key, the ``lines`` they are
    in, and the tokens that those ``behind`` the head of ``key``'s own line draw.

    Raises:
        ConfigurationError: the bucket is unknown, or there is none at all.
        StoreError: the state cannot be read.
    """
    buckets: dict[str, Any] = survey(onlooker(limiter_of_node(quota_of(consumer.app))), name, key)["buckets"]
    for bucket in buckets.values():
        bucket["held"] = {"tasks": 0, "lines": 0, "behind": 0.0}
    for _, line in _lines(consumer):
        (_, head), *rest = line
        for bucket, its_key in {charge[:2] for charge in head} if line else ():
            if bucket in buckets:
                held = buckets[bucket]["held"]
                held["lines"] += 1
                held["tasks"] += len(line)
                if its_key == key:
                    held["behind"] += sum(_draws(charges)[bucket] for _, charges in rest)
    return buckets


def waiting_task(consumer: Any, task_id: str) -> dict[str, Any]:
    """Why a task that a node has waits, and for how long, as JSON has it; empty where the node does not know it.

    Raises:
        ConfigurationError: what the task draws cannot be told.
        StoreError: the state cannot be read.
    """
    # By id there may be none: where a delivery ends after its copy has come, Celery forgets the copy's.
    known = [*state.scheduled_requests, *state.reserved_requests]
    request = next((each for each in known if each.id == task_id), None)
    if request is None:
        return {}
    quota = quota_of(consumer.app)
    rules = quota.rules(request.task, request.delivery_info)
    header = request.request_dict.get(CALL_HEADER)
    charges, _ = quota.charges(request.task, rules, header, request.args, request.kwargs)
    found = {"task": request.name, "running": request in state.active_requests, "draws": _draws(charges)}
    if not charges:
        return found
    store = onlooker(limiter_of_node(quota)).store
    now, states = store.read(charges)
    decision = look(charges, states, now)
    assert decision.limit is not None  # noqa: S101 - there are charges
    found["binds"] = {
        "bucket": decision.bucket,
        "capacity": decision.limit.capacity,
        "refill_rate": float(decision.limit.refill_rate),
        "wait": decision.wait,
    }
    ticket = Ticket.of(request.request_dict.get(HEADER)) or Ticket()
    found["sent_back"] = ticket.deferrals
    for due, line in _lines(consumer):
        ids = [each for each, _ in line]
        if task_id in ids:
            place = ids.index(task_id)
            # After the head's turn flows in what those behind it draw; other nodes have lines for the same tokens.
            between = zip(*(charges for _, charges in line[1 : place + 1]), strict=True)
            longest = max((sum(charge.cost for charge in same) for same in between), default=0)
            found |= {"place": place + 1, "line": len(line), "earliest" if place else "turn": due + longest / SECOND}
    if ticket.turn and ticket.clock == store.clock.identity and "place" not in found:
        found["turn"] = max(0.0, (ticket.turn - now) / SECOND)
    return found


def _lines(consumer: Any) -> Iterator[tuple[float, list[tuple[str, tuple[Charge, ...]]]]]:
    """The lines of requests that a node holds."""
    for step in consumer.steps:
        if isinstance(step, Gate):
            yield from step.held()


def _draws(charges: Sequence[Charge]) -> dict[str, float]:
    """The tokens that are drawn of each bucket."""
    return {charge.bucket: charge.cost / charge.limit.interval for charge in charges}


# -- what all of them know


def ask_nodes(app: Celery, command: str, timeout: float, **arguments: object) -> dict[str, dict[str, Any]]:
    """The answers of those nodes that know ``command``, by node; none where the broker cannot be reached."""
    try:
        replies = app.control.broadcast(command, arguments=arguments, reply=True, timeout=timeout)
    except (OSError, OperationalError):
        return {}
    answers = {name: answer for reply in replies or () for name, answer in reply.items()}
    return {name: answer for name, answer in sorted(answers.items()) if answer and "error" not in answer}


def explain_bucket(app: Celery, name: str, key: str | None, timeout: float) -> dict[str, Any]:
    """How long the backlog of a bucket, or of one key of it, takes, as JSON has it.

    Raises:
        ConfigurationError: the bucket is unknown.
        StoreError: the state cannot be read.
    """
    bucket = survey(onlooker(quota_of(app).limiter), name, key)["buckets"][name]
    answers = ask_nodes(app, "buckets", timeout, bucket=name, key=key)
    held = {node: answer[name]["held"] for node, answer in answers.items()}
    behind = sum(each["behind"] for each in held.values())
    found = {"bucket": name, "key": key, **bucket, "held": held, "behind": behind, "drained_in": 0.0, "binds": None}
    for limit in bucket["limits"]:
        drained = (limit["turns"] + behind - limit["current_tokens"]) / limit["refill_rate"]
        if found["binds"] is None or drained > found["drained_in"]:
            found |= {"drained_in": max(0.0, drained), "binds": limit}
    return found


def tell_bucket(found: Mapping[str, Any]) -> str:
    """:func:`explain_bucket` for people to read."""
    limit = found["binds"]
    key = "" if found["key"] is None else f" of key {found['key']!r}"
    if limit is None:
        return f"bucket {found['bucket']!r} is not limited"
    lines = [
        f"bucket {found['bucket']!r}{key}: {_numbers(limit)}",
        f"it has {limit['current_tokens']:.3f} tokens, and a whole one in {seconds_up(limit['wait_time_seconds'])}",
        f"waiting: turns for {limit['turns']:.6g} tokens, and {found['behind']:.6g} tokens held behind those",
    ]
    tasks = Counter({node: held["tasks"] for node, held in found["held"].items()})
    if tasks.total():
        lines.append(f"held: {', '.join(f'{number} tasks by {node}' for node, number in sorted(tasks.items()))}")
    if limit["turns"] or found["behind"]:
        done = _when(found["drained_in"])
        lines.append(f"all of that is done in {done}; messages that are in the queue still are not counted")
    return "\n".join(lines)


def explain_task(app: Celery, task_id: str, timeout: float) -> dict[str, Any]:
    """Why a task waits and for how long, as JSON has it: what the nodes say, and what the result backend says."""
    found: dict[str, Any] = {
        "id": task_id,
        "state": None,
        "nodes": ask_nodes(app, "bucket_task", timeout, task_id=task_id),
    }
    try:
        result = app.AsyncResult(task_id)
        found["state"], info = result.state, result.info
    except (AttributeError, NotImplementedError):  # without a backend
        return found
    if found["state"] == "RETRY" and isinstance(info, RateLimitExceeded):
        found["refused"] = {"bucket": info.bucket, "wait": info.wait, "turn": info.turn}
    return found


def tell_task(found: Mapping[str, Any]) -> str:
    """:func:`explain_task` for people to read."""
    lines = [f"task {found['id']}: {found['state'] or 'its state is not kept'}"]
    for name, seen in found["nodes"].items():
        if seen["running"]:
            lines.append(f"{name} runs it")
        elif not seen["draws"]:
            lines.append(f"{name} has it, and it draws from no bucket")
        else:
            place = f"holds it, number {seen['place']} of {seen['line']}" if "place" in seen else "has it"
            draws = ", ".join(f"{tokens:.6g} from {bucket!r}" for bucket, tokens in seen["draws"].items())
            binds = seen["binds"]
            lines += [
                f"{name} {place}; sent back {seen['sent_back']} times",
                f"it draws {draws}; what binds is {binds['bucket']!r}: {_numbers(binds)}",
            ]
            if "turn" in seen:
                lines.append(f"its turn is in {_when(seen['turn'])}")
            elif "earliest" in seen:
                lines.append(f"its turn is in {_when(seen['earliest'])} at the earliest")
    refused = found.get("refused")
    if refused and not found["nodes"]:
        turn = _when(refused["turn"] - time.time()) if refused["turn"] else f"{seconds_up(refused['wait'])} at least"
        lines.append(f"bucket {refused['bucket']!r} has refused it; its turn is in {turn}, and no node has it now")
    elif not found["nodes"] and found["state"] in {None, "PENDING"}:
        lines.append("no node has it: it is in a queue still, or has ended, or there is no such task")
    return "\n".join(lines)


def _numbers(limit: Mapping[str, float]) -> str:
    return f"{limit['refill_rate']:.6g} tokens a second, at most {limit['capacity']:.6g}"


def _when(seconds: float) -> str:
    return f"{seconds_up(max(0.0, seconds))} ({time.strftime('%H:%M:%S', time.localtime(time.time() + seconds))})"
