from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# The demo, the tests and the benchmarks start their servers in one way.
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from valkey_server import NoServerError, find_binary, valkey_server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a private Valkey or Redis server. Without one: a failure in CI, else a skip."""
    try:
        find_binary()
    except NoServerError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    with valkey_server() as url:
        yield url
