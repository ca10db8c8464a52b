"""How the buckets stand, as JSON has it and for people to read; the state is looked at and never written."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from tb_celery.errors import ConfigurationError
from tb_celery.limiter import Limiter
from tb_celery.shadow import ALL, likewise
from tb_celery.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tb_celery.status import Status


def onlooker(limiter: Limiter) -> Limiter:
    """``limiter`` for those who take nothing: where there is no state file yet, it makes none."""
    path: Path | None = getattr(limiter.store, "path", None)
    if path is not None:
        try:
            path.lstat()
        except FileNotFoundError:
            return Limiter(limiter.buckets, likewise(limiter.store, MemoryStore()))
        except OSError:
            pass  # there may be one: the store knows how to say what keeps us from it
    return limiter


def survey(limiter: Limiter, name: str | None = None, key: str | None = None) -> dict[str, Any]:
    """How one bucket or all of them stand, limit by limit, as JSON has it; times are in seconds.

    Raises:
        ConfigurationError: the bucket is unknown, or there is none at all.
    """
    if name is None and not limiter.buckets:
        message = "no bucket is declared: name a Celery app with --app, a file with --config, or set TB_CELERY_BUCKETS"
        raise ConfigurationError(message)
    found = limiter.statuses(limiter.buckets if name is None else [name], key=key)
    return {"timestamp": time.time(), "buckets": {bucket.bucket: told(bucket, key) for bucket in found}}


def told(bucket: Status, key: str | None) -> dict[str, Any]:
    """A bucket's status, asked for ``key``, as JSON has it."""
    limits = [
        {
            "capacity": seen.limit.capacity,
            "refill_rate": float(seen.limit.refill_rate),
            "current_tokens": seen.tokens,
            "wait_time_seconds": seen.wait,
            "turns": seen.waiting,
            "drained_in_seconds": seen.drained_in(paused=bucket.paused) if seen.waiting else 0.0,
            "set": seen.declared
            and {
                "declared_capacity": seen.declared.capacity,
                "declared_refill_rate": float(seen.declared.refill_rate),
                "ends_in_seconds": seen.ends,
                "reason": "differs" if seen.elsewhere else "set",
            },
        }
        for seen in bucket.limits
    ]
    standing = {"paused_seconds": bucket.paused, "enforced_percent": bucket.enforced}
    return {"key": key, "limits": limits, "keys": bucket.keys, "turns_of_all_keys": bucket.waiting, **standing}


def table(buckets: Mapping[str, Any]) -> str:
    """The ``buckets`` of a :func:`survey` for people to read; a row says which quota it is where there are several."""
    rows = [["BUCKET", "CAPACITY", "PER SECOND", "TOKENS", "NEXT IN", "TURNS", "DONE IN", "KEYS"]]
    for name, bucket in buckets.items():
        if not bucket["limits"]:
            rows.append([name, "unlimited", *[""] * 6])
        label = name if bucket["key"] is None else f"{name} (key {bucket['key']!r})"
        if bucket["key"] is None and has_other_keys(bucket):
            others = bucket["turns_of_all_keys"] - max(limit["turns"] for limit in bucket["limits"])
            label += f" (without a key{f'; with one {others:.6g} turns' * (others > 0)})"
        if bucket["paused_seconds"]:
            label += f" (paused for {until(bucket['paused_seconds'])})"
        label += told_enforced(bucket["enforced_percent"])
        for limit in bucket["limits"]:
            capacity, rate, tokens, wait, turns, drained, other = limit.values()
            # Rounded down, where waits are rounded up: nobody is promised what is not there.
            held = f"{math.floor(tokens * 1000) / 1000:.3f}"
            shown = [f"{capacity:.6g}", f"{rate:.6g}", held, seconds_up(wait), f"{turns:.6g}"]
            done = seconds_up(drained) if turns else "-"
            rows.append([label + told_set(other), *shown, done, str(bucket["keys"])])
    first, *others = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def has_other_keys(bucket: Mapping[str, Any]) -> bool:
    """Whether more of a bucket's keys are in use than the one that it is told of, as :func:`told` has it."""
    in_use: int = bucket["keys"]
    return in_use > any(limit["current_tokens"] < limit["capacity"] for limit in bucket["limits"])


def told_enforced(percent: float) -> str:
    """That a bucket is not enforced for every task, for people to read."""
    return "" if percent == ALL else f" (enforced for {percent:g} %)" if percent else " (not enforced)"


def told_set(other: Mapping[str, Any] | None) -> str:
    """That other numbers count than those declared, as :func:`told` has it, for people to read."""
    if other is None:
        return ""
    ends = other["ends_in_seconds"]
    why = {"differs": "as another process declares", "set": f"set, for {'good' if ends is None else until(ends)}"}
    declared = f"{other['declared_capacity']:.6g} at {other['declared_refill_rate']:.6g}/s"
    return f" ({why[other['reason']]}; declared: {declared})"


def name_of(found: Mapping[str, Any]) -> str:
    """Which bucket, and which key of it, something is about."""
    return f"bucket {found['bucket']!r}" + ("" if found["key"] is None else f" of key {found['key']!r}")


def numbers(limit: Mapping[str, Any]) -> str:
    """The numbers of a limit that count, as :func:`told` has them, for people to read."""
    return f"{limit['refill_rate']:.6g} tokens a second, at most {limit['capacity']:.6g}{told_set(limit.get('set'))}"


def until(seconds: float) -> str:
    """How long it is from now, and the time of day that it is then: with the day, if that is another."""
    now = time.time()
    then = time.localtime(now + seconds)
    day = "" if then[:3] == time.localtime(now)[:3] else "%Y-%m-%d "
    return f"{seconds_up(max(0.0, seconds))} ({time.strftime(day + '%H:%M:%S', then)})"


def seconds_up(seconds: float) -> str:
    """``seconds`` in milliseconds' precision, never less than they are."""
    return f"{math.ceil(seconds * 1000) / 1000:.3f} s"
