"""The commands that draw from buckets."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from tb_celery import options
from tb_celery.bucket import SECOND
from tb_celery.cli.source import DONE, REFUSED, Source, asking, print_json, sourced
from tb_celery.clock import SystemClock
from tb_celery.report import seconds_up

if TYPE_CHECKING:
    from tb_celery.arithmetic import Decision

STEP = 0.1
"""Seconds from one move of the progress bar to the next."""


@click.command()
@click.option("--timeout", metavar="SECONDS", callback=options.seconds, help="How long the state file may stay locked.")
@click.option("--each", is_flag=True, help="Take what can be had, service by service.")
@sourced
def check(source: Source, *, timeout: float | None, each: bool) -> int:
    """Ask every service in --config for its tokens, and print the plan.

    All or nothing: when one service refuses, none is approved and no token is taken from any. wait_time_seconds is then
    each service's own wait, 0 for those that had the tokens. With --each every service is asked by itself.

    A service that gives neither capacity nor refill_rate is the declared bucket of that name. Where there is none,
    capacity, refill_rate and requested default to 10, 1 and 1; with --app that is an error.

    Example: tb-celery check --config services.json && curl URL

    Exit codes: 0 all approved, 2 not all approved, 1 error.
    """
    if source.config is None:
        message = "Missing option '--config'"
        raise click.UsageError(message, click.get_current_context())
    limiter, costs = source.open(**({} if timeout is None else {"lock_timeout": timeout}))
    with asking(costs):
        decision = None if each else limiter.acquire(costs)
        answers = {name: (limiter.acquire if each else limiter.peek)(name, cost) for name, cost in costs.items()}
    for answer in answers.values() if decision is None else [decision]:
        _tell_unenforced(answer)
    plan = {name: _entry(answer, answer if decision is None else decision, name) for name, answer in answers.items()}
    approved = all(entry["approved"] for entry in plan.values())
    print_json({"all_approved": approved, "timestamp": time.time(), "plan": plan}, indent=2)
    return DONE if approved else REFUSED


def _entry(look: Decision, decision: Decision, bucket: str) -> dict[str, Any]:
    """What ``decision`` means for one bucket, which a ``look`` found so at that time or a moment later."""
    wait = 0.0 if decision else look.wait
    if bucket == decision.bucket:
        wait = max(wait, decision.wait)  # it may have refilled by that moment; refused it was
    # JSON knows no infinity: an unlimited bucket has no tokens to count.
    tokens = look.tokens if math.isfinite(look.tokens) else None
    return {"approved": decision.allowed, "current_tokens": tokens, "wait_time_seconds": wait}


@click.command()
@click.argument("bucket")
@options.cost
@options.key
@options.timeout
@options.as_json
@sourced
def wait(source: Source, bucket: str, *, as_json: bool, **ask: Any) -> int:
    """Take a turn at BUCKET, wait for it, and take the tokens.

    Example: tb-celery wait twitter_api --timeout 60 && curl URL

    Exit codes: 0 taken, 2 the turn would be later than --timeout (known at once; nothing is taken), 1 error.
    """
    started = time.monotonic()
    decision = _take_turn(source, bucket, ask, shown=not as_json)
    if as_json:
        print_json(
            {"bucket": bucket, **_entry(decision, decision, bucket), "waited_seconds": time.monotonic() - started}
        )
    return DONE if decision else REFUSED


class _BeforeCommand(click.Command):
    """Insists on ``--``: without it an option meant for the user's command could be taken for one of ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        separated = "--" in args
        rest = super().parse_args(ctx, args)
        if not separated:
            message = "Missing -- before the command"
            raise click.UsageError(message, ctx)
        return rest


@click.command(cls=_BeforeCommand)
@click.argument("bucket")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@options.cost
@options.key
@options.timeout
@sourced
def run(source: Source, bucket: str, command: tuple[str, ...], **ask: Any) -> int:
    """Wait for a turn at BUCKET as 'tb-celery wait' does, then become COMMAND.

    Example: tb-celery run twitter_api --timeout 60 -- curl URL

    Exit codes: that of COMMAND; before that, 2 the turn would be later than --timeout, 1 error. A COMMAND that does not
    exist takes no token; one that fails does not give its tokens back.
    """
    program = shutil.which(command[0])
    if program is None:
        message = f"there is no command {command[0]!r}; no token was taken"
        raise click.ClickException(message)
    if not _take_turn(source, bucket, ask, shown=True):
        return REFUSED
    try:
        if sys.platform == "win32":  # after an exec the caller's shell would have no process to wait for
            return subprocess.run([program, *command[1:]], check=False).returncode  # noqa: S603 - the user's command
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by the interpreter, and an exec would pass that on
            signal.signal(ignored, signal.SIG_DFL)
        os.execv(program, command)  # noqa: S606 - the user's command
    except OSError as error:
        message = f"{program} cannot be run: {error.strerror}"
        raise click.ClickException(message) from None


def _take_turn(source: Source, bucket: str, ask: dict[str, Any], *, shown: bool) -> Decision:
    limiter, _ = source.open()
    if shown and sys.stderr.isatty():
        limiter.store.clock = _VisibleClock(bucket)
    with asking([bucket]):
        decision = limiter.wait(bucket, **ask)
    _tell_unenforced(decision)
    if shown and not decision:
        turn = seconds_up(decision.wait)
        click.echo(f"tb-celery: bucket {bucket!r} is over quota, and its next turn is in {turn}", err=True)
    return decision


def _tell_unenforced(decision: Decision) -> None:
    if decision.would_wait:
        wait = seconds_up(decision.would_wait)
        click.echo(f"tb-celery: bucket {decision.bucket!r} is not enforced, or this would have waited {wait}", err=True)


class _VisibleClock(SystemClock):
    """A clock whose sleeps can be watched on stderr."""

    def __init__(self, label: str) -> None:
        super().__init__()
        self._label = label

    def sleep(self, seconds: float) -> None:
        end = self.now() + math.ceil(seconds * SECOND)
        steps = math.ceil(seconds / STEP)
        with click.progressbar(length=steps, label=self._label, file=sys.stderr) as bar:
            for left in range(steps, 0, -1):
                super().sleep(max(0, end - self.now()) / SECOND / left)
                bar.update(1)
