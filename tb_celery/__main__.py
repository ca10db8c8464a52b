"""``python -m tb_celery`` is ``tb-celery``: the command, which Ctrl-C ends without a traceback whenever it comes."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command, and exit."""
    # Unless somebody has it ignored, as a shell does for what it runs in the background.
    is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heeded:
        signal.signal(signal.SIGINT, _end)
    from tb_celery.cli import main as command  # noqa: PLC0415 - that takes most of the time of a short command

    try:
        if is_heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command(args)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    finally:
        if is_heeded:
            signal.signal(signal.SIGINT, _end)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    """End at once: an exception would be lost in a module that takes every one for a package that is missing."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
