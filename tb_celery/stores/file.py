"""State in one local file behind an OS file lock, shared by every process of the host.

A decision is lock, read, step, write, unlock on a descriptor that is opened once per process. Records sit at fixed
places and are written with one ``pwrite``, so a process killed at any instruction leaves the old record or the new one.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from filelock import lock_descriptor, unlock_descriptor

from tb_celery.arithmetic import Decision
from tb_celery.bucket import SECOND
from tb_celery.clock import Clock, SystemClock
from tb_celery.errors import StoreError, StoreTimeoutError
from tb_celery.stores.asks import Asks
from tb_celery.stores.backoff import backoff, rest
from tb_celery.stores.finding import surveyed
from tb_celery.stores.forks import tell_after_fork
from tb_celery.stores.hosting import failure, open_state, read_at, write_at
from tb_celery.stores.meter import NOBODY, Meter, Tally
from tb_celery.stores.orders import overtaken
from tb_celery.stores.record import SIZE, WORD, pack_record
from tb_celery.stores.upkeep import create, no_room

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from tb_celery.arithmetic import Place
    from tb_celery.bucket import Bucket, Charge, Limit
    from tb_celery.state import State
    from tb_celery.stores.backoff import Waiting
    from tb_celery.stores.finding import Piece
    from tb_celery.stores.orders import Orders, Step

logger = logging.getLogger("tb_celery")

RECHECK = 10_000_000
"""Nanoseconds after which a process looks whether its path still names the file that it holds open."""
PAUSE = 0.0005
"""Seconds for which others have the lock, after each piece of the file."""
T = TypeVar("T")
_new = object.__new__


class FileStore:
    """State shared by everyone on this host who opens the same path.

    The file and its directory are made on first use. Safe for threads, for processes forked before or after first use,
    and for greenlets: nobody sleeps while holding the lock. Its ``meter`` is told what it answers, but for the short
    way, of which there are ``tallies`` by bucket.

    Args:
        path: the state file, on a local file system.
        clock: where "now" comes from; the same kind in every process that shares the file.
        lock_timeout: seconds to wait for the lock while others hold it.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Clock | None = None, lock_timeout: float = 10.0) -> None:
        self.path = Path(path).absolute()
        self.clock: Clock = clock or SystemClock()
        self._now = self.clock.now
        self.lock_timeout = lock_timeout
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self.meter: Meter = NOBODY
        self._waits: dict[float, float] = {}
        self._table: Asks | None = None
        self._file = (0, 0)
        self._known: tuple[object, ...] | None = None
        self._seen = self._look_again = 0
        # One thread at a time: whoever takes the baton out. Taking it and putting it back are single instructions that
        # no signal handler comes between, as with a lock in a ``with``, which would be a tenth of a decision's cost.
        self._baton: dict[int, None] = {0: None}
        self._wanted: float | None = None  # when leaving tell the meter, and let in a thread that pauses for so long
        tell_after_fork(self)

    def __del__(self) -> None:
        # Not every store is made once and kept: nobody else lets go of the descriptor.
        if hasattr(self, "_table"):
            self._forget()

    def __repr__(self) -> str:
        return f"FileStore({str(self.path)!r})"

    def acquire(  # noqa: C901, PLR0912, PLR0915 - every call that would make it shorter makes it slower
        self, charges: Sequence[Charge], place: Place | None = None
    ) -> Decision:
        baton = self._baton
        try:
            del baton[0]
            waiting = None
        except KeyError:
            waiting = self._wait_for_baton(baton, charges)
        try:
            table = self._table or self._open()
            fd = table.fd
            repeated = table.repeated.get(id(charges))
            if not lock_descriptor(fd, blocking=False):
                self._wait_for_lock(fd, waiting, charges)
            now = self._now()
            if now >= self._look_again:
                table, now = self._rechecked(table, waiting)
                fd = table.fd
                repeated = table.repeated.get(id(charges))
            # The short way, written out in one piece because every call costs: an ask that was made before, of one
            # limit, whose record is what this process saw last or is sound and written with the same numbers on the
            # same clock. What follows is acquire() for tokens that are there and a line that is empty, or that the
            # asker is no part of.
            if repeated is None:
                return self._decide(table, charges, now, place)
            slot, charge, cost, span, tally, tokens, _ = repeated
            raw = read_at(fd, SIZE, slot.offset)
            if raw != slot.seen and not slot.recognizes(raw):
                del table.repeated[id(charges)]
                return self._decide(table, charges, now, place)
            full_at = slot.full_at
            booked_at = slot.booked_at
            filled = (full_at if full_at > now else now) + cost  # noqa: FURB136 - a call costs more
            at = filled - span
            if at > now or (place is not None and (place.ahead or full_at < booked_at > now)):
                if place is None and full_at - span <= now:
                    tally.refused += 1
                    return Decision(now, at, charge, full_at)
                return self._decide(table, charges, now, place)
            if booked_at < filled:  # noqa: PLR1730 - a call costs more
                booked_at = filled
            epoch = table.epoch
            check = (slot.missing - epoch - filled - booked_at) & WORD
            raw = pack_record(slot.mark, epoch, filled, booked_at, check)
            if write_at(fd, raw, slot.offset) != SIZE:
                raise no_room(self.path)
            slot.full_at = filled
            slot.booked_at = booked_at
            slot.seen = raw
            tally.granted += 1
            tally.tokens += tokens
        except OSError as error:
            if error.errno is None:
                raise  # not the system's: a TimeoutError that a signal handler raised, say
            raise self._failure(error, charges) from error
        except StoreError as error:
            self.meter.failed(charges, error)
            raise
        finally:
            try:
                if self._table is not None:
                    unlock_descriptor(self._table.fd)
            except BaseException as error:
                # Closed behind our back, or a signal handler raised on the way, and nobody else would let go of it.
                self._unlock()
                if not isinstance(error, OSError) or error.errno is None:
                    raise
            finally:
                baton[0] = None
                if self._wanted is not None:
                    self._leave()
        decision = _new(Decision)
        decision.now = decision.at = now
        decision.booked = False
        decision._overlooked = 0  # noqa: SLF001 - as below
        decision._charge = charge  # noqa: SLF001 - its constructor takes longer than the rest
        decision._full_at = filled  # noqa: SLF001
        return decision

    def read(self, charges: Sequence[Charge]) -> tuple[int, Sequence[Charge], list[State]]:
        return self._locked(lambda table, now: (now, *table.read(charges, now)))

    def settle(self, charges: Sequence[Charge]) -> int:
        return self._locked(lambda table, now: table.settle(charges, now))

    def order(self, charge: Charge, span: int, declared: Limit | None = None) -> None:
        now, step = self._locked(lambda table, now: (now, table.order(charge, span, now, declared)))
        while (left := now + RECHECK - self._now()) > 0:  # by then everybody looks; gevent's sleep ends early
            self.clock.sleep(left / SECOND)
        while step:
            self._carry(charge, step)
            charge, step = self._overtaken(charge, declared)

    def orders(self, bucket: Bucket, key: str | None = None) -> tuple[int, Orders]:
        return self._locked(lambda table, now: (now, table.orders(bucket.name, key, now).at(now)))

    def survey(self, buckets: Collection[Bucket]) -> tuple[int, dict[str, list[State]]]:
        return surveyed(buckets, self._pieces(lambda *read: read))

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        def free(table: Asks, piece: Piece, _: int) -> int:
            return table.free_all(piece.records([bucket.name])[bucket.name])

        forgotten = sum(self._pieces(free)) if key is None else 0
        return forgotten + self._locked(lambda table, now: table.reset(bucket.draw(key), now))

    # -- under the lock

    def _decide(self, table: Asks, charges: Sequence[Charge], now: int, place: Place | None) -> Decision:
        """The long way, and the end of orders that were found on it."""
        decision = table.acquire(charges, now, place)
        self._look_again = min(self._look_again, table.until)
        self.meter.answered(charges, place, decision)
        return decision

    def _carry(self, charge: Charge, step: Step) -> None:
        """Have the records that there are of a bucket, or of one key, stand where an order about it says."""
        bucket, key = charge[:2]
        if key is not None:
            self._locked(lambda table, now: table.carry(table.records_of(bucket, key, now), step, now))
            return
        # Smaller ones: a change takes so much longer.
        for _ in self._pieces(lambda table, piece, now: table.carry(piece.records([bucket])[bucket], step, now), 8):
            pass

    def _overtaken(self, charge: Charge, declared: Limit | None) -> tuple[Charge, Step | None]:
        return self._locked(lambda table, now: overtaken(charge, table.finder(now), declared, now))

    def _pieces(self, act: Callable[[Asks, Piece, int], T], parts: int = 1) -> Iterator[T]:
        """What ``act`` makes of each piece of the file, locked; in between others have it, and whoever iterates."""
        start = 0

        def do(table: Asks, now: int) -> tuple[T, int]:
            piece = table.piece(start, now, parts)
            return act(table, piece, now), piece.after

        while True:
            made, start = self._locked(do)
            yield made
            if not start:
                return
            time.sleep(PAUSE)

    def _locked(self, act: Callable[[Asks, int], T]) -> T:
        """What ``act`` makes of the table at an instant, with nobody else inside.

        Not for a ``with``: a signal handler that raises as that begins or ends would leave the lock to the traceback.
        """
        baton = self._baton
        try:
            del baton[0]
            waiting = None
        except KeyError:
            waiting = self._wait_for_baton(baton)
        try:
            return act(*self._rechecked(self._lock(waiting), waiting))
        except OSError as error:
            if error.errno is None:
                raise  # not the system's: a TimeoutError that a signal handler raised, say
            raise self._failure(error) from error
        finally:
            try:
                self._unlock()
            except BaseException:
                # A signal handler raised on the way to the unlock, and nobody else would let go of the lock.
                self._unlock()
                raise
            finally:
                baton[0] = None
                if self._wanted is not None:
                    self._leave()

    def _lock(self, waiting: Waiting | None) -> Asks:
        """The table that this process has open, locked."""
        table = self._table or self._open()
        if not lock_descriptor(table.fd, blocking=False):
            self._wait_for_lock(table.fd, waiting)
        return table

    def _rechecked(self, table: Asks, waiting: Waiting | None) -> tuple[Asks, int]:
        """``table``, or the one of the file that the path names by now, locked; and the instant of the look."""
        while True:
            now = self._now()
            if self._is_current(table.fd):
                table.look_at_clocks(now)
                self._known = table.recognize(now, self._known, self._seen)
                table.recheck(now)
                self._seen = now
                self._look_again = min(now + RECHECK, table.until)
                self._wanted = self._wanted or 0.0
                return table, now
            # First: a descriptor that cannot be closed, because nobody can tell whose it is, must not keep the lock.
            self._unlock()
            self._forget()
            table = self._lock(waiting)

    def _wait_for_lock(self, fd: int, waiting: Waiting | None, charges: Sequence[Charge] = ()) -> None:
        """Those who ask for ``charges`` are told of to the meter; who looks, settles or orders is not."""
        started, pauses = waiting or (time.monotonic(), backoff(self.path, self.lock_timeout))
        try:
            for pause in pauses:
                rest(pause)
                if lock_descriptor(fd, blocking=False):
                    return
        finally:
            if charges:
                self._waits[started] = time.monotonic() - started  # one wait, with that for the baton
                self._wanted = self._wanted or 0.0

    def _wait_for_baton(self, baton: dict[int, None], charges: Sequence[Charge] = ()) -> Waiting:
        """Take it when the thread that is inside has put it back; since when, and the pauses left for the lock."""
        started, pauses, asks = time.monotonic(), backoff(self.path, self.lock_timeout), bool(charges)
        while True:
            waited = time.monotonic() - started
            try:
                del baton[0]
                if asks:
                    self._waits[started] = waited  # no call, as for the baton
                return started, pauses  # noqa: TRY300
            except KeyError:
                pass
            try:
                pause = next(pauses)
            except StoreTimeoutError as error:
                if asks:
                    self._waits[started] = waited
                    self.meter.failed(charges, error)
                raise
            self._wanted = max(self._wanted or 0.0, pause)
            rest(pause)

    def _leave(self) -> None:
        """Tell the meter, and sleep for longer than another thread does, which else would find the baton taken."""
        pause, self._wanted = self._wanted, None
        waits, self._waits = self._waits, {}
        for waited in waits.values():
            self.meter.waited(waited)
        self.meter.catch_up()
        if pause:
            time.sleep(2 * pause)

    # -- the descriptor

    def _open(self) -> Asks:
        try:
            fd = open_state(self.path)
        except FileNotFoundError:
            if self._known:
                logger.warning("state file %s was removed while in use: its buckets start empty", self.path)
            create(self.path, self.clock, lost=self._known is not None)
            fd = open_state(self.path)
        self._table = Asks(fd, self.path, self.clock, self.tallies)
        self._file = self._table.file
        self._look_again = 0
        return self._table

    def _is_current(self, fd: int) -> bool:
        """Whether the path still names the file open at ``fd``, and ``fd`` is still what we opened."""
        try:
            named, held = self.path.lstat(), os.fstat(fd)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino) == self._file

    def _forget(self) -> None:
        """Let go of the descriptor, unless the process has since given its number to another file."""
        table, self._table = self._table, None
        if table is not None:
            with suppress(OSError):
                held = os.fstat(table.fd)
                if (held.st_dev, held.st_ino) == self._file:
                    os.close(table.fd)

    def _after_fork(self) -> None:
        # Never unlock here: the copied descriptor shares its lock with the parent's, which may be inside.
        self._forget()
        self.tallies.clear()
        self._baton, self._waits, self._wanted = {0: None}, {}, None

    def _unlock(self) -> None:
        """Also after a failure, and explicitly: a descriptor copied by a fork would keep the lock through a close."""
        if self._table is not None:
            try:
                unlock_descriptor(self._table.fd)
            except OSError:
                # Somebody closed every descriptor of the process, as programs do that become daemons.
                self._forget()

    def _failure(self, error: OSError, charges: Sequence[Charge] = ()) -> StoreError:
        self._look_again = 0
        told = failure(self.path, error)
        if charges:
            self.meter.failed(charges, told)
        return told
