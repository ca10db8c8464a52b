"""One exact quota for Celery tasks, over every worker process of a host."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tb_celery.arithmetic import Decision
    from tb_celery.bucket import Bucket, Limit
    from tb_celery.errors import (
        ConfigurationError,
        RateLimited,
        RateLimitExceeded,
        StoreError,
        StoreTimeoutError,
        TBCeleryError,
    )
    from tb_celery.limiter import Limiter
    from tb_celery.quota import limiter_of
    from tb_celery.reaction import observe, settle
    from tb_celery.settings import Settings, load_settings, open_limiter
    from tb_celery.spreading import Spread, spread
    from tb_celery.task import RateLimitedTask
    from tb_celery.worker import install

__version__ = "0.1.0"
__all__ = [
    "Bucket",
    "ConfigurationError",
    "Decision",
    "Limit",
    "Limiter",
    "RateLimitExceeded",
    "RateLimited",
    "RateLimitedTask",
    "Settings",
    "Spread",
    "StoreError",
    "StoreTimeoutError",
    "TBCeleryError",
    "install",
    "limiter_of",
    "load_settings",
    "observe",
    "open_limiter",
    "settle",
    "spread",
]

_LATE = {
    "Bucket": "tb_celery.bucket",
    "ConfigurationError": "tb_celery.errors",
    "Decision": "tb_celery.arithmetic",
    "Limit": "tb_celery.bucket",
    "Limiter": "tb_celery.limiter",
    "RateLimitExceeded": "tb_celery.errors",
    "RateLimited": "tb_celery.errors",
    "RateLimitedTask": "tb_celery.worker",
    "Settings": "tb_celery.settings",
    "Spread": "tb_celery.spreading",
    "StoreError": "tb_celery.errors",
    "StoreTimeoutError": "tb_celery.errors",
    "TBCeleryError": "tb_celery.errors",
    "install": "tb_celery.worker",
    "limiter_of": "tb_celery.quota",
    "load_settings": "tb_celery.settings",
    "observe": "tb_celery.reaction",
    "open_limiter": "tb_celery.settings",
    "settle": "tb_celery.reaction",
    "spread": "tb_celery.spreading",
}


def __getattr__(name: str) -> object:
    """Import only what somebody needs: a script that asks a bucket starts fast, and a command can be interrupted."""
    if name not in _LATE:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    found: object = getattr(import_module(_LATE[name]), name)
    return found


if "celery" in sys.modules:
    # Its workers are told about us, and plain tasks may have routes in the settings.
    import_module("tb_celery.control")
