"""The worker's side: plain tasks get the check as well, and everything is looked over before anything runs."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from celery import current_app, signals
from celery.app.trace import build_tracer
from celery.utils.imports import symbol_by_name

from tb_celery.errors import ConfigurationError, RateLimitExceeded, StoreError, StoreTimeoutError
from tb_celery.gate import Gate
from tb_celery.quota import Quota, quota_of
from tb_celery.reschedule import LimitedRequest
from tb_celery.rules import QUEUE, SMALLEST, Rule, routed
from tb_celery.settings import PREFIX
from tb_celery.task import RateLimitedTask, arguments_of, call_asking, check_first, rule_of, unbind_functions

if TYPE_CHECKING:
    from celery import Celery, Task

    from tb_celery.bucket import Charge

logger = logging.getLogger("tb_celery")


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
    for task in app.tasks.values():
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
    cls.throws = (*cls.throws, RateLimitExceeded)
    cls.__call__ = _asking(cls.__call__)
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


def _asking(call: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return call_asking(self, call.__get__(self), args, kwargs)

    return __call__


# -- before anything runs


def check_at_start(app: Celery) -> None:
    """Check every task and route against the settings, and that the state can be used.

    Raises:
        ConfigurationError: the settings are wrong, a task or route names an unknown bucket or an argument that its
            tasks do not have, or costs more than a bucket can hold.
        StoreError: the state cannot be read or written here.
    """
    quota = quota_of(app)
    charges: tuple[Charge, ...] = ()
    for name, task in app.tasks.items():
        own: Rule | None = getattr(task, "tb_celery_rule", None)
        if own is not None:
            charges = own.check_buckets(f"task {name!r}", quota.limiter) or charges
    for pattern, rule in quota.settings.routes.items():
        charges = rule.check_buckets(f"route {pattern!r}", quota.limiter) or charges
        for name, task in app.tasks.items():
            if routed({pattern: rule}, name, ()) and not name.startswith("celery."):
                rule.check(f"route {pattern!r}: task {name!r}", arguments_of(type(task)))
    on_reject = quota.settings.on_reject
    for name in on_reject if isinstance(on_reject, dict) else ():
        quota.limiter.charges({name: SMALLEST})
    if charges:
        _try(quota, charges)


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


def _announce(app: Celery, limited: list[tuple[str, Any, list[Rule]]], routes: dict[str, Rule]) -> None:
    lines = [f"{name}: {_drawn(rules)}" for name, _, rules in limited]
    lines += [f"{pattern}: {_drawn([rule])}" for pattern, rule in routes.items() if pattern.startswith(QUEUE)]
    quota = quota_of(app)
    common = "the quota is per host; " * (quota.settings.store == "file")
    logger.info("tb_celery: %sstate in %r; draw from buckets:\n. %s", common, quota.limiter.store, "\n. ".join(lines))


def _drawn(rules: list[Rule]) -> str:
    return ", ".join(sorted({name for rule in rules for name in rule.names}))


def _warn(app: Celery, limited: list[tuple[str, Any, list[Rule]]], processes: int) -> None:
    settings = quota_of(app).settings
    for name, task, rules in limited:
        if getattr(task, "rate_limit", None):
            logger.warning(
                "task %s has a bucket (%s) and Celery's own rate_limit (%s): both apply, the latter in each worker",
                name,
                _drawn(rules),
                task.rate_limit,
            )
    if settings.store == "memory" and processes > 1:
        logger.warning(
            "tb_celery: with the setting store = 'memory' each of this worker's %d processes has a quota of its own;"
            " use 'file' for one that they share",
            processes,
        )
    visible = (app.conf.broker_transport_options or {}).get("visibility_timeout")
    if visible and settings.max_countdown >= visible:
        logger.warning(
            "tb_celery: max_countdown (%g s) is not below the broker's visibility_timeout (%g s): waiting tasks would"
            " run more than once; lower max_countdown (TB_CELERY_MAX_COUNTDOWN)",
            settings.max_countdown,
            visible,
        )
    if not app.conf.worker_eta_task_limit:
        logger.warning(
            "tb_celery: nothing bounds the memory for waiting tasks, of 10 kB each, that the broker hands to this"
            " worker; set Celery's worker_eta_task_limit well above the tasks that wait at once, such as to 10000"
        )


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
    except (ConfigurationError, StoreError) as error:
        # Celery swallows what a receiver raises, except for this.
        sys.exit(f"tb_celery: {error}")
    except Exception:
        logger.exception("tb_celery cannot put the check before the tasks, so the worker does not start")
        sys.exit(1)
    app.steps["consumer"].add(Gate)


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


def _on_ready(sender: Any, **_: Any) -> None:
    app = sender.app
    if not _concerned(app):
        return
    routes = quota_of(app).settings.routes
    limited = _limited(app)
    if limited or routes:
        _announce(app, limited, routes)
        pool: Any = getattr(sender, "pool", None)
        _warn(app, limited, pool.num_processes if getattr(pool, "uses_semaphore", False) else 1)


# Strong references: a receiver that only this module names must not be collected.
signals.worker_init.connect(_on_init, weak=False, dispatch_uid="tb_celery.init")
signals.worker_process_init.connect(_on_process_init, weak=False, dispatch_uid="tb_celery.process_init")
signals.worker_ready.connect(_on_ready, weak=False, dispatch_uid="tb_celery.ready")
