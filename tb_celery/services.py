"""The file of services that scripts ask for: ``tb-celery --config``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tb_celery.declaration import parse_bucket, parse_json
from tb_celery.errors import ConfigurationError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tb_celery.bucket import Bucket

EXAMPLE = '{"twitter_api": {"capacity": 5, "refill_rate": 0.5, "requested": 1}}'
DEFAULTS: dict[str, Any] = {"capacity": 10, "refill_rate": 1, "requested": 1}
"""What a service has where the file gives it no number."""


def read_services(
    config: str, declared: Mapping[str, Bucket | None], *, only_those: bool = False
) -> tuple[dict[str, Bucket | None], dict[str, float]]:
    """The buckets, and the tokens of each, that the JSON file ``config`` (``-`` is stdin) asks for.

    A service without capacity and refill_rate is the bucket of that name in ``declared``; where there is none, that is
    an error with ``only_those``, and else it has the defaults.

    Raises:
        ConfigurationError: the file cannot be read, or asks for what cannot be had.
    """
    source = "--config on stdin" if config == "-" else f"--config {config}"
    try:
        with open(0 if config == "-" else config, encoding="utf-8-sig", closefd=config != "-") as file:
            services = parse_json(file.read(), source)
    except (OSError, UnicodeDecodeError) as error:
        message = f"{source} cannot be read: {getattr(error, 'strerror', 'it is not UTF-8 text')}"
        raise ConfigurationError(message) from None
    if not isinstance(services, dict) or not services:
        message = f"{source} must be an object of at least one service, such as {EXAMPLE}"
        raise ConfigurationError(message)
    buckets, costs = {}, {}
    for name, service in services.items():
        wrong = sorted(service.keys() - DEFAULTS) if isinstance(service, dict) else service
        if wrong or not isinstance(service, dict):
            known = ", ".join(DEFAULTS)
            message = f"{source}: service {shown(name)} can have {known}, as in {EXAMPLE}, but not {shown(wrong)}"
            raise ConfigurationError(message)
        bare = service.keys() <= {"requested"} and (name in declared or (only_those and bool(declared)))
        if bare and name not in declared:
            message = f"{source}: service {shown(name)} has no numbers, and the app declares only {', '.join(declared)}"
            raise ConfigurationError(message)
        numbers = {**DEFAULTS, **service}
        costs[name] = numbers.pop("requested")
        field = ""
        try:
            bucket = buckets[name] = declared[name] if bare else parse_bucket(name, numbers)
            if bucket is not None:
                field = "requested: "
                bucket.charge(costs[name])
        except ConfigurationError as error:
            message = f"{source}: {field}{error}"
            raise ConfigurationError(message) from None
    return buckets, costs
