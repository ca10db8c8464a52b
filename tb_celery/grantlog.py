"""What was granted, for a proof afterwards: whoever takes tokens appends a line for each bucket to one bounded file.

So does whoever gives tokens back or draws more for a call, and whoever makes a bucket full again, pauses it, or gives
it other numbers, for that decides what may be granted.

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
from typing import TYPE_CHECKING, NamedTuple

from filelock import lock_descriptor, unlock_descriptor

from tb_celery.errors import ConfigurationError, StoreError
from tb_celery.stores.orders import changed
from tb_celery.stores.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tb_celery.arithmetic import Decision, Place
    from tb_celery.bucket import Bucket, Charge, Limit
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
        cost: tokens taken, below 0 if given back; ``None`` where the bucket was made full again, or something was
            ordered about it, with all its keys if ``key`` is ``None``.
        since: in that case, an instant before, in nanoseconds: it happened some time between the two.
        stands: nanoseconds that an order stands for; 0 ends it.
        limit: the number, from the slowest refill, of the limit that got other numbers, or from which a call drew more
            or less after all; ``None`` for all of them, and of a pause.
        interval: nanoseconds that one token of it takes to refill.
        span: nanoseconds that it takes to fill.
    """

    bucket: str
    key: str | None
    clock: int
    at: int
    cost: Fraction | int | None
    since: int | None = None
    stands: int | None = None
    limit: int | None = None
    interval: int | None = None
    span: int | None = None

    @property
    def is_grant(self) -> bool:
        """Whether a call was granted its tokens, all at once."""
        return self.cost is not None and self.cost > 0 and self.limit is None

    @property
    def is_sound(self) -> bool:
        """Whether somebody may have logged it."""
        order = (self.stands, self.limit, self.interval, self.span)
        if self.cost is not None:
            is_cost = self.cost > 0 if self.limit is None else self.cost != 0 and self.limit >= 0
            return is_cost and {self.since, self.stands, self.interval, self.span} == {None}
        numbers = [number for number in order[1:] if number is not None]
        is_order = self.stands is not None and self.stands >= 0 and len(numbers) in {0, 3}
        return self.since is not None and (is_order or set(order) == {None}) and all(each > 0 for each in numbers[1:])


class LoggedStore(StoreWrapper):
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
        super().__init__(store)
        self._path = path
        self._salt = b""
        self._failing = False

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        decision = self.wrapped.acquire(charges, place)
        if decision:
            of_bucket = (list(same) for _, same in groupby(charges, key=lambda charge: charge[:2]))
            self._log(decision.now, [(same[0].bucket, same[0].key, f'"cost": {_cost(same)}') for same in of_bucket])
        return decision

    def settle(self, charges: Sequence[Charge]) -> int:
        now = self.wrapped.settle(charges)
        told = [(each, f'"cost": {_cost([each])}, "limit": {each.number}') for each in charges if each.cost]
        self._log(now, [(charge.bucket, charge.key, cost) for charge, cost in told])
        return now

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        before, *_ = self.wrapped.read(())
        number = self.wrapped.reset(bucket, key)
        after, *_ = self.wrapped.read(())
        self._log(after, [(bucket.name, key, f'"cost": null, "since": {before}')])
        return number

    def order(self, charge: Charge, span: int, declared: Limit | None = None) -> None:
        before, *_ = self.wrapped.read(())
        self.wrapped.order(charge, span, declared)
        after, *_ = self.wrapped.read(())
        told = f'"cost": null, "since": {before}, "stands": {span}'
        if not charge.is_pause:
            interval, filling = charge.limit.numbers
            told += f', "limit": {changed(charge)}, "interval": {interval}, "span": {filling}'
        self._log(after, [(charge.bucket, charge.key, told)])

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
    """The shortest number of tokens that costs what one bucket's ``charges`` are; more is never given back."""
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
        older = _older(path)
        parts = [older] * older.exists() + [path]
        for part in parts:
            if len(parts) > 1 and not part.exists():
                continue  # it has only just been moved aside
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
        kinds = (str, str | None, int, int, int | Fraction | None, *[int | None] * 5)
        if all(isinstance(field, kind) for field, kind in zip(entry, kinds, strict=True)) and entry.is_sound:
            return entry
    message = f"grant log {str(path)!r}: line {number} is no line of a log; what it proves ends before it"
    raise StoreError(message)
