"""What was granted, for a proof afterwards: whoever takes tokens appends a line for each bucket to one bounded file.

A line is one append by the operating system, after the decision: a kill leaves whole lines, and leaves out at most the
line of a decision just made. Nothing is kept open, so threads, forks and greenlets have nothing to share. A full file
is moved aside, over the one before it: the last grants are kept, in at most two files of that size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from itertools import groupby
from math import ceil, floor
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import lock_descriptor, unlock_descriptor

from tb_celery.errors import ConfigurationError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tb_celery.arithmetic import Decision, Place, State
    from tb_celery.bucket import Bucket, Charge
    from tb_celery.clock import Clock
    from tb_celery.stores import Store

logger = logging.getLogger("tb_celery")

LARGEST = 64 << 20
"""Bytes from which on a log is moved aside: some 600 000 grants."""
SALT = 16
DIGITS = 20
"""Decimals of a cost: more than a limit can tell apart."""
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class Entry(NamedTuple):
    """A line of a log.

    Attributes:
        bucket: its name.
        key: salted hash of the key; ``None`` for the common quota.
        clock: identity of the clock that the instant is on.
        at: the instant, in nanoseconds.
        cost: tokens taken; ``None`` where the bucket was made full again, with all its keys if ``key`` is ``None``.
        since: in that case, an instant before, in nanoseconds: it happened some time between the two.
    """

    bucket: str
    key: str | None
    clock: int
    at: int
    cost: Fraction | int | None
    since: int | None = None


class LoggedStore:
    """A store whose grants are logged.

    Args:
        store: where the state lives.
        path: of the log.

    Raises:
        ConfigurationError: there is no directory for the log.
    """

    def __init__(self, store: Store, path: Path) -> None:
        if not path.parent.is_dir():
            message = f"setting grant_log: there is no directory {path.parent}; make it, or name another file"
            raise ConfigurationError(message)
        self.clock: Clock = store.clock
        self._store = store
        self._path = path
        self._salt = b""
        self._failing = False

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        decision = self._store.acquire(charges, place)
        if decision:
            of_bucket = (list(same) for _, same in groupby(charges, key=lambda charge: charge[:2]))
            self._log(decision.now, [(same[0].bucket, same[0].key, f'"cost": {_cost(same)}') for same in of_bucket])
        return decision

    def read(self, charges: Sequence[Charge]) -> tuple[int, list[State]]:
        return self._store.read(charges)

    def survey(self, bucket: Bucket) -> tuple[int, list[State]]:
        return self._store.survey(bucket)

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        before, _ = self._store.read(())
        number = self._store.reset(bucket, key)
        after, _ = self._store.read(())
        self._log(after, [(bucket.name, key, f'"cost": null, "since": {before}')])
        return number

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - what one kind of store has besides
        return getattr(self._store, name)

    def __repr__(self) -> str:
        return repr(self._store)

    def _log(self, at: int, drawn: list[tuple[str, str | None, str]]) -> None:
        try:
            lines = [
                f'{{"bucket": {json.dumps(bucket)}, "key": {json.dumps(self._hash(key))}, '
                f'"clock": {self.clock.identity}, "at": {at}, {cost}}}\n'
                for bucket, key, cost in drawn
            ]
            _append(self._path, "".join(lines).encode())
        except OSError as error:
            # The tokens are taken: whoever asked must hear of that, and not of this.
            if not self._failing:
                logger.warning("grants are not logged: %s: %s; mend it, or the setting grant_log", self._path, error)
            self._failing = True
        else:
            self._failing = False

    def _hash(self, key: str | None) -> str | None:
        if key is None:
            return None
        if not self._salt:
            self._salt = _salt(self._path)
        return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), key=self._salt, digest_size=8).hexdigest()


def _cost(charges: Sequence[Charge]) -> Decimal:
    """The shortest number of tokens that costs what one bucket's ``charges`` are."""
    if not any(charge.cost % charge.limit.interval for charge in charges):
        return Decimal(charges[0].cost // charges[0].limit.interval)
    least = min(Fraction(charge.cost, charge.limit.interval) for charge in charges)
    for digits in range(DIGITS):
        parts = floor(least * 10**digits)
        tokens = Fraction(parts, 10**digits)
        if all(ceil(tokens * charge.limit.interval) == charge.cost for charge in charges):
            break
    return Decimal(parts).scaleb(-digits)


def _append(path: Path, lines: bytes) -> None:
    fd = os.open(path, _APPEND, 0o660)
    try:
        size = os.fstat(fd).st_size
        if not size and hasattr(os, "fchmod"):
            # As for the state file: members of the directory's group share it, whatever their umask.
            with suppress(PermissionError):
                os.fchmod(fd, 0o660)
        if os.write(fd, lines) < len(lines):
            message = "the disk is full: a line is incomplete"
            raise OSError(message)
    finally:
        os.close(fd)
    if size + len(lines) >= LARGEST:
        _move_aside(path)


def _move_aside(path: Path) -> None:
    """Unless somebody else does so, or has done."""
    fd = _open_salt(path)
    try:
        if lock_descriptor(fd, blocking=False):
            try:
                # Windows moves no file that others are writing to: then the next one tries.
                with suppress(FileNotFoundError, PermissionError):
                    if path.stat().st_size >= LARGEST:
                        path.replace(_older(path))
            finally:
                unlock_descriptor(fd)
    finally:
        os.close(fd)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _open_salt(path: Path) -> int:
    return os.open(path.with_name(f"{path.name}.salt"), _APPEND & ~os.O_WRONLY | os.O_RDWR, 0o660)


def _salt(path: Path) -> bytes:
    """The salt of a log's hashes: the first that anybody has appended to the file beside it."""
    fd = _open_salt(path)
    try:
        if not os.fstat(fd).st_size:
            if hasattr(os, "fchmod"):
                os.fchmod(fd, 0o660)
            os.write(fd, secrets.token_bytes(SALT))
        os.lseek(fd, 0, os.SEEK_SET)
        return os.read(fd, SALT)
    finally:
        os.close(fd)


# -- reading


def read_log(path: Path) -> Iterator[Entry]:
    """What is left of a log, its older part first; a last line that is not complete is left out.

    Raises:
        StoreError: it cannot be read, or a line in it is no line of a log.
    """
    try:
        for part in (_older(path), path):
            if part != path and not part.exists():
                continue
            with part.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        yield _parse(line, part, number)
    except OSError as error:
        message = f"grant log {str(path)!r} cannot be read: {error.strerror}"
        raise StoreError(message) from error


def _parse(line: bytes, path: Path, number: int) -> Entry:
    with suppress(ValueError, TypeError, AttributeError):
        # No decimal is rounded.
        entry = Entry(**json.loads(line, parse_float=Fraction))
        kinds = (str, str | None, int, int, int | Fraction | None, int | None)
        good = all(isinstance(field, kind) for field, kind in zip(entry, kinds, strict=True))
        if good and (entry.since is not None if entry.cost is None else entry.cost > 0 and entry.since is None):
            return entry
    message = f"grant log {str(path)!r}: line {number} is no line of a log; what it proves ends before it"
    raise StoreError(message)
