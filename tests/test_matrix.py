"""The quick part of the matrix: ``make matrix`` runs all of it, and writes docs/celery.md."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from celery_matrix.cell import BROKERS, FEATURES, MODES, POOLS, Outcome
from celery_matrix.matrix import shown
from celery_matrix.page import page

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
BURST = "a burst"
NODES = ("child", "spawn", "shutdown", "killed", "restarted")
"""In the titles of what takes nodes of its own, whose part of the matrix is for ``make matrix``."""
ON_ONE_NODE = [each.title for each in FEATURES if not any(word in each.title for word in NODES)]
CELLS = {("prefork", mode): ON_ONE_NODE for mode in MODES} | {
    (pool, mode): [BURST] for pool in POOLS if pool != "prefork" for mode in MODES
}

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(server: str) -> Iterator[dict[tuple[str, str], dict[str, Outcome]]]:  # noqa: ARG001 - or a skip
    """What came out of all cells; each is a process with a node that mostly waits, so some share the time."""
    with ThreadPoolExecutor(3) as threads:
        outcomes = threads.map(lambda cell: shown(cell[0], "redis", cell[1], CELLS[cell]), CELLS)
        yield dict(zip(CELLS, outcomes, strict=True))


@pytest.mark.parametrize(("pool", "mode"), CELLS)
def test_every_feature_works(found: dict[tuple[str, str], dict[str, Outcome]], pool: str, mode: str) -> None:
    outcomes = found[pool, mode]
    assert len(outcomes) == (1 if CELLS[pool, mode] == [BURST] else len(ON_ONE_NODE))
    assert {title: outcome.text for title, outcome in outcomes.items() if outcome.verdict != "ok"} == {}


def test_the_page_has_a_line_for_every_feature_and_none_failed() -> None:
    text = (ROOT / "docs" / "celery.md").read_text("utf-8")
    for feature in FEATURES:
        shown = re.findall(rf"^\| {re.escape(feature.title)} (?:\| (?:ok|no \(\d\)) ){{5}}\|$", text, re.MULTILINE)
        assert len(shown) == len(BROKERS), feature.title


@pytest.mark.parametrize("verdict", ["failed", "unsupported"])
def test_the_page_tells_what_did_not_work(verdict: str) -> None:
    fine = {each.title: Outcome("ok") for each in FEATURES}
    title = FEATURES[-1].title
    cells = {(pool, broker, mode): fine for pool in POOLS for broker in BROKERS for mode in MODES}
    cells["solo", "redis", "hold"] = {**fine, title: Outcome(verdict, "a reason")}
    (line,) = re.findall(rf"^\| {re.escape(title)} \|.*(?:failed|no).*$", page(cells, ""), re.MULTILINE)
    assert (
        line
        == f"| {title} | ok | ok | retry: ok, hold: {'**failed**' if verdict == 'failed' else 'no (1)'} | ok | ok |"
    )
