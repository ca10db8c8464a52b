"""Where "now" comes from.

A clock answers in whole nanoseconds, never steps, and has an identity: two readings can be compared only if they were
taken on clocks of the same identity. The file store writes the identity next to every instant: so it notices a reboot.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock(Protocol):
    """What the stores and the limiter need of time."""

    @property
    def identity(self) -> int:
        """32 bits that name this clock; equal identities share one origin."""

    def now(self) -> int:
        """Nanoseconds since the clock's own origin; never goes back."""

    def wall(self) -> int:
        """Nanoseconds since 1970, only used to carry state from one clock to another."""

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""

    async def sleep_async(self, seconds: float) -> None:
        """Let ``seconds`` pass without holding the event loop."""


class SystemClock:
    """The host's boot-time clock: one for all its processes, not moved by NTP steps, running on through suspend.

    Where the kernel has no ``CLOCK_BOOTTIME`` it is the monotonic clock.
    """

    def __init__(self) -> None:
        # Bound C functions rather than methods: a decision takes few microseconds, and a Python frame is a part of one.
        self.now: Callable[[], int]
        self.wall: Callable[[], int] = time.time_ns
        if sys.platform != "win32" and hasattr(time, "CLOCK_BOOTTIME"):
            self.now, source = functools.partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME), "boottime"
        else:
            self.now, source = time.monotonic_ns, "monotonic"
        boot = namespace = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        with suppress(OSError):
            # Two time namespaces of one boot have different origins.
            namespace = str(Path("/proc/self/ns/time").stat().st_ino)
        self.identity = zlib.crc32(f"{boot}|{namespace}|{source}".encode())

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def sleep_async(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class FakeClock:
    """A clock that moves only when told to: for tests, ours and those of users.

    Args:
        now: first reading, in nanoseconds.
        wall: first wall-clock reading, in nanoseconds since 1970.
        identity: which clock it claims to be; change it to play a reboot.
    """

    def __init__(self, now: int = 0, wall: int = 1_800_000_000_000_000_000, identity: int = 1) -> None:
        self.identity = identity
        self._now = now
        self._wall = wall

    def now(self) -> int:
        return self._now

    def wall(self) -> int:
        return self._wall

    def advance(self, nanoseconds: int) -> None:
        """Move both the clock and the wall clock; negative values play a clock that was set back."""
        self._now += nanoseconds
        self._wall += nanoseconds

    def step_wall(self, nanoseconds: int) -> None:
        """Move the wall clock alone, as an NTP step does."""
        self._wall += nanoseconds

    def sleep(self, seconds: float) -> None:
        self.advance(round(seconds * 1_000_000_000))

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)
        await asyncio.sleep(0)
