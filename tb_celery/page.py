"""A page for Prometheus: what a worker node's processes have counted, and how the buckets stand."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from tb_celery.arithmetic import seconds, waiting
from tb_celery.errors import ConfigurationError, StoreError, StoreTimeoutError
from tb_celery.report import onlooker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from tb_celery.bucket import Bucket, Charge
    from tb_celery.limiter import Limiter
    from tb_celery.metrics import Metrics
    from tb_celery.state import State
    from tb_celery.stores import Store

logger = logging.getLogger("tb_celery")

USERS = "PROMETHEUS_MULTIPROC_DIR"
"""The variable by which prometheus_client knows where a user's processes count metrics of their own."""


def check_users_directory() -> None:
    """Look whether there is the directory that is to be on the page, too.

    Raises:
        ConfigurationError: there is none.
    """
    directory = os.environ.get(USERS)
    if directory and not Path(directory).is_dir():
        message = f"variable {USERS}: there is no directory {directory!r}; make it, or unset the variable"
        raise ConfigurationError(message)


def serve(port: int, limiter: Limiter, metrics: Metrics, held: Callable[[], Mapping[str, int]]) -> None:
    """Serve the page at ``port``, in a thread; where that is not possible, say so and go on.

    Args:
        port: of all network interfaces.
        limiter: with little patience, as nobody waits for a page for long.
        metrics: the node's.
        held: tells the tasks that this node holds, by bucket.
    """
    registry = CollectorRegistry()
    registry.register(metrics)
    registry.register(_Standing(limiter, held))
    if os.environ.get(USERS):
        MultiProcessCollector(registry)
    try:
        server, _ = start_http_server(port, registry=registry)
    except OSError as error:
        logger.warning(
            "tb_celery: metrics are not served, port %d cannot be had (%s): give each worker node of a host a"
            " metrics_port (TB_CELERY_METRICS_PORT) of its own",
            port,
            error.strerror or error,
        )
        return
    if hasattr(os, "register_at_fork"):
        # A pool process that outlives this one must not keep the port.
        os.register_at_fork(after_in_child=server.socket.close)
    logger.info("tb_celery: metrics at port %d, /metrics", port)


class _Standing:
    """How the buckets stand when the page is asked for; nothing is taken."""

    def __init__(self, limiter: Limiter, held: Callable[[], Mapping[str, int]]) -> None:
        self._limiter = limiter
        self._held = held

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return _gauges().values()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        gauges = _gauges()
        limiter = onlooker(self._limiter)
        limited = [bucket for bucket in limiter.buckets.values() if bucket is not None]
        held = self._held()
        for bucket in limited:
            gauges["held_tasks"].add_metric([bucket.name], held.get(bucket.name, 0))
        gauges["store_up"].add_metric([], int(_look(gauges, limiter.store, limited)))
        yield from gauges.values()


def _gauges() -> dict[str, GaugeMetricFamily]:
    limit = ["bucket", "limit"]  # a bucket's limits are numbered from the slowest, which is 1
    return {
        name: GaugeMetricFamily(f"tb_celery_{name}", what, labels=labels)
        for name, what, labels in (
            ("tokens", "Tokens at hand; where calls have keys, of the key that has the fewest", limit),
            ("capacity", "Most tokens that the limit holds", limit),
            ("refill_rate", "Tokens a second that the limit gets", limit),
            ("turns", "Tokens that waiting tasks have turns for, of all keys together", limit),
            ("keys", "Keys that are not full", ["bucket"]),
            ("paused_seconds", "Seconds for which all keys of the bucket are paused; 0 where it is not", ["bucket"]),
            ("store_up", "1 where this node can read the state of the buckets, else 0", []),
            ("held_tasks", "Tasks that this worker node holds until their turn", ["bucket"]),
        )
    }


def _look(gauges: Mapping[str, GaugeMetricFamily], store: Store, buckets: Collection[Bucket]) -> bool:
    """Look at ``buckets``; whether all of them can be read."""
    is_up = True
    try:
        _, known = store.survey(buckets)
    except StoreError:
        return False
    for bucket in buckets:
        try:
            _add(gauges, bucket, known[bucket.name], *store.read(bucket.draw(None)))
        except StoreError as error:
            is_up = False
            if isinstance(error, StoreTimeoutError):
                break  # nobody waits for a page for long
    return is_up


def _add(  # noqa: PLR0913, PLR0917
    gauges: Mapping[str, GaugeMetricFamily],
    bucket: Bucket,
    known: Sequence[State],
    now: int,
    heard: Sequence[Charge],
    states: Sequence[State],
) -> None:
    keys = 0
    # With the numbers that are ordered; behind the limits comes that of a pause.
    pauses = [state.full_at for charge, state in zip(heard, states, strict=True) if charge.is_pause]
    gauges["paused_seconds"].add_metric([bucket.name], seconds(max(0, *(until - now for until in pauses), 0)))
    for _, charge, state in zip(bucket.limits, heard, states, strict=False):
        limit = charge.limit
        same = [each for each in known if (each.interval, each.span) == (limit.interval, limit.span)]
        labels = [bucket.name, str(1 + charge.number)]
        gauges["tokens"].add_metric(labels, min(limit.tokens(each.full_at, now) for each in (state, *same)))
        gauges["capacity"].add_metric(labels, float(limit.capacity))
        gauges["refill_rate"].add_metric(labels, float(limit.refill_rate))
        ahead = sum(waiting(each, now, max(pauses, default=0)) for each in same)
        # Costs have three decimals; below them are rounded instants.
        gauges["turns"].add_metric(labels, round(ahead / limit.interval, 3))
        keys = max(keys, sum(each.full_at > now for each in same))
    gauges["keys"].add_metric([bucket.name], keys)
