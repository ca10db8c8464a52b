"""What the buckets answer, counted for Prometheus by each process.

A process counts in plain numbers, for prometheus_client's own counters cost more than a decision does. What a state
file answers the short way it tallies by itself, and what is in the tallies is fetched when somebody looks, when a task
gets its tokens, and every few milliseconds. The numbers of a worker's pool are in files that the pool's processes have
mapped, each its own: nothing is sent, no lock is shared, and what a process that is killed has counted stays counted.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import shutil
import tempfile
from bisect import bisect_left
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING
from zlib import crc32

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from tb_celery.errors import StoreError, StoreTimeoutError
from tb_celery.shadow import enforced_by
from tb_celery.stores.file import FileStore
from tb_celery.stores.meter import Meter
from tb_celery.stores.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from tb_celery.arithmetic import Decision, Place
    from tb_celery.bucket import Bucket, Charge
    from tb_celery.limiter import Limiter
    from tb_celery.stores import Store
    from tb_celery.stores.meter import Tally

logger = logging.getLogger("tb_celery")

DIRECTORY = "_TB_CELERY_COUNTS"
"""The variable by which the processes of a pool know where to count, forked or not."""
COUNTERS = {
    "granted": "Calls that got their tokens",
    "granted_tokens": "Tokens that calls got",
    "refused": "Answers that said to wait, also to those who asked again",
    "unenforced": "Calls let through that would have waited were their bucket enforced",
    "deferred": "Tasks sent back to the queue, or held in the worker, until their turn",
    "store_errors": "Calls that the store failed to answer",
}
GRANTED, TOKENS, REFUSED, UNENFORCED, DEFERRED, ERRORS = range(len(COUNTERS))
WAITS = (0.01, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400)
STORE_TIMES = (0.00002, 0.00005, 0.0001, 0.0005, 0.002, 0.01, 0.05, 0.25, 1, 10)
"""Upper bounds of the histograms' buckets, in seconds."""
WAIT = len(COUNTERS)
ROW = WAIT + 2 + len(WAITS)
"""Numbers to a bucket: the counters, then its histogram: the sum, and one for each upper bound and for none."""
TIMED = 32
"""Calls to one that is timed, where the store does not do so by itself."""
REMEMBERED = 1 << 12
"""Draws that a store keeps worked out."""


class Metrics:
    """The counts of some buckets, of this process and perhaps of others; a collector of prometheus_client's.

    A store may be shared with who asks for other buckets: of these, the store's answers alone are counted.

    Threads share them without a lock. CPython changes threads, and lets signal handlers in, where code calls or jumps
    back, and neither does ``counts[place] += number``, nor ``number, tally.granted = tally.granted, 0``.

    Args:
        buckets: by name; those that are not limited are asked nothing.
    """

    def __init__(self, buckets: Mapping[str, Bucket | None]) -> None:
        names = [name for name, bucket in buckets.items() if bucket is not None]
        self._rows = {name: number * ROW for number, name in enumerate(names)}
        self._store_row = len(names) * ROW
        self._size = self._store_row + 2 + len(STORE_TIMES)
        self._pattern = f"*.{crc32(repr(names).encode()):08x}"
        self._others: Path | None = None
        self._tallies: list[Mapping[str, Tally]] = []
        self.at_once = 0
        """Calls to a state file that did not have to wait, and are not in the counts yet."""
        self.counts: list[float] | memoryview[float] = [0.0] * self._size

    def of(self, store: Store, *, hasty: bool = False) -> Store:
        """``store``, so that its answers are counted here and nowhere else; ``hasty`` as for :class:`FileMeter`."""
        if type(store) is FileStore:
            # Another one, whose tallies are fetched by nobody else.
            file = FileStore(store.path, store.clock, store.lock_timeout)
            file.meter = FileMeter(self, hasty=hasty)
            self._tallies.append(file.tallies)
            return file
        return MeteredStore(store.wrapped if isinstance(store, MeteredStore) else store, self, hasty=hasty)

    def deferred(self, bucket: str) -> None:
        """A task was sent back, or is held because it was refused."""
        self.add(bucket, DEFERRED)

    def add(self, bucket: str, counter: int) -> None:
        """One more, for one of the :data:`COUNTERS`; a bucket that is none of these is not counted."""
        row = self._rows.get(bucket)
        if row is not None:
            self.counts[row + counter] += 1.0

    def waited(self, bucket: str, wait: float) -> None:
        """A task got its tokens after so many seconds."""
        row = self._rows.get(bucket)
        if row is not None:
            self._observe(row + WAIT, WAITS, wait)
        for tallies in self._tallies:
            if bucket in tallies:
                self._fetch(bucket, tallies[bucket])
        self._settle()

    def answered(
        self, charges: Sequence[Charge], place: Place | None, decision: Decision
    ) -> Sequence[tuple[int, float]]:
        """A call got an answer; where it is counted if it got tokens, bucket by bucket, and how many that were."""
        if decision:
            tokens = {charge.bucket: charge.cost / charge.limit.interval for charge in charges}
            draws = [(self._rows[name], drawn) for name, drawn in tokens.items() if name in self._rows]
            for row, drawn in draws:
                self.counts[row + GRANTED] += 1.0
                self.counts[row + TOKENS] += drawn
            if decision.would_wait:
                self.add(decision.bucket, UNENFORCED)
            return draws
        if place is None or not place.ahead:  # who books many turns at once wants no tokens
            self.add(decision.bucket, REFUSED)
        return ()

    def failed(self, charges: Sequence[Charge], error: StoreError, *, hasty: bool) -> None:
        """A call got none."""
        if not (hasty and isinstance(error, StoreTimeoutError)):
            for bucket in {charge.bucket for charge in charges}:
                self.add(bucket, ERRORS)

    def took(self, seconds: float) -> None:
        """The store took so long for an answer, or an error."""
        self._observe(self._store_row, STORE_TIMES, seconds)

    def catch_up(self) -> None:
        """Fetch what is in the tallies."""
        for tallies in self._tallies:
            for bucket, tally in list(tallies.items()):
                self._fetch(bucket, tally)
        self._settle()

    def _settle(self) -> None:
        if self.at_once > 0:
            calls, self.at_once = self.at_once, 0
            self.counts[self._store_row + 1] += calls

    def _fetch(self, bucket: str, tally: Tally) -> None:
        row = self._rows.get(bucket)  # first: no call comes between what is taken and what is added
        granted, tally.granted = tally.granted, 0
        tokens, tally.tokens = tally.tokens, 0.0
        refused, tally.refused = tally.refused, 0
        self.at_once += granted + refused
        if row is None:
            return
        if granted:
            self.counts[row + GRANTED] += granted
            self.counts[row + TOKENS] += tokens
        if refused:
            self.counts[row + REFUSED] += refused

    def _observe(self, place: int, bounds: Sequence[float], value: float) -> None:
        bucket = place + 1 + bisect_left(bounds, value)
        self.counts[place] += value
        self.counts[bucket] += 1.0

    # -- of several processes

    def keep_in(self, directory: Path, name: str) -> None:
        """Count in a file from now on, and go on from what it holds.

        Args:
            directory: where others look for it.
            name: which no other process has now.

        Raises:
            OSError: there can be none.
        """
        size = 8 * self._size
        with (directory / self._pattern.replace("*", name)).open("a+b") as file:
            if file.tell() != size:
                # Not left to the first count: a full disk would end the process then.
                file.truncate(0)
                file.write(bytes(size))
                file.flush()
            self.counts = memoryview(mmap.mmap(file.fileno(), size)).cast("d")
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._part)

    def _part(self) -> None:
        """Whom a task forks must not count in its file: two would overwrite each other's numbers."""
        self.counts = [0.0] * self._size

    def gather(self, directory: Path) -> None:
        """Show what others count in ``directory``, too, if they count the same buckets."""
        self._others = directory

    def _sums(self) -> list[float]:
        self.catch_up()
        files = self._others.glob(self._pattern) if self._others else ()
        rows = [tuple(self.counts), *(counts for file in files if (counts := _read(file, self._size)))]
        return [sum(same) for same in zip(*rows, strict=True)]

    # -- for prometheus_client

    def describe(self) -> Iterable[Metric]:
        return self._families([0.0] * self._size)

    def collect(self) -> Iterable[Metric]:
        return self._families(self._sums())

    def _families(self, counts: Sequence[float]) -> Iterator[Metric]:
        for place, (name, what) in enumerate(COUNTERS.items()):
            counter = CounterMetricFamily(f"tb_celery_{name}", what, labels=["bucket"])
            for bucket, row in self._rows.items():
                counter.add_metric([bucket], counts[row + place])
            yield counter
        wait = "Seconds that tasks had waited when they got their tokens"
        waits = HistogramMetricFamily("tb_celery_wait_seconds", wait, labels=["bucket"])
        for bucket, row in self._rows.items():
            waits.add_metric([bucket], *_histogram(counts, row + WAIT, WAITS))
        yield waits
        took = f"Seconds that calls waited until the state file was free; for other stores, that one in {TIMED} took"
        times = HistogramMetricFamily("tb_celery_store_seconds", took, labels=[])
        times.add_metric([], *_histogram(counts, self._store_row, STORE_TIMES))
        yield times


def _histogram(counts: Sequence[float], place: int, bounds: Sequence[float]) -> tuple[list[tuple[str, float]], float]:
    """The buckets of a histogram, each with those before it, and the sum of what was observed."""
    bucket = place + 1
    upper = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(upper, accumulate(counts[bucket : bucket + len(upper)]), strict=True)), counts[place]


def _read(path: Path, size: int) -> Sequence[float]:
    """So many numbers that another process counts; none where it has only just begun."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < 8 * size:
            return []
        # Mapped, as it is written: a number is never half a new one.
        with (
            mmap.mmap(file.fileno(), 8 * size, access=mmap.ACCESS_READ) as data,
            memoryview(data) as raw,
            raw.cast("d") as counts,
        ):
            return tuple(counts)


class FileMeter(Meter):
    """Counts what a state file's store tells.

    Args:
        metrics: the counts.
        hasty: whether a store that is busy is no failure, for who asks has no patience at all.
    """

    def __init__(self, metrics: Metrics, *, hasty: bool = False) -> None:
        self._metrics = metrics
        self._hasty = hasty

    def answered(self, charges: Sequence[Charge], place: Place | None, decision: Decision) -> None:
        self._metrics.at_once += 1
        self._metrics.answered(charges, place, decision)

    def failed(self, charges: Sequence[Charge], error: StoreError) -> None:
        self._metrics.at_once += 1
        self._metrics.failed(charges, error, hasty=self._hasty)

    def waited(self, seconds: float) -> None:
        self._metrics.at_once -= 1
        self._metrics.took(seconds)

    def catch_up(self) -> None:
        self._metrics.catch_up()


class MeteredStore(StoreWrapper):
    """Any other store, whose answers are counted as they come by.

    Args:
        store: where the state lives.
        metrics: the counts.
        hasty: as for :class:`FileMeter`.
    """

    def __init__(self, store: Store, metrics: Metrics, *, hasty: bool = False) -> None:
        super().__init__(store)
        self._metrics = metrics
        self._hasty = hasty
        self._is_enforced = enforced_by(store) is True
        self._untimed = 0
        self._repeated: dict[int, tuple[int, float, Sequence[Charge]]] = {}

    def acquire(self, charges: Sequence[Charge], place: Place | None = None) -> Decision:
        try:
            if self._untimed:
                self._untimed -= 1
                decision = self.wrapped.acquire(charges, place)
            else:
                self._untimed = TIMED - 1
                decision = self._timed(charges, place)
        except StoreError as error:
            self._metrics.failed(charges, error, hasty=self._hasty)
            raise
        repeated = self._repeated.get(id(charges))
        # A grant is at once, at the very instant of the decision; where it is told otherwise, the long way counts it.
        if repeated is not None and decision.at is decision.now:
            row, tokens, _ = repeated
            counts = self._metrics.counts
            counts[row] += 1.0
            counts[row + 1] += tokens
        else:
            draws = self._metrics.answered(charges, place, decision)
            if len(draws) == 1 and self._is_enforced and type(charges) is tuple:
                # By the object that the ask came as, which can never change.
                if len(self._repeated) >= REMEMBERED:
                    self._repeated.clear()
                self._repeated[id(charges)] = (*draws[0], charges)
        return decision

    def _timed(self, charges: Sequence[Charge], place: Place | None) -> Decision:
        began = perf_counter()
        try:
            return self.wrapped.acquire(charges, place)
        finally:
            self._metrics.took(perf_counter() - began)


def measure(limiter: Limiter, registry: CollectorRegistry | None = REGISTRY) -> Metrics:
    """Count from now on what ``limiter`` answers in this process.

    Args:
        limiter: what counts.
        registry: prometheus_client's, to which the counts are added; ``None`` for none.
    """
    metrics = Metrics(limiter.buckets)
    if registry is not None:
        registry.register(metrics)
    limiter.store = metrics.of(limiter.store)
    return metrics


# -- the processes of a worker node


def measure_node(limiter: Limiter) -> Metrics:
    """:func:`measure` for the main process of a worker node, with what the processes of its pool count.

    They do so in a directory that goes when the node ends.
    """
    before = Path(os.environ.get(DIRECTORY, ""))
    prefix = f"tb_celery-metrics-{os.getpid()}-"
    if before.name.startswith(prefix):
        # Of this very process, before SIGHUP had it begin anew.
        shutil.rmtree(before, ignore_errors=True)
    directory = os.environ[DIRECTORY] = tempfile.mkdtemp(prefix=prefix)
    atexit.register(_remove, directory, os.getpid())
    metrics = measure(limiter, None)
    metrics.gather(Path(directory))
    return metrics


def measure_process(limiter: Limiter, slot: int) -> Metrics:
    """:func:`measure` for one of the processes of a worker node's pool.

    Args:
        limiter: what counts.
        slot: its number, by which it goes on in the file of the one that had it before: so there are no more files than
            processes.
    """
    metrics = measure(limiter, None)
    try:
        metrics.keep_in(Path(os.environ[DIRECTORY]), str(slot))
    except OSError as error:
        logger.warning("tb_celery: what this process counts is not on the page: %s", error)
    return metrics


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
