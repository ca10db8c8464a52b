"""Messages that anybody may have written: they end no worker, pass by no bucket, and stand in nobody's way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import app as tasks
import pytest
import redis
from celery.exceptions import InvalidTaskError
from celery.utils.nodenames import gethostname
from hostile import FAR, Forged, forgeries
from line import START, Line, declare, make_app
from servers import PATIENCE, Site

from tb_celery import ConfigurationError
from tb_celery.clock import FakeClock, SystemClock
from tb_celery.quota import quota_of
from tb_celery.reschedule import HEADER, LimitedRequest
from tb_celery.shadow import lot_of
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from pathlib import Path

CAPACITY, RATE = 5, 150


@pytest.mark.server
@pytest.mark.parametrize(
    ("pool", "mode"), [("prefork", "retry"), ("prefork", "hold"), ("solo", "hold"), ("threads", "hold")]
)
def test_a_worker_goes_on_and_the_quota_holds(client: str, tmp_path: Path, pool: str, mode: str) -> None:
    fast = {"core": {"capacity": CAPACITY, "refill_rate": RATE}, "full": {"capacity": 1000, "refill_rate": 1000}}
    settings = {
        "buckets": {**tasks.BUCKETS, **fast},
        "routes": {"app.routed": {"bucket": "core", "on_reject": mode}, "queue:forged*": "full"},
        "max_countdown": 1.5,
    }
    site = Site(tmp_path, client, settings=settings)
    queue = f"forged-{pool}-{mode}"
    late = [Forged(headers={HEADER: [turn, SystemClock().identity, 1, 1]}) for turn in (FAR, 2 * FAR - 1)]
    try:
        node = site.start("forged", "-P", pool, "-c", "2", "-Q", f"{queue},beside").ready()
        right: list[str] = []
        with redis.Redis.from_url(client) as broker:
            for number, forged in enumerate([*forgeries(), *late]):
                broker.lpush(queue, forged.payload("app.routed", queue))
                if number % 20 == 0:
                    right += [tasks.routed.apply_async(queue=queue).id, tasks.plain.apply_async(queue="beside").id]
        bodies = site.bodies(right)
        assert {len(each) for each in bodies.values()} == {1}
        # All that have run, the forged ones, too, have paid.
        granted = [body["granted"] for body in site.events("body") if "granted" in body]
        assert len(granted) > len(bodies)
        assert first_violation([(at, 1) for at in sorted(granted)], CAPACITY, RATE) is None
        assert tasks.app.control.ping([f"forged@{gethostname()}"], timeout=PATIENCE)
        assert node.stop() == 0
        for sign in ("no copy could be published", "Unrecoverable", "Connection to broker lost", "Error in timer"):
            assert sign not in node.read()
    finally:
        site.stop()
        tasks.app.control.purge()


# -- what is looked at


def made(line: Line, forged: Forged) -> LimitedRequest:
    """The request that a worker makes of a message."""
    task = declare(line.app, name="limited", bucket="one")
    task.delay()
    message = line.take()
    message.headers.update(forged.headers)
    message.delivery_info.update(forged.way)
    return LimitedRequest(message, app=line.app, task=task)


@pytest.fixture
def line() -> Line:
    clock = FakeClock(START)
    return Line(make_app(clock), clock)


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ({"shadow": [1]}, "TypeError: .*unhashable type"),
        ({"eta": {}}, "AttributeError: "),
        ({"headers": "x"}, "headers must be a dict, not 'x'"),
        ({"stamped_headers": 5}, "stamped_headers must be a list, not 5"),
        ({"stamped_headers": [[]]}, "TypeError: .*unhashable type"),
        ({"stamps": 5}, "stamps must be a dict, not 5"),
        ({"timelimit": 5}, "timelimit must be a list, not 5"),
        ({"timelimit": [5]}, r"timelimit must hold two numbers of seconds, or null, not \[5\]"),
        ({"timelimit": [5, True]}, "timelimit must hold two numbers of seconds, or null"),
    ],
)
def test_what_would_end_the_worker_is_refused_with_a_sentence(
    line: Line, headers: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidTaskError, match=sentence):
        made(line, Forged(headers=headers))


@pytest.mark.parametrize("name", ["exchange", "routing_key"])
@pytest.mark.parametrize("value", [5, {"x": 1}, ["x"], True])
def test_a_way_that_is_none_is_a_text_all_the_same(line: Line, name: str, value: object) -> None:
    delivered = made(line, Forged(way={name: value})).delivery_info
    assert delivered[name] == str(value)
    assert quota_of(line.app).rules(line.app.tasks["limited"], delivered)


@pytest.mark.parametrize(
    ("task_id", "text"), [("x", "x"), ("\ud800", "?"), (5, "5"), (True, "True"), ([1], "[1]"), ({"x": 1}, "{'x': 1}")]
)
def test_every_id_is_a_text_under_which_a_result_can_be_stored(line: Line, task_id: object, text: str) -> None:
    request = made(line, Forged(headers={"id": task_id}))
    assert request.id == request.request_dict["id"] == text
    request.execute()
    assert line.app.AsyncResult(text).state == "SUCCESS"


@pytest.mark.parametrize("task_id", ["", None, 0, [], {}])
def test_who_has_no_id_is_given_one(line: Line, task_id: object) -> None:
    request = made(line, Forged(headers={"id": task_id}))
    assert len(request.id) == 36
    assert request.id == request.request_dict["id"]


@pytest.mark.parametrize("task_id", ["", "\ud800", b"x", 5, -1.5, None, True])
def test_any_id_has_a_lot(task_id: object) -> None:
    assert 0 <= lot_of(task_id) < 100


# -- what the publisher tells of the way


def test_the_queue_that_the_worker_tells_is_the_one_that_is_left_alone() -> None:
    app = make_app(routes={"queue:mail": {"bucket": "one", "on_reject": "hold"}})
    told = {"queues": ("mail",), "exchange": "elsewhere", "routing_key": "elsewhere"}
    assert quota_of(app).common_queue(told, {"one"}) == "mail"
    assert quota_of(app).common_queue({**told, "queues": ("other",)}, {"one"}) is None
    alias = {**told, "queues": ("amq.gen", "mail")}
    assert quota_of(app).common_queue(alias, {"one"}) == "amq.gen"


@pytest.mark.parametrize("key", ["elsewhere", None, "", "mail"])
@pytest.mark.parametrize("exchange", ["", None])
def test_a_copy_goes_into_the_queue_that_it_came_by(key: str | None, exchange: str | None) -> None:
    app = make_app()
    app.conf.task_default_queue = "mail"
    told = {"queues": ("mail",), "exchange": exchange, "routing_key": key}
    assert quota_of(app).straight_to(told) == (None if key == "mail" else "mail")


def test_no_header_can_make_a_call_cheaper_than_it_may_be(line: Line) -> None:
    task = declare(line.app, name="limited", bucket="one")
    task.delay()
    message = line.take()
    message.headers["tb_celery_call"] = {"cost": -1}
    assert isinstance(line.deliver(message).info, ConfigurationError)
