"""The benchmarks run from end to end, so that they work on the day they are wanted. Figures mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from servers import LONGEST, ROOT

from benchmarks.behind import behind
from benchmarks.beside import KEPT, QUICK, Comparison, excess, scenes, usual
from benchmarks.celery_drain import over, typical
from benchmarks.contenders import Site
from benchmarks.load import jain, measure
from benchmarks.peers import OURS, PEERS, Opened, Peer, Quota
from benchmarks.plots import PICTURES, draw
from benchmarks.report import render
from benchmarks.rounds import middle, play
from tb_celery.bucket import SECOND

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.usefixtures("server")
def test_a_quick_run_fills_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--into", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs/performance.md").read_text("utf-8")
    assert page == done.stdout.rstrip("\n") + "\n"
    parts = ("Aims", "Where we are behind", "Decisions on one bucket", "Beside other limiters", "Tasks")
    assert all(f"\n## {part}\n" in page for part in parts)
    found = json.loads((tmp_path / "benchmarks/results.json").read_text("utf-8"))
    assert found["ratios"].keys() == {"1", "2"}
    assert all(cell["rate"] > 0 for cells in found["stores"].values() for cell in cells.values())
    assert all(tasks["limited"] > 0 for tasks in found["tasks"].values())
    beside = found["beside"]
    for title, scene in beside["scenes"].items():
        # Everybody has figures or a reason, and we have figures.
        assert scene["peers"].keys() | beside["reasons"].get(title, {}).keys() == PEERS.keys()
        assert OURS in scene["peers"]
        assert all(cell["rate"] > 0 for cell in scene["peers"].values())
    assert beside["kept"].keys() | beside["reasons"].get(KEPT, {}).keys() == PEERS.keys()
    assert beside["kept"][OURS]["over"] == 0
    ran = {row["mode"]: row for row in found["end to end"]["celery_drain"]}
    assert all(ran[mode]["ran"] == ran[mode]["bodies"] == ran[mode]["tasks"] for mode in ("retry", "hold"))
    assert all(ran[mode]["over"] == 0 for mode in ("retry", "hold"))
    assert "not measured" not in page.split("By `python -m benchmarks.memory`.")[1]


def test_the_page_is_what_the_figures_give() -> None:
    found = json.loads((ROOT / "benchmarks/results.json").read_text("utf-8"))
    for name in ("stores", "ratios"):  # JSON has no other keys than text
        found[name] = {int(count): cells for count, cells in found[name].items()}
    pictures = {f"performance-{name}.svg": text for name, (text, _) in PICTURES.items()}
    assert (ROOT / "docs/performance.md").read_text("utf-8") == render(found, pictures)


@pytest.mark.server
def test_a_peer_that_fails_is_a_row_with_its_reason(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Site, __: Quota) -> Opened:
        message = "a long log\nit is broken"
        raise OSError(message)

    peers = {"broken": Peer(broken), "absent": Peer(broken, "no_such_package"), OURS: PEERS[OURS]}
    monkeypatch.setattr("benchmarks.beside.PEERS", peers)
    scene = scenes(QUICK)[0]
    comparison = Comparison(Site(tmp_path, server), QUICK)
    comparison.play(scene)
    found = comparison.found()
    assert found["scenes"][scene.title]["peers"].keys() == {OURS}
    reasons = found["reasons"][scene.title]
    assert reasons["broken"].endswith("it is broken")
    assert reasons["absent"] == "the package no_such_package is not installed (tb-celery[bench])"


def test_processes_are_measured_together() -> None:
    def make() -> Callable[[], object]:
        return lambda: True

    cell = measure(make, 3, 0.01)
    assert cell.allowed == 1
    assert 0 < cell.p50 <= cell.p99 <= cell.p999
    assert 1 / 3 <= cell.fairness <= 1


def test_fairness() -> None:
    assert jain([5, 5, 5, 5]) == 1
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert jain([0, 0]) == 1


def test_only_what_is_too_many_for_certain_counts() -> None:
    quota = Quota(2, 1)
    assert excess([(0, 0), (0, 0), (0, 0)], quota) == 1
    # It may have been granted at the end of a call that took half a second, when one had come back.
    assert excess([(0, 0), (0, 0), (0, SECOND // 2)], quota) == 0


def test_the_worst_window_tells_how_many_are_too_many() -> None:
    lawful = [0] * 5 + [SECOND * number // 50 for number in range(1, 100)]
    assert over(lawful, 5) == 0
    assert over(sorted([*lawful, SECOND, SECOND, SECOND]), 5) == 3


def test_everybody_has_a_turn_in_each_round_but_who_has_failed() -> None:
    runs = iter(range(100))

    def once(name: str) -> dict[str, Any]:
        if name == "broken":
            raise RuntimeError(name)
        return {"name": name, "took": next(runs), "starts": [0.0]}

    found, failed = play(["one", "broken", "other"], 3, once, lambda own: middle(own, lambda run: run["took"]))
    assert [each["name"] for each in found] == ["one", "other"]
    for each in found:
        lower, median, higher = (run["took"] for run in each["rounds"])
        assert lower < each["took"] == median < higher
        assert "starts" in each
        assert "starts" not in each["rounds"][0]
    assert len(failed) == 1
    assert "broken" in failed[0]


def test_of_a_backlog_the_worst_is_told() -> None:
    runs = [DRAINED | {"took": took, "ran": ran, "over": over} for took, ran, over in ((3, 2, 0), (1, 1, 0), (2, 2, 7))]
    assert typical(runs) == DRAINED | {"took": 2, "ran": 1, "over": 7}


def test_of_a_quota_the_most_too_many_is_told() -> None:
    runs = [{"used": used, "over": over} for used, over in ((0.9, 0), (0.8, 5), (1.0, 1))]
    assert usual(runs) == {"used": 0.9, "over": 5}


def figures(rates: dict[str, float]) -> dict[str, Any]:
    cells = {
        name: {"rate": rate, "p50": 1e6 / rate, "p99": 3.0, "p999": 4.0, "fairness": 1.0, "allowed": 1.0}
        for name, rate in rates.items()
    }
    scenes = {f"granted, {count} processes": {"processes": count, "peers": cells} for count in (1, 2)}
    row = {"mode": "hold", "tasks": 2, "rate": 50, "ideal": 0.02, "starts": [0.0, 0.02]}
    return {
        "stores": {},
        "paced": {},
        "beside": {"scenes": scenes, "kept": {}, "reasons": {}},
        "end to end": {"celery_drain": [row | DRAINED]},
    }


DRAINED = {"ran": 2, "took": 0.02, "republished": 0, "used": 1, "over": 0, "jitter p50": 0, "jitter p99": 0}


def test_who_is_ahead_is_read_off_the_figures() -> None:
    assert behind(figures({OURS: 100.0, "LMDB token bucket": 100.0})) == []
    rows = behind(figures({OURS: 100.0, "LMDB token bucket": 200.0, "SQLite token bucket": 300.0}))
    where = "granted, 1 processes"
    ahead = "SQLite token bucket {}; LMDB token bucket {}"
    assert rows[:2] == [
        [where, OURS, "decisions a second", "100", ahead.format("300", "200")],
        [where, OURS, "p50 in us", "10,000", ahead.format("3,333", "5,000")],
    ]


def test_the_same_figures_give_the_same_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws the pictures (tb-celery[bench])")
    found = figures({OURS: 100.0, "LMDB token bucket": 200.0})
    for folder in ("one", "two"):
        assert len(draw(found, tmp_path / folder)) == 3
    for picture in (tmp_path / "one").iterdir():
        assert picture.read_bytes() == (tmp_path / "two" / picture.name).read_bytes()


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.usefixtures("server")
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux to tell the processor's time")
def test_what_metrics_cost_is_measured_to_the_end() -> None:
    command = [sys.executable, "-m", "benchmarks.metrics", "--rounds", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST, check=False)
    assert done.returncode == 0, done.stderr
    _, _, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert all(float(number) > 0 for row in rows for number in row.split("|")[2:4])
