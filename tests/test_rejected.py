"""Real workers, and a service that turns their calls down."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import app
import calling
import pytest
from celery import chord
from servers import Site, until

from tb_celery import open_limiter
from tb_celery.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from celery import Task

    from tb_celery import Limiter

pytestmark = pytest.mark.server
BUCKETS = {
    **app.BUCKETS,
    "calls": {"capacity": 5, "refill_rate": 10},
    "both": {"capacity": 5, "refill_rate": 10},
    "held": {"capacity": 5, "refill_rate": 10},
    "tokens": {"capacity": 10_000, "refill_rate": 0.001},
}
SETTINGS = {
    "buckets": BUCKETS,
    "routes": {"calling.calls_plainly": "calls", "queue:held": {"bucket": "held", "on_reject": "hold"}},
    "rejections": {"requests.HTTPError:429": "pause"},
}
SECOND = 1_000_000_000


class Service(ThreadingHTTPServer):
    """Answers 429 to as many calls as are in ``refusals``, with so many seconds of Retry-After, and else 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refusals: deque[int] = deque()
        self.paths: list[str] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        try:
            wait = self.server.refusals.popleft()
        except IndexError:
            self.send_response(200)
        else:
            self.send_response(429)
            self.send_header("Retry-After", str(wait))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@contextmanager
def nodes(server: str, folder: Path, *options: str, count: int = 1, **settings: str) -> Iterator[Site]:
    site = Site(folder, server, settings={**SETTINGS, **settings}, app="calling")
    try:
        for number in range(count):
            site.start(f"node{number}", *options)
        for node in site.nodes:
            node.ready()
        yield site
    finally:
        site.stop()


@pytest.fixture(scope="module")
def site(client: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two nodes of two processes each."""
    folder = tmp_path_factory.mktemp("rejected")
    with nodes(client, folder, "-c", "2", "-Q", "celery,held", count=2) as site:
        yield site


def limiter_of(site: Site) -> Limiter:
    where: dict[str, object] = {name: site.settings[name] for name in ("store", "key_prefix") if name in site.settings}
    return open_limiter(load_settings({"buckets": BUCKETS, "state_file": str(site.state_file), **where}))


def done(site: Site, ids: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """What each of these tasks has noted at its end, as soon as all have; nobody comes to it twice."""
    wanted = set(ids)
    until(lambda: site.of(wanted, "done").keys() == wanted, f"{len(wanted)} tasks are done\n{site.log()[-3000:]}")
    found = site.of(wanted, "done")
    assert {len(each) for each in found.values()} == {1}
    return found


@pytest.mark.parametrize("task", [calling.calls, calling.calls_plainly, calling.asks], ids=lambda task: str(task.name))
def test_no_process_starts_a_body_in_the_pause_that_one_has_called_for(
    site: Site, service: Service, task: Task
) -> None:
    service.refusals.append(3)
    sent = [task.delay(service.url(f"{task.name}/{number}")).id for number in range(16)]
    done(site, sent)
    ((down,),) = site.of(sent, "turned-down").values()
    until(lambda: site.of([down["id"]], "left"), "its retry is noted")
    left = site.of([down["id"]], "left")[down["id"]]
    paused = next(each["at"] for each in left if each["at"] > down["at"])
    granted = [body["granted"] for each in site.of(sent).values() for body in each]
    over = down["at"] + 3 * SECOND
    assert [at for at in granted if paused < at < over] == []
    assert max(granted) >= over, "the pause was seen"
    bodies = site.of(sent)
    assert {body["retries"] for each in bodies.values() for body in each} == {0}
    assert {id_: len(each) for id_, each in bodies.items()} == {id_: 1 + (id_ == down["id"]) for id_ in sent}
    assert sum(len(each) for each in site.of(sent, "delivery").values()) <= 4 * len(sent), "no storm"


def test_one_call_and_one_message_a_pause_however_often_a_task_is_turned_down(site: Site, service: Service) -> None:
    limiter_of(site).reset("calls")  # of turns that others had
    service.refusals.extend([1, 1, 1])
    result = calling.calls.delay(service.url("again"))
    done(site, [result.id])
    assert service.paths.count("/again") == 4
    assert len(site.of([result.id], "delivery")[result.id]) == 4
    assert result.get(timeout=30) == ""


def test_a_held_task_goes_back_once_and_is_held_again(site: Site, service: Service) -> None:
    service.refusals.append(2)
    sent = [calling.calls_plainly.apply_async((service.url("held"),), queue="held").id for _ in range(8)]
    done(site, sent)
    assert len(site.of(sent, "turned-down")) == 1
    deliveries = sum(len(each) for each in site.of(sent, "delivery").values())
    # Each would be two were they not held. Those that had been handed to the pool when the pause came are.
    assert len(sent) < deliveries < 2 * len(sent), "of a held one the pool hears at its turn"


def test_a_chord_goes_on_once_and_late_acknowledgement_makes_no_second_copy(site: Site, service: Service) -> None:
    service.refusals.extend([1, 1])
    urls = [service.url(f"chord/{number}") for number in range(4)]
    callback = calling.calls_again.si(service.url("chord/callback"))
    result = chord([calling.calls_again.s(url) for url in urls])(callback)
    assert result.get(timeout=30) == ""
    done(site, [result.id, *(each.id for each in result.parent.results)])
    paths = [path for path in service.paths if path.startswith("/chord/")]
    assert paths.count("/chord/callback") + len(urls) + 2 >= len(paths) >= 7
    assert len(site.of([result.id], "delivery")) == 1


@pytest.mark.parametrize("pool", ["threads", "gevent", "solo"])
def test_every_pool(client: str, service: Service, tmp_path: Path, pool: str) -> None:
    concurrency = () if pool == "solo" else ("-c", "4")
    with nodes(client, tmp_path, "-P", pool, "-Q", pool, *concurrency) as site:
        service.refusals.append(1)
        sent = [calling.calls.apply_async((service.url(pool),), queue=pool).id for _ in range(6)]
        costs = [0, 50, 100, 150, 1000, *range(10, 25)]
        settled = [calling.estimates.apply_async((cost,), queue=pool).id for cost in costs]
        done(site, [*sent, *settled])
        assert service.paths.count(f"/{pool}") == 7
        (limit,) = limiter_of(site).status("tokens").limits
        assert limit.tokens == pytest.approx(10_000 - sum(costs), abs=1)
        assert "Traceback" not in site.log()


@pytest.mark.parametrize("store", ["file", "redis"])
def test_processes_settle_what_their_tasks_cost(client: str, tmp_path: Path, store: str) -> None:
    costs = [0, 50, 100, 150, 1000, *range(10, 25)]
    queue, elsewhere = f"settled-{store}", {"store": client, "key_prefix": "settled"} if store == "redis" else {}
    with nodes(client, tmp_path, "-c", "2", "-Q", queue, count=2, **elsewhere) as site:
        limiter = limiter_of(site)
        limiter.reset("tokens")  # nobody knows what a new server held
        done(site, [calling.estimates.apply_async((cost,), queue=queue).id for cost in costs])
        (limit,) = limiter.status("tokens").limits
        assert limit.tokens == pytest.approx(10_000 - sum(costs), abs=1)
        ended = done(site, [calling.estimates_elsewhere.apply_async((cost,), queue=queue).id for cost in costs])
        (limit,) = limiter.status("tokens").limits
        assert limit.tokens == pytest.approx(10_000 - 2 * sum(costs), abs=1)
        assert {len(each["refused"]) for (each,) in ended.values()} == {1}, "who has not the body's context"


def test_a_debt_is_paid_by_those_who_come_later(site: Site) -> None:
    result = calling.estimates.delay(30_000)
    done(site, [result.id])
    decision = limiter_of(site).peek("tokens", 1)
    assert not decision
    assert decision.wait > 5_000 / 0.001


def test_the_log_has_one_warning_for_each_and_no_traceback(site: Site, service: Service) -> None:
    service.refusals.append(1)
    result = calling.calls.delay(service.url("logged"))
    done(site, [result.id])
    log = site.log()
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if result.id in line and "was turned down" in line]
    assert "was turned down (HTTPError: '429 Client Error" in line
