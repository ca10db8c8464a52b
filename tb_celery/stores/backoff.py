"""How to wait for a state file while others are inside."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from tb_celery.errors import StoreTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Waiting = tuple[float, Iterator[float]]
    """Since when, and the pauses that are left."""

BRIEF = 0.005
"""Seconds for which a wait polls at its shortest: a state file is locked for microseconds, mostly."""
_yield = getattr(os, "sched_yield", lambda: time.sleep(0))


def backoff(path: Path, timeout: float) -> Iterator[float]:
    """Seconds to wait before each further look; that takes no signal and no thread, and greenlets go on.

    Args:
        path: the state file.
        timeout: seconds.

    Raises:
        StoreTimeoutError: it has been ``timeout`` seconds.
    """
    started = time.monotonic()
    yield from (0.0, 0.0, 0.0)
    pause = 0.0001
    while (left := started + timeout - time.monotonic()) > 0:
        yield min(pause, left)
        if time.monotonic() - started > BRIEF:
            pause = min(pause * 1.5, 0.002)
    message = (
        f"state file {path} was locked by others for {timeout:g} s; end the process that"
        " holds it if it is stopped, or raise the setting lock_timeout (TB_CELERY_LOCK_TIMEOUT)"
    )
    raise StoreTimeoutError(message)


def rest(pause: float) -> None:
    """Let others go on for ``pause`` seconds, or for once around where it is 0."""
    if pause:
        time.sleep(pause)
    else:
        _yield()
