"""From a state file to a server, with the buckets as full as they are, their lines as long, and what is ordered."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tb_celery.bucket import SECOND
from tb_celery.errors import ConfigurationError
from tb_celery.stores.record import OWN, is_order
from tb_celery.stores.redis_format import DAY, Marker, packed
from tb_celery.stores.redis_keys import MS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tb_celery.bucket import Bucket
    from tb_celery.state import State
    from tb_celery.stores.asks import Asks
    from tb_celery.stores.file import FileStore
    from tb_celery.stores.record import Header
    from tb_celery.stores.redis import RedisStore


class Carried(NamedTuple):
    """What was carried over.

    Attributes:
        limits: how many, each of a key; those that are full and have no line need no record.
        orders: how many pauses and other numbers, set by somebody or claimed by a process that declares less.
    """

    limits: int
    orders: int


def migrate(buckets: Iterable[Bucket], source: FileStore, target: RedisStore) -> Carried:
    """Carry over how full ``buckets`` are, with all of their keys, where their lines end, and what is ordered of them.

    Stop the workers first, and start them with the new setting: what they draw from the file meanwhile is not seen. A
    turn in a message that is under way counts as due when it comes back, for it is on another clock then.

    Args:
        buckets: which; others stay behind, for the file holds no names.
        source: it is only read.
        target: with nothing under its prefix yet.

    Raises:
        ConfigurationError: there is no state file, or the target is in use.
        StoreError: one of them cannot be read or written.
    """
    if not source.path.exists():
        message = f"state file {source.path} does not exist; name the one to carry over in the setting state_file"
        raise ConfigurationError(message)
    server, key = target.server, target.marker
    server.examined()
    there = (name for piece in target.scan(key.removesuffix(b"store")) for name in piece)
    if server.command("GET", key) is not None and any(name != key for name in there):
        message = f"{server} has buckets under the prefix {target.prefix!r} already; choose another setting key_prefix"
        raise ConfigurationError(message)
    # In nanoseconds from the instant at which each was read, which the server's is later than: the strict side.
    found: dict[bytes, State] = {}
    header, lost = source._locked(_loss)  # noqa: SLF001
    names = [bucket.name for bucket in buckets]
    for table, piece, now in source._pieces(lambda *read: read):  # noqa: SLF001
        for bucket, records in piece.records(names).items():
            for _, raw in records:
                state = table.written(raw)
                if state.booked_at > now or state.full_at > now:
                    name = target.named(bucket) + raw[:OWN].hex().encode()
                    # By an even number, so that the line stays marked as it is.
                    full_at, booked_at = (instant - (now & ~1) for instant in (state.full_at, state.booked_at))
                    ahead = state._replace(full_at=full_at, booked_at=booked_at)
                    found[name] = ahead._replace(interval=-ahead.interval) if is_order(raw) else ahead
    seconds, microseconds = server.command("TIME")
    now = int(seconds) * SECOND + int(microseconds) * 1000
    for name, ahead in found.items():
        state = ahead._replace(full_at=now + ahead.full_at, booked_at=now + ahead.booked_at)
        kept = max(state.full_at, state.booked_at) + (DAY if state.interval < 0 else 0)
        server.command("SET", name, packed(state), "PXAT", -(-kept // MS))
    # Last: half of a migration is none, and what was carried over until then is forgotten in time.
    ordered = sum(state.interval < 0 for state in found.values())
    server.command("SET", key, Marker(header.salt, ordered, now + lost, int(header.lost_at != 0)).pack())
    return Carried(len(found) - ordered, ordered)


def _loss(table: Asks, now: int) -> tuple[Header, int]:
    """The header, and how far from now the instant is at which records were last found to be lost; 0 for never."""
    header = table._header(now)  # noqa: SLF001
    return header, header.lost_at and header.lost_at + table._shift(header.epoch, header.clock) - now  # noqa: SLF001
