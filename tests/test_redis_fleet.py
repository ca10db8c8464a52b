"""Two hosts of two nodes each share one exact quota on a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fleet import Fleet
from private_redis import private_server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_two_hosts_share_one_exact_quota(client: str, tmp_path: Path) -> None:
    with private_server() as quota, Fleet(tmp_path, client, quota.url, 1, lock_timeout=0.5).running() as fleet:
        verdict = fleet.finish(fleet.send(60))
        assert verdict.violation is None
        assert verdict.runs == [1] * 60
        # A machine that stands still for half a second loses tokens and misses turns: tests/test_turns.py is exact.
        assert verdict.used() >= 0.5
        assert verdict.sent_back <= 3
