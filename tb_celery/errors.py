"""What can be wrong, and who has to act on it.

Being over quota is an answer, not an error: it becomes :class:`RateLimitExceeded` only where a caller asked for an
exception.
"""

from __future__ import annotations

import re
import reprlib
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime, timedelta
    from decimal import Decimal

LISTED = 20
"""Names that are listed to those who give another one."""
LONGEST_TYPO = 200
"""Characters of a name that are compared with those known: it takes time by the square."""
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def shown(value: object) -> str:
    """``value`` in a sentence: on one short line, whatever it is, and without what may be a password in an address."""
    try:
        return re.sub(r"(?<=://)[^/@'\"]*@|(?<=://)[^/@'\"]*:[^/@'\"]*(?=\.\.\.)", "***@", _short.repr(value))
    except ValueError:  # an integer that Python refuses to print
        return f"a huge {type(value).__name__}"


def hint(name: str, declared: Collection[str]) -> str:
    """What somebody who named ``name`` may have meant, as a sentence ends."""
    if close := get_close_matches(name[:LONGEST_TYPO], declared, 1):
        return f"did you mean {close[0]!r}?"
    return f"declared are: {', '.join(islice(declared, LISTED)) or 'none'}{', ...' * (len(declared) > LISTED)}"


class TBCeleryError(Exception):
    """Base of everything this library raises on purpose.

    Every error keeps its constructor arguments in ``args``, so it survives pickling between worker processes.
    """


class ConfigurationError(TBCeleryError, ValueError):
    """The code or the settings must change: unknown bucket, cost above capacity, a rate that is not a number."""


class StoreError(TBCeleryError):
    """The host must change: the place where the state lives cannot be read, written or trusted."""


class StoreTimeoutError(StoreError):
    """The store stayed busy for longer than the lock timeout; this says nothing about the quota."""


class RateLimitExceeded(TBCeleryError):
    """A caller that asked for an exception was over quota; also what ``AsyncResult.info`` shows of a waiting task.

    Args:
        bucket: name of the bucket that binds.
        wait: seconds until it is worth asking again.
        turn: that instant in seconds since 1970, where a turn was booked.
        paused: whether the bucket is paused, rather than over quota.
    """

    pauses: tuple[tuple[str, bool, float], ...] = ()
    """Those that this task has just caused, for its node to tell of: bucket, whether of one key, until (since 1970)."""

    def __init__(
        self,
        bucket: str,
        wait: float,
        turn: float | None = None,
        paused: bool = False,  # noqa: FBT001, FBT002 - it is made anew from its args
    ) -> None:
        super().__init__(bucket, wait, turn, paused)
        self.bucket = bucket
        self.wait = wait
        self.turn = turn
        self.paused = paused

    def __str__(self) -> str:
        why = "paused" if self.paused else "over quota"
        return f"bucket {self.bucket!r} is {why}; ask again in {self.wait:.3f} s"


class RateLimited(TBCeleryError):
    """For a task's body to raise when the other side turned it down for coming too soon.

    The bucket is paused for everybody, and the task goes back to a turn of its own without spending a retry.

    Args:
        message: what the other side said, for the log.
        retry_after: seconds until which nobody should call, or that instant; also as a ``Retry-After`` header has it,
            text or bytes. ``None``: it did not say.
        bucket: name of the bucket that it is about, where the task draws from several.
    """

    def __init__(
        self,
        message: str = "",
        retry_after: float | Decimal | timedelta | datetime | str | bytes | None = None,
        bucket: str | None = None,
    ) -> None:
        super().__init__(message, retry_after, bucket)
        self.message = message
        self.retry_after = retry_after
        self.bucket = bucket

    def __str__(self) -> str:
        return self.message or "the other side says that calls come too soon"
