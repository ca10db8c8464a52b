"""Who asks the buckets: each delivery once, before its body, and in a delivery that makes many calls each of those."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery._state import get_current_task

from tb_celery.delivery import Delivery
from tb_celery.quota import LimitedTask, quota_of
from tb_celery.reschedule import Ticket, take_delivered, take_headers
from tb_celery.terms import CALL_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from celery.app.task import Context

MAPS = frozenset({"celery.map", "celery.starmap", "celery.chunks"})
"""Celery's own tasks that call another one many times in one delivery."""
_NO_TICKET = Ticket()
_ASKED = object()
"""Marks a request that was let pass. A header can set any attribute of a request, but not to this object."""


def admit(task: LimitedTask, args: Sequence[object], kwargs: Mapping[str, object]) -> Context | None:
    """Let a delivery pass when its tokens are there; else do what is to be done with the refused.

    Returns:
        The delivery's request; ``None`` where this delivery has asked already, which draws nothing more.

    Raises:
        Retry: a copy of the message is under way and will return at the task's turn.
        Dropped: the task is dropped.
        RateLimitExceeded: the task is to fail when refused, or its turn would be later than ``max_wait`` allows.
        ConfigurationError: the bucket is unknown, or the cost could never be met.
        StoreError: the store failed, and the setting ``on_store_error`` says "fail".
    """
    request: Context = task.request  # looked up once, for Celery's way to it is a long one
    fields = vars(request)
    if fields.get("tb_celery_asked") is _ASKED:
        return None
    fields["tb_celery_asked"] = _ASKED
    ticket, grant, call = _NO_TICKET, None, None
    if (headers := request.headers) is not None:
        call = fields.get(CALL_HEADER) or headers.get(CALL_HEADER)
        ticket, grant = take_headers(request)
    fields["tb_celery"] = fields["tb_celery_delivery"] = None
    quota = quota_of(task._get_app())  # noqa: SLF001 - as Celery's own methods do: the property takes long
    terms = quota.terms(task, take_delivered(request))
    charges, max_wait = terms.charges(task, call, args, kwargs)
    if charges:
        delivery = Delivery(task, request, quota, terms, charges, max_wait, ticket)
        if request.is_eager or grant is None or not delivery.pass_with(grant):
            delivery.come_by_tokens()
        fields["tb_celery"] = delivery.passed()
        fields["tb_celery_delivery"] = delivery
    return request


def admit_inner(task: LimitedTask, args: Sequence[object], kwargs: Mapping[str, object]) -> Delivery | None:
    """Let one of the many calls pass that ``map``, ``starmap`` and ``chunks`` make in one delivery: each waits in line.

    Any other direct call is no delivery, and is not asked about.

    Raises:
        RateLimitExceeded: the task is to fail or to be dropped when refused, or its turn would be too late.
        ConfigurationError: the bucket is unknown, or the cost could never be met.
        StoreError: the store failed.
    """
    outer = get_current_task()
    if outer is None or outer.name not in MAPS or not task.request.called_directly:
        return None
    quota = quota_of(task.app)
    terms = quota.terms(task, outer.request.delivery_info or {})
    charges, max_wait = terms.charges(task, None, args, kwargs)
    if not charges:
        return None
    delivery = Delivery(task, outer.request, quota, terms, charges, max_wait, _NO_TICKET, is_inner=True)
    delivery.come_by_tokens()
    return delivery
