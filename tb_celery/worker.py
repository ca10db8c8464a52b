"""The worker's side: plain tasks get the check as well, and everything is looked over before anything runs."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from celery import Task, current_app, signals
from celery.app.trace import build_tracer
from celery.concurrency import get_implementation, solo
from celery.platforms import current_process
from celery.utils.imports import symbol_by_name

from tb_celery.admission import MAPS
from tb_celery.errors import ConfigurationError, RateLimitExceeded, StoreError, StoreTimeoutError
from tb_celery.gate import Gate
from tb_celery.quota import Quota, quota_of
from tb_celery.report import told_enforced
from tb_celery.reschedule import STRATEGY, LimitedRequest, names_of, telling
from tb_celery.rules import QUEUE, Rule, combined, routed
from tb_celery.settings import PREFIX
from tb_celery.shadow import gather, percent, tell
from tb_celery.task import RateLimitedTask, arguments_of, check_first, rule_of, unbind_functions

if TYPE_CHECKING:
    from celery import Celery

    from tb_celery.bucket import Charge

logger = logging.getLogger("tb_celery")

PAGE_PATIENCE = 2.0
"""Seconds that the metrics page waits for the state; what the processes have counted is shown in any case."""


def install(app: Celery) -> None:
    """Have plain tasks of ``app`` ask the buckets that the setting ``routes`` names for them.

    In workers that happens by itself once this package is imported next to Celery; this also does it in processes that
    run tasks eagerly. May be called any number of times, before the application is configured or after.
    """
    if app.finalized:
        cover(app)
    else:
        app.on_after_finalize.connect(_on_finalized, weak=False, dispatch_uid="tb_celery.finalized")


def cover(app: Celery) -> None:
    """Put the check before every task of ``app`` that may be subject to a rule, and before those to come.

    Raises:
        ConfigurationError: the settings are wrong.
    """
    quota = quota_of(app)
    for name, task in app.tasks.items():
        if name in MAPS and quota.settings.routes:
            # The calls in it may be subject to the route of the queue that it came by.
            type(task).Request = _limited_request(type(task).Request)
        _cover(type(task), quota)
    if not any(isinstance(each, _Newcomers) for each in app.annotations):
        app.annotations = [_Newcomers(quota), *app.annotations]


class _Newcomers:
    """What Celery asks for changes to a task that is only now declared."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota

    def annotate(self, task: type[Task[Any, Any]]) -> None:
        _cover(task, self._quota)


def _cover(cls: type[Task[Any, Any]], quota: Quota) -> None:
    if issubclass(cls, RateLimitedTask) or str(cls.name).startswith("celery.") or "tb_celery_rule" in vars(cls):
        return
    rule = _own_rule(cls, quota)
    if rule is None and not quota.settings.routes:
        return
    cls.tb_celery_rule = rule
    cls.Request = _limited_request(cls.Request)
    if cls.Strategy == Task.Strategy:
        cls.Strategy = STRATEGY
    cls.throws = (*cls.throws, RateLimitExceeded)
    check_first(cls)


def _own_rule(cls: type[Task[Any, Any]], quota: Quota) -> Rule | None:
    """The rule that a task without our base class has by its decorator or the setting ``task_annotations``."""
    bucket = getattr(cls, "bucket", None)
    if bucket is None:
        return None
    unbind_functions(cls)
    rule = rule_of(cls)
    with suppress(TypeError):
        if rule.names and all(name in quota.limiter.buckets for name in rule.names):
            rule.check(f"task {cls.name!r}", arguments_of(cls))
            return rule
    logger.warning(
        "task %s has bucket=%r and is no RateLimitedTask; there is no such bucket, so that is taken to mean something"
        " else: the task is not limited by it",
        cls.name,
        bucket,
    )
    return None


def _limited_request(request: object) -> type:
    """``request``, a class or the path of one, so that it does as :class:`LimitedRequest` does."""
    found: type = symbol_by_name(request)
    return found if issubclass(found, LimitedRequest) else type(found.__name__, (LimitedRequest, found), {})


# -- before anything runs


def check_at_start(app: Celery) -> None:
    """Check every task and route against the settings, and that the state can be used.

    Raises:
        ConfigurationError: the settings are wrong, a task or route names an unknown bucket or an argument that its
            tasks do not have, or costs more than a bucket can hold.
        StoreError: the state cannot be read or written here.
    """
    quota = quota_of(app)
    charges: list[Charge] = []
    for name, task in app.tasks.items():
        own: Rule | None = getattr(task, "tb_celery_rule", None)
        if own is not None:
            charges += own.check_buckets(f"task {name!r}", quota.limiter)
        limited = bool(own and own.bucket) or bool(routed(quota.settings.routes, name, ()))
        if limited and name.startswith("celery.") and not str(type(task).__module__).startswith("celery."):
            logger.warning("task %s is named as Celery's own are, which draw nothing: give it another name", name)
    for pattern, rule in quota.settings.routes.items():
        charges += rule.check_buckets(f"route {pattern!r}", quota.limiter)
        for name, task in app.tasks.items():
            if routed({pattern: rule}, name, ()) and not name.startswith("celery."):
                rule.check(f"route {pattern!r}: task {name!r}", arguments_of(type(task)))
    if charges:
        _try(quota, combined(charges))


def _try(quota: Quota, charges: tuple[Charge, ...]) -> None:
    """Look whether the state can be used. What is wrong with a file has to be mended; a server comes back by itself."""
    try:
        quota.limiter.store.read(charges)
    except StoreTimeoutError:
        pass
    except StoreError as error:
        if quota.settings.store == "file" or quota.settings.on_store_error == "fail":
            raise
        logger.warning("%s", error)


def _limited(app: Celery) -> list[tuple[str, Any, list[Rule]]]:
    """The tasks that are subject to rules whatever queue they come by, and those rules."""
    quota = quota_of(app)
    found = [(name, task, quota.rules(task, {})) for name, task in app.tasks.items()]
    return [each for each in found if each[2]]


def _announcement(app: Celery) -> str:
    """Which tasks and queues draw from which buckets, and where those are; nothing where none do."""
    quota = quota_of(app)
    lines = [f"{name}: {_drawn(rules)}" for name, _, rules in _limited(app)]
    lines += [f"{pattern}: {_drawn([rule])}" for pattern, rule in _queue_routes(quota).items()]
    if not lines or not quota.settings.enabled:
        return ""
    notes = {name: told_enforced(percent(quota.settings.enforce, name)) for name in quota.limiter.buckets}
    if free := [f"{name}{note}" for name, note in notes.items() if note]:
        lines.append(f"let through what is over quota: {', '.join(free)}")
    common = "the quota is per host; " * (quota.settings.store == "file")
    return "\n  . ".join((f"[buckets] {common}state in {quota.limiter.store!r}", *lines))


def _announce(worker: Any) -> None:
    """Put the announcement at the end of Celery's banner; a worker that has none logs it."""
    announcement = _announcement(worker.app)
    celerys = getattr(worker, "extra_info", None)
    if announcement and celerys is not None:
        worker.extra_info = lambda: f"{celerys() or ''}\n{announcement}\n"
    elif announcement:
        logger.info("tb_celery: %s", announcement)


def _queue_routes(quota: Quota) -> dict[str, Rule]:
    return {pattern: rule for pattern, rule in quota.settings.routes.items() if pattern.startswith(QUEUE)}


def _drawn(rules: list[Rule]) -> str:
    return ", ".join(sorted({name for rule in rules for name in rule.names}))


def _warn_of_rate_limits(app: Celery) -> None:
    quota = quota_of(app)
    consumed = [name for queue in app.amqp.queues.consume_from.values() for name in names_of(queue)]
    by_queue = routed(_queue_routes(quota), "", consumed)
    for name, task in app.tasks.items():
        rules = quota.rules(task, {})
        if rules and task.rate_limit:
            logger.warning(
                "task %s has a bucket (%s) and Celery's own rate_limit (%s): both apply, the latter in each worker",
                name,
                _drawn(rules),
                task.rate_limit,
            )
        elif by_queue and task.rate_limit and not name.startswith("celery."):
            logger.warning(
                "task %s has Celery's own rate_limit (%s), and a bucket (%s) where it comes by a queue that has one:"
                " both apply, the former in each worker",
                name,
                task.rate_limit,
                _drawn(by_queue),
            )


def _warn(app: Celery, pool: Any) -> None:
    settings = quota_of(app).settings
    processes = pool.num_processes if getattr(pool, "uses_semaphore", False) else 1
    if settings.store == "memory" and processes > 1:
        logger.warning(
            "tb_celery: with the setting store = 'memory' each of this worker's %d processes has a quota of its own;"
            " use 'file' for one that they share",
            processes,
        )
    visible = _visibility_timeout(app)
    # What is held may have waited for an ETA before that.
    holds = any(quota_of(app).terms_of(rules).holds for rules in _all_rules(app))
    if visible and settings.max_countdown * (1 + holds) >= visible:
        logger.warning(
            "tb_celery: max_countdown (%g s) is not below %sthe broker's visibility_timeout (%g s): waiting tasks would"
            " run more than once; lower max_countdown (TB_CELERY_MAX_COUNTDOWN)",
            settings.max_countdown,
            "half of " * holds,
            visible,
        )
    runs_beside = getattr(pool, "is_green", False) or getattr(pool, "body_can_be_buffer", False)
    if app.conf.worker_disable_prefetch and runs_beside and not isinstance(pool, solo.TaskPool):
        logger.warning(
            "tb_celery: with worker_disable_prefetch and this pool Celery looks for messages every second or two only"
            " while its %d places are taken, also by tasks that are refused, so others wait behind them; use the"
            " prefork pool, or give limited tasks a queue and a worker of their own",
            pool.num_processes,
        )
    if not app.conf.worker_eta_task_limit:
        logger.warning(
            "tb_celery: nothing bounds the memory for waiting tasks, of 10 kB each, that the broker hands to this"
            " worker; set Celery's worker_eta_task_limit well above the tasks that wait at once, such as to 10000"
        )


def _visibility_timeout(app: Celery) -> float | None:
    """Seconds after which the broker delivers a message again; ``None`` where it goes by other things."""
    told = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    transport = app.producer_pool.connections.connection.transport
    common = getattr(getattr(transport, "Channel", None), "visibility_timeout", None)
    found = common if told is None else told
    return found if isinstance(found, int | float) else None


def _all_rules(app: Celery) -> list[list[Rule]]:
    """Those of each task, and those of queues."""
    return [rules for *_, rules in _limited(app)] + [[rule] for rule in _queue_routes(quota_of(app)).values()]


# -- metrics, where the settings have a port for them


def _measure(app: Celery, slot: int | None = None) -> None:
    """Count in this process, the node's own or that of its pool which has this number.

    Raises:
        ConfigurationError: what it takes is missing.
    """
    quota = quota_of(app)
    if not quota.settings.metrics_port or (quota.metrics is not None and slot is None):
        return
    try:
        from tb_celery.metrics import measure_node, measure_process  # noqa: PLC0415 - prometheus_client is an extra
        from tb_celery.page import check_users_directory  # noqa: PLC0415 - likewise
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        message = (
            "setting metrics_port (TB_CELERY_METRICS_PORT) needs the package prometheus_client;"
            " pip install 'tb-celery[metrics]'"
        )
        raise ConfigurationError(message) from None
    if slot is None:
        check_users_directory()
        quota.metrics = measure_node(quota.limiter)
    else:
        quota.metrics = measure_process(quota.limiter, slot)


def _serve_metrics(consumer: Any) -> None:
    quota = quota_of(consumer.app)
    if quota.metrics is None:
        return
    from tb_celery.page import serve  # noqa: PLC0415 - as above

    gates = [step for step in consumer.steps if isinstance(step, Gate)]

    def held() -> Counter[str]:
        """The tasks that the node holds, by bucket."""
        found: Counter[str] = Counter()
        for _, line in (each for gate in gates for each in gate.held()):
            for bucket in {charge.bucket for charge in line[0][1]}:
                found[bucket] += len(line)
        return found

    serve(quota.settings.metrics_port, quota.hasty_limiter(PAGE_PATIENCE), quota.metrics, held)


# -- the receivers


def _concerned(app: Celery) -> bool:
    """Whether this application has anything to do with us: others must not stop because of our settings."""
    return (
        app.conf.get("tb_celery") is not None
        or any(name.startswith(PREFIX) for name in os.environ)
        or any(isinstance(task, RateLimitedTask) for task in app.tasks.values())
    )


def _on_finalized(sender: Celery, **_: Any) -> None:
    cover(sender)


def _on_init(sender: Any, **_: Any) -> None:
    """The first moment at which all tasks are known, and the last before the pool's processes are forked."""
    app = sender.app
    if not _concerned(app):
        return
    try:
        cover(app)
        check_at_start(app)
        _measure(app)
        if quota_of(app).settings.enforce is not True and _forks(sender):
            gather()
    except (ConfigurationError, StoreError) as error:
        # Celery swallows what a receiver raises, except for this.
        sys.exit(f"tb_celery: {error}")
    except Exception:
        logger.exception("tb_celery cannot put the check before the tasks, so the worker does not start")
        sys.exit(1)
    app.steps["consumer"].add(Gate)
    app.amqp.Consumer = telling(app.amqp.Consumer)
    _announce(sender)


def _forks(worker: Any) -> bool:
    """Whether the worker's pool is one of processes."""
    pool = getattr(worker, "pool_cls", None)
    return pool is not None and bool(getattr(get_implementation(pool), "uses_semaphore", False))


def _on_process_init(**_: Any) -> None:
    """In a pool process that was not forked the tasks are other objects, whose tracers have been built already."""
    app = current_app._get_current_object()  # noqa: SLF001
    if not _concerned(app):
        return
    before = {name: "tb_celery_rule" in vars(type(task)) for name, task in app.tasks.items()}
    cover(app)
    for name, task in app.tasks.items():
        if "tb_celery_rule" in vars(type(task)) and not before[name] and task.__trace__ is not None:
            task.__trace__ = build_tracer(name, task, app.loader, None, app=app)
    _measure(app, getattr(current_process(), "index", None))


def _on_process_shutdown(**_: Any) -> None:
    tell()
    app = current_app._get_current_object()  # noqa: SLF001
    if _concerned(app) and (metrics := quota_of(app).metrics) is not None:
        metrics.catch_up()


def _on_ready(sender: Any, **_: Any) -> None:
    app = sender.app
    if not _concerned(app):
        return
    if quota_of(app).settings.enabled and (_limited(app) or quota_of(app).settings.routes):
        _warn_of_rate_limits(app)
        _warn(app, getattr(sender, "pool", None))
    _serve_metrics(sender)


# Strong references: a receiver that only this module names must not be collected.
signals.worker_init.connect(_on_init, weak=False, dispatch_uid="tb_celery.init")
signals.worker_process_init.connect(_on_process_init, weak=False, dispatch_uid="tb_celery.process_init")
signals.worker_process_shutdown.connect(_on_process_shutdown, weak=False, dispatch_uid="tb_celery.process_shutdown")
signals.worker_ready.connect(_on_ready, weak=False, dispatch_uid="tb_celery.ready")
