"""What Celery is told of us: its workers' start, remote control of them, and the command ``celery buckets``.

Every ``celery`` command imports this, by the package's entry point: what takes time to import waits until it is needed.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click
from celery import signals
from celery.worker.control import control_command, inspect_command

from tb_celery import options, steering
from tb_celery.errors import ConfigurationError, TBCeleryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

TIMEOUT = 1.0
"""Seconds to wait for the nodes' answers, as Celery does."""


# Under the name that the real receiver has: if that is connected already, this one is not.
@signals.worker_init.connect(weak=False, dispatch_uid="tb_celery.init")
def _on_init(sender: Any, **kwargs: Any) -> None:
    """Have plain tasks asked about in every worker, also where no module of the application's imports us."""
    from tb_celery import worker

    worker._on_init(sender, **kwargs)  # noqa: SLF001 - the real receiver


# -- remote control: in the nodes


@inspect_command(name="buckets", args=[("bucket", str), ("key", str)], signature="[BUCKET [KEY]]")
def inspect_buckets(
    state: Any,
    bucket: str | None = None,
    key: str | None = None,
    standing: bool = True,  # noqa: FBT001, FBT002 - Celery gives it by name
    **_: Any,
) -> dict[str, Any]:
    """How the buckets stand for this node, and how many tasks it holds for them."""
    from tb_celery.explain import node

    try:
        return node(state.consumer, bucket, key, standing=bool(standing))
    except TBCeleryError as error:
        return {"error": str(error)}


@inspect_command(name="bucket_task", args=[("task_id", str)], signature="TASK_ID")
def inspect_task(state: Any, task_id: str, **_: Any) -> dict[str, Any]:
    """Why a task that this node has waits, and for how long."""
    from tb_celery.explain import waiting_task

    try:
        return waiting_task(state.consumer, task_id)
    except TBCeleryError as error:
        return {"error": str(error)}


@control_command(name="bucket_reset", args=[("bucket", str), ("key", str)], signature="BUCKET [KEY]")
def control_reset(state: Any, bucket: str, key: str | None = None, **_: Any) -> dict[str, Any]:
    """Make a bucket full again where this node keeps its state, with all its keys or one."""
    from tb_celery.explain import limiter_of_node
    from tb_celery.quota import quota_of

    try:
        number = limiter_of_node(quota_of(state.app)).reset(bucket, key=key)
    except TBCeleryError as error:
        return {"error": str(error)}
    return {"ok": f"bucket {bucket!r} is full again; records cleared: {number}"}


def _steered(state: Any, act: Callable[..., dict[str, Any]], *asked: Any, **others: Any) -> dict[str, Any]:
    """What a node has done to a bucket, or why not; as other nodes may do it too, twice is as good as once."""
    from tb_celery.explain import limiter_of_node
    from tb_celery.quota import quota_of

    try:
        found = act(limiter_of_node(quota_of(state.app)), *asked, **others)
    except TBCeleryError as error:
        return {"error": str(error)}
    numbers = act in {steering.change, steering.unset}
    return {"ok": (steering.tell_numbers if numbers else steering.tell_pause)(found), "bucket": found}


def _tell(state: Any, event: str, answer: Mapping[str, Any], **fields: Any) -> None:
    """Send an event of what a node has done; a key is no part of it, for it may be a secret."""
    dispatcher = state.consumer.event_dispatcher
    if dispatcher and "error" not in answer:
        found = answer["bucket"]
        dispatcher.send(event, bucket=found["bucket"], one_key=found["key"] is not None, **fields)


@control_command(
    name="bucket_pause", args=[("bucket", str), ("duration", str), ("key", str)], signature="BUCKET DURATION [KEY]"
)
def control_pause(state: Any, bucket: str, duration: object, key: str | None = None, **_: Any) -> dict[str, Any]:
    """Give nobody tokens of a bucket, or one key of it, for a duration such as 120, 90s or 2h."""
    answer = _steered(state, steering.pause, bucket, duration, key)
    if "ok" in answer:
        _tell(state, "bucket-paused", answer, until=time.time() + answer["bucket"]["paused_seconds"])
    return answer


@control_command(name="bucket_resume", args=[("bucket", str), ("key", str)], signature="BUCKET [KEY]")
def control_resume(state: Any, bucket: str, key: str | None = None, **_: Any) -> dict[str, Any]:
    """End the pause of a bucket, or of one key of it."""
    answer = _steered(state, steering.resume, bucket, key)
    _tell(state, "bucket-resumed", answer)
    return answer


@control_command(
    name="bucket_set",
    args=[("bucket", str), ("refill_rate", str), ("capacity", str), ("duration", str), ("limit", str)],
    signature="BUCKET REFILL_RATE|- [CAPACITY|- [DURATION|- [LIMIT]]]",
)
def control_set(  # noqa: PLR0913, PLR0917 - as they come from the command line
    state: Any,
    bucket: str,
    refill_rate: object = None,
    capacity: object = None,
    duration: object = None,
    limit: object = None,
    **_: Any,
) -> dict[str, Any]:
    """Have a bucket refill at another rate, or hold more or fewer tokens; - leaves what is declared."""
    others = {"refill_rate": refill_rate, "capacity": capacity, "duration": duration, "limit": limit}
    return _steered(state, steering.change, bucket, **others)


@control_command(name="bucket_unset", args=[("bucket", str), ("limit", str)], signature="BUCKET [LIMIT]")
def control_unset(state: Any, bucket: str, limit: object = None, **_: Any) -> dict[str, Any]:
    """Have the declared numbers of a bucket count again."""
    return _steered(state, steering.unset, bucket, limit)


# -- celery buckets: here


@contextmanager
def _complaining() -> Iterator[None]:
    try:
        yield
    except TBCeleryError as error:
        raise click.ClickException(str(error)) from None


_timeout = click.option(
    "--timeout", "-t", metavar="SECONDS", type=float, default=TIMEOUT, help="How long to wait for the nodes' answers."
)


@click.group("buckets")
def buckets() -> None:
    """See the quotas that this app's tasks draw from, and what waits for them.

    The state is looked at from here, as this host's workers do; 'celery inspect buckets' asks the workers, wherever
    they are.
    """


@buckets.command()
@click.argument("bucket", required=False)
@options.key
@options.as_json
@click.pass_context
def status(ctx: click.Context, bucket: str | None, *, key: str | None, as_json: bool) -> None:
    """Show BUCKET, or every bucket, limit by limit: how many tokens it has, and who waits."""
    from tb_celery.quota import limiter_of
    from tb_celery.report import onlooker, survey, table

    with _complaining():
        found = survey(onlooker(limiter_of(ctx.obj.app)), bucket, key)
    click.echo(json.dumps(found) if as_json else table(found["buckets"]))


@buckets.command()
@click.argument("name", metavar="BUCKET|TASK_ID")
@options.key
@_timeout
@options.as_json
@click.pass_context
def explain(ctx: click.Context, name: str, *, key: str | None, timeout: float, as_json: bool) -> None:
    """Say why a task waits and when its turn is, or when all that waits for a bucket is done.

    Exit codes: 0 something is known of it, 1 nothing is, or an error.
    """
    from tb_celery.explain import explain_bucket, explain_task, known, tell_bucket, tell_task
    from tb_celery.quota import limiter_of

    app = ctx.obj.app
    with _complaining():
        limiter = limiter_of(app)
        if name in limiter.buckets:
            found = explain_bucket(app, name, key, timeout)
            click.echo(json.dumps(found) if as_json else tell_bucket(found))
            return
        if not name:
            limiter.status(name)  # says that it is no bucket, and Celery refuses to look for such a task
        found = explain_task(app, name, timeout)
        if as_json:
            click.echo(json.dumps(found))
        elif known(found):
            click.echo(tell_task(found))
        elif "unread" in found:
            click.echo(tell_task(found), err=True)
        else:
            click.echo(f"no node has a task {name!r}: it is in a queue still, or has ended, or there is none", err=True)
            limiter.status(name)  # says that it is no bucket, either
    if not known(found):
        ctx.exit(1)


@buckets.command()
@options.interval
@options.once
@_timeout
@click.pass_context
def top(ctx: click.Context, *, interval: float, once: bool, timeout: float) -> None:
    """Watch every bucket: how full it is, how much of it is used, what waits, and when that is done.

    Takes no token. The nodes are asked now and then how many tasks they hold.
    """
    from tb_celery.explain import ask_nodes, limiter_of_node
    from tb_celery.quota import quota_of

    app = ctx.obj.app
    with _complaining():
        from tb_celery.top import show

        ask = partial(ask_nodes, app, "buckets", timeout, standing=False)
        show(limiter_of_node(quota_of(app)), interval, once=once, ask=ask)


@buckets.command()
@click.argument("bucket")
@options.key
@click.pass_context
def reset(ctx: click.Context, bucket: str, key: str | None) -> None:
    """Make BUCKET full again, with all its keys or one."""
    from tb_celery.quota import limiter_of
    from tb_celery.report import onlooker

    with _complaining():
        number = onlooker(limiter_of(ctx.obj.app)).reset(bucket, key=key)
    click.echo(f"bucket {bucket!r} is full again; records cleared: {number}")


def _with_limiter(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the limiter that the app's tasks share."""

    @wraps(command)
    def steered(**asked: Any) -> None:
        from tb_celery.quota import quota_of

        with _complaining():
            quota = quota_of(click.get_current_context().obj.app)
            if quota.settings.store == "memory":
                message = "setting store must not be 'memory' here: no other process sees what one keeps there"
                raise ConfigurationError(message)
            command(quota.limiter, **asked)

    return steered


for _command in steering.commands(_with_limiter):
    buckets.add_command(_command)
