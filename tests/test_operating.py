from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from servers import LONGEST, ROOT

if TYPE_CHECKING:
    from pathlib import Path


def but_for_numbers(page: str) -> str:
    """Columns are as wide as their numbers; gauges, lines, times to go and the day after today are numbers, too."""
    numbers = re.sub(r"(\d{4}-\d\d-\d\d )?(\d+m )?≥?\d[\d.:]*", "#", page)
    return re.sub(r" +", " ", re.sub(r"[▁-█░][▁-█░ ]*", "# ", numbers))


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.usefixtures("server")  # or there is no server program
def test_the_page_on_operating_is_what_the_commands_print(tmp_path: Path) -> None:
    page = tmp_path / "operating.md"
    command = [sys.executable, "-m", "benchmarks.operating", "--into", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LONGEST)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert but_for_numbers(page.read_text()) == but_for_numbers((ROOT / "docs" / "operating.md").read_text())
