"""The options that several commands have, and how their texts are read."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tb_celery.errors import shown

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST = 1e9
"""Seconds that a time-out can be."""
SHORTEST_INTERVAL = 0.1
"""Seconds from one look to the next."""


def _converted(what: str, convert: Callable[[str], Any]) -> Callable[..., Any]:
    """A callback that makes of an option's text what its command wants."""

    def converted(_ctx: click.Context, _param: click.Parameter, text: str | None) -> object:
        if text is None:
            return None
        with suppress(OSError, RuntimeError, ValueError):
            return convert(text)
        message = f"it must be {what}, not {shown(text)}"
        raise click.BadParameter(message)

    return converted


def absolute(text: str) -> Path:
    """The path of a file that a text names.

    Raises:
        ValueError: it names none.
    """
    if not Path(text).name:
        raise ValueError
    # Shells leave the ~ of --state-file=~/state as it is.
    return Path(text).expanduser().absolute()


def read_number(text: str, most: float = sys.float_info.max) -> float:
    """The number, from 0 on, that a text is.

    Raises:
        ValueError: it is none, or higher than ``most``.
    """
    number = float(text)  # takes nan, underscores and the digits of every script, too
    if not text.isascii() or "_" in text or not 0 <= number <= most:
        raise ValueError
    return number


def _interval(text: str) -> float:
    if (number := read_number(text, LONGEST)) < SHORTEST_INTERVAL:
        raise ValueError
    return number


as_json = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
key = click.option("--key", metavar="K", help="Which of the bucket's independent quotas.")
number = _converted("a number above 0", read_number)
cost = click.option("--cost", metavar="NUMBER", callback=number, default="1", help="Tokens to take; 1 unless given.")
file = _converted("the path of a file", absolute)
seconds = _converted(f"a number of seconds from 0 to {LONGEST:g}", lambda text: read_number(text, LONGEST))
timeout = click.option("--timeout", metavar="SECONDS", callback=seconds, help="How far off the turn may be.")
interval = click.option(
    "--interval",
    "-n",
    metavar="SECONDS",
    callback=_converted(f"a number of seconds from {SHORTEST_INTERVAL:g} to {LONGEST:g}", _interval),
    default="1",
    help="From one look to the next; 1 unless given.",
)
once = click.option("--once", is_flag=True, help="Look twice, print one frame, and end; so it is without a terminal.")
refill_rate = click.option("--refill-rate", metavar="NUMBER", callback=number, help="Tokens a second.")
capacity = click.option("--capacity", metavar="NUMBER", callback=number, help="Most tokens that it holds.")
limit = click.option("--limit", metavar="N", type=int, help="Which, if there are several: 0 refills the fastest.")
state_file = click.option(
    "--state-file", metavar="FILE", type=click.Path(), callback=file, help="Instead of the setting state_file."
)
