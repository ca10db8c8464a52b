"""The quick part of the matrix: ``make matrix`` runs all of it, and writes docs/celery.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from celery_matrix.cell import FEATURES, MODES, POOLS, STORES, Outcome
from celery_matrix.matrix import shown
from celery_matrix.page import CELLS as ALL
from celery_matrix.page import TABLES, page

if TYPE_CHECKING:
    from celery_matrix.page import Place

ROOT = Path(__file__).parent.parent
BURST = "a burst"
NODES = ("child", "spawn", "shutdown", "killed", "restarted")
"""In the titles of what takes nodes of its own, whose part of the matrix is for ``make matrix``."""
ON_ONE_NODE = [each.title for each in FEATURES if not any(word in each.title for word in NODES)]
CELLS: dict[Place, list[str]] = {
    **{("prefork", "redis", mode, store): ON_ONE_NODE for mode in MODES for store in STORES},
    **{(pool, "redis", mode, "file"): [BURST] for pool in POOLS if pool != "prefork" for mode in MODES},
}

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
@pytest.mark.usefixtures("server")  # or there is no server program
def test_every_feature_works(cell: Place) -> None:
    outcomes = shown(cell, CELLS[cell])
    assert len(outcomes) == (1 if CELLS[cell] == [BURST] else len(ON_ONE_NODE))
    assert {title: outcome.text for title, outcome in outcomes.items() if outcome.verdict != "ok"} == {}


def test_the_page_has_a_line_for_every_feature_and_none_failed() -> None:
    text = (ROOT / "docs" / "celery.md").read_text("utf-8")
    for feature in FEATURES:
        shown = re.findall(rf"^\| {re.escape(feature.title)} (?:\| (?:ok|no \(\d\)) ){{5}}\|$", text, re.MULTILINE)
        assert len(shown) == len(TABLES), feature.title


@pytest.mark.parametrize("verdict", ["failed", "unsupported"])
def test_the_page_tells_what_did_not_work(verdict: str) -> None:
    fine = {each.title: Outcome("ok") for each in FEATURES}
    title = FEATURES[-1].title
    cells = dict.fromkeys(ALL, fine)
    cells["solo", "redis", "hold", "file"] = {**fine, title: Outcome(verdict, "a reason")}
    (line,) = re.findall(rf"^\| {re.escape(title)} \|.*(?:failed|no).*$", page(cells, ""), re.MULTILINE)
    assert (
        line
        == f"| {title} | ok | ok | retry: ok, hold: {'**failed**' if verdict == 'failed' else 'no (1)'} | ok | ok |"
    )
