"""From a state file to a server, with the buckets as full as they are and their lines as long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_celery.bucket import SECOND
from tb_celery.errors import ConfigurationError
from tb_celery.stores.hosting import read_at
from tb_celery.stores.record import OWN
from tb_celery.stores.redis import MS, Marker, packed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tb_celery.arithmetic import State
    from tb_celery.bucket import Bucket
    from tb_celery.stores.file import FileStore
    from tb_celery.stores.redis import RedisStore


def migrate(buckets: Iterable[Bucket], source: FileStore, target: RedisStore) -> int:
    """Carry over how full ``buckets`` are, with all of their keys, and where their lines end.

    Stop the workers first, and start them with the new setting: what they draw from the file meanwhile is not seen. A
    turn in a message that is under way counts as due when it comes back, for it is on another clock then.

    Args:
        buckets: which; others stay behind, for the file holds no names.
        source: it is only read.
        target: with nothing under its prefix yet.

    Returns:
        The number of limits that were carried over; those that are full need no record.

    Raises:
        ConfigurationError: there is no state file, or the target is in use.
        StoreError: one of them cannot be read or written.
    """
    if not source.path.exists():
        message = f"state file {source.path} does not exist; name the one to carry over in the setting state_file"
        raise ConfigurationError(message)
    server, key = target.server, target.marker
    server.command("MGET", key)  # in a cluster this leads to the node that has the keys, which SCAN does not
    _, names = server.command("SCAN", 0, "MATCH", key.replace(b"store", b"*"), "COUNT", 1 << 30)
    if key in names and len(names) > 1:
        message = f"{server} has buckets under the prefix {target.prefix!r} already; choose another setting key_prefix"
        raise ConfigurationError(message)
    # In nanoseconds from the instant at which each was read, which the server's is later than: the strict side.
    found: dict[bytes, State] = {}
    with source._entered() as (table, now):  # noqa: SLF001
        header = table._header(now)  # noqa: SLF001
        lost = header.lost_at and header.lost_at + table._shift(header.epoch, header.clock) - now  # noqa: SLF001
    for bucket in buckets:
        for table, now, records in source._pieces(bucket):  # noqa: SLF001
            for offset, state in records:
                if state.booked_at > now or state.full_at > now:
                    name = target.named(bucket.name) + read_at(table.fd, OWN, offset).hex().encode()
                    found[name] = state._replace(full_at=state.full_at - now, booked_at=state.booked_at - now)
    seconds, microseconds = server.command("TIME")
    now = int(seconds) * SECOND + int(microseconds) * 1000
    for name, ahead in found.items():
        state = ahead._replace(full_at=now + ahead.full_at, booked_at=now + ahead.booked_at)
        server.command("SET", name, packed(state), "PXAT", -(-max(state.full_at, state.booked_at) // MS))
    # Last: half of a migration is none, and what was carried over until then is forgotten in time.
    server.command("SET", key, Marker(header.salt, now + lost, lost=bool(header.lost_at)).pack())
    return len(found)
