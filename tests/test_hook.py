"""Rules for tasks without the base class, and what happens to the refused, with deliveries made by hand."""

from __future__ import annotations

import gc
import logging
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery, Task, chain, chord
from celery.concurrency import solo
from celery.worker.request import Request
from kombu import Exchange, Queue, binding
from kombu.common import Broadcast
from line import START, Line, Worker, declare, draw, logged, make_app, tokens

from tb_celery import ConfigurationError, Decision, RateLimitedTask, RateLimitExceeded, StoreError, install
from tb_celery.bucket import SECOND
from tb_celery.quota import quota_of
from tb_celery.reschedule import GRANT, HEADER, SOURCE, Grant, LimitedRequest
from tb_celery.rules import Rule, combined
from tb_celery.settings import load_settings
from tb_celery.stores.memory import MemoryStore
from tb_celery.worker import check_at_start, cover

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kombu import Message

    from tb_celery.clock import FakeClock


@pytest.fixture
def routed(clock: FakeClock) -> Callable[..., Line]:
    """A line of an application whose routes are given."""

    def make(routes: object = None, **settings: object) -> Line:
        return Line(make_app(clock, **({} if routes is None else {"routes": routes}), **settings), clock)

    return make


def plain(line: Line, function: Callable[..., object] | None = None, **options: object) -> Task:
    """A task without the base class."""
    return declare(line.app, function, **{"base": Task, "name": "proj.post", **options})


def started(line: Line) -> Line:
    Worker(line.app).start()
    return line


# -- routes


@pytest.mark.parametrize("pattern", ["proj.post", "proj.*", "*", "*post", "queue:*"])
def test_a_plain_task_that_a_route_names_draws_and_goes_back(routed: Callable[..., Line], pattern: str) -> None:
    line = routed({pattern: "one"})
    task = plain(line)
    started(line)
    assert line.send_and_deliver(task).state == "SUCCESS"
    outcome = line.send_and_deliver(task)
    assert (outcome.state, outcome.countdown) == ("RETRY", 2.0)
    line.clock.advance(2 * SECOND)
    assert line.deliver().state == "SUCCESS"


@pytest.mark.parametrize("pattern", ["proj.pos", "post", "other.*", "queue:other", "proj.post.*"])
def test_a_route_that_names_another_one_leaves_a_task_alone(routed: Callable[..., Line], pattern: str) -> None:
    line = routed({pattern: "one"})
    task = plain(line)
    started(line)
    assert [line.send_and_deliver(task).state for _ in range(3)] == ["SUCCESS"] * 3


def test_a_task_of_several_routes_draws_from_all_or_nothing(routed: Callable[..., Line]) -> None:
    line = routed({"proj.*": "five", "*.post": {"bucket": "one"}, "nobody.*": "other"})
    task = plain(line)
    started(line)
    assert line.send_and_deliver(task).state == "SUCCESS"
    assert line.send_and_deliver(task).state == "RETRY"
    assert (tokens(line.app, "five"), tokens(line.app, "one"), tokens(line.app, "other")) == (4, 0, 1)


def test_a_bucket_that_two_rules_name_is_drawn_from_once_at_the_higher_cost(routed: Callable[..., Line]) -> None:
    line = routed({"proj.*": "five", "proj.post": {"bucket": "five", "cost": 3}})
    task = declare(line.app, name="proj.post", bucket="five", cost=2)
    started(line)
    assert line.send_and_deliver(task).state == "SUCCESS"
    assert tokens(line.app, "five") == 2


def test_a_route_adds_to_the_rule_of_a_task_with_the_base_class(routed: Callable[..., Line]) -> None:
    line = routed({"proj.*": "one"})
    task = declare(line.app, name="proj.post", bucket="five")
    started(line)
    assert line.send_and_deliver(task).state == "SUCCESS"
    assert line.send_and_deliver(task).state == "RETRY"
    assert (tokens(line.app, "five"), tokens(line.app, "one")) == (4, 0)


def test_a_route_has_all_the_options_of_a_rule(routed: Callable[..., Line]) -> None:
    line = routed({"proj.*": {"bucket": "five", "cost": lambda text, _: len(text), "key": "user", "max_wait": 1}})
    task = plain(line, lambda text, user="x": text + user)
    started(line)
    assert line.send_and_deliver(task, "abc", "u").state == "SUCCESS"
    assert (tokens(line.app, "five", "u"), tokens(line.app, "five")) == (2, 5)
    outcome = line.send_and_deliver(task, "abcde", "u")
    assert (outcome.state, outcome.exceeded.bucket, outcome.exceeded.wait) == ("FAILURE", "five", 3.0)


def test_an_option_that_is_changed_while_a_worker_runs_counts_from_then_on(routed: Callable[..., Line]) -> None:
    line = routed()
    task = declare(line.app, lambda **_: None, name="proj.post", bucket="five")
    started(line)
    assert line.send_and_deliver(task).state == "SUCCESS"
    task.cost = 2
    assert line.send_and_deliver(task).state == "SUCCESS"
    assert tokens(line.app, "five") == 2
    task.bucket, task.cost, task.on_reject = {"one": 1, "other": 1}, 1, "fail"
    assert [line.send_and_deliver(task).state for _ in range(2)] == ["SUCCESS", "FAILURE"]
    task.bucket["other"] = 0.5
    assert line.send_and_deliver(task).exceeded.bucket == "one"
    line.clock.advance(2 * SECOND)
    assert line.send_and_deliver(task).state == "SUCCESS"
    assert tokens(line.app, "other") == 0.5
    task.bucket = None
    assert line.send_and_deliver(task).state == "SUCCESS"


def test_a_call_s_own_options_are_for_the_task_s_own_rule(routed: Callable[..., Line]) -> None:
    line = routed({"proj.*": "five"})
    task = declare(line.app, name="proj.post", bucket="one")
    started(line)
    assert line.send_and_deliver(task, key="tenant").state == "SUCCESS"
    assert (tokens(line.app, "one", "tenant"), tokens(line.app, "five", "tenant"), tokens(line.app, "five")) == (
        0,
        5,
        4,
    )


@pytest.mark.parametrize(
    ("options", "delivered"),
    [
        ({"queue": "mail"}, True),
        ({"exchange": "posts", "routing_key": "letters"}, True),
        ({"exchange": "topics", "routing_key": "post.air.de"}, True),
        ({"queue": "else"}, False),
    ],
)
def test_a_route_of_a_queue_is_found_however_the_message_came_to_it(
    routed: Callable[..., Line],
    options: dict[str, str],
    delivered: bool,  # noqa: FBT001
) -> None:
    line = routed({"queue:mail*": "one"})
    own = line.app.main  # the broker in memory is one for all tests
    line.app.conf.task_queues = [
        Queue(f"mail-{own}"),
        Queue(f"else-{own}"),
        Queue(f"mail-letters-{own}", Exchange(f"posts-{own}", "direct"), "letters"),
        Queue(f"mail-air-{own}", Exchange(f"topics-{own}", "topic"), "post.#"),
    ]
    with line.app.connection_for_write() as connection:
        for queue in line.app.amqp.queues.values():
            queue(connection.default_channel).declare()
    task = plain(line)
    started(line)
    draw(line.app, "one")
    task.apply_async(**{name: text if name == "routing_key" else f"{text}-{own}" for name, text in options.items()})
    message = next(found for queue in line.app.amqp.queues if (found := line.pop(queue)))
    assert line.deliver(message).state == ("RETRY" if delivered else "SUCCESS")


@pytest.mark.parametrize(
    ("pattern", "key", "matches"),
    [
        ("post.#", "post", True),
        ("post.#", "post.air.de", True),
        ("post.#", "postal", False),
        ("#.de", "de", True),
        ("#.de", "post.de", True),
        ("#.de", "code", False),
        ("post.*.de", "post.air.de", True),
        ("post.*.de", "post.de", False),
        ("post.*.de", "post.air.mail.de", False),
        ("#", "", True),
        ("a+b", "a+b", True),
        ("a+b", "aab", False),
    ],
)
def test_topics_are_matched_as_the_protocol_says(
    routed: Callable[..., Line],
    pattern: str,
    key: str,
    matches: bool,  # noqa: FBT001
) -> None:
    line = routed({"queue:mail": "one", "queue:rest": "other"})
    line.app.conf.task_queues = [
        Queue("mail", Exchange("topics", "topic"), pattern),
        Queue("rest", Exchange("topics", "topic"), "#"),
    ]
    delivered = {"exchange": "topics", "routing_key": key}
    assert quota_of(line.app).rules(plain(line), delivered) == [Rule("one")] * matches + [Rule("other")]


def test_what_a_broker_has_delayed_is_known_by_its_own_routing_key(routed: Callable[..., Line]) -> None:
    line = routed({"queue:mail": "one"})
    line.app.conf.task_queues = [Queue(name, Exchange("mail", "topic"), name) for name in ("mail", "letters")]
    delayed = {"exchange": "celery_delayed_27", "routing_key": ".".join(["0"] * 28 + ["mail"])}
    task = plain(line)
    assert quota_of(line.app).rules(task, delayed) == [Rule("one")]
    assert quota_of(line.app).rules(task, {**delayed, "routing_key": ".".join(["0"] * 28 + ["letters"])}) == []


# -- queues, as the worker's consumer tells of them


class Arrivals:
    """What a worker's consumer hands on of the messages that come to its queues."""

    def __init__(self, line: Line, *queues: Queue) -> None:
        self.line = line
        for queue in queues:
            line.app.amqp.queues.select_add(queue)

    def of(self, task: Task, *added: Queue, **options: object) -> dict[str, list[Message]]:
        """Send ``task`` once; what comes by each queue, and by those ``added`` when the worker is running."""
        found: dict[str, list[Message]] = {}

        def note(message: Message) -> None:
            found.setdefault(message.delivery_info[SOURCE].names[0], []).append(message)

        with self.line.app.connection_for_read() as connection:
            consumer = self.line.app.amqp.TaskConsumer(connection.default_channel, on_message=note)
            with consumer:
                for queue in added:
                    consumer.add_queue(queue)
                    consumer.consume()
                task.apply_async(**options)
                with suppress(TimeoutError):
                    while True:
                        connection.drain_events(timeout=0.01)
            for message in [each for messages in found.values() for each in messages]:
                message.ack()
        return found


def queue_names(line: Line, *names: str) -> tuple[str, ...]:
    """Names of queues that no other test has: the broker in memory is one for all."""
    return tuple(f"{name}-{line.app.main}" for name in names)


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])
def test_of_two_queues_that_get_the_same_messages_a_route_takes_the_one_it_names(
    routed: Callable[..., Line], kind: str
) -> None:
    line = routed({"queue:mail-*": "one"})
    mail, other, exchange = queue_names(line, "mail", "other", "posts")
    task = plain(line)
    started(line)
    draw(line.app, "one")
    arrivals = Arrivals(line, *(Queue(name, Exchange(exchange, kind), "letters") for name in (mail, other)))
    found = arrivals.of(task, exchange=exchange, routing_key="letters")
    assert [line.deliver(found[name][0]).state for name in (mail, other)] == ["RETRY", "SUCCESS"]
    # The copy goes to that one alone: the other has had the task.
    copy = line.take(mail)
    assert (copy.delivery_info["exchange"], copy.delivery_info["routing_key"]) == ("", mail)
    assert line.pop(mail) is None
    assert line.pop(other) is None


def test_a_copy_takes_the_way_of_its_message_where_that_leads_to_its_queue_alone(
    routed: Callable[..., Line],
) -> None:
    line = routed({"queue:mail-*": "one"})
    mail, other, exchange = queue_names(line, "mail", "other", "posts")
    task = plain(line)
    started(line)
    draw(line.app, "one")
    arrivals = Arrivals(line, *(Queue(name, Exchange(exchange, "topic"), name) for name in (mail, other)))
    ((_, (message,)),) = arrivals.of(task, exchange=exchange, routing_key=mail).items()
    assert line.deliver(message).state == "RETRY"
    copy = line.take(mail)
    assert (copy.delivery_info["exchange"], copy.delivery_info["routing_key"]) == (exchange, mail)


def test_a_queue_that_was_added_to_a_running_worker_and_one_with_an_alias_have_their_routes(
    routed: Callable[..., Line],
) -> None:
    line = routed({"queue:late-*": "one", "queue:news-*": "one"})
    late, news, exchange = queue_names(line, "late", "news", "posts")
    task = plain(line)
    started(line)
    draw(line.app, "one")
    arrivals = Arrivals(line, Broadcast(news, exchange=Exchange(exchange, "fanout")))
    found = arrivals.of(task, Queue(late, Exchange(f"{late}.x"), "anything"), exchange=exchange, routing_key="any")
    ((name, (message,)),) = found.items()
    assert name.startswith("bcast.")
    assert line.deliver(message).state == "RETRY"
    found = arrivals.of(
        task, Queue(late, Exchange(f"{late}.x"), "anything"), exchange=f"{late}.x", routing_key="anything"
    )
    assert line.deliver(found[late][0]).state == "RETRY"


def test_the_calls_of_a_map_are_subject_to_the_route_of_the_queue_that_it_came_by(
    routed: Callable[..., Line], clock: FakeClock
) -> None:
    line = routed({"queue:late-*": "one"})
    (late,) = queue_names(line, "late")
    task = plain(line, lambda number: number)
    started(line)
    line.app.set_current()
    arrivals = Arrivals(line)
    many = task.map(range(3))
    found = arrivals.of(many, Queue(late, Exchange(f"{late}.x"), "any"), exchange=f"{late}.x", routing_key="any")
    assert line.deliver(found[late][0]).info == [0, 1, 2]
    assert clock.now() == START + 4 * SECOND


def test_a_message_cannot_say_which_queue_it_came_by(routed: Callable[..., Line]) -> None:
    seen: list[object] = []
    line = routed({"queue:*": "one"})
    task = plain(line, lambda self: seen.append(self.request.delivery_info.get("queues")), bind=True)
    started(line)
    for state in ("SUCCESS", "RETRY"):
        task.apply_async(headers={"queues": ["nowhere"], "delivery_info": {"queues": ["nowhere"]}})
        message = line.take()
        message.delivery_info |= {"queues": ["nowhere"], SOURCE: [["nowhere"], True]}  # which on Redis its sender tells
        assert line.deliver(message).state == state
    assert seen == [None]


@pytest.mark.parametrize(
    ("delivered", "names"),
    [
        ({"exchange": "", "routing_key": "mail"}, ["mail"]),
        ({"exchange": "posts", "routing_key": "b"}, ["mail"]),
        ({"exchange": "posts", "routing_key": "c"}, ["mail", "copies"]),
        ({"exchange": "all", "routing_key": "b"}, ["fan", "news"]),
        ({"exchange": "forms", "routing_key": ""}, ["forms"]),
        # By an exchange that gives what it cannot deliver to another one, or is bound to another one.
        ({"exchange": "unheard-of", "routing_key": "b"}, ["mail", "copies", "fan", "forms", "news"]),
        ({"exchange": "posts", "routing_key": "d"}, ["mail", "copies", "fan", "forms", "news"]),
    ],
)
def test_where_nobody_tells_the_queue_every_one_counts_that_a_message_may_have_come_by(
    routed: Callable[..., Line], delivered: dict[str, str], names: list[str]
) -> None:
    line = routed({f"queue:{name}": {"bucket": "five", "cost": n} for n, name in enumerate(QUEUES, 1)})
    posts, everybody = Exchange("posts", "direct"), Exchange("all", "fanout")
    line.app.conf.task_queues = [
        Queue("mail", bindings=[binding(posts, routing_key=key) for key in "abc"]),
        Queue("copies", posts, "c"),
        Queue("fan", everybody),
        Queue("forms", Exchange("forms", "headers"), bindings=[]),
        Broadcast("news", exchange=everybody),
    ]
    found = [rule.cost for rule in quota_of(line.app).rules(plain(line), delivered)]
    assert [QUEUES[int(cost) - 1] for cost in found if not callable(cost)] == names


QUEUES = ["mail", "copies", "fan", "forms", "news"]


def test_celery_s_own_tasks_never_draw(routed: Callable[..., Line]) -> None:
    line = routed({"*": "one", "queue:*": "one"})
    started(line)
    check_at_start(line.app)
    backend_cleanup = line.app.tasks["celery.backend_cleanup"]
    assert quota_of(line.app).rules(backend_cleanup, {"routing_key": line.app.main}) == []
    assert not hasattr(type(backend_cleanup), "tb_celery_rule")


# -- what is covered


@pytest.mark.parametrize("options", [{"base": RateLimitedTask, "bucket": "one"}, {"base": Task}])
def test_whoever_takes_such_a_name_is_told_that_it_is_not_limited(
    clock: FakeClock, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    app = make_app(clock, routes={"*": "one"})
    declare(app, name="celery.mine", **options)
    check_at_start(app)
    (warning,) = logged(caplog)
    assert warning == (
        "WARNING",
        "task celery.mine is named as Celery's own are, which draw nothing: give it another name",
    )


def test_a_task_declared_after_the_start_is_covered(routed: Callable[..., Line]) -> None:
    line = started(routed({"proj.*": "one"}))
    task = plain(line)
    assert [line.send_and_deliver(task).state for _ in range(2)] == ["SUCCESS", "RETRY"]


def test_covering_twice_asks_once(routed: Callable[..., Line]) -> None:
    line = routed({"proj.*": "five"})
    task = plain(line)
    for _ in range(3):
        cover(line.app)
        started(line)
    assert line.send_and_deliver(task).state == "SUCCESS"
    assert tokens(line.app, "five") == 4
    assert sum(type(each).__name__ == "_Newcomers" for each in line.app.annotations) == 1


def test_the_receivers_outlive_the_garbage_collection_of_whoever_installed_them(routed: Callable[..., Line]) -> None:
    line = routed({"proj.*": "one"})

    def inside() -> None:
        install(line.app)

    inside()
    gc.collect()
    task = plain(line)
    started(line)
    assert [line.send_and_deliver(task).state for _ in range(2)] == ["SUCCESS", "RETRY"]


def test_installed_it_covers_eager_tasks_without_a_worker(clock: FakeClock) -> None:
    app = Celery("eager", broker="memory://", set_as_current=False)
    install(app)
    app.conf.update(
        task_always_eager=True,
        tb_celery={"store": "memory", "buckets": {"five": {"capacity": 5, "refill_rate": 1}}, "routes": {"*": "five"}},
    )

    @app.task(shared=False, name="post")
    def post() -> str:
        return "ran"

    app.finalize()
    quota_of(app).limiter.store = MemoryStore(clock)
    assert [post.delay().get() for _ in range(7)] == ["ran"] * 7
    assert clock.now() == START + 2 * SECOND


def test_a_task_s_own_before_start_and_call_still_run(routed: Callable[..., Line]) -> None:
    seen: list[str] = []

    class Own(Task):
        abstract = True

        def before_start(self, *_: object) -> None:
            seen.append("before")

        def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            seen.append("call")
            return super().__call__(*args, **kwargs)

    line = routed({"proj.*": "one"})
    task = plain(line, lambda: seen.append("body"), base=Own)
    started(line)
    assert [line.send_and_deliver(task).state for _ in range(2)] == ["SUCCESS", "RETRY"]
    assert seen == ["before", "call", "body"]


def test_a_task_s_own_request_class_is_kept(routed: Callable[..., Line]) -> None:
    class Own(Request):
        mine = True

    line = routed({"proj.*": "one"})
    task = plain(line, Request=Own)
    started(line)
    assert issubclass(task.Request, LimitedRequest)
    assert issubclass(task.Request, Own)
    assert [line.send_and_deliver(task, serializer="pickle").state for _ in range(2)] == ["SUCCESS", "RETRY"]
    assert line.take().content_type == "application/x-python-serialize"


def test_the_setting_task_annotations_may_give_a_plain_task_a_bucket(routed: Callable[..., Line]) -> None:
    line = routed()
    line.app.conf.task_annotations = {"proj.post": {"bucket": "five", "cost": 5}}
    task = plain(line)
    started(line)
    assert [line.send_and_deliver(task).state for _ in range(2)] == ["SUCCESS", "RETRY"]


def test_a_bucket_without_the_base_class_counts_where_it_is_declared(
    routed: Callable[..., Line], caplog: pytest.LogCaptureFixture
) -> None:
    line = routed()
    task = plain(line, bucket="one")
    store = plain(line, name="proj.upload", bucket="s3-photos")
    with caplog.at_level(logging.WARNING, "tb_celery"):
        started(line)
    assert [line.send_and_deliver(task).state for _ in range(2)] == ["SUCCESS", "RETRY"]
    line.take()
    assert [line.send_and_deliver(store).state for _ in range(2)] == ["SUCCESS"] * 2
    assert [
        text.startswith("task proj.upload has bucket='s3-photos' and is no RateLimitedTask")
        for _, text in logged(caplog)
    ] == [True]


def test_turned_off_nobody_asks(routed: Callable[..., Line]) -> None:
    line = routed({"proj.*": "one"}, enabled=False)
    task, limited = plain(line), declare(line.app, bucket="one")
    started(line)
    assert [line.send_and_deliver(each).state for each in [task, limited] * 2] == ["SUCCESS"] * 4


# -- at start


@pytest.mark.parametrize(
    ("routes", "sentence"),
    [
        (
            {"proj.*": "fvie"},
            "route 'proj.*': bucket 'fvie' is not declared in the setting buckets; did you mean 'five'?",
        ),
        ({"queue:x": "fvie"}, "route 'queue:x': bucket 'fvie' is not declared"),
        ({"proj.*": {"bucket": "five", "cost": 6}}, "route 'proj.*': bucket 'five': cost 6 is above capacity 5"),
        (
            {"proj.*": {"bucket": "five", "key": "usr"}},
            "route 'proj.*': task 'proj.post': key 'usr' is not the name of",
        ),
    ],
)
def test_a_route_that_cannot_work_stops_the_worker(
    routed: Callable[..., Line], routes: dict[str, object], sentence: str
) -> None:
    line = routed(routes)
    plain(line, lambda user: user)
    with pytest.raises(SystemExit) as end:
        started(line)
    assert str(end.value).startswith(f"tb_celery: {sentence}")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"routes": ["five"]}, "setting routes must be a dict as in {"),
        ({"routes": {"": "five"}}, "route '' must be a task's name, a glob, or such a one of a queue after 'queue:'"),
        ({"routes": {"queue:": "five"}}, "route 'queue:' must be a task's name"),
        ({"routes": {5: "five"}}, "route 5 must be a task's name"),
        ({"routes": {"a": None}}, "route 'a' names no bucket, as in {"),
        ({"routes": {"a": {"cost": 2}}}, "route 'a' names no bucket"),
        ({"routes": {"a": 5}}, "route 'a': bucket must be a name, a list of names or a dict of costs by name, not 5"),
        (
            {"routes": {"a": {"bucket": "five", "buckets": 1}}},
            "route 'a': option 'buckets' is not known, did you mean 'b",
        ),
        ({"routes": {"a": {"bucket": "five", "on_reject": "drpo"}}}, 'route \'a\': on_reject must be "retry", "hold"'),
        ({"on_reject": "dorp"}, 'setting on_reject must be "retry", "hold", "fail" or "drop", or a dict of those by'),
        ({"on_reject": {"five": 5}}, "setting on_reject must be"),
        ({"enabled": "no"}, "setting enabled must be true or false, not 'no'"),
        ({"max_held": 0}, "setting max_held must be a number of tasks above 0, such as 1000, not 0"),
        ({"max_eager_wait": "1m"}, "setting max_eager_wait must be a number of seconds above 0"),
    ],
)
def test_settings_that_are_wrong_are_named(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings({"buckets": {"five": {"capacity": 5, "refill_rate": 1}}, **settings})
    assert str(refused.value).startswith(sentence)


def test_routes_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TB_CELERY_ROUTES", '{"proj.*": {"bucket": "five", "on_reject": "hold"}}')
    monkeypatch.setenv("TB_CELERY_ON_REJECT", "drop")
    monkeypatch.setenv("TB_CELERY_ENABLED", "false")
    monkeypatch.setenv("TB_CELERY_MAX_HELD", "7")
    found = load_settings({"routes": {"other.*": "one"}})
    assert found.routes == {"proj.*": Rule("five", on_reject="hold")}
    assert (found.on_reject, found.enabled, found.max_held) == ("drop", False, 7)


def test_the_start_tells_who_draws_from_what(routed: Callable[..., Line], caplog: pytest.LogCaptureFixture) -> None:
    line = routed({"proj.*": ["one", "five"], "queue:mail": "other"})
    plain(line)
    declare(line.app, name="zoo", bucket="fast")
    with caplog.at_level(logging.INFO, "tb_celery"):
        started(line)
    ((level, text),) = logged(caplog)
    assert level == "INFO"
    assert text.splitlines()[1:] == ["  . proj.post: five, one", "  . zoo: fast", "  . queue:mail: other"]


def test_turned_off_the_start_says_nothing_of_it(routed: Callable[..., Line], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tb_celery"):
        started(routed({"proj.*": "one", "queue:mail": "other"}, enabled=False))
    assert caplog.records == []


def test_memory_that_nothing_bounds_is_warned_of(routed: Callable[..., Line], caplog: pytest.LogCaptureFixture) -> None:
    line = routed({"proj.*": "one"})
    line.app.conf.worker_eta_task_limit = None
    with caplog.at_level(logging.WARNING, "tb_celery"):
        started(line)
    ((_, text),) = logged(caplog)
    assert "worker_eta_task_limit" in text


def test_a_server_that_is_away_stops_no_worker_unless_that_is_a_failure(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    away = f"unix://{tmp_path}/none.sock"
    app = make_app(None, store=away)
    declare(app, bucket="five")
    with caplog.at_level(logging.WARNING, "tb_celery"):
        check_at_start(app)
    ((_, text),) = logged(caplog)
    assert "cannot be reached" in text
    strict = make_app(None, store=away, on_store_error="fail")
    declare(strict, bucket="five")
    with pytest.raises(StoreError, match="cannot be reached"):
        check_at_start(strict)


def test_a_quota_in_memory_for_several_processes_is_warned_of(
    routed: Callable[..., Line], caplog: pytest.LogCaptureFixture
) -> None:
    line = routed({"proj.*": "one"})
    worker = Worker(line.app)
    worker.pool = SimpleNamespace(uses_semaphore=True, num_processes=4)
    with caplog.at_level(logging.WARNING, "tb_celery"):
        worker.start()
    ((_, text),) = logged(caplog)
    assert "each of this worker's 4 processes has a quota of its own" in text


@pytest.mark.parametrize(
    ("pool", "warns"), [("threads", True), ("gevent", True), ("eventlet", True), ("solo", False), ("prefork", False)]
)
def test_pools_that_do_not_wake_celerys_loop_are_warned_of_where_it_does_not_prefetch(
    routed: Callable[..., Line], caplog: pytest.LogCaptureFixture, pool: str, *, warns: bool
) -> None:
    line = routed({"proj.*": "one"}, store="file")
    line.app.conf.worker_disable_prefetch = True
    worker = Worker(line.app, SimpleNamespace(num_processes=3))
    if pool == "solo":
        worker.pool = solo.TaskPool()
    else:
        same = {"is_green": pool in {"gevent", "eventlet"}, "body_can_be_buffer": pool == "threads"}
        worker.pool = SimpleNamespace(num_processes=3, uses_semaphore=pool == "prefork", **same)
    with caplog.at_level(logging.WARNING, "tb_celery"):
        worker.start()
    texts = [text for _, text in logged(caplog) if "worker_disable_prefetch" in text]
    assert len(texts) == warns
    assert all("while its 3 places are taken" in text for text in texts)


def test_a_plain_task_with_celery_s_own_rate_limit_is_warned_of(
    routed: Callable[..., Line], caplog: pytest.LogCaptureFixture
) -> None:
    line = routed({"proj.*": "one"})
    plain(line, rate_limit="1/s")
    with caplog.at_level(logging.WARNING, "tb_celery"):
        started(line)
    ((_, text),) = logged(caplog)
    assert text.startswith("task proj.post has a bucket (one) and Celery's own rate_limit (1/s)")


@pytest.mark.parametrize(("consumed", "warns"), [("mail", True), ("letters", False)])
def test_so_is_one_that_only_a_queue_of_this_worker_limits(
    routed: Callable[..., Line],
    caplog: pytest.LogCaptureFixture,
    consumed: str,
    warns: bool,  # noqa: FBT001
) -> None:
    line = routed({"queue:mail": "one"})
    line.app.conf.task_queues = [Queue("mail"), Queue("letters")]
    line.app.amqp.queues.select([consumed])
    plain(line, rate_limit="1/s")
    plain(line, name="proj.other")
    with caplog.at_level(logging.WARNING, "tb_celery"):
        started(line)
    sentence = (
        "task proj.post has Celery's own rate_limit (1/s), and a bucket (one) where it comes by a queue that has one:"
        " both apply, the former in each worker"
    )
    assert [text for _, text in logged(caplog)] == [sentence] * warns


# -- what happens to the refused


def test_fail_fails_at_once_and_books_no_turn(routed: Callable[..., Line]) -> None:
    line = routed({"proj.*": {"bucket": "one", "on_reject": "fail"}})
    task = plain(line)
    started(line)
    draw(line.app, "one")
    outcome = line.send_and_deliver(task)
    assert (outcome.state, outcome.exceeded.bucket, outcome.exceeded.wait) == ("FAILURE", "one", 2.0)
    assert line.pop() is None
    assert quota_of(line.app).limiter.status("one").limits[0].waiting == 0


def test_drop_ignores_and_says_so(routed: Callable[..., Line], caplog: pytest.LogCaptureFixture) -> None:
    line = routed()
    task = declare(line.app, lambda: pytest.fail("must not run"), name="post", bucket="one", on_reject="drop")
    draw(line.app, "one")
    with caplog.at_level(logging.INFO, "tb_celery"):
        assert line.send_and_deliver(task, task_id="dropped").state == "PENDING"
    assert logged(caplog) == [("INFO", "post[dropped] is dropped: bucket 'one' is over quota")]
    assert line.pop() is None
    assert quota_of(line.app).limiter.status("one").limits[0].waiting == 0


def test_what_is_dropped_ends_its_chain_and_its_chord(routed: Callable[..., Line]) -> None:
    line = routed()
    post = declare(line.app, name="post", bucket="one", on_reject="drop")
    done = declare(line.app, name="done")
    chord([post.s(), post.s()])(done.si())
    assert [line.deliver().state for _ in range(2)] == ["SUCCESS", "PENDING"]
    chain(post.si(), done.si())()
    assert line.deliver().state == "PENDING"
    assert line.pop() is None


@pytest.mark.parametrize(("choice", "state"), [("retry", "RETRY"), ("fail", "FAILURE"), ("drop", "PENDING")])
def test_a_function_decides(routed: Callable[..., Line], choice: str, state: str) -> None:
    seen: list[Decision] = []

    def decide(decision: Decision) -> str:
        seen.append(decision)
        return choice

    line = routed()
    task = declare(line.app, bucket="one", on_reject=decide)
    assert line.send_and_deliver(task).state == "SUCCESS"
    assert seen == []
    assert line.send_and_deliver(task).state == state
    assert [(decision.bucket, decision.wait) for decision in seen] == [("one", 2.0)]


def test_what_decides_can_be_any_object_that_can_be_called(routed: Callable[..., Line]) -> None:
    @dataclass
    class Patience:
        longest: float

        def __call__(self, decision: Decision) -> str:
            return "retry" if decision.wait <= self.longest else "fail"

    line = routed()
    patient, hasty = (declare(line.app, name=f"after{s}", bucket="one", on_reject=Patience(s)) for s in (3, 1))
    draw(line.app, "one")
    assert line.send_and_deliver(hasty).state == "FAILURE"
    assert line.send_and_deliver(patient).state == "RETRY"


def test_a_task_that_is_dropped_after_it_was_sent_back_is_pending_again(routed: Callable[..., Line]) -> None:
    line, choices = routed(), iter(["retry", "drop"])
    task = declare(line.app, bucket="one", on_reject=lambda _: next(choices))
    draw(line.app, "one")
    assert line.send_and_deliver(task).state == "RETRY"
    line.clock.advance(2 * SECOND)
    draw(line.app, "one")
    line.clock.advance(SECOND // 10)
    outcome = line.deliver()
    assert (outcome.state, outcome.info) == ("PENDING", None)
    assert line.pop() is None


@pytest.mark.parametrize("nonsense", ["maybe", ["retry"]])
def test_a_function_that_decides_nonsense_fails_the_task_with_a_sentence(
    routed: Callable[..., Line], nonsense: object
) -> None:
    line = routed()
    task = declare(line.app, name="post", bucket="one", on_reject=lambda _: nonsense)
    draw(line.app, "one")
    outcome = line.send_and_deliver(task)
    assert str(outcome.info) == (
        f'task \'post\': its on_reject function must answer "retry", "fail" or "drop", not {nonsense!r}'
    )


def test_what_a_task_says_is_stronger_than_its_bucket_s_and_that_than_the_common_one(
    routed: Callable[..., Line],
) -> None:
    line = routed({"a.*": {"bucket": "one", "on_reject": "retry"}, "*": "one"}, on_reject={"one": "fail"})
    tasks = [plain(line, name=name) for name in ("a.post", "b.post")]
    started(line)
    draw(line.app, "one")
    assert line.send_and_deliver(tasks[1]).state == "FAILURE"
    assert line.send_and_deliver(tasks[0]).state == "RETRY"


def test_of_several_buckets_the_one_that_refuses_decides(routed: Callable[..., Line]) -> None:
    line = routed({"*": ["one", "other"]}, on_reject={"one": "fail", "other": "retry"})
    task = plain(line)
    started(line)
    draw(line.app, "other")
    assert line.send_and_deliver(task).state == "RETRY"
    line.clock.advance(3600 * SECOND)
    draw(line.app, "one")
    assert line.deliver().state == "FAILURE"


@pytest.mark.parametrize(
    ("own", "routes", "state"),
    [
        # The task's own rule, then the routes in their order; whoever says nothing is passed over.
        ("drop", {"*": "fail", "proj.*": "retry"}, "PENDING"),
        (None, {"*": "fail", "proj.*": "drop"}, "FAILURE"),
        (None, {"proj.*": "drop", "*": "fail"}, "PENDING"),
        (None, {"*": None, "proj.*": "fail"}, "FAILURE"),
        (None, {"*": None, "proj.*": None}, "RETRY"),
    ],
)
def test_of_several_rules_for_one_bucket_the_first_that_says_something_decides(
    routed: Callable[..., Line], own: str | None, routes: dict[str, str | None], state: str
) -> None:
    line = routed({pattern: {"bucket": "one", "on_reject": each} for pattern, each in routes.items()})
    task = declare(line.app, name="proj.post", bucket="one", on_reject=own)
    started(line)
    draw(line.app, "one")
    assert line.send_and_deliver(task).state == state


def test_that_is_so_whichever_of_their_keys_refuses(routed: Callable[..., Line]) -> None:
    line = routed({"pro*": {"bucket": "one", "key": "user", "on_reject": "fail"}, "proj.*": "one"}, on_reject="drop")
    task = plain(line, lambda user: user)
    started(line)
    draw(line.app, "one")
    assert line.send_and_deliver(task, "alice").state == "FAILURE"


# -- many calls in one delivery


def test_map_starmap_and_chunks_wait_in_line_for_each_call(routed: Callable[..., Line], clock: FakeClock) -> None:
    line = routed({"proj.*": "five"})
    task, own = plain(line, lambda *numbers: sum(numbers)), declare(line.app, lambda n: n, name="own", bucket="five")
    started(line)
    line.app.set_current()
    task.map(range(7)).apply_async()
    assert line.deliver().state == "SUCCESS"
    assert clock.now() == START + 2 * SECOND
    task.starmap([(1, 2)] * 3).apply_async()
    assert line.deliver().info == [3, 3, 3]
    assert clock.now() == START + 5 * SECOND
    own.chunks([(n,) for n in range(4)], 4).apply_async()
    assert line.deliver().info == [0, 1, 2, 3]
    assert clock.now() == START + 9 * SECOND


@pytest.mark.parametrize("on_reject", ["fail", "drop"])
def test_a_call_of_a_map_that_may_not_wait_fails_the_map(routed: Callable[..., Line], on_reject: str) -> None:
    line = routed({"proj.*": {"bucket": "five", "on_reject": on_reject}})
    task = plain(line, lambda number: number)
    started(line)
    line.app.set_current()
    task.map(range(7)).apply_async()
    outcome = line.deliver()
    assert (outcome.state, outcome.exceeded.bucket) == ("FAILURE", "five")


def test_a_direct_call_draws_nothing_and_an_inner_one_draws_no_second_time(routed: Callable[..., Line]) -> None:
    def body(self: Task, depth: int) -> int:
        return depth if depth == 2 else self(depth + 1)

    line = routed({"proj.*": "five"})
    task, own = plain(line, body, bind=True), declare(line.app, body, name="own", bind=True, bucket="five")
    started(line)
    assert [task(0), own(0), task(0)] == [2, 2, 2]
    assert tokens(line.app, "five") == 5
    assert [line.send_and_deliver(each, 0).info for each in (task, own)] == [2, 2]
    assert tokens(line.app, "five") == 3


def test_a_chain_through_limited_and_plain_tasks(routed: Callable[..., Line]) -> None:
    line = routed({"proj.*": "one"})
    first, second = plain(line, lambda: 1), plain(line, lambda n: n + 1, name="proj.second")
    started(line)
    chain(first.s(), second.s()).apply_async()
    assert line.deliver().info == 1
    assert line.deliver().state == "RETRY"
    line.clock.advance(2 * SECOND)
    assert line.deliver().info == 2
    assert line.pop() is None


# -- eager


def test_an_eager_task_waits_no_longer_than_the_setting_says(routed: Callable[..., Line], clock: FakeClock) -> None:
    line = routed(max_eager_wait=1.5)
    task = declare(line.app, bucket="one")
    assert task.apply().state == "SUCCESS"
    outcome = task.apply()
    assert isinstance(outcome.result, RateLimitExceeded)
    clock.advance(SECOND)
    assert task.apply().state == "SUCCESS"


@pytest.mark.parametrize(("on_reject", "state"), [("fail", "FAILURE"), ("drop", "IGNORED")])
def test_eager_tasks_fail_and_drop_as_others_do(routed: Callable[..., Line], on_reject: str, state: str) -> None:
    line = routed()
    task = declare(line.app, bucket="one", on_reject=on_reject)
    assert [task.apply().state for _ in range(2)] == ["SUCCESS", state]


# -- tokens taken before


def granted(line: Line, task: Task, age: float) -> LimitedRequest:
    """A request whose tokens were taken ``age`` seconds ago."""
    task.apply_async()
    request: LimitedRequest = task.Request(line.take(), app=line.app, task=task)
    store = quota_of(line.app).limiter.store
    request.grant(Grant(store.clock.identity, quota_of(line.app).limiter.acquire("one")))
    line.clock.advance(int(age * SECOND))
    return request


@pytest.mark.parametrize("age", [0.05, -0.05])
def test_tokens_taken_a_moment_ago_are_not_taken_again(routed: Callable[..., Line], age: float) -> None:
    """What a pool process has for a server's clock may be a little behind what the worker has."""
    seen: list[object] = []
    line = routed()

    def body(self: Task) -> None:
        seen.append((bool(self.request.tb_celery), self.request.headers, vars(self.request).get(GRANT)))

    task = declare(line.app, body, bind=True, bucket="one")
    granted(line, task, age).execute()
    assert seen == [(True, None, None)]


def test_tokens_taken_long_ago_count_no_more(routed: Callable[..., Line]) -> None:
    line = routed()
    request = granted(line, declare(line.app, lambda: pytest.fail("must not run"), bucket="one"), 0.25)
    request.execute()
    assert line.app.AsyncResult(request.id).state == "RETRY"


@pytest.mark.parametrize("forged", [[1, True], {"clock": 1}, "yes", True, [1, [START, START, 1, 1, 1]]])
def test_a_message_cannot_bring_tokens(routed: Callable[..., Line], forged: object) -> None:
    line = routed()
    task = declare(line.app, lambda: pytest.fail("must not run"), bucket="one")
    draw(line.app, "one")
    assert line.send_and_deliver(task, headers={GRANT: forged}).state == "RETRY"
    assert line.take().headers.keys() & {GRANT, HEADER} == {HEADER}


# -- queues that are left alone


MAIL = {"exchange": "", "routing_key": "mail"}


@pytest.mark.parametrize(
    ("options", "common"),
    [
        ({}, "mail"),
        ({"bucket": "five"}, "mail"),
        ({"bucket": "five", "max_wait": 5}, None),
        ({"bucket": "five", "on_reject": "fail"}, None),
        ({"bucket": "five", "on_reject": "drop"}, None),
        ({"bucket": "one", "on_reject": "retry"}, None),
        ({"bucket": "five", "on_reject": lambda _: "retry"}, None),
    ],
)
def test_a_queue_is_common_where_every_task_would_be_held(
    routed: Callable[..., Line], options: dict[str, object], common: str | None
) -> None:
    line = routed({"queue:mail": {"bucket": "one", "on_reject": "hold"}})
    plain(line)
    declare(line.app, None, name="proj.other", base=RateLimitedTask if options else Task, **options)
    quota = quota_of(started(line).app)
    assert quota.common_queue(MAIL, {"one"}) == common
    assert quota.common_queue(MAIL, {"one", "five"}) is None


@pytest.mark.parametrize("option", [{"max_wait": 5}, {"on_reject": "fail"}, {"key": "user"}])
def test_a_queue_whose_route_holds_nobody_or_not_all_together_is_not_common(
    routed: Callable[..., Line], option: dict[str, object]
) -> None:
    line = routed({"queue:mail": {"bucket": "one", "on_reject": "hold", **option}})
    plain(line)
    assert quota_of(started(line).app).common_queue(MAIL, {"one"}) is None


# -- rules


def test_charges_of_several_rules_are_put_together(routed: Callable[..., Line]) -> None:
    limiter = quota_of(routed().app).limiter
    mixed = [
        *limiter.charges("five", 2, key="b"),
        *limiter.charges("one"),
        *limiter.charges("five", 1, key="b"),
        *limiter.charges("five", 3),
    ]
    assert [(charge.bucket, charge.key, charge.cost // SECOND) for charge in combined(mixed)] == [
        ("five", None, 3),
        ("five", "b", 2),
        ("one", None, 2),
    ]


def test_an_attribute_of_a_class_of_ones_own_that_would_be_right_as_an_option_is_taken_for_one() -> None:
    with pytest.raises(ConfigurationError, match=r"task 'Post' has no option 'buckets'; did you mean 'bucket'\?"):

        class Post(RateLimitedTask):
            buckets = ("five", "one")

    with pytest.raises(ConfigurationError, match=r"task 'other' has no option 'maxwait'; did you mean 'max_wait'\?"):

        class Other(RateLimitedTask):
            name = "other"
            bucket = "five"
            maxwait = 5


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("maxwait", "did you mean 'max_wait'?"),
        ("cots", "did you mean 'cost'?"),
        ("kye", "did you mean 'key'?"),
        ("costs", "did you mean 'cost'?"),
        ("keys", "did you mean 'key'?"),
        ("bucket", "only its task has a bucket"),
        ("on_reject", "only its task has a on_reject"),
    ],
)
def test_a_misspelt_option_of_a_call_is_refused(routed: Callable[..., Line], option: str, hint: str) -> None:
    line = routed()
    task = declare(line.app, name="post", bucket="five")
    with pytest.raises(ConfigurationError) as refused:
        task.apply_async(**{option: 5})
    assert str(refused.value) == f"task 'post': a call has no option {option!r}; {hint}"
    assert line.pop() is None
