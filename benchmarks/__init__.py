"""What a decision costs, measured against what it could cost at best and what the alternatives cost: `make bench`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The demo, the tests and the benchmarks start their servers in one way.
sys.path.insert(0, str(ROOT / "examples"))
