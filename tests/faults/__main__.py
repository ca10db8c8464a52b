"""Run the faults, and write down what was measured: ``python -m tests.faults``, or ``make test-faults``."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# As pytest has it for the tests.
sys.path[:0] = [str(HERE), str(ROOT / "tests"), str(ROOT / "examples")]

from faults.report import page  # noqa: E402

from benchmarks.conditions import conditions  # noqa: E402

NUMBERS = ("tried", "survived", "lost", "grants")


def measured(report: Path) -> dict[str, dict[str, Any]]:
    """What the tests recorded, by their functions' names: the sum where one has parameters."""
    found: dict[str, dict[str, Any]] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest's own
        name = case.attrib["name"].partition("[")[0]
        cells = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
        if (skipped := case.find("skipped")) is not None:
            found.setdefault(name, {})["why"] = skipped.attrib["message"]
        elif cells:
            row = found.setdefault(name, {})
            row |= {each: int(cells[each]) + row.get(each, 0) for each in NUMBERS}
            row["over"] = max(cells["over"], row.get("over", ""), key=lambda over: float(over or 0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.faults", description="Every fault, on real processes: docs/reliability.md. Options go to pytest."
    )
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "reliability.md", help="the file to write")
    options, arguments = parser.parse_known_args()
    surroundings = conditions(Path(tempfile.gettempdir()))
    for path in sorted(HERE.glob("test_*.py")):
        importlib.import_module(path.stem)
    with tempfile.TemporaryDirectory(prefix="tb_celery-faults-") as folder:
        report = Path(folder) / "report.xml"
        but = f"--ignore={HERE / 'test_reliability.py'}"  # it looks at the page as it was before
        into = [f"--junit-xml={report}", "--override-ini=junit_family=xunit1"]  # the one with properties
        command = [sys.executable, "-m", "pytest", "-q", "-m", "", but, *into, str(HERE), *arguments]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode or arguments:
            sys.exit(done.returncode)
        options.into.write_text(page(measured(report), surroundings), "utf-8")


if __name__ == "__main__":
    main()
