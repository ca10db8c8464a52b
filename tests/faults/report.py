"""The faults, each with what is promised of it; and what the tests measured, as a page."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HEAD = ("fault", "what holds", "what the test does", "measured")
TEXT = Path(__file__).parent / "page.md"
Test = TypeVar("Test", bound="Callable[..., None]")


@dataclass(frozen=True)
class Fault:
    """What befalls the processes.

    Attributes:
        name: of its test.
        title: as the page has it.
        promise: what holds nevertheless.
        deed: what the test does.
    """

    name: str
    title: str
    promise: str
    deed: str


FAULTS: list[Fault] = []
LONG = (pytest.mark.slow, pytest.mark.faults)
"""For what is left to ``make test-faults``."""


def fault(title: str, promise: str) -> Callable[[Test], Test]:
    """Give a test's fault a row of the page; its docstring says there what it does."""

    def register(test: Test) -> Test:
        deed = " ".join((inspect.getdoc(test) or "").split())
        FAULTS.append(Fault(test.__name__, title, promise, deed))
        return test

    return register


def page(found: Mapping[str, Mapping[str, Any]], conditions: Mapping[str, str]) -> str:
    """The text around the tables is in page.md.

    Args:
        found: what was measured, by the name of the test; as ``why`` the reason where some or all of it did not run.
        conditions: what it ran on.
    """
    machine = [row("", ""), row("---", "---"), *(row(*each) for each in conditions.items())]
    rows = [row(*HEAD), row(*["---"] * len(HEAD))]
    rows += [row(each.title, each.promise, each.deed, told(found[each.name])) for each in FAULTS]
    text = TEXT.read_text("utf-8")
    return text.replace("(machine)", "\n".join(machine)).replace("(faults)", "\n".join(rows))


def told(cells: Mapping[str, Any]) -> str:
    """What was measured, in a cell of the table."""
    why = f"not run: {cells['why']}" if "why" in cells else ""
    if "tried" not in cells:
        return why
    return (
        f"tried {cells['tried']:,}, survived {cells['survived']:,}, over-admitted {cells['over']},"
        f" lost {cells['lost']:,}; {cells['grants']:,} grants" + f"; in part {why}" * bool(why)
    )


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
