"""Steering a bucket from outside while it runs: what the commands and the worker nodes do, and what they say.

As every ``celery`` command imports this, what takes time to import waits until it is needed.
"""

from __future__ import annotations

import json
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from tb_celery import options
from tb_celery.errors import ConfigurationError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tb_celery.limiter import Limiter


# -- what is done; each answers how the bucket then stands, as JSON has it


def pause(limiter: Limiter, bucket: str, duration: object, key: str | None = None) -> dict[str, Any]:
    """Have a bucket, or one key of it, give nobody tokens for a duration, as people write it.

    Raises:
        ConfigurationError: the bucket is unknown or not limited, or the duration is none, or too long.
        StoreError: the state cannot be read or written.
    """
    from tb_celery.declaration import parse_duration

    limiter.pause(bucket, parse_duration(duration), key=key)
    return standing(limiter, bucket, key)


def resume(limiter: Limiter, bucket: str, key: str | None = None) -> dict[str, Any]:
    """End a pause; raises as :func:`pause` does."""
    from tb_celery.report import onlooker

    limiter = onlooker(limiter)
    limiter.resume(bucket, key=key)
    return standing(limiter, bucket, key)


def change(  # noqa: PLR0913
    limiter: Limiter,
    bucket: str,
    *,
    refill_rate: object = None,
    capacity: object = None,
    limit: object = None,
    duration: object = None,
) -> dict[str, Any]:
    """Have other numbers count than those declared, for a duration or for good; raises as :func:`pause` does."""
    from tb_celery.declaration import parse_duration

    rate, most = _number("refill_rate", refill_rate), _number("capacity", capacity)
    if rate is None and most is None:
        message = f"bucket {bucket!r}: nothing is set: give refill_rate, capacity, or both"
        raise ConfigurationError(message)
    span = None if duration is None or duration == "-" else parse_duration(duration)
    limiter.set(bucket, refill_rate=rate, capacity=most, limit=_place(limit), duration=span)
    return standing(limiter, bucket)


def unset(limiter: Limiter, bucket: str, limit: object = None) -> dict[str, Any]:
    """Have the declared numbers count again; raises as :func:`pause` does."""
    from tb_celery.report import onlooker

    limiter = onlooker(limiter)
    limiter.unset(bucket, limit=_place(limit))
    return standing(limiter, bucket)


def standing(limiter: Limiter, bucket: str, key: str | None = None) -> dict[str, Any]:
    """How a bucket stands, as JSON has it."""
    from tb_celery.report import told

    return {"bucket": bucket, **told(limiter.status(bucket, key=key), key)}


def _number(name: str, value: object) -> float | None:
    """The number, which is a text where a command line gave it; ``-`` stands for none."""
    if value is None or value == "-":
        return None
    try:
        return options.read_number(str(value))
    except ValueError:
        message = f"{name} must be a number above 0, or - for the one declared, not {shown(value)}"
        raise ConfigurationError(message) from None


def _place(value: object) -> int | None:
    """Which limit, as a text where a command line of Celery's gave it."""
    if value is None or type(value) is int:
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    message = f"limit must be the number of one of the bucket's limits, such as 0, not {shown(value)}"
    raise ConfigurationError(message)


# -- what is said of it


def tell_pause(found: Mapping[str, Any]) -> str:
    """Until when a bucket is paused, for people to read."""
    from tb_celery.report import name_of, until

    paused = found["paused_seconds"]
    return f"{name_of(found)} is {f'paused for {until(paused)}' if paused else 'not paused'}"


def tell_numbers(found: Mapping[str, Any]) -> str:
    """Which numbers of a bucket count, a line for each limit, for people to read."""
    from tb_celery.report import name_of, numbers

    return "\n".join(f"{name_of(found)}: {numbers(limit)}" for limit in found["limits"])


# -- the commands


def commands(steered: Callable[[Callable[..., None]], Callable[..., Any]]) -> list[click.Command]:
    """``pause``, ``resume``, ``set`` and ``unset``.

    Args:
        steered: makes a command's function of one that wants a limiter for its first argument.
    """

    def telling(tell: Callable[[Mapping[str, Any]], str]) -> Callable[..., Callable[..., Any]]:
        def decorate(act: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
            @options.as_json
            @steered
            @wraps(act)
            def command(*arguments: Any, as_json: bool, **others: Any) -> None:
                found = act(*arguments, **others)
                click.echo(json.dumps(found) if as_json else tell(found))

            return command

        return decorate

    @click.command("pause")
    @click.argument("bucket")
    @click.argument("duration")
    @options.key
    @telling(tell_pause)
    def pause_command(limiter: Limiter, **asked: Any) -> dict[str, Any]:
        """Give nobody tokens of BUCKET for DURATION: 120 (seconds), 90s, 5m, 2h, 1d.

        All its keys are paused, or one with --key. A pause that is longer already stays as it is. Nothing is lost:
        tasks get turns after the end.
        """
        return pause(limiter, **asked)

    @click.command("resume")
    @click.argument("bucket")
    @options.key
    @telling(tell_pause)
    def resume_command(limiter: Limiter, **asked: Any) -> dict[str, Any]:
        """End the pause of BUCKET, or that of one key with --key.

        Tasks that were sent back meanwhile come at the turns they were told; who asks from now on has a turn as if the
        pause had been no longer.
        """
        return resume(limiter, **asked)

    @click.command("set")
    @click.argument("bucket")
    @options.refill_rate
    @options.capacity
    @options.limit
    @click.option("--for", "duration", metavar="DURATION", help="Such as 90s or 2h; for good unless given.")
    @telling(tell_numbers)
    def set_command(limiter: Limiter, **asked: Any) -> dict[str, Any]:
        """Have BUCKET fill at another rate, or hold more or fewer tokens, than is declared.

        Every process heeds it from its next decision on. The tokens that are there stay what they are.
        """
        return change(limiter, **asked)

    @click.command("unset")
    @click.argument("bucket")
    @options.limit
    @telling(tell_numbers)
    def unset_command(limiter: Limiter, **asked: Any) -> dict[str, Any]:
        """Have the declared numbers of BUCKET count again."""
        return unset(limiter, **asked)

    return [pause_command, resume_command, set_command, unset_command]
