"""A crew of writers, as a test has it: it starts them, waits for them, and judges what they were granted."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from faults import writer as program
from servers import PATIENCE, ROOT, until

from tb_celery.clock import SystemClock
from tb_celery.grantlog import Entry
from tb_celery.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tb_celery import Bucket


class Verdict(NamedTuple):
    """What the grants that were written down say."""

    grants: int
    over: Fraction
    """Tokens above what the fullest window may have: of the first one that has too many, of any bucket."""


def judged(entries: Iterable[Entry], buckets: Mapping[str, Bucket] = program.BUCKETS) -> Verdict:
    """The verdict of tb_celery.verify over all the buckets that were drawn from."""
    known = list(entries)
    used = {entry.bucket for entry in known if entry.cost is not None}
    verdicts = verify(known, {name: buckets[name] for name in used})
    over = [each.violation.granted - each.violation.allowed for each in verdicts if each.violation]
    return Verdict(sum(each.grants for each in verdicts), max(over, default=Fraction(0)))


@dataclass
class Writer:
    """One process of a crew."""

    pid: int
    log: Path
    entries: list[Entry] = field(default_factory=list)
    """Its grants, as of the last look."""
    errors: list[str] = field(default_factory=list)
    _read: int = 0

    def size(self) -> int:
        """Of its log, in bytes."""
        return self.log.stat().st_size if self.log.exists() else 0

    def look(self) -> Writer:
        if self.log.exists():
            with self.log.open("rb") as log:
                log.seek(self._read)
                # A line that is being written has no end yet.
                lines, end, _ = log.read().rpartition(b"\n")
            self._read += len(lines) + len(end)
            for line in map(json.loads, lines.splitlines()):
                if isinstance(line, str):
                    self.errors.append(line)
                else:
                    self.entries.append(Entry(*line))
        return self

    @property
    def state(self) -> str:
        """As in proc(5): R, S, D, T for stopped; or nothing when it is gone."""
        with suppress(FileNotFoundError, ProcessLookupError):
            return Path(f"/proc/{self.pid}/stat").read_text("utf-8").rpartition(") ")[2][0]
        return ""

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """And wait until it is gone, for no longer than that takes."""
        end = os.pidfd_open(self.pid)
        self.send(signal.SIGKILL)
        gone, _, _ = select.select([end], [], [], PATIENCE)
        os.close(end)
        assert gone, f"process {self.pid} is still there"

    def granted(self, number: int) -> None:
        """Wait until it has been granted tokens so often since the last look."""
        before = len(self.entries)
        until(
            lambda: len(self.look().entries) >= before + number, f"process {self.pid} is granted tokens {number} times"
        )

    def told(self, text: str) -> None:
        """Wait until it has an error with this text in it, since the last look."""
        before = len(self.look().errors)
        until(lambda: any(text in each for each in self.look().errors[before:]), f"process {self.pid} is told: {text}")


class Crew:
    """Writers that are started alike.

    Args:
        folder: for their logs.
        state: the state file.
        prefix: the command that starts their program.
        environment: variables of theirs.
    """

    def __init__(self, folder: Path, state: Path, prefix: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        folder.mkdir()
        self.folder = folder
        self.state = state
        self.writers: list[Writer] = []
        with (folder / "stderr").open("wb") as stderr:
            self._starter = subprocess.Popen(
                [*prefix, sys.executable, program.__file__, state, folder],
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                text=True,
                bufsize=1,
            )

    def add(self, number: int = 1, **options: object) -> list[Writer]:
        """So many writers more, with the options of :func:`faults.writer.write`."""
        assert self._starter.stdin
        assert self._starter.stdout
        added = []
        for _ in range(number):
            print(json.dumps(options), file=self._starter.stdin, flush=True)
            words = self._starter.stdout.readline().split()
            assert words, self.stderr()
            added.append(Writer(int(words[0]), self.folder / words[1]))
        self.writers += added
        return added

    def stop(self) -> None:
        """By force, all of it."""
        with suppress(ProcessLookupError):
            os.killpg(self._starter.pid, signal.SIGKILL)
        self._starter.communicate()
        for each in self.writers:
            until(lambda each=each: each.state in {"", "Z"}, "the writers are gone")  # type: ignore[misc]

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text("utf-8", "replace")

    def entries(self) -> list[Entry]:
        return [entry for each in self.writers for entry in each.look().entries]

    def errors(self) -> list[str]:
        return [error for each in self.writers for error in each.look().errors]


def all_granted(writers: Sequence[Writer], number: int = 10) -> int:
    """Wait until every one of these has been granted tokens so often from now on; how many they are."""
    before = [len(each.look().entries) for each in writers]

    def lacking() -> list[int]:
        return [each.pid for each, had in zip(writers, before, strict=True) if len(each.look().entries) < had + number]

    until(lambda: not lacking(), f"all of {len(writers)} writers are granted tokens {number} times")
    return len(writers)


CLOCK = SystemClock()
"""That of the writers, where they have no other one."""


def one_more(bucket: Bucket = program.API) -> Entry:
    """An entry by which a capacity more may be granted from now on."""
    now = CLOCK.now()
    return Entry(bucket.name, None, CLOCK.identity, now, None, now)
