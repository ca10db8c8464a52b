"""What a body tells afterwards, without a worker: a broker in memory, and a clock that moves only when told to."""

from __future__ import annotations

import contextvars
import logging
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery, chain
from celery.exceptions import Ignore
from line import START, Line, declare, draw, logged, make_app, tokens

import tb_celery
from tb_celery import ConfigurationError, Limit, RateLimited, RateLimitExceeded, StoreError, limiter_of
from tb_celery.bucket import SECOND
from tb_celery.feedback import Feedback
from tb_celery.following import SHORTEST, UNSAID
from tb_celery.quota import quota_of
from tb_celery.reschedule import GRANT, HEADER, Grant
from tb_celery.shadow import ShadowStore
from tb_celery.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Task
    from kombu import Message

    from tb_celery.bucket import Charge
    from tb_celery.clock import FakeClock

TABLE = {"builtins.ConnectionError": "pause:30", "builtins.Exception": "ignore", "builtins.TimeoutError": "pause"}


class TooFastError(Exception):
    """What a client raises that has the response at hand."""

    def __init__(self, status_code: int, **headers: str) -> None:
        super().__init__(status_code)
        self.status_code = status_code
        self.headers = {name.replace("_", "-"): text for name, text in headers.items()}


@pytest.fixture
def app(clock: FakeClock) -> Celery:
    return make_app(clock, rejections=TABLE)


def paused(app: Celery, bucket: str, key: str | None = None) -> float:
    return limiter_of(app).status(bucket, key=key).paused


def raising(*errors: BaseException | None) -> Callable[..., str]:
    """A body that raises these, one a call, and then runs."""
    left = list(errors)

    def body(*_: object, **__: object) -> str:
        error = left.pop(0) if left else None
        if error is not None:
            raise error
        return "ran"

    return body


# -- the other side says stop


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (RateLimited("slowly", retry_after=120), 120),
        (RateLimited(retry_after="7"), 7),
        (RateLimited(retry_after=1e12), 86400),
        (RateLimited(retry_after=-1), SHORTEST),
        (RateLimited(retry_after=0), SHORTEST),
        (RateLimited(), UNSAID),
        (ConnectionRefusedError("busy"), 30),
        (TimeoutError(), UNSAID),
    ],
)
def test_a_rejection_pauses_the_bucket_and_sends_the_task_back_to_its_turn(
    app: Celery, line: Line, error: Exception, seconds: float
) -> None:
    task = declare(app, raising(error), bucket="five", max_retries=0)
    task.apply_async((1,), {"word": "x"}, headers={"mine": 1}, priority=3)
    message = line.take()
    outcome = line.deliver(message)
    assert (outcome.state, outcome.exceeded.bucket, outcome.exceeded.wait) == ("RETRY", "five", seconds)
    assert outcome.countdown == seconds or outcome.countdown < 900 < seconds, "in hops where it is long"
    assert paused(app, "five") == seconds
    assert tokens(app, "five") == 4, "it is spent"
    copy = line.take()
    assert line.pop() is None
    assert copy.body == message.body
    assert {name: copy.headers[name] for name in message.headers if name != "eta"} == {
        name: value for name, value in message.headers.items() if name != "eta"
    }
    assert (copy.headers["id"], copy.headers["retries"], copy.headers["mine"]) == (message.headers["id"], 0, 1)
    assert HEADER in copy.headers
    line.clock.advance(round(seconds * SECOND))
    assert line.deliver(copy).info == "ran"


def test_nobody_gets_tokens_in_the_pause(app: Celery, line: Line) -> None:
    rejected, other = declare(app, raising(RateLimited(retry_after=120)), bucket="five"), declare(app, bucket="five")
    line.send_and_deliver(rejected)
    line.take()
    outcome = line.send_and_deliver(other)
    assert outcome.state == "RETRY"
    assert outcome.exceeded.wait >= 119
    assert not limiter_of(app).acquire("five")


def test_one_publish_a_pause_however_often_a_task_is_turned_down(app: Celery, line: Line) -> None:
    task = declare(app, raising(*[RateLimited(retry_after=10)] * 20), bucket="five", max_retries=0)
    task.apply_async()
    (run,) = line.run_all()
    assert run.state == "SUCCESS"
    assert run.countdowns == [10] * 20
    assert line.clock.now() == START + 200 * SECOND


def in_flight(line: Line, *tasks: Task) -> list[Message]:
    """Messages of these tasks, whose tokens are taken by now."""
    messages = []
    for task in tasks:
        task.apply_async()
        message = line.take()
        granted = limiter_of(line.app).acquire(task.bucket)
        message.headers[GRANT] = Grant(line.clock.identity, granted)
        messages.append(message)
    return messages


def test_many_that_are_turned_down_at_once_come_back_one_by_one(app: Celery, line: Line) -> None:
    error = RateLimited(retry_after=10)
    tasks = [declare(app, raising(error), name=f"task{number}", bucket="five") for number in range(5)]
    outcomes = [line.deliver(message) for message in in_flight(line, *tasks)]
    assert [outcome.state for outcome in outcomes] == ["RETRY"] * 5
    assert [outcome.countdown for outcome in outcomes] == [10] * 5, "by then it is full"
    line.clock.advance(10 * SECOND)
    assert [run.countdowns for run in line.run_all()] == [[]] * 5


@pytest.mark.parametrize("options", [{"autoretry_for": (Exception,)}, {"autoretry_for": (RateLimited,)}])
def test_celerys_autoretry_does_not_spend_a_retry_on_it(app: Celery, line: Line, options: dict[str, Any]) -> None:
    errors = [RateLimited(retry_after=5), RateLimited(retry_after=5), OSError("something else")]
    task = declare(app, raising(*errors), bucket="five", max_retries=1, default_retry_delay=0, **options)
    task.apply_async()
    assert line.deliver().state == "RETRY"
    line.clock.advance(5 * SECOND)
    copy = line.take()
    assert copy.headers["retries"] == 0
    assert line.deliver(copy).state == "RETRY"
    line.clock.advance(5 * SECOND)
    outcome = line.deliver()
    if Exception in options["autoretry_for"]:
        assert outcome.state == "RETRY"
        assert line.take().headers["retries"] == 1
    else:
        assert outcome.state == "FAILURE"


def test_a_retry_of_the_bodys_own_is_left_alone(app: Celery, line: Line) -> None:
    def body(self: Task) -> None:
        raise self.retry(exc=RateLimited(retry_after=100), countdown=3)

    outcome = line.send_and_deliver(declare(app, body, bind=True, bucket="five"))
    assert outcome.state == "RETRY"
    assert outcome.retry is not None
    assert outcome.retry.when == 3
    assert line.take().headers["retries"] == 1
    assert paused(app, "five") == 0


def test_control_flow_is_no_rejection_whatever_the_table_says(clock: FakeClock) -> None:
    app = make_app(clock, rejections={"Exception": "pause:30"})
    line = Line(app, clock)
    line.send_and_deliver(declare(app, raising(Ignore()), bucket="five"))
    assert paused(app, "five") == 0
    assert line.send_and_deliver(declare(app, raising(ValueError()), name="other", bucket="five")).state == "RETRY"


def test_other_errors_are_failures_as_ever(app: Celery, line: Line) -> None:
    outcome = line.send_and_deliver(declare(app, raising(ValueError("no")), bucket="five"))
    assert (outcome.state, str(outcome.info)) == ("FAILURE", "no")
    assert paused(app, "five") == 0


def test_it_can_name_one_of_several_buckets(app: Celery, line: Line) -> None:
    task = declare(app, raising(RateLimited(retry_after=9, bucket="one")), bucket=["five", "one"])
    assert line.send_and_deliver(task).exceeded.bucket == "one"
    assert (paused(app, "five"), paused(app, "one")) == (0, 9)


def test_without_a_name_all_of_them_are_paused(app: Celery, line: Line) -> None:
    line.send_and_deliver(declare(app, raising(RateLimited(retry_after=9)), bucket=["five", "one"]))
    assert (paused(app, "five"), paused(app, "one")) == (9, 9)


def test_a_bucket_that_the_task_does_not_draw_from_is_an_error(app: Celery, line: Line) -> None:
    outcome = line.send_and_deliver(declare(app, raising(RateLimited(bucket="one")), bucket="five"))
    assert (outcome.state, type(outcome.info)) == ("FAILURE", ConfigurationError)
    assert "RateLimited names bucket 'one', from which this task does not draw, but from five" in str(outcome.info)


def test_only_the_key_of_the_call_is_paused(app: Celery, line: Line) -> None:
    task = declare(app, raising(RateLimited(retry_after=9)), bucket="five", key=lambda user: user)
    line.send_and_deliver(task, "alice")
    assert (paused(app, "five", "alice"), paused(app, "five", "bob"), paused(app, "five")) == (9, 0, 0)


def test_a_pause_is_never_shortened_nor_prolonged_by_who_does_not_know(
    app: Celery, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [RateLimited(retry_after=50), RateLimited(retry_after=5), RateLimited()]
    tasks = [declare(app, raising(error), name=f"task{number}", bucket="five") for number, error in enumerate(errors)]
    assert [line.deliver(message).state for message in in_flight(line, *tasks)] == ["RETRY"] * 3
    assert paused(app, "five") == 50
    ends = ["paused for 50 s", "paused for 50 s", "paused already"]
    assert [sentence.rpartition(" is ")[2] for _, sentence in logged(caplog)] == ends


@pytest.mark.parametrize("key", [None, lambda *_: "alice"], ids=["all", "one key"])
def test_its_node_hears_of_the_pause(app: Celery, line: Line, key: Callable[..., str] | None) -> None:
    task = declare(app, raising(RateLimited(retry_after=50)), bucket=["five", "other"], key=key)
    before = time.time()
    retry = line.send_and_deliver(task).retry
    exceeded = pickle.loads(pickle.dumps(retry)).exc  # noqa: S301 - as it comes to the node
    assert sorted(each[:2] for each in exceeded.pauses) == [("five", key is not None), ("other", key is not None)]
    assert all(before + 50 <= until <= time.time() + 50 for *_, until in exceeded.pauses)
    assert line.deliver().exceeded.pauses == ()


def test_max_wait_counts(app: Celery, line: Line) -> None:
    task = declare(app, raising(RateLimited(retry_after=100)), bucket="five", max_wait=60, autoretry_for=(Exception,))
    outcome = line.send_and_deliver(task)
    assert (outcome.state, outcome.exceeded.wait) == ("FAILURE", 100)
    assert line.pop() is None


@pytest.mark.parametrize(("on_reject", "state"), [("fail", "FAILURE"), ("drop", "PENDING"), ("hold", "RETRY")])
def test_on_reject_decides(app: Celery, line: Line, on_reject: str, state: str) -> None:
    task = declare(app, raising(RateLimited(retry_after=9)), bucket="five", on_reject=on_reject)
    assert line.send_and_deliver(task).state == state
    assert paused(app, "five") == 9


def test_who_is_not_limited_fails(app: Celery, line: Line) -> None:
    for bucket in (None, "off"):
        outcome = line.send_and_deliver(declare(app, raising(RateLimited("no")), name=str(bucket), bucket=bucket))
        assert (outcome.state, str(outcome.info)) == ("FAILURE", "no")


def test_a_direct_call_raises_what_it_raises(app: Celery) -> None:
    task = declare(app, raising(RateLimited("no")), bucket="five", autoretry_for=(Exception,))
    with pytest.raises(RateLimited):
        task()
    assert paused(app, "five") == 0


def test_a_direct_call_in_a_body_is_that_bodys(app: Celery, line: Line) -> None:
    inner = declare(app, raising(None, RateLimited(retry_after=9)), name="inner", bucket="one")
    assert line.send_and_deliver(inner).state == "SUCCESS"
    outer = declare(app, lambda: inner(), name="outer", bucket="five")  # noqa: PLW0108
    assert line.send_and_deliver(outer).exceeded.bucket == "five"
    assert (paused(app, "one"), paused(app, "five")) == (0, 9)


def test_a_call_of_a_map_waits_in_line_and_is_made_again(app: Celery, line: Line, clock: FakeClock) -> None:
    app.set_current()
    results = iter([None, RateLimited(retry_after=9), None, None])

    def body(number: int) -> int:
        error = next(results)
        if error:
            raise error
        return number

    task = declare(app, body, bucket="five", autoretry_for=(Exception,))
    task.map([1, 2, 3]).apply_async()
    assert line.deliver().info == [1, 2, 3]
    assert clock.now() == START + 9 * SECOND
    assert line.pop() is None


def test_an_eager_task_waits_in_line_and_runs_again(app: Celery, clock: FakeClock) -> None:
    task = declare(app, raising(*[RateLimited(retry_after=25)] * 2), bucket="five", autoretry_for=(Exception,))
    result = task.apply()
    assert (result.state, result.result) == ("SUCCESS", "ran")
    assert clock.now() == START + 50 * SECOND


def test_an_eager_task_waits_no_longer_than_the_setting_says_in_all(app: Celery, clock: FakeClock) -> None:
    task = declare(app, raising(*[RateLimited(retry_after=25)] * 9), bucket="five", autoretry_for=(Exception,))
    result = task.apply()
    assert (result.state, type(result.result)) == ("FAILURE", RateLimitExceeded)
    assert clock.now() == START + 50 * SECOND


def test_a_class_that_has_its_own_call(app: Celery, line: Line) -> None:
    class Own(tb_celery.RateLimitedTask):
        def __call__(self, *args: object, **kwargs: object) -> object:
            return self.run(*args, **kwargs)

    task = declare(app, raising(RateLimited(retry_after=9)), base=Own, bucket="five")
    assert line.send_and_deliver(task).state == "RETRY"


def test_each_call_of_a_map_asks_once_whatever_calls_its_class_has(app: Celery, line: Line) -> None:
    class Own(tb_celery.RateLimitedTask):
        def __call__(self, *args: object, **kwargs: object) -> object:
            return super().__call__(*args, **kwargs)

    class Further(Own):
        def __call__(self, *args: object, **kwargs: object) -> object:
            return super().__call__(*args, **kwargs)

    app.set_current()
    task = declare(app, lambda number: number, base=Further, bucket="five")
    task.map([1, 2]).apply_async()
    assert line.deliver().info == [1, 2]
    assert tokens(app, "five") == 3
    assert line.send_and_deliver(task, 3).info == 3
    assert tokens(app, "five") == 2


def test_a_chain_goes_on_once(app: Celery, line: Line) -> None:
    first = declare(app, raising(RateLimited(retry_after=9)), name="first", bucket="five")
    chain(first.s(), declare(app, lambda word: word * 2, name="second", bucket="five").s()).apply_async()
    assert [run.state for run in line.run_all()] == ["SUCCESS"]
    assert line.deliver().info == "ranran"
    assert line.pop() is None


def test_it_is_told_in_one_line(app: Celery, line: Line, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    task = declare(app, raising(RateLimited("calm down", retry_after=9)), bucket="five")
    task.apply_async(task_id="id")
    line.deliver()
    assert logged(caplog) == [
        ("WARNING", f"{task.name}[id] was turned down (RateLimited: 'calm down'): bucket 'five' is paused for 9 s")
    ]


class NoOrders(MemoryStore):
    """Lets pass, and cannot be told of pauses."""

    def order(self, charge: Charge, span: int, declared: Limit | None = None) -> None:  # noqa: ARG002
        message = "state file /x is on fire"
        raise StoreError(message)


@pytest.mark.parametrize("policy", ["defer", "allow", "fail"])
def test_where_the_pause_cannot_be_kept_the_task_still_leaves(clock: FakeClock, policy: str) -> None:
    app = make_app(on_store_error=policy)
    quota_of(app).limiter.store = NoOrders(clock)
    line = Line(app, clock)
    outcome = line.send_and_deliver(declare(app, raising(RateLimited(retry_after=100)), bucket="five"))
    assert (outcome.state, outcome.countdown, type(outcome.info)) == ("RETRY", 100, StoreError)
    assert line.deliver().info == "ran"


def test_where_the_pause_cannot_be_kept_an_eager_task_waits_for_it_and_takes_tokens_anew(clock: FakeClock) -> None:
    app = make_app()
    quota_of(app).limiter.store = NoOrders(clock)
    assert declare(app, raising(RateLimited(retry_after=9)), bucket="one").apply().get() == "ran"
    assert clock.now() == START + 9 * SECOND
    assert tokens(app, "one") == 0, "the first one has come back meanwhile, and is spent again"


@pytest.mark.parametrize("error", [RateLimited(retry_after=9), RateLimited(retry_after=9, bucket="five")])
def test_where_limits_are_not_enforced_the_other_sides_is(clock: FakeClock, error: Exception) -> None:
    app = make_app(clock, enforce=False)
    quota_of(app).limiter.store = ShadowStore(MemoryStore(clock), enforce=False)
    line = Line(app, clock)
    task = declare(app, raising(*[error] * 3), bucket="five")
    task.apply_async()
    for _ in range(3):
        outcome = line.deliver()
        assert (outcome.state, outcome.countdown, outcome.exceeded.paused) == ("RETRY", 9, True)
        clock.advance(9 * SECOND)
    assert line.deliver().info == "ran"
    assert line.pop() is None


@pytest.mark.parametrize(("pause", "state"), [(9, "SUCCESS"), (61, "FAILURE")])
def test_an_eager_task_whose_limits_are_not_enforced_waits_for_the_other_side_alone(
    clock: FakeClock, pause: int, state: str
) -> None:
    app = make_app(clock, enforce=False)
    quota_of(app).limiter.store = ShadowStore(MemoryStore(clock), enforce=False)
    task = declare(app, raising(RateLimited(retry_after=pause)), bucket="five")
    assert task.apply().state == state
    assert clock.now() == START + (pause * SECOND if state == "SUCCESS" else 0)
    assert task.apply().state == "SUCCESS", "nobody else waits"
    assert clock.now() == START + (pause * SECOND if state == "SUCCESS" else 0)


def test_a_call_of_a_map_whose_limits_are_not_enforced_waits_for_the_other_side_alone(clock: FakeClock) -> None:
    app = make_app(clock, enforce=False)
    quota_of(app).limiter.store = ShadowStore(MemoryStore(clock), enforce=False)
    app.set_current()
    line = Line(app, clock)
    task = declare(app, raising(RateLimited(retry_after=90)), bucket="five")
    task.map([[], []]).apply_async()
    assert line.deliver().state == "SUCCESS"
    assert clock.now() == START + 90 * SECOND


# -- costs known afterwards


def settling(*costs: Any) -> Callable[..., None]:
    def body(*_: object) -> None:
        for cost in costs:
            tb_celery.settle(cost)

    return body


@pytest.mark.parametrize(
    ("costs", "left"),
    [((3,), 2), ((0,), 5), ((1,), 4), ((0.5,), 4.5), ((4, 2), 3), ((0, 2), 3), (({"five": 3},), 2)],
)
def test_the_difference_is_drawn_or_given_back(app: Celery, line: Line, costs: tuple[Any, ...], left: float) -> None:
    assert line.send_and_deliver(declare(app, settling(*costs), bucket="five")).state == "SUCCESS"
    assert tokens(app, "five") == left


def test_a_cost_may_be_more_than_there_is_and_later_ones_wait(app: Celery, line: Line) -> None:
    line.send_and_deliver(declare(app, settling(8), name="first", bucket="five"))
    outcome = line.send_and_deliver(declare(app, name="second", bucket="five"))
    assert outcome.exceeded.wait == 4


def test_each_bucket_and_key_is_settled(app: Celery, line: Line) -> None:
    task = declare(app, settling({"five": 3}), bucket={"five": 2, "one": 1}, key=lambda user: user)
    line.send_and_deliver(task, "alice")
    assert (tokens(app, "five", "alice"), tokens(app, "one", "alice"), tokens(app, "five")) == (2, 0, 5)


def test_a_bound_task_has_a_method(app: Celery, line: Line) -> None:
    def body(self: Task) -> None:
        self.settle(0)

    task = declare(app, body, bind=True, bucket="five")
    line.send_and_deliver(task)
    assert tokens(app, "five") == 5
    task()
    task.run()


def in_thread(call: Callable[[], object], *, context: bool) -> list[object]:
    """What ``call`` has raised in another thread."""
    raised: list[object] = []

    def run() -> None:
        try:
            call()
        except ConfigurationError as error:
            raised.append(error)

    target = partial(contextvars.copy_context().run, run) if context else run
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    return raised


@pytest.mark.parametrize("method", [True, False])
def test_a_thread_with_the_bodys_context_settles_and_another_hears_why_not(
    app: Celery, line: Line, *, method: bool
) -> None:
    raised: list[object] = []

    def body(self: Task) -> None:
        settle = self.settle if method else tb_celery.settle
        assert in_thread(partial(settle, 3), context=True) == []
        raised.extend(in_thread(partial(settle, 1), context=False))

    task = declare(app, body, bind=True, bucket="five")
    assert line.send_and_deliver(task).state == "SUCCESS"
    assert tokens(app, "five") == 2
    (error,) = raised
    assert "settle is for the body of a task, in its own thread, or in one with the context of the body's" in str(error)
    assert in_thread(partial(task.settle, 1), context=False) == [], "no body runs: a function that somebody calls"


def test_a_thread_of_a_body_that_draws_nothing_settles_nothing(app: Celery, line: Line) -> None:
    task = declare(app, lambda: in_thread(partial(tb_celery.settle, 3), context=True), bucket="off")
    assert line.send_and_deliver(task).info == []


def test_of_many_threads_calls_one_is_the_last(app: Celery, line: Line) -> None:
    def body() -> None:
        context = contextvars.copy_context()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda cost: context.copy().run(tb_celery.settle, cost), [1, 2, 3] * 20))
        tb_celery.settle(4)

    line.send_and_deliver(declare(app, body, bucket="five"))
    assert tokens(app, "five") == 1


def test_a_failure_can_give_its_tokens_back(app: Celery, line: Line) -> None:
    class Refunding(tb_celery.RateLimitedTask):
        def on_failure(self, *_: object) -> None:
            self.settle(0)

    line.send_and_deliver(declare(app, raising(ValueError()), base=Refunding, bucket="five"))
    assert tokens(app, "five") == 5


def test_a_direct_call_settles_for_the_body_that_makes_it(app: Celery, line: Line) -> None:
    inner = declare(app, settling(3), name="inner", bucket="one")
    line.send_and_deliver(declare(app, lambda: inner(), name="outer", bucket="five"))  # noqa: PLW0108
    assert (tokens(app, "five"), tokens(app, "one")) == (2, 1)


def test_each_call_of_a_map_settles_for_itself(app: Celery, line: Line) -> None:
    app.set_current()
    task = declare(app, lambda cost: tb_celery.settle(cost), bucket="five")  # noqa: PLW0108
    task.map([0, 2, 1]).apply_async()
    assert line.deliver().state == "SUCCESS"
    assert tokens(app, "five") == 2


def test_after_a_rejection_it_is_the_new_tokens_that_are_settled(app: Celery) -> None:
    results = iter([RateLimited(retry_after=1), None])

    def body() -> None:
        tb_celery.settle(2)
        if error := next(results):
            raise error

    assert declare(app, body, bucket="week").apply().state == "FAILURE", "it owes a week"
    assert declare(app, settling(2), name="other", bucket="five").apply().state == "SUCCESS"
    assert tokens(app, "five") == 3


def test_nothing_is_settled_where_nothing_is_drawn(app: Celery, line: Line) -> None:
    task = declare(app, settling(3), bucket="off")
    assert line.send_and_deliver(task).state == "SUCCESS"
    task()


@pytest.mark.parametrize(
    ("cost", "sentence"),
    [
        (-1, "actual must be a finite number above 0, not -1"),
        (None, "actual must be a number, not None"),
        (False, "actual must be a number, not False"),
        ({"one": 1}, "settle names bucket 'one', from which this task does not draw, but from five"),
    ],
)
def test_a_wrong_cost_fails_the_task(app: Celery, line: Line, cost: object, sentence: str) -> None:
    outcome = line.send_and_deliver(declare(app, settling(cost), bucket="five"))
    assert (outcome.state, type(outcome.info)) == ("FAILURE", ConfigurationError)
    assert sentence in str(outcome.info)
    assert tokens(app, "five") == 4


@pytest.mark.parametrize("call", [tb_celery.settle, tb_celery.observe])
def test_outside_of_a_task_that_is_an_error(call: Callable[[Any], object]) -> None:
    with pytest.raises(ConfigurationError, match="is for the body of a task, in its own thread, or in one with"):
        call({})


def test_a_header_of_its_name_means_nothing(app: Celery, line: Line) -> None:
    task = declare(app, settling(3), bucket=None)
    task.apply_async(headers={"tb_celery_delivery": "mine"})
    assert line.deliver().state == "SUCCESS"


# -- what a response says


def test_a_body_that_has_a_response_pauses_its_buckets(app: Celery, line: Line) -> None:
    said = []

    def body() -> None:
        said.append(tb_celery.observe(TooFastError(429, Retry_After="9")))

    assert line.send_and_deliver(declare(app, body, bucket=["five", "one"])).state == "SUCCESS"
    assert said == [Feedback(rejected=True, pause=9.0)]
    assert (paused(app, "five"), paused(app, "one")) == (9, 9)


def test_a_body_that_observes_and_raises_waits_for_what_was_said(app: Celery, line: Line) -> None:
    def body() -> None:
        if tb_celery.observe({"Retry-After": "9"}, 503, bucket="five").rejected:
            raise RateLimited

    assert line.send_and_deliver(declare(app, body, bucket=["five", "one"])).countdown == UNSAID
    assert (paused(app, "five"), paused(app, "one")) == (9, UNSAID)


def test_where_fewer_calls_are_left_than_tokens_the_difference_is_taken_away(app: Celery) -> None:
    limiter = limiter_of(app)
    limiter.observe("five", {"X-RateLimit-Remaining": "3"}, 200)
    assert tokens(app, "five") == 3
    limiter.observe("five", {"X-RateLimit-Remaining": "4"})
    assert tokens(app, "five") == 3, "none are added"
    limiter.observe("five", {"X-RateLimit-Remaining": "2"}, cost=2, key="alice")
    assert (tokens(app, "five", "alice"), tokens(app, "five")) == (4, 3)


def test_a_call_costs_what_the_delivery_took(app: Celery, line: Line) -> None:
    def body() -> None:
        tb_celery.observe({"X-RateLimit-Remaining": "1"}, bucket="five")

    line.send_and_deliver(declare(app, body, bucket={"five": 2, "one": 1}))
    assert tokens(app, "five") == 2


def test_a_quota_that_is_used_up_is_a_pause_until_its_reset(app: Celery) -> None:
    limiter_of(app).observe("five", {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "40"}, 200)
    assert paused(app, "five") == 40


def test_the_numbers_that_are_ordered_count(app: Celery) -> None:
    limiter = limiter_of(app)
    limiter.set("five", capacity=10, refill_rate=0.5)
    limiter.observe("five", {"X-RateLimit-Remaining": "3"})
    assert tokens(app, "five") == 3


def test_nothing_follows_for_a_bucket_that_is_not_limited(app: Celery, line: Line) -> None:
    assert limiter_of(app).observe("off", {"Retry-After": "9"}, 429).rejected
    said = []
    task = declare(app, lambda: said.append(tb_celery.observe({"Retry-After": "9"}, 429)), bucket="off")
    line.send_and_deliver(task)
    assert said[0].pause == 9


def test_a_predicate_decides_what_a_rejection_is(app: Celery) -> None:
    limiter = limiter_of(app)
    assert not limiter.observe("five", {}, 400).rejected
    assert limiter.observe("five", {}, 400, rejected=lambda _, status: status == 400).rejected
    assert paused(app, "five") == UNSAID


def test_an_answer_as_boto3_has_it(app: Celery) -> None:
    answer = {"ResponseMetadata": {"HTTPStatusCode": 429, "HTTPHeaders": {"retry-after": "9"}}}
    assert limiter_of(app).observe("five", answer).pause == 9


def test_drift_is_told_once(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    limiter = limiter_of(app)
    for _ in range(2):
        limiter.observe("five", {"RateLimit-Policy": '"default";q=30;w=60'})
        limiter.observe("five", {"RateLimit-Policy": '"default";q=90;w=60'})
        limiter.observe("five", {"RateLimit-Policy": '"default";q=60;w=60'})
        limiter.observe("one", {"X-RateLimit-Limit": "60", "X-RateLimit-Reset": "3000"})
    one, other = (
        "bucket 'five' is declared in the setting buckets as 5 at 1/s",
        "bucket 'one' is declared in the setting",
    )
    assert [(level, sentence.removesuffix(" that the other side allows")) for level, sentence in logged(caplog)] == [
        ("WARNING", f"{one}, which is more than the 30 calls in 60 s"),
        ("INFO", f"{one}, which is less than the 90 calls in 60 s"),
        ("WARNING", f"{other} buckets as 1 at 0.5/s, which is more than the 60 calls until a reset in 3000 s"),
    ]


def test_a_call_that_owes_nothing_more_writes_nothing(app: Celery, line: Line) -> None:
    draw(app, "five", 1)
    line.send_and_deliver(declare(app, settling(1, 1), bucket="five"))
    assert tokens(app, "five") == 3
