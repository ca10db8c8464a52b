"""The task without a worker: a broker in memory, deliveries made by hand, and a clock that moves only when told to."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import pickle
import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from celery import Celery, Task, chain, chord, current_app, group, shared_task, signals
from celery.exceptions import Retry, SoftTimeLimitExceeded
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError
from line import BUCKETS, START, Line, Worker, declare, draw, logged, make_app, tokens

from tb_celery import (
    ConfigurationError,
    Decision,
    RateLimited,
    RateLimitedTask,
    RateLimitExceeded,
    StoreError,
    open_limiter,
    settle,
)
from tb_celery.bucket import SECOND
from tb_celery.clock import FakeClock
from tb_celery.delivery import IN_PLACE, PUBLISH_RETRY, STORE_RETRY
from tb_celery.quota import quota_of
from tb_celery.reschedule import HEADER, LimitedRequest, Ticket, shortest_countdown
from tb_celery.stores.memory import MemoryStore
from tb_celery.worker import check_at_start, cover

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from celery.app.task import Context
    from kombu import Message

    from tb_celery import Limiter, Settings
    from tb_celery.arithmetic import Place
    from tb_celery.bucket import Charge


class BrokenStore(MemoryStore):
    """Fails as long as ``broken``."""

    broken = True

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        if self.broken:
            message = "state file /x is on fire"
            raise StoreError(message)
        return super().acquire(charges, place)


@pytest.fixture
def broken(app: Celery, clock: FakeClock) -> BrokenStore:
    quota_of(app).limiter.store = store = BrokenStore(clock)
    return store


# -- declaration


@pytest.mark.parametrize(
    "options",
    [
        {"bucket": "five"},
        {"bucket": ["five", "one"]},
        {"bucket": ("five",)},
        {"bucket": {"five": 2, "one": 1}},
        {"bucket": None},
        {"bucket": "five", "cost": 2.5},
        {"bucket": "five", "cost": len},
        {"bucket": "five", "key": "user"},
        {"bucket": "five", "key": lambda user, **_: user},
        {"bucket": "five", "max_wait": 60},
        {"bucket": "five", "max_wait": None},
        {"bucket": "five", "rate_limit": "1/s", "max_retries": 3, "acks_late": True, "serializer": "pickle"},
        {"bucket": "five", "basket": "mine", "monkey": "any", "bind_to": 1},
    ],
)
def test_right_options_are_taken(app: Celery, options: dict[str, object]) -> None:
    task = declare(app, lambda user: user, **options)
    assert all(getattr(task, name) == value for name, value in options.items())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bucket": 5}, "task 'post': bucket must be a name, a list of names or a dict of costs by name, not 5"),
        ({"bucket": b"five"}, "bucket must be a name, a list of names or a dict of costs by name, not b'five'"),
        ({"bucket": ["five", 1]}, "bucket must be a name, a list"),
        ({"bucket": lambda: "five"}, "bucket must be a name, a list"),
        ({"bucket": ""}, "bucket must be a name, a list of names or a dict of costs by name, not ''"),
        ({"bucket": []}, "bucket must be a name, a list"),
        ({"bucket": {}}, "bucket must be a name, a list"),
        ({"bucket": ["five", ""]}, "bucket must be a name, a list"),
        ({"bucket": {"five": 2}, "cost": 2}, "give the costs in bucket or in cost, not in both"),
        ({"bucket": {"five": 2}, "cost": len}, "give the costs in bucket or in cost, not in both"),
        ({"bucket": "five", "cost": 0}, "task 'post': cost must be a finite number above 0, not 0"),
        ({"bucket": "five", "cost": -1}, "cost must be a finite number above 0, not -1"),
        ({"bucket": "five", "cost": float("nan")}, "cost must be a finite number above 0, not nan"),
        ({"bucket": "five", "cost": float("inf")}, "cost must be a finite number above 0, not inf"),
        ({"bucket": "five", "cost": True}, "cost must be a number, not True"),
        ({"bucket": "five", "cost": "2"}, "cost must be a number, not '2'"),
        ({"bucket": "five", "cost": None}, "cost must be a number, not None"),
        ({"bucket": "five", "max_wait": 0}, "max_wait must be a finite number above 0, not 0"),
        ({"bucket": "five", "max_wait": "1m"}, "max_wait must be a number, not '1m'"),
        ({"bucket": "five", "key": 7}, "key must be the name of an argument or a function of the arguments, not 7"),
        ({"bucket": "five", "key": "usr"}, "key 'usr' is not the name of one of its arguments"),
        ({"bucket": "five", "key": "self", "bind": True}, "key 'user' is not the name of one of its arguments"),
    ],
)
def test_a_wrong_option_is_refused_at_declaration(app: Celery, options: dict[str, object], sentence: str) -> None:
    def post(user: str) -> None:
        """Bound, its only argument is the task itself."""

    with pytest.raises(ConfigurationError) as refused:
        declare(app, post, name="post", **(options | {"key": "user"} if options.get("bind") else options))
    assert sentence in str(refused.value)
    assert "post" in str(refused.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("buckets", "bucket"),
        ("bukcet", "bucket"),
        ("Bucket", "bucket"),
        ("costs", "cost"),
        ("keys", "key"),
        ("maxwait", "max_wait"),
        ("max_wiat", "max_wait"),
        ("max_waits", "max_wait"),
    ],
)
def test_a_misspelt_option_is_refused_at_declaration(app: Celery, written: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=f"task 'post' has no option '{written}'; did you mean '{meant}'"):
        declare(app, None, name="post", **{written: "five"})


def test_the_decorator_as_everybody_writes_it_refuses_at_the_latest_when_the_app_is_finalized(app: Celery) -> None:
    @app.task(base=RateLimitedTask, bukcet="five", shared=False)
    def post() -> None:
        """Celery looks at it when the app is finalized, or at once when it already is."""

    with pytest.raises(ConfigurationError, match="did you mean 'bucket'"):
        app.finalize()


def test_attributes_of_a_class_of_ones_own_are_not_taken_for_misspelt_options() -> None:
    class Post(RateLimitedTask):
        bucket = "five"
        costs: ClassVar = [1, 2]

        def keys(self) -> list[str]:
            return []

    assert Post.costs == [1, 2]


def test_a_class_with_a_wrong_option_is_refused_where_it_stands() -> None:
    with pytest.raises(ConfigurationError, match="task 'Post': cost must be a finite number above 0, not -2"):

        class Post(RateLimitedTask):
            bucket = "five"
            cost = -2


def test_the_key_of_a_base_class_is_checked_against_the_arguments_of_its_tasks(app: Celery) -> None:
    class PerTenant(RateLimitedTask):
        abstract = True
        bucket = "five"
        key = "tenant"

    class Deeper(PerTenant):
        def run(self, tenant: str) -> str:
            return tenant

    declare(app, lambda tenant: tenant, base=PerTenant, name="right")
    with pytest.raises(ConfigurationError, match="key 'tenant' is not the name of one of its arguments"):
        declare(app, lambda user: user, base=PerTenant, name="wrong")
    with pytest.raises(ConfigurationError, match="key 'tennant' is not the name of one of its arguments"):

        class Deepest(Deeper):
            key = "tennant"


def cost_of(text: str, times: int = 1) -> int:
    return len(text) * times


def test_a_cost_function_in_the_decorator_sees_the_arguments_alone(app: Celery, line: Line) -> None:
    task = declare(app, lambda text, times=1: text * times, bucket="five", cost=cost_of)
    assert line.send_and_deliver(task, "ab").state == "SUCCESS"
    assert tokens(app, "five") == 3
    task.apply_async(("x",), {"times": 3})
    assert line.deliver().state == "SUCCESS"
    assert tokens(app, "five") == 0
    assert task.cost("abc") == 3


def test_a_cost_in_a_class_body_is_a_method_and_sees_the_task(app: Celery, line: Line) -> None:
    class Post(RateLimitedTask):
        name = "post"
        bucket = "five"
        factor = 2

        def cost(self, text: str) -> int:
            return self.factor * len(text)

        def key(self, text: str) -> str:
            return text[0]

        def run(self, text: str) -> str:
            return text

    task = app.register_task(Post())
    assert line.send_and_deliver(task, "ab").state == "SUCCESS"
    assert (tokens(app, "five", "a"), tokens(app, "five", "b")) == (1, 5)


@pytest.mark.parametrize("answer", [0, 6, None, -1, float("nan"), "1"])
def test_a_cost_function_that_answers_nonsense_fails_the_task(app: Celery, line: Line, answer: object) -> None:
    outcome = line.send_and_deliver(declare(app, bucket="five", cost=lambda: answer))
    assert outcome.state == "FAILURE"
    assert isinstance(outcome.info, ConfigurationError)
    assert line.pop() is None
    assert tokens(app, "five") == 5


def test_the_setting_task_annotations_may_give_options(app: Celery, line: Line) -> None:
    app.conf.task_annotations = {
        "limited": {"bucket": "five", "cost": lambda *words: len(words), "before_start": lambda *_: None},
        "wrong": {"bucket": 5},
    }
    task = declare(app, name="limited")
    assert [line.send_and_deliver(task, "a", "b").state for _ in range(3)] == ["SUCCESS", "SUCCESS", "RETRY"]
    assert tokens(app, "five") == 1
    with pytest.raises(ConfigurationError, match="task 'wrong': bucket must be a name"):
        declare(app, name="wrong")


def test_one_bucket_for_several_tasks_and_another_for_another(app: Celery, line: Line) -> None:
    one, two = (declare(app, name=name, bucket="five") for name in ("a", "b"))
    third = declare(app, name="c", bucket="other")
    states = [line.send_and_deliver(task).state for task in (one, two, one, two, one, two)]
    assert states == ["SUCCESS"] * 5 + ["RETRY"]
    line.take()
    assert line.send_and_deliver(third).state == "SUCCESS"


def test_a_key_splits_a_bucket_and_its_forms_agree(app: Celery, line: Line) -> None:
    tasks = [
        declare(app, lambda user="u", **_: user, name="by_name", bucket="one", key="user"),
        declare(app, lambda user="u", **_: user, name="by_function", bucket="one", key=lambda user="u", **_: user),
        declare(app, lambda self, user="u": (self, user)[1], name="bound", bucket="one", key="user", bind=True),
    ]
    for number, task in enumerate(tasks):
        users = [f"{number}a", f"{number}b"]
        assert [line.send_and_deliver(task, user).state for user in users] == ["SUCCESS", "SUCCESS"]
        task.apply_async(kwargs={"user": users[0]})
        assert line.deliver().state == "RETRY"
        line.take()
    assert line.send_and_deliver(tasks[0]).state == "SUCCESS"  # the argument's default value is a key as any other,
    assert line.send_and_deliver(tasks[2]).state == "RETRY"  # and the bucket's, not the task's


def test_a_key_that_is_none_fails_the_task_and_says_what_to_do(app: Celery, line: Line) -> None:
    task = declare(app, lambda user=None: user, bucket="one", key="user")
    outcome = line.send_and_deliver(task)
    assert outcome.state == "FAILURE"
    assert "its key 'user' is None in this call; give it a value, or the task no key" in str(outcome.info)


def test_several_buckets_are_drawn_from_all_or_nothing(app: Celery, line: Line) -> None:
    draw(app, "one")
    outcome = line.send_and_deliver(declare(app, bucket=["five", "one"]))
    assert outcome.state == "RETRY"
    assert outcome.exceeded.bucket == "one"
    assert tokens(app, "five") == 5
    line.clock.advance(2 * SECOND)
    assert line.deliver().state == "SUCCESS"
    assert (tokens(app, "five"), tokens(app, "one")) == (4, 0)


def test_costs_by_bucket(app: Celery, line: Line) -> None:
    assert line.send_and_deliver(declare(app, bucket={"five": 3, "one": 1})).state == "SUCCESS"
    assert (tokens(app, "five"), tokens(app, "one")) == (2, 0)


def test_bucket_none_and_a_bucket_declared_unlimited_run_at_once(app: Celery, line: Line) -> None:
    for name, bucket in (("plain", None), ("unlimited", "off")):
        task = declare(app, lambda self: repr(self.request.tb_celery), name=name, bind=True, bucket=bucket)
        assert [line.send_and_deliver(task).info for _ in range(20)] == ["None"] * 20


def test_the_base_class_for_a_whole_app(clock: FakeClock) -> None:
    app = Celery("whole", broker="memory://", backend="cache+memory://", task_cls=RateLimitedTask, set_as_current=False)
    app.conf.task_default_queue = f"whole{uuid.uuid4()}"
    app.conf.tb_celery = {"store": "memory", "buckets": BUCKETS}
    quota_of(app).limiter.store = MemoryStore(clock)
    line = Line(app, clock)
    limited = declare(app, bucket="one", name="limited", base=app.Task)
    plain = declare(app, name="plain", base=app.Task)
    assert [line.send_and_deliver(task).state for task in (limited, plain, plain, limited)] == [
        *["SUCCESS"] * 3,
        "RETRY",
    ]
    check_at_start(app)


def test_shared_task(app: Celery, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    from celery import _state  # noqa: PLC0415

    # Celery gives it to every app that this process makes from here on.
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))  # noqa: SLF001

    @shared_task(base=RateLimitedTask, bucket="one", cost=lambda _: 1, key="user", name="shared")
    def post(user: str) -> str:
        return user

    task = app.tasks["shared"]
    assert [line.send_and_deliver(task, user).state for user in "aba"] == ["SUCCESS", "SUCCESS", "RETRY"]


def test_the_body_sees_the_decision_that_let_it_run(app: Celery, line: Line) -> None:
    seen: list[Decision] = []
    task = declare(app, lambda self: seen.append(self.request.tb_celery), bind=True, bucket="five")
    line.send_and_deliver(task)
    (decision,) = seen
    assert (decision.allowed, decision.now, decision.bucket, decision.tokens) == (True, START, "five", 4.0)


# -- settings


def test_the_quota_is_made_from_the_app_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app, other = (Celery(set_as_current=False) for _ in range(2))
    app.conf.tb_celery = {"buckets": {"one": "1/s"}}
    monkeypatch.setenv("TB_CELERY_STATE_FILE", str(tmp_path / "late.state"))  # long after the import
    quota = quota_of(app)
    assert quota.settings.state_file == tmp_path / "late.state"
    assert list(quota.limiter.buckets) == ["one"]
    assert quota_of(app) is quota
    assert list(quota_of(other).limiter.buckets) == []


def test_the_quota_of_the_current_app_is_that_app_s() -> None:
    app = make_app()
    before = current_app._get_current_object()  # noqa: SLF001
    app.set_current()
    try:
        assert quota_of(current_app) is quota_of(app)
    finally:
        before.set_current()


def test_threads_that_ask_first_at_once_share_one_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    together = threading.Barrier(8)

    def slowly(settings: Settings) -> Limiter:
        limiter = open_limiter(settings)
        threading.Event().wait(0.01)
        return limiter

    monkeypatch.setattr("tb_celery.quota.open_limiter", slowly)

    def ask() -> bool:
        together.wait()
        return bool(quota_of(app).limiter.acquire("one"))

    with ThreadPoolExecutor(8) as pool:
        assert Counter(pool.map(lambda _: ask(), range(8))) == {True: 1, False: 7}


def test_settings_under_celery_s_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    django = SimpleNamespace(
        CELERY_BROKER_URL="memory://", CELERY_TB_CELERY={"buckets": {"one": "1/s"}, "store": "memory"}, DEBUG=True
    )
    app = Celery(set_as_current=False)
    app.config_from_object(django, namespace="CELERY")
    assert list(quota_of(app).limiter.buckets) == ["one"]
    # Django's settings are an object that looks things up when they are asked for, found by its path.
    monkeypatch.setattr("test_task.SETTINGS", django)
    app = Celery(set_as_current=False)
    app.config_from_object("test_task:SETTINGS", namespace="CELERY")
    assert list(quota_of(app).limiter.buckets) == ["one"]


SETTINGS = SimpleNamespace(broker_url="memory://", tb_celery={"buckets": {"mine": "2/s"}, "store": "memory"})


@pytest.mark.parametrize("where", [SETTINGS, "test_task:SETTINGS", {"tb_celery": SETTINGS.tb_celery}])
def test_settings_from_an_object(where: object) -> None:
    app = Celery(set_as_current=False)
    app.config_from_object(where)
    assert list(quota_of(app).limiter.buckets) == ["mine"]


def test_the_environment_is_stronger_than_the_app(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery(set_as_current=False)
    app.conf.tb_celery = {"buckets": {"my_api": {"capacity": 5, "refill_rate": 0.5}}, "max_countdown": 5}
    monkeypatch.setenv("TB_CELERY_BUCKETS__my_api__CAPACITY", "7")
    monkeypatch.setenv("TB_CELERY_MAX_COUNTDOWN", "9")
    assert quota_of(app).settings.max_countdown == 9
    (limit,) = quota_of(app).limiter.status("my_api").limits
    assert (limit.limit.capacity, limit.limit.refill_rate) == (7, 0.5)


# -- at start


def test_an_unknown_bucket_stops_the_worker(app: Celery) -> None:
    declare(app, name="proj.post", bucket="fvie")
    with pytest.raises(ConfigurationError) as refused:
        check_at_start(app)
    assert str(refused.value) == (
        "task 'proj.post': bucket 'fvie' is not declared in the setting buckets; did you mean 'five'?"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"bucket": "five", "cost": 6}, "bucket 'five': cost 6 is above capacity 5 and could never be met"),
        ({"bucket": ["five", "one"], "cost": 2}, "bucket 'one': cost 2 is above capacity 1 and could never be met"),
        ({"bucket": {"five": 5, "one": 1.5}}, "bucket 'one': cost 1.5 is above capacity 1"),
        ({"bucket": {"five": "2"}}, "bucket 'five': cost must be a number, not '2'"),
        ({"bucket": ["five", "nope"]}, "bucket 'nope' is not declared"),
        ({"bucket": "nope", "cost": len}, "bucket 'nope' is not declared"),
    ],
)
def test_what_could_never_be_met_stops_the_worker(app: Celery, options: dict[str, object], sentence: str) -> None:
    declare(app, None, name="post", **options)
    with pytest.raises(ConfigurationError) as refused:
        check_at_start(app)
    assert str(refused.value).startswith(f"task 'post': {sentence}")


def test_the_worker_ends_with_the_sentence_and_a_code(app: Celery) -> None:
    declare(app, name="post", bucket="nope")
    with pytest.raises(SystemExit) as end:
        Worker(app).start()
    assert str(end.value.code).startswith("tb_celery: task 'post': bucket 'nope' is not declared")


def test_the_worker_ends_when_the_state_cannot_be_used(tmp_path: Path) -> None:
    state = tmp_path / "a letter"
    state.write_text("Dear Sir or Madam, " * 10, "ascii")
    app = make_app(None, store="file", state_file=str(state))
    declare(app, bucket="five")
    with pytest.raises(SystemExit) as end:
        Worker(app).start()
    assert str(end.value.code).startswith(f"tb_celery: {state} is not a state file")
    assert state.read_text("ascii").startswith("Dear Sir")


def test_right_tasks_start_and_the_log_says_where_the_state_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(None, store="file", state_file=str(tmp_path / "s"))
    declare(app, bucket={"five": 5}, name="a")
    declare(app, bucket="off", cost=1000, name="b")
    declare(app, bucket="five", cost=lambda: 1000, name="c")  # told when it is called
    with caplog.at_level(logging.INFO, "tb_celery"):
        Worker(app).start()
    state = f"FileStore('{tmp_path}/s')"
    sentence = f"tb_celery: [buckets] the quota is per host; state in {state}\n  . a: five\n  . b: off\n  . c: five"
    assert logged(caplog) == [("INFO", sentence)]


def test_an_app_without_limited_tasks_starts_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(None)
    declare(app, name="plain")
    with caplog.at_level(logging.INFO, "tb_celery"):
        Worker(app).start()
    assert caplog.records == []


def test_celery_s_own_rate_limit_beside_a_bucket_is_warned_of_once(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    declare(app, name="proj.post", bucket=["five", "one"], rate_limit="1/s")
    declare(app, name="proj.other", rate_limit="1/s")
    Worker(app).start()
    assert logged(caplog) == [
        (
            "WARNING",
            (
                "task proj.post has a bucket (five, one) and Celery's own rate_limit (1/s): both apply, the latter in "
                "each worker"
            ),
        )
    ]


@pytest.mark.parametrize(
    ("visibility_timeout", "on_reject", "warned"),
    [
        (900, "retry", True),
        (901, "retry", False),
        (None, "retry", False),
        (1800, "hold", True),
        (1801, "hold", False),
    ],
)
def test_a_broker_that_delivers_again_before_tasks_are_back_is_warned_of(
    app: Celery,
    caplog: pytest.LogCaptureFixture,
    visibility_timeout: int | None,
    on_reject: str,
    warned: bool,  # noqa: FBT001
) -> None:
    declare(app, bucket="five", on_reject=on_reject)
    app.conf.broker_transport_options = {"visibility_timeout": visibility_timeout}
    Worker(app).start()
    assert [level for level, text in logged(caplog) if "max_countdown (900 s)" in text] == ["WARNING"] * warned


@pytest.mark.parametrize(("max_countdown", "warned"), [(3600.0, True), (3599.0, False)])
def test_so_is_one_whose_usual_time_is_not_enough(
    caplog: pytest.LogCaptureFixture,
    max_countdown: float,
    warned: bool,  # noqa: FBT001
) -> None:
    app = make_app(max_countdown=max_countdown)
    app.conf.broker_url = "redis://127.0.0.1:1"
    declare(app, bucket="five")
    Worker(app).start()
    assert [level for level, text in logged(caplog) if "visibility_timeout (3600 s)" in text] == ["WARNING"] * warned


# -- options of one call


def test_one_call_may_cost_more(app: Celery, line: Line) -> None:
    task = declare(app, bucket="five")
    assert line.send_and_deliver(task, cost=4).state == "SUCCESS"
    assert tokens(app, "five") == 1
    assert line.send_and_deliver(task, cost=1.5).state == "RETRY"
    line.clock.advance(SECOND)
    assert line.deliver().state == "SUCCESS"  # the copy kept the cost
    assert tokens(app, "five") == 0.5


def test_one_call_may_have_a_key(app: Celery, line: Line) -> None:
    task = declare(app, lambda user: user, bucket="one", key="user")
    assert line.send_and_deliver(task, "a", key="x").state == "SUCCESS"
    assert line.send_and_deliver(task, "b", key="x").state == "RETRY"
    assert (tokens(app, "one", "x"), tokens(app, "one", "a")) == (0, 1)


def test_one_call_may_give_up_sooner_or_later(app: Celery, line: Line) -> None:
    task = declare(app, bucket="one", max_wait=1)
    draw(app, "one")
    assert line.send_and_deliver(task).state == "FAILURE"
    assert line.send_and_deliver(task, max_wait=2.5).state == "RETRY"
    line.take()
    assert line.send_and_deliver(task, max_wait=None).countdown == 4.0


def test_options_of_a_call_work_on_signatures_and_in_the_canvas(app: Celery, line: Line) -> None:
    task = declare(app, bucket="five", name="t")
    task.s().set(cost=2, key="k").apply_async()
    line.deliver()
    assert tokens(app, "five", "k") == 3
    chain(task.si().set(cost=2), task.si().set(cost=3)).apply_async()
    line.deliver()
    assert tokens(app, "five") == 3
    line.deliver()
    assert tokens(app, "five") == 0
    group(task.si().set(key="g", cost=2), task.si().set(key="g", cost=1)).apply_async()
    line.deliver()
    line.deliver()
    assert tokens(app, "five", "g") == 2


def test_options_of_a_call_leave_headers_alone(app: Celery, line: Line) -> None:
    task = declare(app, bucket="five")
    mine = {"trace": "abc"}
    task.apply_async(headers=mine, cost=2)
    assert mine == {"trace": "abc"}
    assert line.take().headers["trace"] == "abc"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"cost": 0}, "task 'post': cost must be a finite number above 0, not 0"),
        ({"cost": float("nan")}, "cost must be a finite number above 0, not nan"),
        ({"cost": None}, "cost must be a number, not None"),
        ({"cost": "3"}, "cost must be a number, not '3'"),
        ({"cost": len}, "cost must be a number, not <built-in function len>"),
        ({"key": 3}, "key must be a string, not 3"),
        ({"key": None}, "key must be a string, not None"),
        ({"max_wait": -1}, "max_wait must be a finite number above 0, not -1"),
    ],
)
def test_wrong_options_of_a_call_are_refused_before_anything_is_published(
    app: Celery, line: Line, options: dict[str, object], sentence: str
) -> None:
    task = declare(app, bucket="five", name="post")
    with pytest.raises(ConfigurationError) as refused:
        task.apply_async(**options)
    assert sentence in str(refused.value)
    assert line.pop() is None


def test_a_call_cannot_cost_what_its_buckets_say(app: Celery) -> None:
    with pytest.raises(ConfigurationError, match="task 'post': its bucket gives the costs, so a call cannot"):
        declare(app, bucket={"five": 1}, name="post").apply_async(cost=2)


@pytest.mark.parametrize(
    "header", ["x", 5, [], ["cost"], {"cost": -5}, {"cost": "1"}, {"price": 1}, {"key": 1}, {"max_wait": "soon"}, True]
)
def test_a_forged_call_header_fails_its_task_and_grants_nothing(app: Celery, line: Line, header: object) -> None:
    outcome = line.send_and_deliver(declare(app, bucket="five"), headers={"tb_celery_call": header})
    assert (outcome.state, type(outcome.info)) == ("FAILURE", ConfigurationError)
    assert tokens(app, "five") == 5


# -- eager, direct, nested


@pytest.fixture
def eager(app: Celery) -> Celery:
    app.conf.task_always_eager = True
    return app


def test_eager_tasks_wait_in_line(eager: Celery, clock: FakeClock) -> None:
    task = declare(eager, bucket="five")
    assert [task.delay().get() for _ in range(200)] == ["ran"] * 200  # far beyond the stack that Celery's retries need
    assert clock.now() == START + 195 * SECOND
    assert task.apply().get() == "ran"
    assert clock.now() == START + 196 * SECOND


def test_an_eager_task_that_would_wait_too_long_fails(eager: Celery, clock: FakeClock) -> None:
    task = declare(eager, bucket="one", max_wait=1)
    draw(eager, "one")
    result = task.delay()
    assert result.state == "FAILURE"
    assert isinstance(result.result, RateLimitExceeded)
    assert (result.result.bucket, result.result.wait) == ("one", 2.0)
    assert clock.now() == START
    assert task.apply_async(max_wait=3).get() == "ran"
    eager.conf.task_eager_propagates = True
    with pytest.raises(RateLimitExceeded):
        task.delay()


def test_the_options_of_a_call_count_when_it_is_applied(eager: Celery) -> None:
    post = declare(eager, bucket="five")
    post.apply((), key="k", cost=2)
    chain(post.si().set(key="k"), post.si().set(key="k")).apply_async()
    assert (tokens(eager, "five", "k"), tokens(eager, "five")) == (1, 5)
    with pytest.raises(ConfigurationError, match="did you mean 'cost'"):
        post.apply((), costs=2)


def test_eager_calls_have_options_too(eager: Celery) -> None:
    task = declare(eager, bucket="five")
    assert task.apply_async(cost=2, key="k").get() == "ran"
    assert tokens(eager, "five", "k") == 3


@pytest.mark.parametrize(("on_store_error", "state"), [("allow", "SUCCESS"), ("defer", "FAILURE"), ("fail", "FAILURE")])
def test_an_eager_task_cannot_be_deferred_when_the_store_fails(
    clock: FakeClock, on_store_error: str, state: str
) -> None:
    app = make_app(clock, on_store_error=on_store_error)
    quota_of(app).limiter.store = BrokenStore(clock)
    result = declare(app, bucket="five").apply()
    assert result.state == state
    assert state == "SUCCESS" or isinstance(result.result, StoreError)


def test_a_direct_call_draws_nothing(app: Celery) -> None:
    task = declare(app, bucket="one")
    assert [task() for _ in range(5)] == ["ran"] * 5
    assert task.run() == "ran"
    assert tokens(app, "one") == 1


def test_calls_inside_the_body_draw_nothing(app: Celery, line: Line) -> None:
    def nest(self: Task, depth: int) -> int:
        return 1 + self(depth - 1) if depth else 0

    assert line.send_and_deliver(declare(app, nest, bind=True, bucket="five"), 3).info == 3
    assert tokens(app, "five") == 4


# -- before_start of one's own


def hooks(order: list[str]) -> Iterator[type[RateLimitedTask]]:
    class Plain(RateLimitedTask):
        def before_start(self, *_args: object) -> None:
            order.append("own")

    class WithSuper(RateLimitedTask):
        def before_start(self, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            super().before_start(task_id, args, kwargs)
            order.append("own")
            super().before_start(task_id, args, kwargs)

    class Child(Plain):
        pass

    class Grandchild(WithSuper):
        def before_start(self, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            super().before_start(task_id, args, kwargs)

    class Mixin:
        def before_start(self, *_args: object) -> None:
            order.append("own")

    class Mixed(Mixin, RateLimitedTask):
        pass

    yield from (Plain, WithSuper, Child, Grandchild, Mixed)


@pytest.mark.parametrize("number", range(5))
def test_a_before_start_of_ones_own_keeps_the_check_and_comes_after_it(app: Celery, line: Line, number: int) -> None:
    order: list[str] = []
    base = list(hooks(order))[number]
    task = declare(app, lambda: order.append("body"), base=base, bucket="one")
    assert [line.send_and_deliver(task).state for _ in range(2)] == ["SUCCESS", "RETRY"]
    assert order == ["own", "body"]
    assert tokens(app, "one") == 0


def test_a_before_start_given_to_the_decorator_keeps_the_check(app: Celery, line: Line) -> None:
    ids: list[str] = []
    task = declare(app, bucket="one", before_start=lambda _task, task_id, _args, _kwargs: ids.append(task_id))
    assert [line.send_and_deliver(task, task_id=task_id).state for task_id in "xy"] == ["SUCCESS", "RETRY"]
    assert ids == ["x"]


def test_a_before_start_that_fails_leaves_no_body_that_a_later_call_is_taken_for(app: Celery, line: Line) -> None:
    class Failing(RateLimitedTask):
        def before_start(self, task_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            super().before_start(task_id, args, kwargs)
            raise LookupError

    task = declare(app, lambda self: self.request.args, bind=True, base=Failing, bucket="five")
    assert line.send_and_deliver(task).state == "FAILURE"
    assert task() == ()
    with pytest.raises(ConfigurationError, match="is for the body of a task"):
        settle(1)


# -- what a refused task leads to


@pytest.mark.parametrize("exchange", ["", "posts"])
def test_a_retry_of_its_own_is_a_message_like_any_other(app: Celery, line: Line, exchange: str) -> None:
    """Of a delivery by an exchange with a name, Celery publishes all that the worker has told."""

    def body(self: Task) -> None:
        raise self.retry(countdown=0)

    app.conf.task_default_exchange = exchange or "mail"
    post = declare(app, body, bind=True, bucket="five", name="post")
    post.apply_async()
    message = line.take()
    message.delivery_info["exchange"] = exchange
    assert line.deliver(message).state == "RETRY"
    copy = line.take()
    assert (copy.content_type, copy.headers["retries"]) == ("application/json", 1)
    assert copy.payload[0] == []
    assert copy.properties.keys() & {"queues", "subscribed"} == set()


def test_a_refused_task_goes_back_and_runs_at_its_turn(app: Celery, line: Line) -> None:
    bodies: list[tuple[str, int, object]] = []

    def body(self: Task) -> None:
        bodies.append((self.request.id, self.request.retries, self.request.headers))

    task = declare(app, body, bind=True, bucket="one")
    draw(app, "one")
    outcome = line.send_and_deliver(task, task_id="me")
    assert outcome.state == "RETRY"
    assert outcome.countdown == 2.0
    assert (outcome.exceeded.bucket, outcome.exceeded.wait) == ("one", 2.0)
    assert outcome.exceeded.turn == pytest.approx(datetime.now(UTC).timestamp() + 2, abs=1)
    assert bodies == []
    copy = line.take()
    eta = datetime.fromisoformat(copy.headers["eta"])
    assert abs((eta - datetime.now(UTC)).total_seconds() - 2) < 1
    line.clock.advance(2 * SECOND)
    assert line.deliver(copy).state == "SUCCESS"
    assert bodies == [("me", 0, None)]
    assert line.pop() is None


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_the_meta_of_a_waiting_task_survives_serialization(clock: FakeClock, serializer: str) -> None:
    app = make_app(clock)
    app.conf.result_serializer = serializer
    app.conf.result_accept_content = [serializer]
    draw(app, "one")
    outcome = Line(app, clock).send_and_deliver(declare(app, bucket="one"))
    assert (outcome.exceeded.bucket, outcome.exceeded.wait) == ("one", 2.0)
    assert outcome.exceeded.turn is not None


def test_what_ends_a_refused_delivery_pickles() -> None:
    error = RateLimitExceeded("one", 2.5, 1_800_000_000.25)
    for twin in (pickle.loads(pickle.dumps(error)), RateLimitExceeded(*json.loads(json.dumps(error.args)))):  # noqa: S301
        assert (type(twin), twin.args) == (RateLimitExceeded, error.args)
        assert (twin.bucket, twin.wait, twin.turn) == ("one", 2.5, 1_800_000_000.25)
        assert str(twin) == "bucket 'one' is over quota; ask again in 2.500 s"
    retry = Retry("m", exc=error, when=2.5)
    again = pickle.loads(pickle.dumps(retry))  # noqa: S301
    assert (again.when, again.exc.args) == (2.5, error.args)


def test_a_refusal_is_one_line_of_information(app: Celery, line: Line, caplog: pytest.LogCaptureFixture) -> None:
    failures: list[object] = []
    listener = lambda **fields: failures.append(fields)  # noqa: E731
    signals.task_failure.connect(listener)
    task = declare(app, name="proj.post", bucket="one", max_retries=3)
    draw(app, "one")
    try:
        with caplog.at_level(logging.INFO):
            for number in range(20):
                assert line.send_and_deliver(task, task_id=f"id{number}").state == "RETRY"
                line.take()
    finally:
        signals.task_failure.disconnect(listener)
    assert failures == []
    assert [each.levelname for each in caplog.records] == ["INFO"] * 20
    assert all(each.exc_info is None for each in caplog.records)
    assert caplog.messages[0] == "Task proj.post[id0] retry: bucket 'one' is over quota: turn in 2.000 s"


def test_each_refused_task_has_a_turn_of_its_own(app: Celery, line: Line) -> None:
    task = declare(app, bucket="five")
    for _ in range(105):
        task.delay()
    runs = line.run_all()
    assert Counter(run.state for run in runs) == {"SUCCESS": 105}
    waited = [run.countdowns for run in runs if run.countdowns]
    assert len(waited) == 100
    assert all(len(countdowns) == 1 for countdowns in waited)
    assert len({int(countdowns[0]) for countdowns in waited}) == 100  # not a herd
    assert max(run.ended for run in runs) == START + 100 * SECOND


def test_many_tasks_need_no_more_retries_than_they_may_have(app: Celery, line: Line) -> None:
    task = declare(app, bucket="burst", max_retries=3)
    for _ in range(200):
        task.delay()
    runs = line.run_all()
    assert Counter(run.state for run in runs) == {"SUCCESS": 200}
    assert max(len(run.countdowns) for run in runs) <= 3
    assert sum(len(run.countdowns) for run in runs) <= 1.1 * 200


# -- what a broker delivers again: docs/celery.md, "Redelivery"


def turns(app: Celery) -> float:
    return quota_of(app).limiter.status("one").limits[0].waiting


def test_a_copy_that_comes_again_asks_with_its_turn_and_pays_once(app: Celery, line: Line) -> None:
    bodies: list[int] = []
    task = declare(app, lambda: bodies.append(line.clock.now()), bucket="one")
    draw(app, "one")
    assert line.send_and_deliver(task).state == "RETRY"
    copy = line.take()
    for _ in range(3):  # a node that is lost, or a time-out that is too short, before its time has come
        outcome = line.deliver(copy)
        assert (outcome.state, outcome.countdown) == ("RETRY", 2.0)
        copy = line.take()
        assert turns(app) == 1
    line.clock.advance(2 * SECOND)
    assert line.deliver(copy).state == "SUCCESS"
    assert (bodies, tokens(app, "one")) == ([START + 2 * SECOND], 0)


def test_a_message_whose_copy_was_never_published_runs_once_and_one_turn_passes_unused(app: Celery, line: Line) -> None:
    task = declare(app, bucket="one")
    draw(app, "one")
    task.apply_async()
    message = line.take()
    assert line.deliver(message).countdown == 2.0
    line.take()  # it never was
    assert line.deliver(message).countdown == 4.0
    assert turns(app) == 2
    line.clock.advance(4 * SECOND)
    assert line.deliver().state == "SUCCESS"
    assert line.pop() is None


def test_a_message_that_comes_again_beside_its_copy_is_one_more_task_within_the_quota(app: Celery, line: Line) -> None:
    """It was not acknowledged, with late acks, after the copy was published: what Celery lets run twice pays twice."""
    bodies: list[int] = []
    task = declare(app, lambda: bodies.append(line.clock.now()), bucket="one", acks_late=True)
    draw(app, "one")
    task.apply_async()
    message = line.take()
    copies = []
    for countdown in (2.0, 4.0):
        assert line.deliver(message).countdown == countdown
        copies.append(line.take())
    assert turns(app) == 2
    for copy in copies:
        line.clock.advance(2 * SECOND)
        assert line.deliver(copy).state == "SUCCESS"
    assert bodies == [START + 2 * SECOND, START + 4 * SECOND]


@pytest.mark.parametrize("bucket", ["one", "fast"])
def test_the_countdown_follows_the_quota(app: Celery, line: Line, bucket: str) -> None:
    limit = quota_of(app).limiter.status(bucket).limits[0].limit
    draw(app, bucket)
    task = declare(app, bucket=bucket)
    for _ in range(20):
        task.delay()
    runs = line.run_all()
    assert all(0 < countdown <= 20 / limit.refill_rate + 0.1 for run in runs for countdown in run.countdowns)
    assert max(len(run.countdowns) for run in runs) <= 2


def test_a_wait_of_milliseconds_is_slept_out_in_place(app: Celery, line: Line) -> None:
    draw(app, "fast")
    assert line.send_and_deliver(declare(app, bucket="fast")).state == "SUCCESS"
    assert 0 < line.clock.now() - START <= IN_PLACE


def test_max_retries_is_not_touched(app: Celery, line: Line) -> None:
    retries: list[int] = []
    task = declare(
        app,
        lambda self: retries.append(self.request.retries),
        bind=True,
        bucket="week",
        max_retries=1,
        autoretry_for=(Exception,),
    )
    draw(app, "week")
    outcome = line.send_and_deliver(task)
    for deferrals in range(2, 12):
        copy = line.take()
        assert copy.headers["retries"] == 0
        line.clock.advance(900 * SECOND)
        outcome = line.deliver(copy)
        assert outcome.state == "RETRY"
        assert Ticket(*line_header(copy)).deferrals == deferrals - 1
    line.clock.advance(604800 * SECOND)
    assert line.deliver().state == "SUCCESS"
    assert retries == [0]
    assert task.max_retries == 1
    assert "override_max_retries" not in vars(task) or task.override_max_retries is None


def line_header(message: Message) -> list[int]:
    header = message.headers[HEADER]
    assert isinstance(header, list)
    return header


def test_a_turn_far_away_is_reached_in_hops(app: Celery, line: Line) -> None:
    draw(app, "week")
    task = declare(app, bucket="week")
    first = line.send_and_deliver(task)
    copy = line.take()
    turn = Ticket(*line_header(copy)).turn
    assert turn == START + 604800 * SECOND
    assert 0.75 * 900 <= first.countdown <= 900
    line.clock.advance(900 * SECOND)
    line.deliver(copy)
    copy = line.take()
    assert Ticket(*line_header(copy)).turn == turn
    line.clock.advance(turn - line.clock.now() - SECOND)
    last = line.deliver(copy)
    assert last.countdown == 1.0


def test_hops_of_different_tasks_end_at_different_instants(app: Celery, line: Line) -> None:
    draw(app, "week")
    task = declare(app, bucket="week")
    countdowns = []
    for _ in range(20):
        countdowns.append(line.send_and_deliver(task).countdown)
        line.take()
    assert len(set(countdowns)) == 20
    assert all(675 <= countdown <= 900 for countdown in countdowns)


def test_max_countdown_and_min_countdown_are_kept(clock: FakeClock) -> None:
    app = make_app(clock, max_countdown=7, min_countdown=3)
    line = Line(app, clock)
    draw(app, "week")
    draw(app, "one")
    assert line.send_and_deliver(declare(app, bucket="week", name="a")).countdown <= 7
    line.take()
    assert line.send_and_deliver(declare(app, bucket="one", name="b")).countdown == 3


def test_what_the_broker_can_delay_is_stronger_than_max_countdown(clock: FakeClock) -> None:
    app = make_app(clock, max_countdown=0.5)
    vars(quota_of(app))["soonest"] = 1.0
    draw(app, "week")
    assert Line(app, clock).send_and_deliver(declare(app, bucket="week")).countdown == 1.0


def test_on_quorum_queues_a_countdown_is_a_second_at_least() -> None:
    app = Celery(broker="memory://", set_as_current=False)
    assert shortest_countdown(app, 0.1) == 0.1
    app = Celery(broker="amqp://", set_as_current=False)
    assert shortest_countdown(app, 0.1) == 0.1
    app.conf.task_default_queue_type = "quorum"
    app = Celery(broker="amqp://", set_as_current=False)
    app.conf.task_default_queue_type = "quorum"
    assert shortest_countdown(app, 0.1) == 1.0
    assert shortest_countdown(app, 2.5) == 2.5


def test_a_task_that_would_wait_too_long_fails_and_books_nothing(app: Celery, line: Line) -> None:
    draw(app, "one")
    task = declare(app, bucket="one", max_wait=1.5)
    outcome = line.send_and_deliver(task)
    assert outcome.state == "FAILURE"
    assert (outcome.exceeded.bucket, outcome.exceeded.wait) == ("one", 2.0)
    assert line.pop() is None
    assert line.send_and_deliver(declare(app, bucket="one", name="next")).countdown == 2.0


def test_a_task_that_gives_up_is_logged_in_a_line(app: Celery, line: Line, caplog: pytest.LogCaptureFixture) -> None:
    draw(app, "one")
    with caplog.at_level(logging.INFO):
        line.send_and_deliver(declare(app, bucket="one", max_wait=1, name="post"), task_id="me")
    ((level, text),) = logged(caplog)
    assert level == "INFO"
    assert text.startswith("Task post[me] raised expected: RateLimitExceeded('one', 2.0")
    assert caplog.records[0].exc_info is None


def test_max_wait_counts_from_the_first_refusal(app: Celery, line: Line) -> None:
    draw(app, "one")
    task = declare(app, bucket="one", max_wait=5)
    assert line.send_and_deliver(task).countdown == 2.0
    line.clock.advance(2 * SECOND)
    draw(app, "one")  # a script takes the token just before
    assert line.deliver().countdown == 2.0
    line.clock.advance(2 * SECOND)
    draw(app, "one")
    outcome = line.deliver()
    assert (outcome.state, outcome.exceeded.wait) == ("FAILURE", 2.0)


def test_no_turn_is_booked_for_a_task_that_expires_before_it(app: Celery, line: Line) -> None:
    draw(app, "one")
    task = declare(app, bucket="one")
    assert line.send_and_deliver(task, expires=1).state == "RETRY"
    assert Ticket(*line_header(line.take())).turn == 0
    assert line.send_and_deliver(task, expires=600).countdown == 2.0
    assert Ticket(*line_header(line.take())).turn == START + 2 * SECOND


def test_a_task_that_arrives_early_waits_on_for_its_own_turn(app: Celery, line: Line) -> None:
    draw(app, "one")
    task = declare(app, bucket="one")
    assert line.send_and_deliver(task).countdown == 2.0
    line.clock.advance(SECOND)
    assert line.deliver().countdown == 1.0
    line.clock.advance(SECOND)
    assert line.deliver().state == "SUCCESS"


def test_a_bucket_that_is_gone_fails_its_tasks_at_the_next_ask(app: Celery, line: Line) -> None:
    draw(app, "one")
    line.send_and_deliver(declare(app, bucket="one"))
    store = quota_of(app).limiter.store
    # As in a worker that has been started with other settings by now.
    app.conf.tb_celery = {**app.conf.tb_celery, "buckets": {"other": BUCKETS["other"]}}
    del app.tb_celery_quota
    quota_of(app).limiter.store = store
    outcome = line.deliver()
    assert outcome.state == "FAILURE"
    assert "bucket 'one' is not declared" in str(outcome.info)


def test_what_the_body_raises_is_its_own(app: Celery, line: Line) -> None:
    def body() -> None:
        message = "not allowed"
        raise PermissionError(message)

    outcome = line.send_and_deliver(declare(app, body, bucket="one"))
    assert (outcome.state, type(outcome.info)) == ("FAILURE", PermissionError)


# -- when the store fails


def test_a_store_that_fails_defers_the_task(app: Celery, line: Line, broken: BrokenStore) -> None:
    task = declare(app, bucket="one")
    outcome = line.send_and_deliver(task)
    assert outcome.state == "RETRY"
    assert STORE_RETRY <= outcome.countdown <= 1.5 * STORE_RETRY
    assert isinstance(outcome.info, StoreError)
    assert "on fire" in str(outcome.info)
    broken.broken = False
    assert line.deliver().state == "SUCCESS"


def test_max_wait_ends_the_wait_for_the_store_too(app: Celery, line: Line, broken: BrokenStore) -> None:
    assert broken.broken
    assert line.send_and_deliver(declare(app, bucket="one", max_wait=4)).state == "RETRY"
    line.clock.advance(5 * SECOND)
    outcome = line.deliver()
    assert (outcome.state, type(outcome.info)) == ("FAILURE", StoreError)


def test_a_store_that_fails_may_fail_the_task(clock: FakeClock) -> None:
    app = make_app(clock, on_store_error="fail")
    line = Line(app, clock)
    quota_of(app).limiter.store = BrokenStore(clock)
    outcome = line.send_and_deliver(declare(app, bucket="one"))
    assert (outcome.state, type(outcome.info)) == ("FAILURE", StoreError)
    assert line.pop() is None


def test_a_store_that_fails_may_let_the_task_run(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(clock, on_store_error="allow")
    line = Line(app, clock)
    quota_of(app).limiter.store = BrokenStore(clock)
    outcome = line.send_and_deliver(declare(app, bucket="one", name="post"), task_id="me")
    assert outcome.state == "SUCCESS"
    assert "post[me] runs without a token: state file /x is on fire" in caplog.messages


def test_a_store_that_fails_many_times_moves_nobody_s_turn(app: Celery, line: Line, broken: BrokenStore) -> None:
    task = declare(app, bucket="one")
    broken.broken = False
    draw(app, "one")
    assert line.send_and_deliver(task).countdown == 2.0
    unlucky = line.take()
    broken.broken = True
    for _ in range(50):
        assert line.deliver(unlucky).state == "RETRY"
        unlucky = line.take()
    broken.broken = False
    assert line.send_and_deliver(task).countdown == 4.0  # the turn after the unlucky one's, as if nothing had been
    line.take()
    line.clock.advance(2 * SECOND)
    assert line.deliver(unlucky).state == "SUCCESS"


# -- the state of a task that waits


class Calls(Task):
    """A plain task with a call of its own: Celery makes a request for that beside the delivery's."""

    abstract = True

    def __call__(self, *args: object) -> object:
        return super().__call__(*args)


@pytest.mark.parametrize("base", [RateLimitedTask, Calls])
@pytest.mark.parametrize("turned_down", [False, True])
def test_what_a_copy_stores_that_has_run_already_stays(
    app: Celery, line: Line, base: type[Task], *, turned_down: bool
) -> None:
    """The broker and the worker may be quicker than the delivery that sends the copy."""

    def body() -> None:
        raise RateLimited(retry_after=2)

    task = declare(app, body, base=base, bucket="one")
    cover(app)
    if not turned_down:
        draw(app, "one")
    result = task.delay()
    seen: list[str] = []

    def run_at_once(headers: dict[str, str], **_: object) -> None:
        seen.append(result.state)
        app.backend.mark_as_failure(headers["id"], ValueError("of the copy"))

    signals.after_task_publish.connect(run_at_once)
    try:
        outcome = line.deliver()
    finally:
        signals.after_task_publish.disconnect(run_at_once)
    assert seen == ["RETRY"]
    assert outcome.countdown == 2.0
    assert (outcome.state, str(outcome.info)) == ("FAILURE", "of the copy")


@pytest.mark.parametrize("ignored", [True, False])
def test_whoever_ignores_results_has_none_stored_of_the_wait(app: Celery, line: Line, *, ignored: bool) -> None:
    task = declare(app, bucket="one", ignore_result=not ignored)
    draw(app, "one")
    assert line.send_and_deliver(task, ignore_result=ignored).state == ("PENDING" if ignored else "RETRY")
    assert line.take().headers["ignore_result"] is ignored


def test_a_state_that_cannot_be_stored_is_no_reason_to_lose_the_task(
    app: Celery, line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        reason = "no results today"
        raise OSError(reason)

    draw(app, "one")
    declare(app, bucket="one", name="post").apply_async(task_id="me")
    monkeypatch.setattr(app.backend, "store_result", refuse)
    assert line.deliver().countdown == 2.0
    assert line.take().headers["id"] == "me"
    assert caplog.messages == ["post[me] is RETRY, which could not be stored: no results today"]


# -- when no copy can be published


def test_a_task_whose_copy_cannot_be_published_waits_in_place_and_runs(
    app: Celery, line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    draw(app, "one")
    task = declare(app, bucket="one", name="post")
    task.apply_async(task_id="me")
    message = line.take()

    def refuse(*_args: object, **_options: object) -> None:
        reason = "no broker"
        raise OperationalError(reason)

    monkeypatch.setattr(app, "send_task", refuse)
    outcome = line.deliver(message)
    assert (outcome.state, outcome.retry) == ("SUCCESS", None)
    assert line.clock.now() == START + 2 * SECOND
    assert caplog.messages == ["post[me] waits in the worker, no copy could be published: no broker"]


def test_a_task_that_waits_in_place_lets_go_when_the_broker_is_back(
    app: Celery, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(app, "week")
    declare(app, bucket="week").delay()
    message = line.take()
    send, failures = app.send_task, iter([True, True, False])

    def refuse(*args: object, **options: object) -> object:
        if next(failures):
            reason = "no broker"
            raise OperationalError(reason)
        return send(*args, **options)

    monkeypatch.setattr(app, "send_task", refuse)
    outcome = line.deliver(message)
    assert outcome.state == "RETRY"
    assert line.clock.now() == START + round(2 * PUBLISH_RETRY * SECOND)
    assert Ticket(*line_header(line.take())).turn == START + 604800 * SECOND


def test_a_soft_time_limit_ends_the_wait_for_the_broker(
    app: Celery, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        raise SoftTimeLimitExceeded

    draw(app, "one")
    declare(app, bucket="one").delay()
    message = line.take()
    monkeypatch.setattr(app, "send_task", interrupted)
    outcome = line.deliver(message)
    assert (outcome.state, type(outcome.info)) == ("FAILURE", SoftTimeLimitExceeded)


# -- the copy


def stripped(message: Message, *, again: bool = False) -> dict[str, object]:
    """Everything in a message but its ETA, our header, and what says how it was transported."""
    properties = dict(message.properties)
    for name in ("delivery_tag", "expiration", "delivery_info"):
        properties.pop(name, None)
    # Celery puts some headers here as well, where a caller gave them; the copy is without.
    repeated = {"argsrepr", "kwargsrepr", "origin"} & properties.keys()
    assert not (again and repeated)
    for name in repeated:
        del properties[name]
    assert again is (HEADER in message.headers)
    return {
        "headers": {name: value for name, value in message.headers.items() if name not in {"eta", HEADER}},
        "properties": properties,
        "where": {name: message.delivery_info.get(name) for name in ("exchange", "routing_key")},
        "body": message.body,
        "encoded": (message.content_type, message.content_encoding),
    }


CALLBACK: dict[str, object] = {
    "task": "done",
    "args": [],
    "kwargs": {},
    "options": {},
    "subtask_type": None,
    "immutable": True,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"task_id": "mine"},
        {"priority": 7},
        {"priority": 0},
        {"serializer": "pickle", "args": ({1, 2}, b"\xff", datetime(2026, 1, 1, tzinfo=UTC))},
        {"compression": "gzip"},
        {"compression": "bzip2", "serializer": "pickle"},
        {"argsrepr": "<redacted>", "kwargsrepr": "{password=<redacted>}", "kwargs": {"password": "s3cret"}},
        {"expires": 600},
        {"expires": datetime(2040, 1, 1, tzinfo=UTC)},
        {"expires": datetime.now(UTC) + timedelta(hours=1)},
        {"time_limit": 30, "soft_time_limit": 20},
        {"headers": {"trace": "abc", "nested": {"a": [1, None]}}},
        {"link": CALLBACK, "link_error": [CALLBACK, CALLBACK]},
        {"chain": [CALLBACK, CALLBACK]},
        {"chord": CALLBACK | {"options": {"task_id": "body"}}, "group_id": "g", "group_index": 3},
        {"shadow": "another.name"},
        {"ignore_result": True},
        {"ignore_result": False},
        {"reply_to": "me"},
        {"retries": 2},
        {"root_id": "root", "parent_id": "parent"},
        {"delivery_mode": 1},
        {"stamped_headers": ["tenant"], "tenant": ["a"]},
        {"stamped_headers": ["x", "y"], "x": "1", "y": ["2"], "headers": {"z": 3}},
        {"replaced_task_nesting": 2},
        {"origin": "elsewhere"},
        {"cost": 1, "key": "k", "max_wait": 60},
        {"queue": "q2"},
        {"eta": datetime.now(UTC) - timedelta(hours=1)},
    ],
)
def test_the_copy_differs_in_nothing_but_eta_and_our_header(app: Celery, line: Line, options: dict[str, Any]) -> None:
    task = declare(app, bucket="one", name="post")
    declare(app, name="done", base=app.Task)
    draw(app, "one", key=options.get("key"))
    queue = options.setdefault("queue", app.main)
    task.apply_async(**options)
    original = line.take(queue)
    before = stripped(original)
    app.conf.task_routes = {"post": {"exchange": "elsewhere", "routing_key": "elsewhere"}}  # as the worker may have it
    app.amqp.flush_routes()
    del app.amqp.router
    for _ in range(3):
        assert line.deliver(original).state in {"RETRY", "PENDING"}
        copy = line.take(queue)
        assert stripped(copy, again=True) == before
        assert copy.headers["eta"] > datetime.now(UTC).isoformat()
        original = copy
    if "expires" in options:
        assert float(copy.properties["expiration"]) > 0
    line.clock.advance(20 * SECOND)
    assert line.deliver(original).state in {"SUCCESS", "PENDING"}


def test_a_named_exchange_is_gone_back_to(app: Celery, line: Line) -> None:
    name = f"{app.main}.topic"
    app.conf.task_queues = [Queue(name, Exchange(f"{name}.x", type="topic"), routing_key="a.#")]
    task = declare(app, bucket="one")
    draw(app, "one")
    with app.connection_for_write() as connection:
        app.amqp.queues[name](connection.default_channel).declare()
    task.apply_async(exchange=f"{name}.x", routing_key="a.b.c")
    assert line.deliver(line.take(name)).state == "RETRY"
    copy = line.take(name)
    assert (copy.delivery_info["exchange"], copy.delivery_info["routing_key"]) == (f"{name}.x", "a.b.c")


@pytest.mark.parametrize(
    ("kind", "delivered", "exchange", "routing_key"),
    [
        ("topic", "post", "celery_delayed_27", f"{'0.' * 27}1.post"),
        # A message that was delayed comes from another exchange, with the delay in its routing key.
        ("topic", "celery_delayed_delivery", "celery_delayed_27", f"{'0.' * 27}1.post"),
        ("topic", "celery_delayed_0", "celery_delayed_27", f"{'0.' * 27}1.post"),
        ("direct", "post", "post", "post"),
        ("direct", "unknown", "unknown", "post"),
    ],
)
def test_with_quorum_queues_the_broker_delays_the_copy_each_time_anew(
    app: Celery, line: Line, monkeypatch: pytest.MonkeyPatch, kind: str, delivered: str, exchange: str, routing_key: str
) -> None:
    """Celery takes another way where it detects quorum queues, which only RabbitMQ has."""
    app.conf.task_queues = [Queue("post", Exchange("post", type=kind), routing_key="post")]
    app.conf.task_default_queue = app.conf.task_default_routing_key = "post"
    app.conf.task_default_exchange = "post"
    app.conf.task_default_exchange_type = kind
    task = declare(app, bucket="five")
    draw(app, "five", 5)
    published: list[tuple[object, object]] = []

    def note(exchange: str | Exchange, routing_key: str, **_: object) -> None:
        published.append((getattr(exchange, "name", exchange), routing_key))

    # Before the first message: Celery may keep the list of receivers that it finds then, and no other.
    signals.before_task_publish.connect(note)
    try:
        task.apply_async()
        message = line.take()
        message.delivery_info["exchange"] = delivered
        if delivered.startswith("celery_delayed"):
            message.delivery_info["routing_key"] = f"{'0.' * 26}1.0.post"
        monkeypatch.setattr("celery.app.base.detect_quorum_queues", lambda *_: (True, "post"))
        assert line.deliver(message).countdown == 1.0
    finally:
        signals.before_task_publish.disconnect(note)
    assert published[1:] == [(exchange, routing_key)]


def test_a_message_does_not_grow_by_being_sent_back(app: Celery, line: Line) -> None:
    draw(app, "week")
    declare(app, bucket="week").apply_async(("x",), {"y": 1}, headers={"h": 1}, link=CALLBACK, cost=1)
    declare(app, name="done", base=app.Task)
    message = line.take()

    def size() -> int:
        return len(message.body) + len(json.dumps(message.headers))

    first = size()
    sizes = []
    for _ in range(100):
        line.deliver(message)
        message = line.take()
        sizes.append(size())
    assert max(sizes) <= 1.2 * first
    assert max(sizes) - min(sizes) <= 10


def test_the_copy_is_no_child_of_the_delivery_that_sent_it(app: Celery, line: Line) -> None:
    children: list[list[object]] = []

    def note(request: Context, **_: object) -> None:
        children.append(request.children)

    draw(app, "one")
    signals.task_retry.connect(note)
    try:
        line.send_and_deliver(declare(app, bucket="one"))
    finally:
        signals.task_retry.disconnect(note)
    assert children == [[]]


def test_the_parent_keeps_its_children(app: Celery, line: Line) -> None:
    """A task that is sent back is not its own parent, nor its own child."""
    children: list[object] = []

    def parent(self: Task) -> None:
        child.delay()
        children.extend(each.id for each in self.request.children)

    task = declare(app, parent, bind=True, bucket="one", name="parent")
    child = declare(app, bucket="other", name="child")
    draw(app, "one")
    draw(app, "other")
    assert line.send_and_deliver(task, task_id="p").state == "RETRY"
    line.clock.advance(2 * SECOND)
    draw(app, "other")
    assert line.deliver().state == "SUCCESS"
    line.clock.advance(-SECOND)
    message = line.take()
    assert children == [message.headers["id"]]
    for _ in range(2):
        assert (message.headers["root_id"], message.headers["parent_id"]) == ("p", "p")
        assert line.deliver(message).state == "RETRY"
        message = line.take()


def test_the_users_own_retry_counts_its_own_and_does_not_carry_our_headers(app: Celery, line: Line) -> None:
    seen: list[tuple[int, object]] = []

    def body(self: Task) -> str:
        seen.append((self.request.retries, self.request.headers))
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return "done"

    task = declare(app, body, bind=True, bucket="one", max_retries=2)
    draw(app, "one")
    task.apply_async(headers={"trace": "abc"}, cost=1)
    copies = []
    states = []
    message = line.pop()
    while message:
        copies.append(dict(message.headers))
        states.append(line.deliver(message).state)
        line.clock.advance(2 * SECOND)
        message = line.pop()
    # refused, run and retried; each retry is a delivery that draws again, and is there by then
    assert states == ["RETRY"] * 3 + ["SUCCESS"]
    assert [HEADER in headers for headers in copies] == [False, True, False, False]
    assert {name for headers in copies for name in headers if name.startswith(HEADER)} == {HEADER, "tb_celery_call"}
    assert [headers["retries"] for headers in copies] == [0, 0, 1, 2]
    assert [retries for retries, _ in seen] == [0, 1, 2]
    assert all(headers == {"trace": "abc", "tb_celery_call": {"cost": 1}} for _, headers in seen)


def test_autoretry_does_not_see_the_refusals(app: Celery, line: Line) -> None:
    runs: list[int] = []

    def body(self: Task) -> None:
        runs.append(self.request.retries)
        message = "service is down"
        raise ConnectionError(message)

    task = declare(
        app,
        body,
        bind=True,
        bucket="one",
        autoretry_for=(Exception,),
        max_retries=2,
        retry_backoff=False,
        default_retry_delay=0,
    )
    draw(app, "one")
    task.delay()
    published = 0
    outcome = None
    while message := line.pop():
        published += 1
        outcome = line.deliver(message)
        line.clock.advance(SECOND)
    assert runs == [0, 1, 2]
    assert outcome is not None
    assert (outcome.state, type(outcome.info)) == ("FAILURE", ConnectionError)
    assert published > 3


def test_a_chord_waits_for_its_deferred_members(app: Celery, line: Line) -> None:
    header = declare(app, lambda number: number, bucket="one", name="header")
    declare(app, lambda numbers: 0 + sum(numbers), name="body", base=app.Task)
    draw(app, "one")
    # The cache backend counts a chord's members as they end.
    chord([header.s(number) for number in range(4)])(app.tasks["body"].s())
    results = []
    while message := line.pop():
        outcome = line.deliver(message)
        if message.headers["task"] == "body":
            results.append(outcome.info)
        line.clock.advance(SECOND)
    assert results == [6]


# -- headers that anybody may have written


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5) | st.tuples(inner, inner, inner, inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=8,
)
numbers = (
    st.integers(-(1 << 64), 1 << 64) | st.integers(0, 1 << 64) | st.sampled_from([0, START, (1 << 62) - 1, 1 << 62])
)
tickets = st.lists(numbers, min_size=4, max_size=4)


@given(anything | tickets)
def test_a_ticket_is_read_from_a_right_header_only(header: object) -> None:
    ticket = Ticket.of(header)
    if ticket is None:
        return
    assert isinstance(header, list | tuple)
    assert list(ticket) == list(header)
    assert all(type(number) is int and number >= 0 for number in ticket)


@profile(max_examples=60, deadline=None)
@given(st.data())
def test_no_header_grants_a_token(data: st.DataObject) -> None:
    line, ran = forged_line()
    line.clock = clock = FakeClock(START)
    quota_of(line.app).limiter.store = MemoryStore(clock)
    ran.clear()
    step = data.draw(st.integers(0, SECOND))
    for _ in range(4):
        forged = data.draw(anything | tickets | tickets.map(lambda ticket: [ticket[0], clock.identity, *ticket[2:]]))
        headers = {HEADER: forged, "tb_celery_asked": forged, "content_type": forged}
        assert line.send_and_deliver(line.app.tasks["forged"], headers=headers).state in {"SUCCESS", "RETRY"}
        clock.advance(step)
    while line.pop():
        pass
    assert all(isinstance(decision, Decision) and decision.allowed for decision in ran)
    starts = [decision.now for decision in ran]
    assert starts
    assert all(later - sooner >= 2 * SECOND for sooner, later in itertools.pairwise(starts))


@functools.cache
def forged_line() -> tuple[Line, list[Decision]]:
    clock = FakeClock(START)
    app = make_app(clock)
    ran: list[Decision] = []
    declare(app, lambda self: ran.append(self.request.tb_celery), bind=True, bucket="one", name="forged")
    return Line(app, clock), ran


def test_a_forged_turn_only_makes_its_own_task_wait(app: Celery, line: Line) -> None:
    task = declare(app, bucket="one")
    draw(app, "one")
    far = [line.clock.now() + 10**6 * SECOND, line.clock.identity, 0, 0]
    assert line.send_and_deliver(task, headers={HEADER: far}).state == "RETRY"
    line.take()
    assert line.send_and_deliver(task).countdown == 2.0


def test_a_turn_of_another_clock_means_now(app: Celery, line: Line) -> None:
    task = declare(app, bucket="five")
    draw(app, "five", 5)
    assert line.send_and_deliver(task).countdown == 1.0
    line.take()
    line.clock.advance(SECOND)
    assert line.send_and_deliver(task).state == "RETRY"  # a token is there, but meant for the one that waits
    line.take()
    far = [line.clock.now() + 10**6 * SECOND, line.clock.identity + 1, 3, line.clock.wall()]
    assert line.send_and_deliver(task, headers={HEADER: far}).state == "SUCCESS"


def test_the_request_tells_how_its_message_was_encoded(app: Celery, line: Line) -> None:
    task = declare(app, bucket="one")
    task.apply_async(serializer="pickle")
    message = line.take()
    request = LimitedRequest(message, app=app, task=task)
    assert request.request_dict["delivery_info"]["content_type"] == "application/x-python-serialize"
    assert "content_type" not in message.delivery_info
    assert itemgetter("id")(request.request_dict) == message.headers["id"]
