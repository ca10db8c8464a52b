"""What the commands have in common: where the buckets and their state are, and how answers are given."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tb_celery import options
from tb_celery.errors import ConfigurationError, StoreError, shown
from tb_celery.limiter import Limiter
from tb_celery.services import EXAMPLE, read_services
from tb_celery.settings import load_settings, open_limiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from tb_celery.settings import Settings

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
"""Exit codes."""


class Source(NamedTuple):
    """Where the buckets and their state are, as the command line says."""

    app: str | None
    config: str | None
    state_file: Path | None

    def settings(self, **changes: object) -> Settings:
        """The settings in force, with ``changes``."""
        declared = {} if self.app is None else _declared_by(self.app)
        if self.state_file is not None:
            changes |= {"store": "file", "state_file": self.state_file}
            if isinstance(declared, dict):  # or a user without a home would be refused for want of a default
                declared = {"state_file": self.state_file, **declared}
        settings = load_settings(declared).model_copy(update=changes)
        if settings.store == "memory":
            message = "setting store must not be 'memory' here: what one command takes, the next one has to know"
            raise ConfigurationError(message)
        return settings

    def open(self, **changes: object) -> tuple[Limiter, dict[str, float]]:
        """A limiter over every bucket, and what ``--config`` requests of which; ``changes`` are to the settings."""
        limiter = open_limiter(self.settings(**changes))
        if self.config is None:
            return limiter, {}
        buckets, costs = read_services(self.config, limiter.buckets, only_those=self.app is not None)
        return Limiter({**limiter.buckets, **buckets}, limiter.store), costs


def _declared_by(name: str) -> Mapping[str, Any]:
    """What the Celery app ``name`` (such as ``proj.celery:app``) holds for us in its configuration."""
    # Celery takes longer to import than all the rest together, and only --app needs it.
    from celery.app.utils import find_app  # noqa: PLC0415
    from celery.utils.imports import cwd_in_path  # noqa: PLC0415

    if "/" in name or name.endswith(".py") or "" in re.split("[.:]", name):
        message = f"--app {shown(name)} must be a module, or a module and its Celery app, as in --app proj.celery:app"
        raise ConfigurationError(message)
    module, named, attribute = name.partition(":")
    try:
        # A program reads our answer on stdout: what the app's modules print must not get into it.
        with cwd_in_path(), redirect_stdout(sys.stderr):
            app = getattr(import_module(module), attribute) if named else find_app(name)
            return app.conf.get("tb_celery") or {}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and whatever else the app's modules raise
        reason = f"{type(error).__name__}: {error}"
        message = f"--app {shown(name)} does not lead to a Celery app, as --app proj.celery:app would: {reason}"
        raise ConfigurationError(message) from error


def sourced(command: Callable[..., int]) -> Callable[..., int]:
    """Give ``command`` the options that every command has; it gets them as its first argument."""

    @click.option("--app", metavar="MODULE:APP", help="Celery app whose conf.tb_celery declares the buckets.")
    @click.option("--config", metavar="FILE", type=click.Path(), help=f"JSON file of services (- is stdin): {EXAMPLE}")
    @options.state_file
    @wraps(command)
    def sourced(app: str | None, config: str | None, state_file: Path | None, **others: object) -> int:
        return command(Source(app, config, state_file), **others)

    return sourced


def steered(command: Callable[..., None]) -> Callable[..., int]:
    """:func:`sourced` for a ``command`` that wants a limiter."""

    @sourced
    @wraps(command)
    def steered(source: Source, *, bucket: str, **others: object) -> int:
        with asking([bucket]):
            command(source.open()[0], bucket=bucket, **others)
        return DONE

    return steered


@contextmanager
def asking(buckets: Iterable[str]) -> Iterator[None]:
    """Name the buckets in what the store complains of, unless it names one itself."""
    try:
        yield
    except StoreError as error:
        if any(f"bucket {bucket!r}" in str(error) for bucket in buckets):
            raise
        message = f"bucket {', '.join(map(repr, buckets))}: {error}"
        raise StoreError(message) from error


def print_json(answer: Mapping[str, Any], indent: int | None = None) -> None:
    """Answer a program: one line, unless it is indented for people too."""
    click.echo(json.dumps(answer, indent=indent, allow_nan=False))
