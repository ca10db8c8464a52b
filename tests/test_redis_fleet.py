"""Two hosts of two nodes each share one exact quota on a real server, and come through its failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fleet import Fleet
from private_redis import private_server
from servers import until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_two_hosts_share_one_exact_quota_through_what_befalls_the_server(server: str, tmp_path: Path) -> None:
    with private_server() as quota, Fleet(tmp_path, server, quota.url, 1, lock_timeout=0.5).running() as fleet:
        verdict = fleet.finish(fleet.send(60))
        assert verdict.violation is None
        assert verdict.runs == [1] * 60
        assert verdict.used() >= 0.99
        assert verdict.sent_back <= 1.1

        # It stands still for as long as it takes that somebody notices.
        ids = fleet.send(40)
        fleet.until_granted(ids, 10)
        quota.pause()
        try:
            until(lambda: any("did not answer within 0.5 s" in site.log() for site in fleet.sites), "somebody notices")
        finally:
            quota.resume()
        verdict = fleet.finish(ids)
        assert verdict.violation is None
        assert verdict.runs == [1] * 40

        # It is gone, and comes back empty.
        ids = fleet.send(40)
        fleet.until_granted(ids, 10)
        quota.stop()
        try:
            until(lambda: any("cannot be reached" in site.log() for site in fleet.sites), "somebody notices")
        finally:
            quota.start()
        verdict = fleet.finish(ids)
        assert verdict.violation is None
        assert verdict.runs == [1] * 40
        assert any("has lost its state: buckets start empty" in site.log() for site in fleet.sites)
