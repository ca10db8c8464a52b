"""Who is told what a store answers, so that it can be counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tb_celery.arithmetic import Decision, Place
    from tb_celery.bucket import Charge
    from tb_celery.errors import StoreError


class Tally:
    """What a store has answered about one bucket without telling its meter.

    It counts in any case: to add to an attribute takes as long as to ask whether anybody wants to know, and a call
    several times that.

    Attributes:
        granted: calls that got their tokens.
        tokens: that they got.
        refused: answers that said to wait.
    """

    __slots__ = ("granted", "refused", "tokens")

    def __init__(self) -> None:
        self.granted = self.refused = 0
        self.tokens = 0.0


class Meter:
    """What a store tells of those who ask for tokens; this one listens to nothing."""

    def answered(self, charges: Sequence[Charge], place: Place | None, decision: Decision) -> None:
        """A call got an answer that is in no tally."""

    def failed(self, charges: Sequence[Charge], error: StoreError) -> None:
        """A call got none."""

    def waited(self, seconds: float) -> None:
        """A call had to wait for so long, also one that gets no answer; the others found the store free."""

    def catch_up(self) -> None:
        """There is more in the tallies; told every few milliseconds while there are calls."""


NOBODY = Meter()
