"""docs/reliability.md is what ``make test-faults`` writes; here its numbers are left aside."""

from __future__ import annotations

import importlib
from pathlib import Path

from faults.report import FAULTS, HEAD, told

PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"


def test_the_page_promises_what_the_tests_show() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(path.stem)
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    found = {tuple(cells[:3]) for cells in rows if len(cells) == 4}
    promised = {(each.title, each.promise, each.deed) for each in FAULTS}
    assert found - promised == {HEAD[:3], ("---",) * 3}
    assert promised <= found


def test_what_did_not_run_is_told() -> None:
    found = {"tried": 2, "survived": 2, "over": "0", "lost": 0, "grants": 1000}
    figures = told(found)
    assert told({"why": "there is no strace"}) == "not run: there is no strace"
    assert told({**found, "why": "there is no strace"}) == f"{figures}; in part not run: there is no strace"
