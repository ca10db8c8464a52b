"""The benchmarks run from end to end, so that they work on the day they are wanted. Figures mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.server
@pytest.mark.usefixtures("server")
def test_a_quick_run_fills_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "--quick", "--into", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "docs/performance.md").read_text("utf-8")
    assert page == done.stdout.rstrip("\n") + "\n"
    assert all(f"\n## {part}\n" in page for part in ("Aims", "Decisions on one bucket", "Tasks"))
    found = json.loads((tmp_path / "benchmarks/results.json").read_text("utf-8"))
    assert found["ratios"].keys() == {"1", "2"}
    assert all(cell["rate"] > 0 for cells in found["stores"].values() for cell in cells.values())
    assert all(tasks["limited"] > 0 for tasks in found["tasks"].values())
