"""Tells what a process has open, in each process that is forked from it, that it is in another one now."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class _Forked(Protocol):
    def _after_fork(self) -> None: ...


_told: weakref.WeakSet[_Forked] = weakref.WeakSet()


def tell_after_fork(it: _Forked) -> None:
    """Have ``it`` told, for as long as it lives."""
    _told.add(it)


def _after_fork() -> None:
    for each in _told:
        each._after_fork()  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
