"""Records found by hash in one open state file.

Every method runs under the file's lock, which is the caller's business. The file grows by appending levels, each with
twice as many blocks as the one before; nothing is moved, renamed or unlinked. Records of full buckets go to others.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from tb_celery.arithmetic import settle
from tb_celery.bucket import FOREVER, LONGEST_PAUSE, LONGEST_SPAN, PAUSED, SECOND
from tb_celery.state import State, fit, strictest
from tb_celery.stores import record
from tb_celery.stores.claims import Others, claims_of, is_news, look_again
from tb_celery.stores.hosting import read_at
from tb_celery.stores.orders import NONE, Orders, change, collect, consequence, heeded, last_pause, outlived
from tb_celery.stores.places import Look, Places
from tb_celery.stores.record import FREE, IN_DEBT, KEPT, OWN, SIZE, Header, Slot, is_order, is_sound

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from tb_celery.bucket import Charge, Limit, Name
    from tb_celery.clock import Clock
    from tb_celery.stores.claims import Claim, Claims
    from tb_celery.stores.orders import Step

logger = logging.getLogger("tb_celery")

REMEMBERED = 1 << 16
"""Limits whose slot a process remembers."""
REPEATED = 1 << 14
"""Asks that a process keeps worked out."""
LONGEST_KEY = 256
"""Characters of a key that is worth remembering."""


class Found(NamedTuple):
    """What there is of a limit.

    Attributes:
        slot: where its record is; ``None`` where it has none.
        state: where it stands.
        is_stale: whether the record has it otherwise: a new rate, or a clock set back, counts from the first look.
        written: where it stands by its record, if that was written with other numbers.
        look: what tells where there is room for a record; where it has none.
    """

    slot: Slot | None
    state: State
    is_stale: bool
    written: State | None = None
    look: Look | None = None


class Table(Places):
    """The records in an open state file; see :class:`~tb_celery.stores.upkeep.StateFile` for what it takes."""

    def __init__(self, fd: int, path: Path, clock: Clock) -> None:
        super().__init__(fd, path, clock)
        self._slots: dict[Name, Slot] = {}
        self._others = Others(FOREVER)
        self._orders: dict[tuple[str, str | None], Orders] = {}
        self._claims: dict[tuple[str, int], Claims] = {}
        self._is_ordered = False
        self._noted_epoch = 0
        self.until = FOREVER
        """The instant from which on what stands may be another: an order or claim ends, or is to be claimed anew."""

    def recognize(self, now: int, known: tuple[object, ...] | None, until: int) -> tuple[object, ...]:
        """What the file is known by; if another was at its path ``until`` some instant, what that held is lost.

        What such a file holds is of no worth either: it may be an older copy. So everything starts empty, unless that
        was noted since: by whoever made the file and knew the other one, or noticed before.
        """
        if self._headed and known == (*self.file, self._headed.salt) and self._stands():
            return known
        if self._headed is None:
            self._others.opened_at = now
        header = self._header(now)
        lost_at = header.lost_at and header.lost_at + self._shift(header.epoch, header.clock)
        if known not in {None, (*self.file, header.salt)} and (not lost_at or lost_at < until):
            logger.warning("state file %s was replaced while in use: its buckets start empty", self.path)
            self._fill(SIZE, record.file_size(header.levels))
            header = self._mark_lost(header._replace(salt=secrets.token_bytes(16)), now)
        return (*self.file, header.salt)

    def recheck(self, now: int) -> bool:
        """Notice orders and claims that were made or have ended; called often enough for who gives one to wait for it.

        Returns:
            Whether there may be others than were known.
        """
        # Where the wall clock was stepped, an order from before a reboot ends at another instant than it did.
        is_stepped = abs(self.epoch - self._noted_epoch) > SECOND
        is_changed = is_stepped or now >= self.until or not self._stands()
        if is_changed:
            self._forget()
            header = self._header(now)
            self._is_ordered = header.orders > 0
            # Last: whom a signal handler's exception has interrupted before this has still to look.
            self._noted_epoch, self.until = self.epoch, FOREVER
            self._note(header)
        return is_changed

    def _forget(self) -> None:
        """What was worked out by orders and claims that may stand no longer."""
        self._orders.clear()
        self._claims.clear()

    def orders(self, bucket: str, key: str | None, now: int) -> Orders:
        """What stands about a bucket, or one key of it, at ``now``."""
        if not self._is_ordered:
            return NONE
        if (bucket, key) not in self._orders:
            find = self.finder(now)
            drop_oldest(self._orders, REPEATED)
            if key is None:
                found = collect(bucket, find, now)
            else:
                found = self.orders(bucket, None, now).with_pause(key, find((bucket, key, PAUSED)))
            self._orders[bucket, key] = found
            self.until = min([self.until, *(until for _, until in found.limits.values())])
        return self._orders[bucket, key]

    def claims(self, bucket: str, count: int, now: int) -> Claims:
        """What is claimed of a bucket by those who declare so many limits."""
        if not self._is_ordered:
            return {}
        if (bucket, count) not in self._claims:
            self._claims[bucket, count] = found = claims_of(bucket, count, self.finder(now), now)
            self.until = min([self.until, *look_again(found.values(), now)])
        return self._claims[bucket, count]

    def heed(self, charges: Sequence[Charge], now: int, *, asks: bool = True) -> Sequence[Charge]:
        """``charges`` by the orders and claims that stand."""
        if not self._is_ordered:
            return charges
        return heeded(charges, *self._standing(now), now, asks=asks)

    def find(self, asked: Sequence[Charge], now: int) -> tuple[Sequence[Charge], list[Found]]:
        """What is asked, by the numbers that count, and what there is of it; others hear of those declared here."""
        charges = self.heed(asked, now)
        found = self.load(charges, now)
        written = [each.written for each in found]
        is_changed = any(written)
        if is_changed and self.recheck(now):
            return self.find(asked, now)  # by what was ordered or claimed since, of which the record may tell
        if is_changed or any(self._claims.values()):
            met = self._others.meet(asked, charges, written, self.finder(now), now) if is_changed else ()
            due = list(self._others.due(asked, met, *self._standing(now), now))
            taken = {each.slot.offset for each in found if each.slot} if due else ()
            with suppress(OSError):  # no decision hangs on it
                for each in due:
                    self._claim(*each, now, taken)
            if due:
                charges = self.heed(asked, now)  # which notices when it has to be claimed anew
                found = [each._replace(look=None) for each in found]  # a claim may be where there was room
        return charges, found

    def _standing(self, now: int) -> tuple[Callable[[str, str | None], Orders], Callable[[str, int], Claims]]:
        return lambda bucket, key: self.orders(bucket, key, now), lambda bucket, count: self.claims(bucket, count, now)

    def _claim(self, name: Name, old: Claim | None, new: Claim, now: int, taken: Collection[int]) -> None:
        """Have a claim take the place of an older one."""
        look = self.look(name, now)
        offset, known_by, _ = (look.offset, look.name, look.raw) if look.raw else self.room(look, now, taken)
        if is_news(old, new):
            self._count_order(self._header(now))
        state = new.state()
        ordered = state._replace(interval=-state.interval)
        self._write(record.packed(known_by, self._clock, self.epoch, ordered, KEPT), offset)
        self._claims.clear()
        self.recheck(now)

    def last_pause(self, charges: Sequence[Charge], now: int) -> int:
        """The instant at which the last pause of those who are charged has ended, or will; 0 where none is known."""
        return last_pause(charges, lambda bucket, key: self.orders(bucket, key, now)) if self._is_ordered else 0

    def order(self, charge: Charge, span: int, now: int, declared: Limit | None = None) -> Step | None:
        """Have ``charge`` stand for a span, which is 0 where it ends: a pause if it is one, else its limit.

        A longer pause is left as it is. What is returned tells what becomes of the records, once everybody heeds it.
        """
        step = consequence(charge, span, self.finder(now), declared, now)
        until = now + span
        look = self.look(charge[:3], now)
        name, offset, raw = look.name, look.offset, look.raw
        if until > now and not raw:
            offset, name, _ = self.room(look, now, ())
        self._count_order(self._header(now))
        if offset and charge.is_pause and not span:
            self.free(offset)  # or it stood again if the clock were set back
        elif offset:  # other numbers that have ended are still known for a while
            if raw and charge.is_pause:
                until = max(until, min(self.written(raw).full_at, now + LONGEST_PAUSE))
            order = State(until, until, -charge.limit.interval, charge.limit.span)
            kept = 0 if charge.is_pause else KEPT
            self._write(record.packed(name, self._clock, self.epoch, order, kept), offset)
        self.recheck(now)
        return step

    def _count_order(self, header: Header) -> None:
        """Before it is written: one that is not counted would come to life with the next that is."""
        self._write(header._replace(orders=(header.orders + 1) & 0xFFFFFFFF or 1).pack(), 0)

    def about(self, charge: Charge, now: int) -> State | None:
        """The order about the limit of ``charge``, also one that has ended."""
        # Also the first one in the file, which others may heed some milliseconds before this process does.
        return self.finder(now)(change(charge.bucket, charge.number, charge.limit)[:3])

    def carry(self, records: Iterable[tuple[int, bytes]], step: Step, now: int) -> None:
        """Have limits stand where ``step`` says."""
        for offset, raw in records:
            state = self.written(raw)
            if not is_order(raw) and (new := step(record.number_of(raw[:OWN]), state, now)) != state:
                kept = KEPT if new.numbers != state.numbers else record.unpack(raw)[3] & KEPT
                self._write(record.packed(raw[: OWN + 4], self._clock, self.epoch, new, kept), offset)

    def load(self, charges: Sequence[Charge], now: int) -> list[Found]:
        """What there is of each charge's limit, or pause, at ``now``."""
        mended = self.mended
        found = [self._load(charge, now) for charge in charges]
        for quota in {charge[:2] for charge, each in zip(charges, found, strict=True) if each.written}:
            others = [self.written(raw) for _, raw in self.records_of(*quota, now)]
            for i, (charge, each) in enumerate(zip(charges, found, strict=True)):
                if charge[:2] == quota and not charge.is_pause:
                    state = strictest(each.state, charge.limit, others, now)
                    found[i] = each._replace(state=state, is_stale=each.is_stale or state != each.state)
        # What was found before the header was mended is gone, and nobody else would find it where it was.
        return found if mended == self.mended else self.load(charges, now)

    def _load(self, charge: Charge, now: int) -> Found:
        if charge.is_pause:
            until = self.orders(charge.bucket, charge.key, now).paused[charge.key]
            return Found(None, State(until, until, *charge.limit.numbers), is_stale=False)
        slot = self._slots.get(charge[:3])
        if slot is not None:
            raw = read_at(self.fd, SIZE, slot.offset)
            if raw.startswith(slot.name) and is_sound(raw):
                return self._found(charge, slot, raw, now)
        look = self.look(charge[:3], now)
        if look.raw:
            return self._found(charge, self._slot(charge, look.offset, look.name), look.raw, now)
        return Found(None, self._unseen(charge, look.header, now), is_stale=False, look=look)

    def make_room(self, charge: Charge, look: Look | None, now: int, taken: Collection[int], kept: int = 0) -> Slot:
        """A slot for a limit that has no record: free, or of a bucket that is full, but none of those ``taken``."""
        offset, name, _ = self.room(look or self.look(charge[:3], now), now, taken)
        return self._slot(charge, offset, name, kept)

    def save(self, charge: Charge, slot: Slot, state: State) -> None:
        """Write ``state`` into ``slot``.

        Raises:
            OSError: the disk is full, read-only or broken; the old record stands.
        """
        slot = self._slot(charge, slot.offset, slot.name, slot.kept, IN_DEBT if state.in_debt else 0)
        self._write(slot.record(self.epoch, state.full_at, state.booked_at), slot.offset)

    def save_all(
        self, charges: Sequence[Charge], found: Sequence[Found], new: Sequence[State] | None, now: int
    ) -> None:
        """Write what is ``new``, and else what was found otherwise than it is written."""
        taken = {each.slot.offset for each in found if each.slot}
        for i, (charge, each) in enumerate(zip(charges, found, strict=True)):
            if (new is not None or each.is_stale) and not charge.is_pause:
                slot = each.slot or self.make_room(charge, each.look, now, taken)
                taken.add(slot.offset)
                self.save(charge, slot, each.state if new is None else new[i])

    def read(self, charges: Sequence[Charge], now: int) -> tuple[Sequence[Charge], list[State]]:
        """``charges`` by what is ordered, and where each one's limit stands."""
        heard = self.heed(charges, now)
        return heard, [found.state for found in self.load(heard, now)]

    def settle(self, charges: Sequence[Charge], now: int) -> int:
        """Draw what a call cost more than was taken, or give it back; the instant of that."""
        heard = self.heed(charges, now, asks=False)
        found = self.load(heard, now)
        self.save_all(heard, found, settle(heard, [each.state for each in found], now), now)
        return now

    def reset(self, charges: Sequence[Charge], now: int) -> int:
        """Make the limits that are charged full; how many of them had records."""
        # By the numbers that are ordered; full, too, where damage makes those without a record start empty.
        charges = self.heed(charges, now, asks=False)
        gone = [each.slot.offset for each in self.load(charges, now) if each.slot]
        for offset in gone:
            self.free(offset)
        for charge, each in zip(charges, self.load(charges, now), strict=True):
            if each.state.full_at > now:
                self.save(charge, self.make_room(charge, None, now, (), KEPT), fit(None, charge.limit, now))
        return len(gone)

    def free_all(self, records: Iterable[tuple[int, bytes]]) -> int:
        """Forget limits; how many they are."""
        limits = [offset for offset, raw in records if not is_order(raw)]
        for offset in limits:
            self.free(offset)
        return len(limits)

    def free(self, offset: int) -> None:
        """Forget one record."""
        self._write(FREE, offset)

    # -- finding

    def _slot(self, charge: Charge, offset: int, name: bytes, kept: int = 0, debt: int = 0) -> Slot:
        """The slot of ``charge``'s limit, remembered."""
        slot = self._slots.get(charge[:3])
        known = slot and (slot.offset, slot.name, slot.limit, slot.kept, slot.debt)
        if slot is None or known != (offset, name, charge.limit, kept, debt):
            slot = Slot(offset, name, charge.limit, self._clock, kept, debt)
            if is_short(charge.key):
                self._keep(charge, slot)
        return slot

    def _keep(self, charge: Charge, slot: Slot) -> None:
        drop_oldest(self._slots, REMEMBERED)
        self._slots[charge[:3]] = slot

    def _unseen(self, charge: Charge, header: Header, now: int) -> State:
        """Full, unless its record may be among those that were lost: then it was empty, at worst, when they were."""
        state = fit(None, charge.limit, now)
        if header.lost_at + self._shift(header.epoch, header.clock) > now:
            header = self._mark_lost(header, now)  # the clock was set back: empty once, not at every look
        if header.lost_at:
            lost_at = header.lost_at + self._shift(header.epoch, header.clock)
            full_at = min(lost_at, now) + charge.limit.span
            if full_at > now:
                state = state._replace(full_at=full_at, booked_at=full_at)
        return state

    def _found(self, charge: Charge, slot: Slot, raw: bytes, now: int) -> Found:
        """The slot, and the state in its sound record on this process's clock and as its limit sees it."""
        _, clock, _, span, _, full_at, booked_at, _ = record.unpack(raw)
        limit = charge.limit
        written, kept = self.written(raw), span & KEPT
        is_changed = written.numbers != limit.numbers
        order = self.about(charge, now) if is_changed else None
        can_be = written.interval > 0 and 0 < written.span <= LONGEST_SPAN and not is_order(raw)
        if can_be:
            state = outlived(written, order, limit, now)
        else:
            # Sound to its check word and still impossible: written by something else, so empty.
            state = State(now + limit.span, now + limit.span, *limit.numbers)
        if is_changed:
            kept = KEPT
        slot = self._slot(charge, slot.offset, slot.name, kept, IN_DEBT if written.in_debt else 0)
        is_stale = clock != self._clock or state != written._replace(full_at=full_at, booked_at=booked_at)
        return Found(slot, state, is_stale, written if is_changed and can_be else None)


def is_short(key: str | None) -> bool:
    """Whether a key is worth remembering."""
    return key is None or len(key) <= LONGEST_KEY


def drop_oldest(remembered: dict[Any, Any], most: int) -> None:
    """Make room where ``most`` are remembered: for several at once, as looking for the first takes time."""
    if len(remembered) >= most:
        for name in [*islice(remembered, 1 + most // 64)]:
            del remembered[name]
