"""Run the matrix: ``python -m tests.celery_matrix``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# As pytest has it for the tests.
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

from celery_matrix.matrix import main  # noqa: E402

main()
