"""A benchmark that ends half way has measured nothing: what fails becomes a line that says why."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Made = TypeVar("Made")


def attempt(what: str, do: Callable[[], Made]) -> Made | str:
    """What it makes, or a line for people if it fails; the whole error is on stderr."""
    try:
        return do()
    except Exception as error:  # noqa: BLE001 - whatever it was, the others go on
        print(f"{what}: {error!r}", file=sys.stderr, flush=True)
        return f"{what:10}  not measured: {reason(error)}"


def reason(error: Exception) -> str:
    """In one line: an error may carry a whole log, whose last line says what went wrong."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no more is known'])[-1]}"
