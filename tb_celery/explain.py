"""Why something waits, and for how long: from the state, the result backend, and the worker nodes that hold it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from celery.worker import state
from kombu.exceptions import OperationalError

from tb_celery.arithmetic import look
from tb_celery.bucket import SECOND
from tb_celery.errors import RateLimitExceeded
from tb_celery.gate import Gate
from tb_celery.quota import Quota, quota_of
from tb_celery.report import has_other_keys, name_of, numbers, onlooker, seconds_up, survey, told, told_enforced, until
from tb_celery.reschedule import HEADER, Ticket, dropped, sent_back
from tb_celery.terms import CALL_HEADER
from tb_celery.usage import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from celery import Celery

    from tb_celery.bucket import Charge
    from tb_celery.limiter import Limiter

PATIENCE = 0.5
"""Seconds that a node waits for the state file's lock, or the server: its consumer does nothing else meanwhile."""


# -- what one node knows


def limiter_of_node(quota: Quota) -> Limiter:
    """A limiter for a node's remote control: it does not hold up the consumer's loop for long."""
    return quota.hasty_limiter(PATIENCE)


def node(consumer: Any, name: str | None = None, key: str | None = None, *, standing: bool = True) -> dict[str, Any]:
    """How one bucket or all of them stand, unless that is not asked, and what a node holds for them, as JSON has it.

    Each has besides what :func:`survey` tells ``held``: the ``tasks`` held, whatever their key, the ``lines`` they are
    in, the tokens that those ``behind`` the head of ``key``'s own line draw, and the ``most`` that any key's do; and
    ``sent_back`` and ``dropped``: how often the node has sent tasks back since its start, and how many it has dropped,
    because this bucket refused them.

    Raises:
        ConfigurationError: the bucket is unknown, or there is none at all; where it is not asked how they stand, such
            a bucket is missing in the answer.
        StoreError: the state cannot be read.
    """
    quota = quota_of(consumer.app)
    buckets: dict[str, Any] = {each: {} for each in quota.limiter.buckets if name in {None, each}}
    if standing:  # which takes its time where there are many keys
        buckets = survey(onlooker(limiter_of_node(quota)), name, key)["buckets"]
    for known, bucket in buckets.items():
        bucket |= {"held": {"tasks": 0, "lines": 0, "behind": 0.0, "most": 0.0}}
        bucket |= {"sent_back": sent_back[known], "dropped": dropped[known]}
    behind: defaultdict[tuple[str, str | None], float] = defaultdict(float)
    for _, line in _lines(consumer):
        (_, head), *rest = line
        for bucket, its_key in {charge[:2] for charge in head}:
            if bucket in buckets:
                held = buckets[bucket]["held"]
                held["lines"] += 1
                held["tasks"] += len(line)
                behind[bucket, its_key] += sum(_draws(charges)[bucket] for _, charges in rest)
    for (bucket, its_key), tokens in behind.items():
        held = buckets[bucket]["held"]
        held["most"] = max(held["most"], tokens)
        if its_key == key:
            held["behind"] = tokens
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
    terms = quota.terms(request.task, request.delivery_info)
    header = request.request_dict.get(CALL_HEADER)
    charges, _ = terms.charges(request.task, header, request.args, request.kwargs)
    found = {"task": request.name, "running": request in state.active_requests, "draws": _draws(charges)}
    held = quota.held_to(charges, request.id)
    found["not_enforced"] = sorted({charge.bucket for charge in charges} - {charge.bucket for charge in held})
    if not held:
        return found
    charges = held
    store = onlooker(limiter_of_node(quota)).store
    now, heard, states = store.read(charges)
    decision = look(heard, states, now)
    # Behind the limits come pauses. What binds besides a pause is of interest, too.
    binds = look(heard[: len(charges)], states[: len(charges)], now)
    assert binds.limit is not None  # noqa: S101 - there are charges
    found["binds"] = {
        "bucket": binds.bucket,
        "capacity": binds.limit.capacity,
        "refill_rate": float(binds.limit.refill_rate),
        "wait": binds.wait,
    }
    found["paused"] = {"bucket": decision.bucket, "seconds": decision.wait} if decision.paused else None
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

    Without a key ``all_keys`` tells of all together: how many are in use, the tokens that are waited for, and how long.

    Raises:
        ConfigurationError: the bucket is unknown.
        StoreError: the state cannot be read.
    """
    status = onlooker(quota_of(app).limiter).status(name, key=key)
    bucket = told(status, key)
    answers = ask_nodes(app, "buckets", timeout, bucket=name, key=key, standing=False)
    held = {node: answer[name]["held"] for node, answer in answers.items()}
    behind = sum(each["behind"] for each in held.values())
    found = {"bucket": name, **bucket, "held": held, "behind": behind, "drained_in": 0.0, "binds": None}
    for seen, limit in zip(status.limits, bucket["limits"], strict=True):
        drained = seen.drained_in(behind, status.paused if seen.waiting or behind else 0)
        if found["binds"] is None or drained > found["drained_in"]:
            found |= {"drained_in": drained, "binds": limit}
    if key is None:
        [row] = Watch(quota_of(app).limiter).rows([name], answers)
        found["all_keys"] = {"keys": row.keys, "waiting": row.waiting, "drained_in": row.drained_in}
    return found


def tell_bucket(found: Mapping[str, Any]) -> str:
    """:func:`explain_bucket` for people to read."""
    limit = found["binds"]
    if limit is None:
        return f"bucket {found['bucket']!r} is not limited"
    lines = [
        f"{name_of(found)}{told_enforced(found['enforced_percent'])}: {numbers(limit)}",
        *([f"it is paused for {until(found['paused_seconds'])}"] if found["paused_seconds"] else []),
        f"it has {limit['current_tokens']:.3f} tokens, and a whole one in {seconds_up(limit['wait_time_seconds'])}",
        f"waiting: turns for {limit['turns']:.6g} tokens, and {found['behind']:.6g} tokens held behind those",
    ]
    tasks = Counter({node: held["tasks"] for node, held in found["held"].items()})
    if tasks.total():
        lines.append(f"held: {', '.join(f'{number} tasks by {node}' for node, number in sorted(tasks.items()))}")
    if limit["turns"] or found["behind"]:
        done = until(found["drained_in"])
        lines.append(f"all of that is done in {done}; messages that are in the queue still are not counted")
    every = found.get("all_keys")
    if every and every["waiting"] and has_other_keys(found):
        done = until(every["drained_in"])
        lines.append(f"all its keys together: {every['waiting']:.6g} tokens are waited for, and that is done in {done}")
    if not found["held"]:
        lines.append("no node answers, so what nodes hold is not counted")
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
    except Exception as error:  # noqa: BLE001 - each backend has its own
        found["unread"] = f"{type(error).__name__}: {error}"
        return found
    if found["state"] == "RETRY" and isinstance(info, RateLimitExceeded):
        found["refused"] = {"bucket": info.bucket, "wait": info.wait, "turn": info.turn, "paused": info.paused}
    return found


def tell_task(found: Mapping[str, Any]) -> str:
    """:func:`explain_task` for people to read."""
    unread = f"its state cannot be read from the result backend ({found['unread']})" if "unread" in found else ""
    lines = [f"task {found['id']}: {found['state'] or unread or 'its state is not kept'}"]
    for name, seen in found["nodes"].items():
        if seen["running"]:
            lines.append(f"{name} runs it")
        elif not seen["draws"]:
            lines.append(f"{name} has it, and it draws from no bucket")
        elif "binds" not in seen:
            free = ", ".join(map(repr, seen["not_enforced"]))
            lines.append(f"{name} has it, and it waits for no bucket: {free} is not enforced for it")
        else:
            place = f"holds it, number {seen['place']} of {seen['line']}" if "place" in seen else "has it"
            free = seen.get("not_enforced", ())
            draws = ", ".join(
                f"{tokens:.6g} from {bucket!r}{' (not enforced for it)' * (bucket in free)}"
                for bucket, tokens in seen["draws"].items()
            )
            binds = seen["binds"]
            lines += [
                f"{name} {place}; sent back {seen['sent_back']} times",
                f"it draws {draws}; what binds is {binds['bucket']!r}: {numbers(binds)}",
            ]
            if paused := seen.get("paused"):
                lines.append(f"bucket {paused['bucket']!r} is paused for {until(paused['seconds'])}")
            if "turn" in seen:
                lines.append(f"its turn is in {until(seen['turn'])}")
            elif "earliest" in seen:
                lines.append(f"its turn is in {until(seen['earliest'])} at the earliest")
    refused = found.get("refused")
    if refused and not found["nodes"]:
        turn = until(refused["turn"] - time.time()) if refused["turn"] else f"{seconds_up(refused['wait'])} at least"
        why = "was paused" if refused["paused"] else "has refused it"
        lines.append(f"bucket {refused['bucket']!r} {why}; its turn is in {turn}, and no node has it now")
    return "\n".join(lines)


def known(found: Mapping[str, Any]) -> bool:
    """Whether :func:`explain_task` has found anything at all."""
    return bool(found["nodes"]) or found["state"] not in {None, "PENDING"}
