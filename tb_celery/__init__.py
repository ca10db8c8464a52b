"""One exact quota for Celery tasks, over every worker process of a host."""

from tb_celery.bucket import Bucket, Decision, Limit
from tb_celery.errors import (
    ConfigurationError,
    RateLimitExceeded,
    StoreError,
    StoreTimeoutError,
    TBCeleryError,
)
from tb_celery.limiter import Limiter

__version__ = "0.1.0"
__all__ = [
    "Bucket",
    "ConfigurationError",
    "Decision",
    "Limit",
    "Limiter",
    "RateLimitExceeded",
    "StoreError",
    "StoreTimeoutError",
    "TBCeleryError",
]
