"""What is shown on one running node, all at once: each scenario has a bucket or a key of its own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery import chain, chord, group
from celery.canvas import StampingVisitor
from celery_matrix.cell import PATIENCE, Cell, feature

from tb_celery import RateLimitExceeded
from tb_celery.bucket import SECOND
from tb_celery.reschedule import HEADER
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from celery.result import AsyncResult


BURST = 30


def within(bodies: list[dict[str, Any]], capacity: float, rate: float) -> None:
    granted = [(body["granted"], 1) for body in bodies]
    assert first_violation(granted, capacity, rate) is None


def in_order(bodies: list[dict[str, Any]], *results: AsyncResult) -> None:
    ran = {body["id"]: body["began"] for body in bodies}
    began = [ran[each.id] for each in results]
    assert began == sorted(began)


def line(result: AsyncResult) -> list[AsyncResult]:
    """A chain's results, first to last."""
    found = [result]
    while found[0].parent is not None:
        found.insert(0, found[0].parent)
    return found


@feature("a burst stays within the bound, each body runs once", alone=True)
async def burst(cell: Cell) -> str:
    # Each process connects to the broker when it sends its first task back, which takes it a moment.
    await cell.once(*[cell.tasks.quick.apply_async(key="warm") for _ in range(4)])
    results = [cell.tasks.burst.delay(number) for number in range(BURST)]
    bodies = await cell.once(*results)
    within(bodies, 3, 20)
    granted = [body["granted"] for body in bodies]
    took = (max(granted) - min(granted)) / SECOND
    republished = cell.refusals(each.id for each in results) / BURST
    return f"{took:.2f} s (ideal {(BURST - 3) / 20:.2f} s), {republished:.2f} republished per task"


@feature("plain tasks pass a starved bucket's")
async def plain_beside_starved(cell: Cell) -> str:
    starved = [cell.tasks.starved.delay() for _ in range(60)]
    plain = [cell.tasks.plain.delay() for _ in range(20)]
    await cell.once(*plain)
    ran = cell.site.of(each.id for each in starved)
    assert len(ran) <= 1
    return "60 wait"


@feature("chain")
async def chained(cell: Cell) -> None:
    tasks = cell.tasks
    cell.drain("quick", "chain")
    result = chain(
        tasks.quick.s(1).set(key="chain"), tasks.quick.si(2).set(key="chain"), tasks.plain.si(3)
    ).apply_async()
    in_order(await cell.once(*line(result)), *line(result))
    assert [each.result for each in line(result)] == [1, 2, 3]


@feature("group")
async def grouped(cell: Cell) -> None:
    cell.drain("quick", "group")
    result = group(cell.tasks.quick.s(number).set(key="group") for number in range(3)).apply_async()
    within(await cell.once(*result.results), 1, 4)
    assert [each.result for each in result.results] == [0, 1, 2]


@feature("chord of 8")
async def chord_of_eight(cell: Cell) -> None:
    tasks = cell.tasks
    cell.drain("quick", "chord")
    members = [tasks.quick.s(number).set(key="chord") for number in range(8)]
    result = chord(members, tasks.total.s()).apply_async()
    bodies = await cell.once(*result.parent.results, result)
    within([body for body in bodies if body["id"] != result.id], 1, 4)
    assert result.result == sum(range(8))


@feature("group in a group")
async def group_in_group(cell: Cell) -> None:
    part = {"key": "nested"}
    cell.drain("quick", "nested")
    quick = cell.tasks.quick
    result = group(quick.s(1).set(**part), group(quick.s(2).set(**part), quick.s(3).set(**part))).apply_async()
    members = [leaf for each in result.results for leaf in (each.results if hasattr(each, "results") else [each])]
    within(await cell.once(*members), 1, 4)
    assert sorted(each.result for each in members) == [1, 2, 3]


@feature("chord in a chain")
async def chord_in_chain(cell: Cell) -> None:
    tasks = cell.tasks
    part = {"key": "chord in chain"}
    cell.drain("quick", part["key"])
    result = chain(
        tasks.quick.s(0).set(**part),
        group(tasks.quick.si(number).set(**part) for number in (1, 2, 3)),
        tasks.total.s(),
        tasks.quick.s().set(**part),
    ).apply_async()
    await cell.state("SUCCESS", result)
    assert result.result == 6
    everything = [each for each in line(result) if not hasattr(each, "results")]
    members = [each for part in line(result) if hasattr(part, "results") for each in part.results]
    await cell.once(*everything, *members)


@feature("link and link_error")
async def linked(cell: Cell) -> None:
    tasks = cell.tasks
    cell.drain("quick", "link")
    good, bad = tasks.plain.si(1).set(task_id=f"{cell.tasks.PREFIX}-good"), tasks.failed.si()
    bad.set(task_id=f"{cell.tasks.PREFIX}-bad")
    fine = tasks.quick.apply_async((1,), key="link", link=good, link_error=tasks.failed.si().set(task_id="never"))
    broken = tasks.fails.apply_async(key="link", link=tasks.plain.si(2).set(task_id="never"), link_error=bad)
    await cell.once(fine)
    await cell.state("FAILURE", broken)
    ran = await cell.bodies([good.options["task_id"], bad.options["task_id"], broken.id])
    assert [len(each) for each in ran.values()] == [1, 1, 1]
    assert cell.site.of(["never"]) == {}


class Stamp(StampingVisitor):
    def on_signature(self, *_: object, **__: object) -> dict[str, list[str]]:
        return {"tenant": ["a"]}


@feature("stamps")
async def stamped(cell: Cell) -> None:
    cell.drain("quick", "stamps")
    signature = cell.tasks.quick.s(1).set(key="stamps")
    signature.stamp(Stamp())
    result = signature.apply_async()
    await cell.once(result)
    for delivery in cell.site.of([result.id], "delivery")[result.id]:
        assert delivery["request"]["stamps"] == {"tenant": ["a"]}


@feature("self.replace")
async def replaced(cell: Cell) -> None:
    cell.drain("quick", "replace")
    result = cell.tasks.replaces_itself.apply_async((7,), key="replace")
    await cell.state("SUCCESS", result)
    assert result.result == 7
    bodies = (await cell.bodies([result.id]))[result.id]
    assert len(bodies) == 2
    within(bodies, 1, 4)


@feature("autoretry_for")
async def retried_by_celery(cell: Cell) -> None:
    cell.drain("quick", "autoretry")
    result = cell.tasks.fails_once.apply_async(key="autoretry")
    await cell.state("SUCCESS", result)
    bodies = cell.site.of([result.id])[result.id]
    assert [body["retries"] for body in bodies] == [0, 1]
    within(bodies, 1, 4)


@feature("self.retry")
async def retried_by_itself(cell: Cell) -> None:
    cell.drain("quick", "retry")
    result = cell.tasks.retries_itself.apply_async(key="retry", headers={"trace": "abc"})
    await cell.state("SUCCESS", result)
    bodies = cell.site.of([result.id])[result.id]
    assert [body["retries"] for body in bodies] == [0, 1, 2]
    assert all(body["headers"]["trace"] == "abc" and HEADER not in body["headers"] for body in bodies)
    within(bodies, 1, 4)


@feature("acks_late")
async def acknowledged_late(cell: Cell) -> None:
    cell.drain("quick", "acks")
    within(await cell.once(*[cell.tasks.acked_late.apply_async(key="acks") for _ in range(3)]), 1, 4)


@feature("ignore_result")
async def result_ignored(cell: Cell) -> None:
    cell.drain("quick", "ignored")
    result = cell.tasks.ignored.apply_async(key="ignored")
    bodies = await cell.bodies([result.id])
    assert [len(each) for each in bodies.values()] == [1]
    assert cell.tasks.app.AsyncResult(result.id).state == "PENDING"


@feature("expires is a point in time")
async def expires(cell: Cell) -> None:
    """Of three that wait for one slow bucket, the one that expires never runs, and nobody waits for it."""
    cell.drain("slow", "expires")
    at = datetime.now(UTC) + timedelta(seconds=PATIENCE)
    lives = cell.tasks.slow.apply_async(key="expires", expires=at)
    expired = cell.tasks.slow.apply_async(key="expires", expires=1.0)
    after = cell.tasks.slow.apply_async(key="expires", expires=PATIENCE)
    await cell.once(lives, after)
    if cell.broker == "redis":
        await cell.state("REVOKED", expired)  # RabbitMQ drops an expired message of a queue by itself, and tells nobody
    assert cell.site.of([expired.id]) == {}
    for delivery in cell.site.of([lives.id], "delivery")[lives.id]:
        assert datetime.fromisoformat(delivery["request"]["expires"]) == at


@feature("time limits do not count the wait")
async def time_limits(cell: Cell) -> None:
    cell.drain("slow", "limits")
    await cell.once(cell.tasks.slow.apply_async(key="limits", soft_time_limit=1, time_limit=1))


@feature("priority, exchange, routing key, headers")
async def destination(cell: Cell) -> None:
    cell.drain("quick", "destination")
    result = cell.tasks.quick.apply_async(
        (1,),
        key="destination",
        queue=cell.tasks.CUSTOM,
        routing_key="special.one",
        priority=7,
        headers={"trace": "abc"},
    )
    (body,) = await cell.once(result)
    assert body["headers"]["trace"] == "abc"
    assert HEADER not in body["headers"]
    for delivery in cell.site.of([result.id], "delivery")[result.id]:
        delivered = delivery["request"]["delivery_info"]
        assert delivered["routing_key"].endswith("special.one")
        assert delivered["priority"] == 7
        if not delivered["exchange"].startswith("celery_delayed_"):
            assert delivered["exchange"] == cell.tasks.TOPIC


@feature("pydantic=True")
async def validated(cell: Cell) -> None:
    cell.drain("quick", "pydantic")
    result = cell.tasks.typed.apply_async(({"number": 3},), key="pydantic")
    await cell.once(result)
    assert result.result == 3


@feature("revoke of a waiting task")
async def revoked(cell: Cell) -> None:
    """It has ten seconds before it in the line, for a busy worker hears of it late; and one task behind it."""
    cell.drain("second", "revoked")
    before, (result, after) = (
        [cell.tasks.early_acked.apply_async(key="revoked") for _ in range(count)] for count in (10, 2)
    )
    await cell.waiting(result)
    result.revoke()
    await cell.state("REVOKED", result)
    within(await cell.once(*before, after), 1, 1)
    assert cell.site.of([result.id]) == {}


@feature("result.get()")
async def got(cell: Cell) -> None:
    cell.drain("quick", "get")
    result = cell.tasks.quick.apply_async((5,), key="get")
    assert result.get(timeout=PATIENCE) == 5


@feature("map, starmap, chunks")
async def many_calls(cell: Cell) -> None:
    """Calls inside one delivery have no key; of the bucket that all share, each draws a token."""
    inner = cell.tasks.inner
    cell.drain("quick")
    asked = cell.limiter.peek("quick").now
    mapped = inner.map([1, 2]).apply_async()
    starred = inner.starmap([(3,), (4,)]).apply_async()
    chunked = inner.chunks([(5,), (6,), (7,)], 2).apply_async()
    await cell.state("SUCCESS", mapped, starred, *chunked.results)
    calls = [event for event in cell.site.events("inner") if event["at"] >= asked]
    assert sorted(call["number"] for call in calls) == [1, 2, 3, 4, 5, 6, 7]
    for number, call in enumerate(calls, 1):
        # A token was there for each: one at most at the start, and those that have come since.
        assert number <= 1 + 4 * (call["at"] - asked) / SECOND


@feature("class-based and shared tasks")
async def other_forms(cell: Cell) -> None:
    cell.drain("quick", "class")
    shared = cell.tasks.app.tasks[f"{cell.tasks.NAME}.shared"]
    results = [each.apply_async((number,), key="class") for number, each in enumerate((cell.tasks.of_class, shared))]
    within(await cell.once(*results), 1, 4)


@feature("route by task glob")
async def routed_by_task(cell: Cell) -> None:
    within(await cell.once(*[cell.tasks.globbed.delay() for _ in range(4)]), 1, 4)


@feature("route by queue")
async def routed_by_queue(cell: Cell) -> None:
    within(await cell.once(*[cell.tasks.plain.apply_async(queue=cell.tasks.LIMITED) for _ in range(4)]), 1, 4)


@feature('on_reject: "fail", "drop", a function')
async def on_reject(cell: Cell) -> None:
    tasks = cell.tasks
    cell.drain("starved", "rejected")
    cell.drain("quick", "rejected")
    failing = tasks.fails_when_refused.apply_async(key="rejected")
    dropped = [each.apply_async(key="rejected") for each in (tasks.dropped_when_refused, tasks.chosen_to_drop)]
    await cell.once(tasks.chosen_to_wait.apply_async(key="rejected"))
    await cell.state("FAILURE", failing)
    assert isinstance(failing.result, RateLimitExceeded)
    for each in dropped:
        sentence = f"[{each.id}] is dropped: bucket 'starved' is over quota"
        await cell.until(lambda sentence=sentence: sentence in cell.log(), "the drop is logged")  # type: ignore[misc]
    assert cell.site.of(each.id for each in (failing, *dropped)) == {}


@feature("task_annotations with a bucket")
async def annotated(cell: Cell) -> None:
    cell.drain("quick", "annotated")
    within(await cell.once(*[cell.tasks.annotated.delay("annotated") for _ in range(3)]), 1, 4)


@feature("a task declared late")
async def declared_late(cell: Cell) -> None:
    cell.drain("quick", "late")
    send = cell.tasks.app.send_task
    names = [f"{cell.tasks.NAME}.declared_late_{kind}" for kind in ("plain", "limited")]
    within(await cell.once(*[send(name, ("late",)) for name in names]), 1, 4)
