"""What a store on a Redis or Valkey server calls its records, and what is done to many of them at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tb_celery.bucket import SECOND
from tb_celery.stores.record import number_of, own_name
from tb_celery.stores.redis_format import packed, unpacked, unpacked_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tb_celery.state import State
    from tb_celery.stores.orders import Step
    from tb_celery.stores.redis_server import Server

MS = SECOND // 1000
DIGITS = 16
"""Hexadecimal digits at the end of a record's key, which are all that it has for itself."""
SWAP = Path(__file__).with_name("redis_swap.lua").read_text("utf-8")


class RedisKeys:
    """The keys under a prefix.

    Args:
        server: where they are.
        prefix: what they begin with, in braces.
    """

    swapping = SWAP

    def __init__(self, server: Server, prefix: str) -> None:
        self.server = server
        self.prefix = prefix
        self.marker = f"{{{prefix}}}:store".encode()

    def named(self, bucket: str) -> bytes:
        """What the keys of a bucket have in common; 16 hexadecimal digits follow."""
        return b"{%b}:%b:" % (self.prefix.encode(), bucket.encode("utf-8", "surrogatepass"))

    def key_of(self, salt: bytes, bucket: str, key: str | None, number: int) -> bytes:
        """That of the record of a bucket's key and limit."""
        return self.named(bucket) + own_name(salt, bucket, key, number).hex().encode()

    def records(self, buckets: Iterable[str]) -> Iterator[tuple[str, bytes, State | None]]:
        """The buckets and keys of all records of ``buckets``, but not those of orders, and what they say."""
        names = {self.named(bucket): bucket for bucket in buckets}
        # One pass for all, which costs as much as for one.
        begin = next(iter(names)) if len(names) == 1 else self.marker.removesuffix(b"store")
        for piece in self.scan(begin, b"*" + b"?" * DIGITS):
            keys = [key for key in piece if key[:-DIGITS] in names]
            for key, record in zip(keys, self.seen(keys), strict=True):
                if not unpacked_order(record):
                    yield names[key[:-DIGITS]], key, unpacked(record)[0]

    def scan(self, begin: bytes, rest: bytes = b"*") -> Iterator[list[bytes]]:
        """The keys that begin so, each once; a piece of the database at a time, for others are served in between."""
        pattern = re.sub(rb"([\\*?\[\]^-])", rb"\\\1", begin) + rest
        # SCAN names no key, so a cluster would not send us to the node that has them.
        self.server.command("MGET", self.marker)
        cursor, seen = b"0", set[bytes]()
        while True:
            cursor, keys = self.server.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            fresh = {key for key in keys if key not in seen}
            seen |= fresh
            yield [*fresh]
            if cursor == b"0":
                return

    def seen(self, keys: list[bytes]) -> list[bytes | None]:
        """The bytes of records."""
        found: list[bytes | None] = self.server.command("MGET", *keys) if keys else []
        return found

    def swap(self, keys: Iterable[bytes], records: Iterable[bytes | None], step: Step, now: int) -> list[bytes]:
        """Have limits stand where ``step`` says.

        Args:
            keys: of their records.
            records: what was seen there.
            step: from where they stand to where they are to.
            now: an instant since they were seen.

        Returns:
            The keys of those that others have changed since.
        """
        names, words = list[bytes](), list[bytes | int]()
        for name, record in zip(keys, records, strict=True):
            state, keep = unpacked(record)
            number = number_of(bytes.fromhex(name[-DIGITS:].decode()))
            if record and state and (new := step(number, state, now)) != state:
                if new.numbers != state.numbers:
                    keep = max(keep, kept_for(state, now))
                until = max(new.full_at, new.booked_at, keep * SECOND)
                names.append(name)
                words += [record, packed(new, keep), -(-until // MS)]
        missed = self.server.command("EVAL", self.swapping, len(names), *names, *words) if names else ()
        return [names[place - 1] for place in missed]


def kept_for(old: State, now: int) -> int:
    """The second until which a record is kept that had ``old`` numbers: full by its own, it may not be so by those."""
    return (now + old.span) // SECOND + 1
