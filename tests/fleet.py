"""Two hosts, as far as tb_celery can tell: two folders, four nodes, one broker, and a quota on another server."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import app as tasks
from kombu import Connection
from servers import PATIENCE, Site, until

from tb_celery.bucket import SECOND
from tb_celery.verify import first_violation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tb_celery.verify import Violation

CAPACITY, RATE = 5, 10  # of the bucket "core"


@dataclass(frozen=True)
class Verdict:
    """What was recorded of some tasks."""

    grants: list[int]
    """Instants, in nanoseconds of the server's clock."""
    runs: list[int]
    """How often each task ran."""
    deliveries: list[int]
    """How often each task came to a worker."""

    @property
    def violation(self) -> Violation | None:
        """The window with more than the quota, if there is one."""
        return first_violation([(now, 1) for now in self.grants], CAPACITY, RATE)

    @property
    def sent_back(self) -> float:
        """How often a task was, on average."""
        return sum(self.deliveries) / len(self.deliveries) - 1

    def used(self, since: int = 0, until: int = 1 << 63) -> float:
        """Share of the quota that was used between two instants, from the first grant to the last one."""
        grants = [now for now in self.grants if since <= now < until]
        tokens, before, overflow = Fraction(CAPACITY), grants[0], Fraction(0)
        for now in grants:
            tokens += Fraction(RATE * (now - before), SECOND)
            overflow += max(Fraction(0), tokens - CAPACITY)
            tokens, before = min(tokens, Fraction(CAPACITY)) - 1, now
        return float(len(grants) / (len(grants) + overflow))


class Fleet:
    """Four nodes of two processes on two hosts."""

    def __init__(self, folder: Path, broker: str, store: str, store_retry: float = 5.0, **settings: object) -> None:
        self.broker = broker
        self.sites = []
        settings = {"store": store, "key_prefix": uuid.uuid4().hex, **settings}
        for number in (1, 2):
            (folder / f"host{number}").mkdir()
            retry = {"TEST_STORE_RETRY": str(store_retry)}
            self.sites.append(Site(folder / f"host{number}", broker, settings=settings, environment=retry))

    @contextmanager
    def running(self) -> Iterator[Fleet]:
        try:
            for site in self.sites:
                for number in (1, 2):
                    site.start(f"{site.folder.name}-node{number}", "-c", "2")
            for site in self.sites:
                for node in site.nodes:
                    node.ready()
            # Each process connects to the broker when it sends its first task back, which takes it a moment.
            self.finish(self.send(24, key="warm"))
            yield self
        finally:
            for site in self.sites:
                site.stop()

    def send(self, number: int, **options: Any) -> list[str]:
        with Connection(self.broker) as connection:
            options |= {"connection": connection, "ignore_result": True}
            return [tasks.core.apply_async((each,), **options).id for each in range(number)]

    def bodies(self, ids: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for site in self.sites:
            for task, events in site.of(ids).items():
                found.setdefault(task, []).extend(events)
        return found

    def finish(self, ids: Sequence[str], patience: float = PATIENCE) -> Verdict:
        """What became of these tasks, once each has run."""
        until(lambda: len(self.bodies(ids)) == len(ids), f"all {len(ids)} tasks have run", patience)
        bodies = self.bodies(ids)
        arrived: dict[str, int] = dict.fromkeys(ids, 0)
        for site in self.sites:
            for task, events in site.of(ids, "delivery").items():
                arrived[task] += len(events)
        grants = sorted(event["granted"] for events in bodies.values() for event in events if event["granted"])
        return Verdict(grants, [len(events) for events in bodies.values()], list(arrived.values()))

    def until_granted(self, ids: Sequence[str], number: int) -> int:
        """The instant (of this host's wall clock) at which so many have run."""
        until(lambda: len(self.bodies(ids)) >= number, f"{number} tasks have run")
        return time.time_ns()
