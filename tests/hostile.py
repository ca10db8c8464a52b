"""Messages that anybody may have written: what is wrong with each, as changes to one that is right."""

from __future__ import annotations

import base64
import json
import uuid
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FAR = 1 << 62
"""A turn in a hundred years."""
LEFT_OUT: Any = object()


class Forged(NamedTuple):
    """What differs from a right message.

    Attributes:
        headers: those, or :data:`LEFT_OUT` in place of one.
        way: what its publisher tells of its exchange and routing key.
        properties: others.
        body: a text, or what is to be encoded.
        fields: whatever else.
    """

    headers: Mapping[str, Any] = {}
    way: Mapping[str, Any] = {}
    properties: Mapping[str, Any] = {}
    body: Any = LEFT_OUT
    fields: Mapping[str, Any] = {}

    def payload(self, task: str, queue: str) -> str:
        """As Redis keeps it, for a task and a queue."""
        body = [[], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
        told = {
            "lang": "py",
            "task": task,
            "id": uuid.uuid4().hex,
            "retries": 0,
            "argsrepr": "()",
            "kwargsrepr": "{}",
        }
        text = self.body if isinstance(self.body, str) else json.dumps(body if self.body is LEFT_OUT else self.body)
        payload = {
            "body": base64.b64encode(text.encode("utf-8", "surrogatepass")).decode(),
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {name: value for name, value in (told | dict(self.headers)).items() if value is not LEFT_OUT},
            "properties": {
                "correlation_id": uuid.uuid4().hex,
                "reply_to": "",
                "delivery_mode": 2,
                "delivery_info": {"exchange": "", "routing_key": queue, **self.way},
                "priority": 0,
                "body_encoding": "base64",
                "delivery_tag": uuid.uuid4().hex,
                **self.properties,
            },
            **self.fields,
        }
        return json.dumps(payload)


TEXTS: tuple[Any, ...] = ("", "x", "\ud800", 5, -1, 1.5, True, None, [], ["x"], {}, {"x": 1}, FAR << 10)
HEADERS = (
    *("id", "root_id", "parent_id", "group", "shadow", "origin", "argsrepr", "kwargsrepr", "retries", "eta", "expires"),
    *("ignore_result", "timelimit", "stamped_headers", "stamps", "headers", "is_eager", "called_directly", "chord"),
    *("delivery_info", "properties", "args", "kwargs", "correlation_id", "reply_to", "hostname", "utc", "compression"),
    *("tb_celery", "tb_celery_call", "tb_celery_grant", "tb_celery_source", "tb_celery_asked", "tb_celery_delivery"),
    *("queues", "content_type", "subscribed", "replaced_task_nesting"),
)
PROPERTIES = ("priority", "reply_to", "correlation_id", "delivery_mode", "expiration")
OVERRIDDEN = ("delivery_info", "tb_celery_source", "tb_celery_grant", "tb_celery_asked", "headers", "id", "is_eager")
LATE, EARLY = "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"
FORMS: dict[str, tuple[Any, ...]] = {
    "timelimit": ([None], [1], ["x", "y"], [None, {}], [1, 2, 3], {"a": 1, "b": 2}),
    "tb_celery": ([FAR, 0, 0, 0], [-1, 0, 0, 0], [1, 2, FAR * 2 - 1, 1], [0.5, 0, 0, 0], [0] * 3, [[], 0, 0, 0]),
    "tb_celery_call": ({"cost": -1}, {"cost": 1e300}, {"cost": "x"}, {"key": 5}, {"max_wait": "x"}, {"other": 1}),
}


def forgeries() -> Iterator[Forged]:
    """One thing wrong in each."""
    yield from (Forged(headers={name: value}) for name, value in product(HEADERS, (*TEXTS, LEFT_OUT)))
    yield from (Forged(headers={name: value}) for name, values in FORMS.items() for value in values)
    yield Forged(headers={"stamped_headers": ["x"], "stamps": ["x"]})
    yield Forged(headers={"stamped_headers": [["x"]], "stamps": {"x": 1}})
    yield Forged(headers={"expires": EARLY, "eta": LATE})
    for name, value in product(("exchange", "routing_key"), (*TEXTS, "celery_delayed_27", "celery_delayed_27.x")):
        yield Forged(way={name: value})
        yield Forged(way={"exchange": "x", "routing_key": "x", name: value})
    yield from (Forged(properties={name: value}) for name, value in product(PROPERTIES, TEXTS))
    yield from bodies()
    yield from (Forged(fields={"content-type": kind}) for kind in ("application/x-python-serialize", "x", None, 5))
    yield from (Forged(fields={"content-encoding": name}) for name in ("x", "utf-16", None))


def bodies() -> Iterator[Forged]:
    """The right headers, and not what has to follow."""
    parts: tuple[Any, ...] = (None, 5, "x", {}, [], [[]])
    for part in parts:
        yield from (Forged(body=body) for body in (part, [part, {}, {}], [[], part, {}], [[], {}, part]))
    said: tuple[Any, ...] = (None, True, "x", {"queues": ["x"], "exchange": "x", "routing_key": "x"}, [["x"], True])
    yield from (Forged(body=[[], {}, {name: value}]) for name, value in product(OVERRIDDEN, said))
    yield from (Forged(body=text) for text in ("", "{", "null", "\x00", "[" * 10_000))
