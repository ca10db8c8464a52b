"""Asks for tokens, and the short way for most of them: those that the instants of their records alone decide.

The long way knows of everything: orders, lines, debts, other numbers and other clocks. The short way answers as it
does where none of these matters, over plain integers, and leaves the rest to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tb_celery.arithmetic import Decision, acquire
from tb_celery.stores import record
from tb_celery.stores.hosting import read_at
from tb_celery.stores.record import KEPT, SIZE, Slot
from tb_celery.stores.table import REPEATED, Table, drop_oldest, is_short

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tb_celery.arithmetic import Place
    from tb_celery.bucket import Charge
    from tb_celery.clock import Clock
    from tb_celery.stores.meter import Tally
    from tb_celery.stores.places import Look


class Draw(NamedTuple):
    """What an ask takes from one limit."""

    slot: Slot
    charge: Charge
    cost: int
    span: int
    asked: Sequence[Charge]
    """The whole ask, kept alive so that nothing else gets its ``id``."""

    @classmethod
    def of(cls, asked: Sequence[Charge], charge: Charge, slot: Slot) -> Draw:
        return cls(slot, charge, charge.cost, charge.limit.span, asked)


Repeated = tuple[Slot, "Charge", int, int, "Tally", float, "Sequence[Charge]"]
"""A draw that is a whole ask, and where it is counted, as how many tokens. A plain tuple is unpacked four times as fast
as a named one."""


class Asks(Table):
    """A table that is asked for tokens, and remembers what for.

    Args:
        fd: of the open state file.
        path: its path.
        clock: where "now" comes from.
        tallies: by bucket, of asks for one limit that were made before.

    Attributes:
        repeated: asks for one limit that were made before, by their ``id``, and may be again.
        together: those for several.
    """

    def __init__(self, fd: int, path: Path, clock: Clock, tallies: Mapping[str, Tally]) -> None:
        super().__init__(fd, path, clock)
        self._tallies = tallies
        self.repeated: dict[int, Repeated] = {}
        self.together: dict[int, list[Draw]] = {}

    def _forget(self) -> None:
        super()._forget()
        self.repeated.clear()
        self.together.clear()

    def acquire(self, asked: Sequence[Charge], now: int, place: Place | None) -> Decision:
        """A decision as :func:`~tb_celery.arithmetic.acquire` makes it, and what follows from it written down."""
        draws = self.together.get(id(asked))
        if draws is not None and all(self._recognized(draw.slot) for draw in draws):
            decision = self._answer(draws, now, place)
        elif id(asked) in self.repeated:
            decision = None  # the store has tried the short way
        else:
            decision = self._answer_first(asked, now, place)
        if decision is None:
            charges, found = self.find(asked, now)
            decision, new = acquire(charges, [each.state for each in found], now, place, self.last_pause(asked, now))
            self.save_all(charges, found, new, now)
            # Not in debt: the short way, which writes the same mark again, would not notice that it has been paid.
            slots = [each.slot for each in found if each.slot and not each.slot.debt]
            if decision and len(slots) == len(charges) and all(charge.cost <= charge.limit.span for charge in charges):
                self._remember(asked, [Draw.of(asked, *each) for each in zip(charges, slots, strict=True)])
        return decision

    def _recognized(self, slot: Slot) -> bool:
        raw = read_at(self.fd, SIZE, slot.offset)
        return raw == slot.seen or slot.recognizes(raw)

    def _answer(self, draws: Sequence[Draw], now: int, place: Place | None) -> Decision | None:
        """The short way from what the slots know; ``None`` where it does not lead there, and nothing has changed."""
        filled, instants = [], []
        for slot, _, cost, span, _ in draws:
            full_at = slot.full_at
            until = (full_at if full_at > now else now) + cost  # noqa: FURB136 - a call costs more
            at = until - span
            if full_at - span > now or (
                place is not None and (at > now or place.ahead or full_at < slot.booked_at > now)
            ):
                return None
            filled.append(until)
            instants.append(at)
        at = max(instants)
        binding = instants.index(at)
        if at > now:
            return Decision(now, at, draws[binding].charge, draws[binding].slot.full_at)
        for (slot, *_), until in zip(draws, filled, strict=True):
            booked_at = max(slot.booked_at, until)
            raw = slot.record(self.epoch, until, booked_at)
            self._write(raw, slot.offset)
            slot.full_at, slot.booked_at, slot.seen = until, booked_at, raw
        return Decision(now, now, draws[binding].charge, filled[binding])

    def _answer_first(self, asked: Sequence[Charge], now: int, place: Place | None) -> Decision | None:
        """The short way for what was not asked before; a limit without a record has one once the answer is yes."""
        charges = self.heed(asked, now)
        if any(self._claims.values()):
            return None  # it may have to be claimed anew
        slots: list[Slot | None] = []
        vain: list[Look] = []
        for charge in charges:
            if charge.number < 0 or charge.cost > charge.limit.span:
                return None
            slot = self._slots.get(charge[:3])
            if slot is None or slot.limit != charge.limit or not self._recognized(slot):
                look = self.look(charge[:3], now)
                slot = None
                if look.raw:
                    slot = Slot(look.offset, look.name, charge.limit, self._clock, record.unpack(look.raw)[3] & KEPT)
                    if not slot.recognizes(look.raw):
                        return None
                else:
                    vain.append(look)
            elif slot.debt:
                return None
            slots.append(slot)
        taken = {slot.offset for slot in slots if slot}
        looks = iter(vain)
        draws = [
            Draw.of(asked, charge, slot or self._vacant(charge, next(looks), now, taken))
            for charge, slot in zip(charges, slots, strict=True)
        ]
        decision = self._answer(draws, now, place)
        if decision or (decision is not None and not vain):
            self._remember(asked, draws)
        return decision

    def _vacant(self, charge: Charge, look: Look, now: int, taken: set[int]) -> Slot:
        """A slot for a limit without a record: what is there is taken for its record until it is overwritten."""
        offset, name, raw = self.room(look, now, taken)
        taken.add(offset)
        slot = Slot(offset, name, charge.limit, self._clock)
        slot.seen = raw
        slot.full_at = slot.booked_at = self._unseen(charge, look.header, now).full_at if look.header.lost_at else now
        return slot

    def _remember(self, asked: Sequence[Charge], draws: list[Draw]) -> None:
        """Remember where its records are, and an ask by the object that it came as, if that can never change."""
        for _, charge, *_ in draws:
            if not is_short(charge.key):
                return
        for slot, charge, *_ in draws:
            self._keep(charge, slot)
        if type(asked) is not tuple:
            return
        if len(draws) > 1:
            drop_oldest(self.together, REPEATED)
            self.together[id(asked)] = draws
        else:
            drop_oldest(self.repeated, REPEATED)
            ((slot, charge, cost, span, _),) = draws
            tokens = cost / charge.limit.interval
            self.repeated[id(asked)] = slot, charge, cost, span, self._tallies[charge.bucket], tokens, asked
