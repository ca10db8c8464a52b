"""The commands for those who look after buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tb_celery import options
from tb_celery.bucket import Bucket, Limit
from tb_celery.cli.source import DONE, FAILED, REFUSED, Source, asking, print_json, sourced
from tb_celery.doctor import PATIENCE, examine
from tb_celery.errors import ConfigurationError, shown
from tb_celery.grantlog import read_log
from tb_celery.report import onlooker, survey, table
from tb_celery.rules import SMALLEST
from tb_celery.settings import Settings
from tb_celery.stores.file import FileStore
from tb_celery.verify import verify as verified

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@click.command()
@click.argument("bucket", required=False)
@options.key
@options.as_json
@sourced
def status(source: Source, bucket: str | None, *, key: str | None, as_json: bool) -> int:
    """Show BUCKET, or every bucket, limit by limit: how many tokens it has, and who waits.

    Takes no token and makes no state file. TURNS are the tokens that those in line have turns for, DONE IN is when the
    last of them has its tokens, KEYS the keys that are not full.
    """
    found = survey(onlooker(source.open(grant_log=None)[0]), bucket, key)
    if as_json:
        print_json(found)
    else:
        click.echo(table(found["buckets"]))
    return DONE


@click.command()
@options.interval
@options.once
@sourced
def top(source: Source, *, interval: float, once: bool) -> int:
    """Watch every bucket: how full it is, how much of it is used, what waits for it, and when that is done.

    Takes no token and makes no state file. Tasks that worker nodes hold are not in it: 'celery buckets top' asks the
    nodes. Ends with q or Ctrl-C.
    """
    from tb_celery.top import show  # noqa: PLC0415 - what it draws with is an extra

    show(source.open(grant_log=None, lock_timeout=PATIENCE)[0], interval, once=once)
    return DONE


@click.command()
@sourced
def dump(source: Source) -> int:
    """Print every bucket as JSON: what 'tb-celery status --json' prints, for people to read."""
    print_json(survey(onlooker(source.open(grant_log=None)[0])), indent=2)
    return DONE


@click.command()
@click.argument("bucket")
@options.key
@sourced
def reset(source: Source, bucket: str, key: str | None) -> int:
    """Make BUCKET full again, with all its keys or one."""
    with asking([bucket]):
        records = onlooker(source.open()[0]).reset(bucket, key=key)
    click.echo(f"bucket {bucket!r} is full again; records cleared: {records}")
    return DONE


@click.command()
@options.as_json
@sourced
def doctor(source: Source, *, as_json: bool) -> int:
    """Look whether this host can keep a quota: settings, directory, file system, state file, clock, and the lock.

    The lock is tried with a second process, on a file of its own next to the state file, which is not touched. A state
    file is one quota per host: each host, and each container with a volume of its own, has its own.

    Exit codes: 0 all is well, 1 something is not.
    """
    checks = list(examine(lambda: source.open()[0], source.state_file))
    well = all(one.ok for one in checks)
    if as_json:
        print_json({"ok": well, "checks": [one._asdict() for one in checks]})
    else:
        click.echo("\n".join(f"{'ok' if one.ok else 'FAIL':4}  {one.name:11}  {one.detail}" for one in checks))
    return DONE if well else FAILED


@click.command()
@click.argument("log", metavar="LOG", type=click.Path(), callback=options.file)
@click.option("--bucket", metavar="BUCKET", help="Leave out all others.")
@click.option("--capacity", metavar="NUMBER", callback=options.number, help="With --refill-rate, instead of settings.")
@click.option("--refill-rate", metavar="NUMBER", callback=options.number, help="Tokens a second.")
@options.as_json
@sourced
def verify(source: Source, log: Path, *, bucket: str | None, as_json: bool, **limit: Any) -> int:
    """Check every window, of every length, of the grants in LOG, which workers write if the setting grant_log names it.

    Each bucket and key may have been granted capacity + refill_rate * w tokens in w seconds, by the numbers that
    counted then if others were set, and none in a pause. Tokens that calls gave back count as not granted, and those
    drawn for them afterwards as granted, before the next grant. Instants are shown in nanoseconds of the clock that the
    state is kept on.

    Exit codes: 0 all windows hold, 2 one does not (the one that ends first is shown), 1 error.
    """
    entries = list(read_log(log))
    granted = dict.fromkeys(entry.bucket for entry in entries if entry.is_grant)
    names = [*granted] if bucket is None else [bucket]
    buckets: Mapping[str, Bucket | None] = {}
    if None not in limit.values():
        buckets = {name: Bucket(name, (Limit(**limit),)) for name in names}
    elif any(limit.values()):
        message = "Give '--capacity' and '--refill-rate', or neither"
        raise click.UsageError(message, click.get_current_context())
    elif names:
        limiter, _ = source.open(store="file", grant_log=None)
        limiter.charges(dict.fromkeys(names, SMALLEST))  # or the bucket is unknown
        buckets = {name: limiter.buckets[name] for name in names}
    verdicts = verified(entries, buckets)
    well = not any(verdict.violation for verdict in verdicts)
    if as_json:
        print_json({"ok": well, "limits": [verdict.as_json() for verdict in verdicts]})
    else:
        click.echo("\n".join(map(str, verdicts)))
    return DONE if well else REFUSED


@click.command()
@click.option("--from", "origin", metavar="file:FILE", help="The state file; that of the settings unless given.")
@click.option("--to", "target", metavar="URL", required=True, help="The server, as the setting store names it.")
@sourced
def migrate(source: Source, origin: str | None, target: str) -> int:
    """Carry the buckets over from a state file to a Redis or Valkey server: as full, paused or set as they are.

    Stop the workers first, and start them with the new setting store. The buckets are those that are declared: the file
    has no names. On the server nothing may be yet under the setting key_prefix.

    Example: tb-celery migrate --app proj:app --to redis://redis.example.com/0
    """
    settings = source.settings(store="file", grant_log=None)
    if origin is not None:
        kind, _, path = origin.partition(":")
        if kind != "file" or not path:
            message = f"--from must be a state file, as in file:{settings.state_file}, not {shown(origin)}"
            raise ConfigurationError(message)
        settings = settings.model_copy(update={"state_file": options.absolute(path)})
    # Anew, so that the address is checked as the setting is.
    server = Settings(**{**settings.model_dump(include={"key_prefix", "lock_timeout"}), "store": target})
    if server.store in {"file", "memory"}:
        message = f"--to must be the address of a server, as in redis://redis.example.com/0, not {shown(target)}"
        raise ConfigurationError(message)
    # The server's client is an extra.
    from tb_celery.migrate import migrate as carry_over  # noqa: PLC0415
    from tb_celery.stores.redis import RedisStore  # noqa: PLC0415

    buckets = [bucket for bucket in source.open(store="file", grant_log=None)[0].buckets.values() if bucket]
    file = FileStore(settings.state_file, lock_timeout=settings.lock_timeout)
    limits, orders = carry_over(buckets, file, RedisStore(server.store, server.lock_timeout, server.key_prefix))
    place = f"{server.key_prefix!r} on the server"
    if limits:
        click.echo(f"limits carried over to {place}: {limits}; the others are full")
    else:
        click.echo(f"every bucket is full, and needs no record under {place}")
    if orders:
        click.echo(f"pauses and other numbers carried over: {orders}")
    return DONE
