"""The dashboard and the alerts, as a real Prometheus answers them that scrapes two nodes under load."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode
from urllib.request import urlopen

import app as tasks
import pytest
from servers import PATIENCE, ROOT, Site, until
from valkey_server import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "tb_celery.json").read_text("utf-8"))
MANUAL = (ROOT / "docs" / "metrics.md").read_text("utf-8")
PROMETHEUS = shutil.which("prometheus")
SCRAPES = """\
global:
  scrape_interval: 500ms
scrape_configs:
  - job_name: tb_celery
    static_configs:
      - targets: {targets}
"""
INTERVAL = "5s"  # Grafana's $__rate_interval is four scrapes or more


def expressions() -> dict[str, str]:
    """Every query of the dashboard with what Grafana puts in, and of the manual's alerts, by where it stands."""
    queries = {
        f"{panel['title']} {target['refId']}": target["expr"]
        .replace("$__rate_interval", INTERVAL)
        .replace("$bucket", ".*")
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }
    return queries | {f"alert {name}": expr for name, expr in re.findall(r"- alert: (\w+)\n  expr: (.*)", MANUAL)}


def test_nothing_of_grafanas_is_left_in_the_queries() -> None:
    assert len(expressions()) > 15
    assert not [query for query in expressions().values() if "$" in query]


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24, "Grafana's grid has so many columns"
    for panel in panels:
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)


@pytest.fixture
def site(tmp_path: Path, server: str) -> Iterator[Site]:
    tasks.app.conf.update(broker_url=server, result_backend=server)
    site = Site(tmp_path, server, settings={"enforce": {"five": False}})
    try:
        yield site
    finally:
        site.stop()
        with tasks.app.connection_for_write() as connection:
            connection.default_channel.client.flushall()


@pytest.fixture
def ask(site: Site) -> Iterator[Callable[..., Any]]:
    """Asks a Prometheus that scrapes two nodes; what it answers, which must not be an error."""
    assert PROMETHEUS
    ports = [free_port() for _ in range(3)]
    for number in (0, 1):
        site.environment["TB_CELERY_METRICS_PORT"] = str(ports[number])
        site.start(f"node{number}", "-c", "1").ready()
    (site.folder / "prometheus.yml").write_text(
        SCRAPES.format(targets=json.dumps([f"127.0.0.1:{port}" for port in ports[:2]])), "utf-8"
    )
    at = f"127.0.0.1:{ports[2]}"

    def asked(path: str, **query: str) -> Any:  # noqa: ANN401
        with urlopen(f"http://{at}/api/v1/{path}?{urlencode(query)}", timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def up() -> bool:
        assert process.poll() is None, (site.folder / "prometheus.log").read_text("utf-8")
        try:
            return len(asked("query", query="up == 1")["result"]) == 2
        except OSError:
            return False

    with (site.folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={site.folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={site.folder / 'prometheus'}",
                f"--web.listen-address={at}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        until(up, "Prometheus scrapes both nodes")
        yield asked
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.skipif(not PROMETHEUS, reason="no prometheus on the PATH; on Debian: apt install prometheus")
def test_prometheus_answers_every_query_of_the_dashboard(site: Site, ask: Callable[..., Any]) -> None:
    tasks.app.control.broadcast("bucket_pause", arguments={"bucket": "slow", "duration": "1h"}, reply=True)
    missing = {name: query for name, query in expressions().items() if not name.startswith("alert")}
    deadline = time.monotonic() + PATIENCE
    while missing:
        ids = {task.delay().id for task in (tasks.one_of_five, tasks.another_of_five) for _ in range(3)}
        site.bodies(ids | {tasks.core.delay(number).id for number in range(8)})
        found = {name: numbers(ask("query", query=query)) for name, query in missing.items()}
        missing = {name: query for name, query in missing.items() if not found[name]}
        assert time.monotonic() < deadline, f"nothing comes of {missing}"
    for query in expressions().values():
        ask("query", query=query)
    # As Grafana asks for the names that its variable can have.
    assert set(ask("label/bucket/values", **{"match[]": "tb_celery_granted_total"})) == tasks.BUCKETS.keys()


def numbers(answer: Any) -> list[float]:  # noqa: ANN401
    """A quantile of nothing is no number."""
    found = [float(each["value"][1]) for each in answer["result"]]
    return [each for each in found if not math.isnan(each)]
