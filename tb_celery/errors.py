"""What can be wrong, and who has to act on it.

Being over quota is an answer, not an error: it becomes :class:`RateLimitExceeded` only where a caller asked for an
exception.
"""

from __future__ import annotations

import re
import reprlib

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


def shown(value: object) -> str:
    """``value`` in a sentence: on one short line, whatever it is, and without what may be a password in an address."""
    try:
        return re.sub(r"(?<=://)[^/@'\"]*@|(?<=://)[^/@'\"]*:[^/@'\"]*(?=\.\.\.)", "***@", _short.repr(value))
    except ValueError:  # an integer that Python refuses to print
        return f"a huge {type(value).__name__}"


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
    """

    def __init__(self, bucket: str, wait: float, turn: float | None = None) -> None:
        super().__init__(bucket, wait, turn)
        self.bucket = bucket
        self.wait = wait
        self.turn = turn

    def __str__(self) -> str:
        return f"bucket {self.bucket!r} is over quota; ask again in {self.wait:.3f} s"
