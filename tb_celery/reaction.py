"""What a task's body tells afterwards: that the other side turned it down, what it has said, or what a call cost."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from celery._state import _task_stack
from celery.exceptions import Ignore, Retry, TaskPredicate

from tb_celery.admission import admit_inner
from tb_celery.bucket import SECOND, positive
from tb_celery.delivery import Delivery
from tb_celery.errors import ConfigurationError, RateLimited, RateLimitExceeded, StoreError, shown
from tb_celery.feedback import rejection_of
from tb_celery.following import pause_after, read
from tb_celery.shadow import percent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from celery.app.task import Context

    from tb_celery.bucket import Charge
    from tb_celery.feedback import Feedback

logger = logging.getLogger("tb_celery")


def observe(
    response: object,
    status: int | None = None,
    *,
    bucket: str | None = None,
    rejected: Callable[[Mapping[str, str], int | None], bool | None] | None = None,
) -> Feedback:
    """Heed, in a task's body, what the other side says of its limits in a response.

    What follows for the task's buckets is what :meth:`tb_celery.Limiter.observe` does. Where the delivery draws
    nothing, such as in a direct call, nothing follows.

    Args:
        response: of requests, httpx, aiohttp, urllib or boto3, an error that has one, or headers by themselves.
        status: of HTTP; where it is ``None``, that of the response.
        bucket: the one that it is about; ``None``: all that the task draws from.
        rejected: as for :func:`tb_celery.feedback.observe`.

    Returns:
        What it says. Where it is ``rejected``, the body may raise :class:`~tb_celery.RateLimited` to be run again.

    Raises:
        ConfigurationError: there is no task, or it does not draw from the bucket.
        StoreError: the state cannot be read or written.
    """
    delivery = _current("observe")
    if delivery is None:
        return read(response, status, rejected)
    limiter = delivery.quota.limiter
    charges = _drawn(delivery, None if bucket is None else [bucket], "observe")
    feedback = read(response, status, rejected, now=limiter.store.clock.wall() / SECOND)
    limiter.follow(charges, feedback)
    return feedback


def settle(actual: float | Mapping[str, float]) -> None:
    """Tell, in a task's body, what this delivery cost after all: the difference is drawn, or given back.

    Of several calls the last one counts. A bucket can owe more than it holds, and later calls wait until that is paid;
    it is never more than full. Where the delivery draws nothing, such as in a direct call, nothing follows.

    Args:
        actual: tokens from each of the task's buckets, or from those named; 0 where no call has left the host.

    Raises:
        ConfigurationError: there is no task, it does not draw from the bucket, or a cost is no number from 0.
        StoreError: the state cannot be read or written; nothing was settled.
    """
    delivery = _current("settle")
    if delivery is None:
        return
    named = list(actual) if isinstance(actual, Mapping) else None
    costs = actual if isinstance(actual, Mapping) else dict.fromkeys(_buckets(delivery), actual)
    exact = {bucket: positive("actual", cost) if cost != 0 or cost is False else 0 for bucket, cost in costs.items()}
    _drawn(delivery, named, "settle")
    with delivery.settling:  # of several threads' calls, too, one is the last
        before = delivery.settled or [
            # It may have been let pass by a store that failed.
            charge if delivery.decision else charge._replace(cost=0)
            for charge in delivery.charges
        ]
        after = [
            charge._replace(cost=math.ceil(exact[charge.bucket] * charge.limit.interval))
            if charge.bucket in exact
            else charge
            for charge in before
        ]
        more = [new._replace(cost=new.cost - old.cost) for new, old in zip(after, before, strict=True) if new != old]
        if more:
            delivery.quota.limiter.store.settle(more)
        delivery.settled = after


# -- what a body raises


class _TurnedDown(Ignore):
    """Carries a rejection past Celery's ``autoretry_for``, which lets this kind pass."""

    def __init__(self, error: Exception, feedback: Feedback) -> None:
        super().__init__()
        self.error = error
        self.feedback = feedback


class _Body:
    """The body of a delivery, or of one of many calls in one, that runs here or comes next.

    Attributes:
        task: whose body it is.
        request: the delivery's, for as long as Celery's call of the body has not come.
        delivery: ``None`` where nothing is drawn.
    """

    __slots__ = ("_token", "delivery", "request", "task")

    def __init__(self, task: Any, delivery: Delivery | None, request: Context | None = None) -> None:
        self.task = task
        self.delivery = delivery
        self.request = request
        self._token = _body.set(self)

    def run(self, call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call, in a way that other threads which the body starts can know of its delivery."""
        _running.add(self)
        try:
            while True:
                try:
                    return call(*args, **kwargs)
                except Exception as error:
                    task = self.task
                    delivery = _delivery_of(task.request)
                    turned_down = _turned_down(delivery, error)
                    if delivery is None or turned_down is None:
                        raise
                _stop(task, delivery, turned_down.error, turned_down.feedback)
        finally:
            _running.discard(self)
            _body.reset(self._token)


def watch(task: Any, request: Context) -> None:
    """Have rejections noticed that the body raises which comes next, before ``autoretry_for`` sees them."""
    autoretried = vars(task).get("_orig_run")
    if autoretried is not None and not hasattr(autoretried, "tb_celery_watched"):
        task._orig_run = _noticing(task, autoretried)  # noqa: SLF001
    if getattr(type(task).__call__, "tb_celery_runs", False):
        _Body(task, request.tb_celery_delivery, request)
    elif not hasattr(task.run, "tb_celery_watched"):
        # A call of the class's own may do with the body, and with what that raises, as it likes.
        task.run = _watching(task, task.run)


def told_apart(own: Callable[..., Any], *, runs: bool) -> Callable[..., Any]:
    """A class's ``__call__``, so that those of deliveries are told from others.

    Args:
        own: what it was.
        runs: whether that does nothing but run the body.
    """

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        body = _body.get()
        if body is None or body.request is None or body.task is not self:
            return _call_directly(self, own.__get__(self), args, kwargs)
        # As for a task without a __call__ of its own, which has one request and not two.
        body.request._protected = 1  # noqa: SLF001
        body.request = None
        return body.run(self.run, args, kwargs)

    __call__.tb_celery_runs = runs  # type: ignore[attr-defined]
    return __call__


def _call_directly(task: Any, call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``task`` the way ``call`` does: one of the many calls in one delivery asks the buckets first.

    Where such a call is turned down, it waits in line again, and is made again.
    """
    request = task.request_stack.top
    is_asked = request is not None and (not request.called_directly or _delivery_of(request) is not None)
    delivery = None if is_asked else admit_inner(task, args, kwargs)
    if delivery is None:
        return call(*args, **kwargs)
    task.push_request(args=args, kwargs=kwargs)
    task.request.tb_celery_delivery = delivery
    try:
        return _Body(task, delivery).run(call, args, kwargs)
    finally:
        task.pop_request()


def _watching(task: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _task_stack.stack:  # a function that somebody calls
            return own(*args, **kwargs)
        return _Body(task, _current("")).run(own, args, kwargs)

    run.tb_celery_watched = True  # type: ignore[attr-defined]
    return run


def _noticing(task: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return own(*args, **kwargs)
        except Exception as error:
            turned_down = _turned_down(_delivery_of(task.request), error)
            if turned_down is None:
                raise
            raise turned_down from error

    run.tb_celery_watched = True  # type: ignore[attr-defined]
    return run


def _turned_down(delivery: Delivery | None, error: Exception) -> _TurnedDown | None:
    """What a body has raised, where that is a rejection."""
    if isinstance(error, _TurnedDown):
        return error
    if delivery is None or isinstance(error, TaskPredicate):  # not what somebody means by "Exception"
        return None
    quota = delivery.quota
    feedback = rejection_of(error, quota.settings.rejections, now=quota.limiter.store.clock.wall() / SECOND)
    return None if feedback is None else _TurnedDown(error, feedback)


def _stop(task: Any, delivery: Delivery, error: Exception, feedback: Feedback) -> None:
    """Pause the buckets, and come by tokens anew: those that were taken are spent, for the other side has counted.

    Raises:
        Exception: as :meth:`Delivery.come_by_tokens`.
        ConfigurationError: the error names a bucket that the task does not draw from.
    """
    named = error.bucket if isinstance(error, RateLimited) else None
    charges = _drawn(delivery, None if named is None else [named], "RateLimited")
    said = f"{type(error).__name__}: {shown(str(error))}"
    buckets = ", ".join(sorted({repr(charge.bucket) for charge in charges}))
    pause = pause_after(feedback)
    enforce = delivery.quota.settings.enforce
    try:
        span = delivery.quota.limiter.follow(charges, feedback)
    except StoreError as failed:
        sentence = "%s[%s] was turned down (%s), and %s cannot be paused: %s"
        logger.warning(sentence, task.name, task.request.id, said, buckets, failed)
        delivery.put_off(pause, failed)
        delivery.come_by_tokens()
    else:
        paused = f"paused for {span:g} s" if span else "paused already"
        sentence = "%s[%s] was turned down (%s): bucket %s is %s"
        logger.warning(sentence, task.name, task.request.id, said, buckets, paused)
        with _telling(charges, span):
            if not any(delivery.lot < percent(enforce, charge.bucket) for charge in charges):
                # Our own limits are not enforced for this task, so it would call at once again; the other side's is.
                exceeded = RateLimitExceeded(charges[0].bucket, pause, time.time() + pause, paused=True)
                delivery.put_off(pause, exceeded)
            delivery.come_by_tokens()
    task.request.tb_celery = delivery.passed()


@contextmanager
def _telling(charges: Sequence[Charge], span: float) -> Iterator[None]:
    """Have the refusal that ends a delivery tell its node that the buckets of ``charges`` were paused for ``span``."""
    until = time.time() + span
    try:
        yield
    except Retry as retry:
        if span and isinstance(retry.exc, RateLimitExceeded):
            retry.exc.pauses = tuple({(charge.bucket, charge.key is not None, until) for charge in charges})
        raise


# -- the delivery that this is


_body: ContextVar[_Body | None] = ContextVar("tb_celery_body", default=None)
"""The body that runs, also for threads that were given its context."""
_running: set[_Body] = set()
"""The bodies that run in this process."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)


def is_elsewhere(task: Any) -> bool:
    """Whether this is no body, nor a plain call of one, but something that a body of ``task`` may have started."""
    return _body.get() is not None or any(body.task.name == task.name for body in list(_running))


def _delivery_of(request: Any) -> Delivery | None:
    found = getattr(request, "tb_celery_delivery", None)
    return found if isinstance(found, Delivery) else None  # a header may have this name


def _current(asker: str) -> Delivery | None:
    """The delivery that runs here, maybe by way of direct calls.

    Raises:
        ConfigurationError: no task runs here.
    """
    if not _task_stack.stack:
        body = _body.get()
        if body is None or body.request is not None:
            message = (
                f"{asker} is for the body of a task, in its own thread, or in one with the context of the body's, as"
                " asyncio.to_thread and contextvars.copy_context().run give it; elsewhere call that of limiter_of(app)"
            )
            raise ConfigurationError(message)
        return body.delivery
    for task in reversed(_task_stack.stack):
        for request in reversed(task.request_stack.stack):
            if (found := _delivery_of(request)) is not None or not request.called_directly:
                return found
    return None


def _buckets(delivery: Delivery) -> list[str]:
    return list(dict.fromkeys(charge.bucket for charge in delivery.charges))


def _drawn(delivery: Delivery, buckets: Sequence[str] | None, asker: str) -> list[Charge]:
    """What a delivery draws of some buckets, or of all."""
    known = _buckets(delivery)
    for bucket in buckets or ():
        if bucket not in known:
            message = (
                f"{asker} names bucket {shown(bucket)}, from which this task does not draw, but from {', '.join(known)}"
            )
            raise ConfigurationError(message)
    return [charge for charge in delivery.charges if buckets is None or charge.bucket in buckets]
