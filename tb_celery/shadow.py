"""Buckets that are not enforced: what would have waited is let through, counted, and told once a minute.

Such a bucket has a copy, from which calls draw as if each had waited for its turn, below empty: the next one's wait is
that behind all before it. The bucket itself is left to those who are held to it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from tb_celery.arithmetic import Decision, look
from tb_celery.errors import StoreError
from tb_celery.stores.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tb_celery.arithmetic import Place
    from tb_celery.bucket import Bucket, Charge, Limit
    from tb_celery.state import State
    from tb_celery.stores import Store

logger = logging.getLogger("tb_celery")

Enforce = bool | float | Mapping[str, bool | float]
"""Whether limits are enforced, or for how many percent of the tasks; or that by bucket, and the others are."""
ALL = 100.0
"""Percent."""
EVERY = 60.0
"""Seconds from one line in the log to the next."""
OFTEN = 1.0
"""Seconds after which a process passes on what another one is to tell."""
LONGEST = 500
"""Characters of an error that are passed on."""
REMEMBERED = 1 << 10
"""Draws whose copies are kept."""
COPY = "\0copy"
"""What follows a bucket's name in that of its copy."""


def is_enforce(value: object) -> bool:
    """Whether ``value`` can be a setting ``enforce``."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and not isinstance(value[name], Mapping) for name in value) and all(
            map(is_enforce, value.values())
        )
    return isinstance(value, int | float) and 0 <= value <= ALL


def percent(enforce: Enforce, bucket: str) -> float:
    """The percentage of tasks for which ``bucket`` is enforced."""
    share = enforce.get(bucket, True) if isinstance(enforce, Mapping) else enforce
    return ALL * share if isinstance(share, bool) else share


def lot_of(task_id: object) -> float:
    """From 0 up to 100, by task: those below a percentage are held to what is enforced for so many."""
    # Anybody may have written it: it may be no text, or one that cannot be encoded.
    return zlib.crc32(str(task_id).encode("utf-8", "surrogatepass")) / (1 << 32) * ALL


def enforced_by(store: Store) -> Enforce:
    """What ``store`` enforces."""
    enforce: Enforce = getattr(store, "enforce", True)
    return enforce


def likewise(store: Store, other: Store) -> Store:
    """``other``, so that it enforces what ``store`` does."""
    enforce = enforced_by(store)
    return other if enforce is True else ShadowStore(other, enforce)


def peek(enforce: Enforce, charges: Sequence[Charge], states: Sequence[State], now: int) -> Decision:
    """What a caller who is no task would be told, with the tokens as they are before anything is taken."""
    decision = look(charges, states, now)
    if decision or enforce is True:
        return decision
    pairs = list(zip(charges, states, strict=True))
    held = [pair for pair in pairs if percent(enforce, pair[0].bucket) == ALL]
    if held and not (refusal := look([charge for charge, _ in held], [state for _, state in held], now)):
        return refusal
    return decision.let_through(decision.bucket)


class ShadowStore(StoreWrapper):
    """A store that lets calls through that their bucket would refuse, where that is not enforced for them.

    Looks and orders at a bucket that nobody is held to are at its copy.

    Args:
        store: where the state lives.
        enforce: the setting.
        copies: where the copies live, which may be ``store`` without its log of grants.
    """

    def __init__(self, store: Store, enforce: Enforce, copies: Store | None = None) -> None:
        super().__init__(store)
        self.enforce = enforce
        self._copies = store if copies is None else copies

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        shares = {charge.bucket: percent(self.enforce, charge.bucket) for charge in charges}
        # Those who are no tasks have no lot, and are held to what everybody is held to.
        lot = ALL if place is None else place.lot
        held_to = {bucket for bucket, share in shares.items() if share == ALL or lot < share}
        held = charges if len(held_to) == len(shares) else [each for each in charges if each.bucket in held_to]
        decision = self.wrapped.acquire(held, place) if held else None
        if place is not None and place.turn is None:
            # The copy is to know of them, too, or the others would be told too short a wait.
            self._note([each for each in held if shares[each.bucket] < ALL])
        if decision is not None and (not decision or held is charges):
            return decision
        told = self._pass([each for each in charges if each.bucket not in held_to])
        return told if decision is None or told.would_wait else decision

    def _pass(self, charges: Sequence[Charge]) -> Decision:
        """Draw from the copies, and count what would have had to wait."""
        copies = _copies(tuple(charges))
        try:
            decision = self._copies.acquire(copies)
            if not decision:
                self._copies.settle(copies)
        except StoreError as error:
            _tally.fail(charges[0].bucket, str(error))
            now = self.clock.now()
            return Decision(now, now, charges[0], now)
        told = decision.let_through(decision.bucket.removesuffix(COPY))
        if told.would_wait:
            _tally.count(told.bucket, told.would_wait)
        return told

    def _note(self, charges: Sequence[Charge]) -> None:
        if charges:
            # They have their answer already, so they must not hear of this.
            with suppress(StoreError):
                self._copies.settle([_copy(charge) for charge in charges])

    def read(self, charges: Sequence[Charge]) -> tuple[int, Sequence[Charge], list[State]]:
        now, heard, states = self.wrapped.read([_copy(each) if self._is_off(each.bucket) else each for each in charges])
        return now, [each._replace(bucket=each.bucket.removesuffix(COPY)) for each in heard], states

    def settle(self, charges: Sequence[Charge]) -> int:
        held = [each for each in charges if not self._is_off(each.bucket)]
        copies = [_copy(each) for each in charges if self._is_off(each.bucket)]
        now = self.wrapped.settle(held) if held else 0
        return max(now, self._copies.settle(copies)) if copies else now

    def order(self, charge: Charge, span: int, declared: Limit | None = None) -> None:
        # The copy has to heed it as well.
        self.wrapped.order(charge, span, declared)
        self._copies.order(_copy(charge), span, declared)

    def survey(self, buckets: Collection[Bucket]) -> tuple[int, dict[str, list[State]]]:
        now, known = self.wrapped.survey([_copy_of(each) if self._is_off(each.name) else each for each in buckets])
        return now, {name.removesuffix(COPY): states for name, states in known.items()}

    def reset(self, bucket: Bucket, key: str | None = None) -> int:
        return max(self.wrapped.reset(bucket, key), self._copies.reset(_copy_of(bucket), key))

    def _is_off(self, bucket: str) -> bool:
        return not percent(self.enforce, bucket)


def _copy(charge: Charge) -> Charge:
    return charge._replace(bucket=charge.bucket + COPY)


@lru_cache(REMEMBERED)
def _copies(charges: tuple[Charge, ...]) -> tuple[Charge, ...]:
    """The same object for the same charges, by which a store finds its record faster."""
    return tuple(map(_copy, charges))


def _copy_of(bucket: Bucket) -> Bucket:
    return replace(bucket, name=bucket.name + COPY)


# -- the lines in the log


class _Tally:
    """What this process has let through since the last lines, and what others have that it hears of through a pipe."""

    def __init__(self) -> None:
        self._outlet: int | None = None
        self._is_forked = False
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_forked)

    def _renew(self) -> None:
        self._mutex = threading.Lock()
        self._caught_up = threading.Event()
        self._waits: dict[str, tuple[int, float]] = {}
        self._errors: dict[str, str] = {}

    def _renew_forked(self) -> None:
        # The parent tells its own, and its threads do not live here.
        self._is_forked = True
        self._renew()

    def gather(self) -> None:
        if self._outlet is None and sys.platform != "win32":
            inlet, self._outlet = os.pipe()
            self._is_forked = False
            # Whoever cannot pass on what it has let through tells it by itself.
            os.set_blocking(self._outlet, False)
            threading.Thread(target=self._listen, args=(inlet,), daemon=True).start()

    def _listen(self, inlet: int) -> None:
        rest = b""
        while read := os.read(inlet, 1 << 16):
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                bucket, calls, wait, error = json.loads(line or b'["", 0, 0, ""]')
                if error:
                    self.fail(bucket, error)
                elif calls:
                    self.count(bucket, wait, calls)
                else:
                    self._caught_up.set()

    def count(self, bucket: str, wait: float, calls: int = 1) -> None:
        with self._mutex:
            self._set_alarm()
            before, longest = self._waits.get(bucket, (0, 0.0))
            self._waits[bucket] = before + calls, max(longest, wait)

    def fail(self, bucket: str, error: str) -> None:
        with self._mutex:
            self._set_alarm()
            self._errors[bucket] = error

    def _set_alarm(self) -> None:
        if self._waits or self._errors:
            return
        alarm = threading.Timer(OFTEN if self._is_forked and self._outlet else EVERY, self.tell)
        alarm.daemon = True
        with suppress(RuntimeError):  # the interpreter ends, and tells by then
            alarm.start()

    def tell(self) -> None:
        if self._outlet is not None and not self._is_forked:
            self._caught_up.clear()
            with suppress(OSError):
                os.write(self._outlet, b"\n")  # behind what others have said
                self._caught_up.wait(OFTEN)
        with self._mutex:
            waits, self._waits = self._waits, {}
            errors, self._errors = self._errors, {}
        for bucket, (calls, longest) in waits.items():
            if not self._pass_on(bucket, calls, longest, ""):
                logger.info(
                    "bucket %r is not enforced: %d let through in %g s or less, of which the last in line would have"
                    " waited %.3f s",
                    bucket,
                    calls,
                    EVERY,
                    longest,
                )
        for bucket, error in errors.items():
            if not self._pass_on(bucket, 0, 0.0, error[:LONGEST]):
                sentence = "bucket %r is not enforced, and what would have waited is not known: %s"
                logger.warning(sentence, bucket, error)

    def _pass_on(self, *told: object) -> bool:
        if self._outlet is not None and self._is_forked:
            with suppress(OSError):
                # No other process's line can fall into so short a one.
                return os.write(self._outlet, json.dumps(told).encode() + b"\n") > 0
        return False


_tally = _Tally()
tell = _tally.tell
"""Write the lines now: this process is about to end."""
gather = _tally.gather
"""Have the processes that will be forked from this one leave their lines to it: one for all of them."""
atexit.register(tell)
