"""The command ``tb-celery``: the workers' quota for shell scripts, cron jobs and the people who look after it."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stdout, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from tb_celery.bucket import SECOND
from tb_celery.clock import SystemClock
from tb_celery.doctor import examine, onlooker, seconds_up, survey, table
from tb_celery.errors import ConfigurationError, StoreError, TBCeleryError
from tb_celery.limiter import Limiter
from tb_celery.settings import load_settings, open_limiter, parse_bucket, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tb_celery.bucket import Bucket, Decision

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""
LONGEST = 1e9
"""Seconds that a time-out can be."""
STEP = 0.1
"""Seconds from one move of the progress bar to the next."""
DEFAULTS: dict[str, Any] = {"capacity": 10, "refill_rate": 1, "requested": 1}
"""What a service in a ``--config`` file has where it gives no number."""
EXAMPLE = '{"twitter_api": {"capacity": 5, "refill_rate": 0.5, "requested": 1}}'


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit: whatever is wrong is one sentence on stderr and exit code 1."""
    code: object = FAILED
    complaint = None
    try:
        code = cli.main(args, prog_name="tb-celery", standalone_mode=False)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "tb-celery"
        complaint = f"{path}: {error.format_message().rstrip('.')}; see '{path} --help'"
    except (click.ClickException, TBCeleryError) as error:
        complaint = f"tb-celery: {error}"
    except click.Abort:
        code = INTERRUPTED
    except (OSError, UnicodeEncodeError) as error:
        complaint = f"tb-celery: the answer cannot be written: {error}"
        with suppress(OSError):
            # What is left in the buffer would be tried, and complained of, once more when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if complaint:
        click.echo(" ".join(complaint.splitlines()), err=True)
    sys.exit(code if isinstance(code, int) else DONE)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
@click.version_option(sys.modules["tb_celery"].__version__, prog_name="tb-celery")
def cli() -> None:
    """Ask, and look after, the quotas that this host's Celery workers share.

    Buckets come from the settings (environment TB_CELERY_*, or the file that TB_CELERY_CONFIG names), from a Celery app
    with --app, or from a JSON file with --config. All commands and workers of one user share one state file unless told
    otherwise, so a bucket of the same name is the same quota in all of them.

    Exit codes: 0 the tokens were taken, or all is well; 2 over quota; 1 anything else, and one sentence on stderr says
    what; 130 interrupted.
    """


# -- where the buckets and their state are


class _Source(NamedTuple):
    """Where the buckets and their state are, as the command line says."""

    app: str | None
    config: str | None
    state_file: str | None

    def open(self, **changes: object) -> tuple[Limiter, dict[str, float]]:
        """A limiter over every bucket, and what ``--config`` requests of which; ``changes`` are to the settings."""
        declared = {} if self.app is None else _declared_by(self.app)
        if self.state_file is not None:
            changes |= {"store": "file", "state_file": Path(self.state_file)}
            if isinstance(declared, dict):  # or a user without a home would be refused for want of a default
                declared = {"state_file": self.state_file, **declared}
        settings = load_settings(declared).model_copy(update=changes)
        if settings.store == "memory":
            message = "setting store must not be 'memory' here: what one command takes, the next one has to know"
            raise ConfigurationError(message)
        limiter = open_limiter(settings)
        if self.config is None:
            return limiter, {}
        buckets, costs = _services(self.config, {} if self.app is None else limiter.buckets)
        return Limiter({**limiter.buckets, **buckets}, limiter.store), costs


def _declared_by(name: str) -> Mapping[str, Any]:
    """What the Celery app ``name`` (such as ``proj.celery:app``) holds for us in its configuration."""
    # Celery takes longer to import than all the rest together, and only --app needs it.
    from celery.app.utils import find_app  # noqa: PLC0415
    from celery.utils.imports import cwd_in_path  # noqa: PLC0415

    try:
        # A program reads our answer on stdout: what the app's modules print must not get into it.
        with cwd_in_path(), redirect_stdout(sys.stderr):
            return find_app(name).conf.get("tb_celery") or {}
    except (Exception, SystemExit) as error:
        message = f"--app {name} does not lead to a Celery app: {type(error).__name__}: {error}"
        raise ConfigurationError(message) from error


def _services(config: str, declared: Mapping[str, Bucket | None]) -> tuple[dict[str, Bucket | None], dict[str, float]]:
    """The buckets and tokens that ``config`` (``-`` is stdin) asks for; without numbers, those in ``declared``."""
    source = "--config on stdin" if config == "-" else f"--config {config}"
    try:
        with click.open_file(config, encoding="utf-8-sig") as file:
            services = parse_json(file.read(), source)
    except (OSError, UnicodeDecodeError) as error:
        message = f"{source} cannot be read: {getattr(error, 'strerror', 'it is not UTF-8 text')}"
        raise ConfigurationError(message) from None
    if not isinstance(services, dict) or not services:
        message = f"{source} must be an object of at least one service, such as {EXAMPLE}"
        raise ConfigurationError(message)
    buckets, costs = {}, {}
    for name, service in services.items():
        wrong = sorted(service.keys() - DEFAULTS) if isinstance(service, dict) else service
        if wrong or not isinstance(service, dict):
            message = f"{source}: service {name!r} can have {', '.join(DEFAULTS)}, as in {EXAMPLE}, but not {wrong!r}"
            raise ConfigurationError(message)
        if declared and name not in declared and service.keys() <= {"requested"}:
            message = f"{source}: service {name!r} has no numbers, and the app declares only {', '.join(declared)}"
            raise ConfigurationError(message)
        numbers = {**DEFAULTS, **service}
        costs[name] = numbers.pop("requested")
        known = name in declared and service.keys() <= {"requested"}
        field = ""
        try:
            bucket = buckets[name] = declared[name] if known else parse_bucket(name, numbers)
            if bucket is not None:
                field = "requested: "
                bucket.charge(costs[name])
        except ConfigurationError as error:
            message = f"{source}: {field}{error}"
            raise ConfigurationError(message) from None
    return buckets, costs


def _sourced(command: Callable[..., int]) -> Callable[..., int]:
    """Give ``command`` the options that every command has; it gets them as its first argument."""

    @click.option("--app", metavar="MODULE:APP", help="Celery app whose conf.tb_celery declares the buckets.")
    @click.option("--config", metavar="FILE", help=f"JSON file of services (- is stdin): {EXAMPLE}")
    @click.option(
        "--state-file", metavar="FILE", callback=_must("name a file", bool), help="Instead of the setting state_file."
    )
    @wraps(command)
    def sourced(app: str | None, config: str | None, state_file: str | None, **options: object) -> int:
        return command(_Source(app, config, state_file), **options)

    return sourced


def _must(be: str, holds: Callable[[Any], bool]) -> Callable[..., Any]:
    """A check of an option's value."""

    def checked(_ctx: click.Context, _param: click.Parameter, value: object) -> object:
        if value is not None and not holds(value):
            message = f"it must {be}, not {value!r}"
            raise click.BadParameter(message)
        return value

    return checked


@contextmanager
def _asking(buckets: Iterable[str]) -> Iterator[None]:
    """Name the buckets in what the store complains of."""
    try:
        yield
    except StoreError as error:
        message = f"bucket {', '.join(map(repr, buckets))}: {error}"
        raise StoreError(message) from error


_sane = _must(f"be from 0 to {LONGEST:g} seconds", lambda seconds: 0 <= seconds <= LONGEST)  # which nan is not
_json = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
_key = click.option("--key", metavar="K", help="Which of the bucket's independent quotas.")
_cost = click.option("--cost", type=float, default=1, show_default=True, help="Tokens to take.")
_timeout = click.option("--timeout", type=float, callback=_sane, help="Seconds that the turn may be off.")


def _print(answer: Mapping[str, Any], indent: int | None = None) -> None:
    click.echo(json.dumps(answer, indent=indent, allow_nan=False))


@cli.command()
@click.option("--timeout", type=float, callback=_sane, help="Seconds that the state file may stay locked.")
@click.option("--each", is_flag=True, help="Take what can be had, service by service.")
@_sourced
def check(source: _Source, *, timeout: float | None, each: bool) -> int:
    """Ask every service in --config for its tokens, and print the plan.

    All or nothing: when one service refuses, none is approved and no token is taken from any. wait_time_seconds is then
    each service's own wait, 0 for those that had the tokens. With --each every service is asked by itself.

    capacity, refill_rate and requested default to 10, 1 and 1. With --app a service that gives neither capacity nor
    refill_rate is the app's bucket of that name.

    Example: tb-celery check --config services.json && curl URL

    Exit codes: 0 all approved, 2 not all approved, 1 error.
    """
    if source.config is None:
        message = "Missing option '--config'"
        raise click.UsageError(message, click.get_current_context())
    limiter, costs = source.open(**({} if timeout is None else {"lock_timeout": timeout}))
    with _asking(costs):
        decision = None if each else limiter.acquire(costs)
        answers = {name: (limiter.acquire if each else limiter.peek)(name, cost) for name, cost in costs.items()}
    plan = {name: _entry(answer, answer if decision is None else decision, name) for name, answer in answers.items()}
    approved = all(entry["approved"] for entry in plan.values())
    _print({"all_approved": approved, "timestamp": time.time(), "plan": plan}, indent=2)
    return DONE if approved else REFUSED


def _entry(look: Decision, decision: Decision, bucket: str) -> dict[str, Any]:
    """What ``decision`` means for one bucket, which a ``look`` found so at that time or a moment later."""
    wait = 0.0 if decision else look.wait
    if bucket == decision.bucket:
        wait = max(wait, decision.wait)  # it may have refilled by that moment; refused it was
    # JSON knows no infinity: an unlimited bucket has no tokens to count.
    tokens = look.tokens if math.isfinite(look.tokens) else None
    return {"approved": decision.allowed, "current_tokens": tokens, "wait_time_seconds": wait}


@cli.command()
@click.argument("bucket")
@_cost
@_key
@_timeout
@_json
@_sourced
def wait(source: _Source, bucket: str, *, as_json: bool, **ask: Any) -> int:
    """Take a turn at BUCKET, wait for it, and take the tokens.

    Example: tb-celery wait twitter_api --timeout 60 && curl URL

    Exit codes: 0 taken, 2 the turn would be later than --timeout (known at once; nothing is taken), 1 error.
    """
    started = time.monotonic()
    decision = _take_turn(source, bucket, ask, shown=not as_json)
    if as_json:
        _print({"bucket": bucket, **_entry(decision, decision, bucket), "waited_seconds": time.monotonic() - started})
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


@cli.command(cls=_BeforeCommand)
@click.argument("bucket")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@_cost
@_key
@_timeout
@_sourced
def run(source: _Source, bucket: str, command: tuple[str, ...], **ask: Any) -> int:
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


def _take_turn(source: _Source, bucket: str, ask: dict[str, Any], *, shown: bool) -> Decision:
    limiter, _ = source.open()
    if shown and sys.stderr.isatty():
        limiter.store.clock = _VisibleClock(bucket)
    with _asking([bucket]):
        decision = limiter.wait(bucket, **ask)
    if shown and not decision:
        turn = seconds_up(decision.wait)
        click.echo(f"tb-celery: bucket {bucket!r} is over quota, and its next turn is in {turn}", err=True)
    return decision


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


# -- looking after


@cli.command()
@click.argument("bucket", required=False)
@_key
@_json
@_sourced
def status(source: _Source, bucket: str | None, *, key: str | None, as_json: bool) -> int:
    """Show BUCKET, or every bucket, limit by limit: how many tokens it has, and who waits.

    Takes no token and makes no state file. TURNS are the tokens that those in line have turns for, KEYS the keys that
    are not full.
    """
    found = survey(onlooker(source.open()[0]), bucket, key)
    if as_json:
        _print(found)
    else:
        click.echo(table(found["buckets"]))
    return DONE


@cli.command()
@_sourced
def dump(source: _Source) -> int:
    """Print every bucket as JSON: what 'tb-celery status --json' prints, for people to read."""
    _print(survey(onlooker(source.open()[0])), indent=2)
    return DONE


@cli.command()
@click.argument("bucket")
@_key
@_sourced
def reset(source: _Source, bucket: str, key: str | None) -> int:
    """Make BUCKET full again, with all its keys or one."""
    with _asking([bucket]):
        records = onlooker(source.open()[0]).reset(bucket, key=key)
    click.echo(f"bucket {bucket!r} is full again; records cleared: {records}")
    return DONE


@cli.command()
@_json
@_sourced
def doctor(source: _Source, *, as_json: bool) -> int:
    """Look whether this host can keep a quota: settings, directory, file system, state file, clock, and the lock.

    The lock is tried with a second process, on a file of its own next to the state file, which is not touched. A state
    file is one quota per host: each host, and each container with a volume of its own, has its own.

    Exit codes: 0 all is well, 1 something is not.
    """
    checks = list(examine(lambda: source.open()[0], source.state_file))
    well = all(one.ok for one in checks)
    if as_json:
        _print({"ok": well, "checks": [one._asdict() for one in checks]})
    else:
        click.echo("\n".join(f"{'ok' if one.ok else 'FAIL':4}  {one.name:11}  {one.detail}" for one in checks))
    return DONE if well else FAILED
