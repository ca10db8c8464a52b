"""One exact quota for Celery tasks, over every worker process of a host."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tb_celery.bucket import Bucket, Decision, Limit
from tb_celery.errors import (
    ConfigurationError,
    RateLimitExceeded,
    StoreError,
    StoreTimeoutError,
    TBCeleryError,
)
from tb_celery.limiter import Limiter

if TYPE_CHECKING:
    from tb_celery.delivery import limiter_of
    from tb_celery.settings import Settings, load_settings, open_limiter
    from tb_celery.task import RateLimitedTask

__version__ = "0.1.0"
__all__ = [
    "Bucket",
    "ConfigurationError",
    "Decision",
    "Limit",
    "Limiter",
    "RateLimitExceeded",
    "RateLimitedTask",
    "Settings",
    "StoreError",
    "StoreTimeoutError",
    "TBCeleryError",
    "limiter_of",
    "load_settings",
    "open_limiter",
]

_LATE = {
    "RateLimitedTask": "tb_celery.task",
    "Settings": "tb_celery.settings",
    "limiter_of": "tb_celery.delivery",
    "load_settings": "tb_celery.settings",
    "open_limiter": "tb_celery.settings",
}


def __getattr__(name: str) -> object:
    """Import Celery and pydantic only for what needs them: a script that asks a bucket starts fast."""
    if name not in _LATE:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    found: object = getattr(import_module(_LATE[name]), name)
    return found
