"""What Celery is told of us: its workers' start, remote control of them, and the command ``celery buckets``.

Every ``celery`` command imports this, by the package's entry point: what takes time to import waits until it is needed.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from celery import signals
from celery.worker.control import control_command, inspect_command

from tb_celery import options
from tb_celery.errors import TBCeleryError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
def inspect_buckets(state: Any, bucket: str | None = None, key: str | None = None, **_: Any) -> dict[str, Any]:
    """How the buckets stand for this node, and how many tasks it holds for them."""
    from tb_celery.explain import node

    try:
        return node(state.consumer, bucket, key)
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
    from tb_celery.doctor import onlooker, survey, table
    from tb_celery.quota import limiter_of

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
    """Say why a task waits and when its turn is, or when all that waits for a bucket is done."""
    from tb_celery.explain import explain_bucket, explain_task, tell_bucket, tell_task
    from tb_celery.quota import limiter_of

    app = ctx.obj.app
    with _complaining():
        if name in limiter_of(app).buckets:
            found = explain_bucket(app, name, key, timeout)
            text = tell_bucket(found)
        else:
            found = explain_task(app, name, timeout)
            text = tell_task(found)
    click.echo(json.dumps(found) if as_json else text)


@buckets.command()
@click.argument("bucket")
@options.key
@click.pass_context
def reset(ctx: click.Context, bucket: str, key: str | None) -> None:
    """Make BUCKET full again, with all its keys or one."""
    from tb_celery.doctor import onlooker
    from tb_celery.quota import limiter_of

    with _complaining():
        number = onlooker(limiter_of(ctx.obj.app)).reset(bucket, key=key)
    click.echo(f"bucket {bucket!r} is full again; records cleared: {number}")
