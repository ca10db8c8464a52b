"""A program that shares the state file and knows nothing of it but docs/state-file.md."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import re
import struct
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import pytest

from tb_celery.bucket import Bucket, Charge, Limit, pause
from tb_celery.clock import FakeClock, SystemClock
from tb_celery.errors import StoreError
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore
from tb_celery.stores.orders import change

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = (Path(__file__).parent.parent / "docs" / "state-file.md").read_text("utf-8")
SECOND = 10**9
BOOT = 17 * 3600 * SECOND


# -- the program: nothing in this part comes from tb_celery


def checked(body: bytes) -> bytes:
    return body + struct.pack("<Q", (0x5952454C45434254 - sum(struct.unpack("<7Q", body))) % 2**64)


def is_sound(raw: bytes) -> bool:
    return len(raw) == 64 and checked(raw[:56]) == raw


FREE = checked(bytes(56))


@dataclass(frozen=True)
class Numbers:
    """Of a limit, as the page works them out."""

    capacity: float
    rate: float | Fraction

    @property
    def interval(self) -> int:
        d = Fraction(str(self.capacity)).denominator
        return d * ceil(10**9 / (Fraction(str(self.rate)) * d))

    @property
    def span(self) -> int:
        return int(Fraction(str(self.capacity)) * self.interval)

    @property
    def parts(self) -> int:
        return int(Fraction(str(self.capacity)) * 1000)

    def charge(self, cost: float) -> int:
        return ceil(Fraction(str(cost)) * self.interval)


KEPT = 2**62
DAY = 86_400 * 10**9


@dataclass(frozen=True)
class Record:
    hashes: bytes
    clock: int
    interval: int
    span: int
    epoch: int
    full_at: int
    booked_at: int
    kept: bool = False
    in_debt: bool = False

    @classmethod
    def read(cls, raw: bytes) -> Record:
        assert is_sound(raw)
        record = cls(*struct.unpack("<12sI5q8x", raw))
        if record.interval >= KEPT:
            record = replace(record, interval=record.interval - KEPT, in_debt=True)
        return replace(record, span=record.span & ~KEPT, kept=bool(record.span & KEPT))

    def raw(self) -> bytes:
        span = self.span | (KEPT if self.kept else 0)
        interval = self.interval | (KEPT if self.in_debt else 0)
        fields = (self.hashes, self.clock, interval, span, self.epoch, self.full_at, self.booked_at)
        return checked(struct.pack("<12sI5q", *fields))


@dataclass(frozen=True)
class Reading:
    """Of the clock: the instant, the epoch and the identity."""

    now: int
    epoch: int
    clock: int


class File:
    """The locked file."""

    def __init__(self, fd: int, reading: Reading) -> None:
        self.fd = fd
        self.reading = reading
        raw = os.pread(fd, 64, 0)
        assert is_sound(raw)
        magic, version, self.levels, self.orders, self.salt, *lost = struct.unpack("<8s2HI16s3q8x", raw)
        self.lost_at, epoch, clock = lost
        assert (magic, version) == (b"TBCELERY", 1)
        if self.lost_at:
            self.lost_at += 0 if clock == reading.clock else epoch - reading.epoch

    def write_header(self) -> None:
        lost = (self.lost_at, self.reading.epoch, self.reading.clock) if self.lost_at else (0, 0, 0)
        known = b"TBCELERY", 1, self.levels, self.orders, self.salt
        os.pwrite(self.fd, checked(struct.pack("<8s2HI16s3q", *known, *lost)), 0)

    def hashes(self, bucket: str, key: str | None = None, number: int = 0) -> bytes:
        def hashed(text: str) -> bytes:
            return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=self.salt).digest()

        def part(text: str) -> str:
            return f"{len(text)}:{text}"

        own = part(bucket) + ("-" if key is None else part(key)) + part(str(number))
        record = bytearray(hashed(own))
        if number >= 0:
            record[7] = record[7] % 32 + 32 * number
        return bytes(record) + hashed(part(bucket))[:4]

    def places(self, hashes: bytes) -> Iterator[int]:
        h = int.from_bytes(hashes[:8], "little")
        for level in range(self.levels):
            block = h % (8 * 2**level)
            begin = 64 + 4096 * (2**level - 1) + 512 * block
            yield from range(begin, begin + 512, 64)

    def find(self, hashes: bytes) -> tuple[int, Record] | None:
        for offset in self.places(hashes):
            raw = os.pread(self.fd, 64, offset)
            if not is_sound(raw):
                self.lost_at = max(self.reading.now, 1)
                self.write_header()
                os.pwrite(self.fd, FREE, offset)
            elif raw[:12] == hashes:
                return offset, self.moved(Record.read(raw))
        return None

    def moved(self, record: Record) -> Record:
        shift = 0 if record.clock == self.reading.clock else record.epoch - self.reading.epoch
        return replace(
            record,
            full_at=record.full_at + shift,
            booked_at=record.booked_at + shift,
            epoch=self.reading.epoch,
            clock=self.reading.clock,
        )

    def spare(self, hashes: bytes) -> int:
        for offset in self.places(hashes):
            raw = os.pread(self.fd, 64, offset)
            written = Record.read(raw)
            record = self.moved(written)
            since = self.reading.now - (365 * DAY if record.kept else 0)
            if written.interval < 0 and written.clock != self.reading.clock and self.reading.now < 31 * DAY:
                continue
            if raw == FREE or max(record.full_at, record.booked_at) <= since:
                return offset
        os.pwrite(self.fd, FREE * 64 * 2**self.levels, 64 + 4096 * (2**self.levels - 1))
        self.levels += 1
        self.write_header()
        return list(self.places(hashes))[-8]

    def take(self, numbers: Numbers, bucket: str, key: str | None = None, cost: float = 1) -> int:
        """The instant to ask again at; the present one if the tokens were granted."""
        now, hashes, charge = self.reading.now, self.hashes(bucket, key), numbers.charge(cost)
        interval, span = numbers.interval, numbers.span
        other = self.order(bucket, None, -2)
        if other:
            charge, interval, span = -(-charge * -other.interval // interval), -other.interval, other.span
        else:
            self.claim(numbers, bucket, hashes)
            interval, span = self.narrowed(numbers, bucket)
            charge = -(-charge * interval // numbers.interval)
        pauses = [order.full_at for each in {None, key} if (order := self.order(bucket, each, -1))]
        others = [self.find(self.hashes(bucket, key, number)) for number in range(1, 8)]
        found = self.find(hashes)
        if found is None:
            full_at = max(now, min(self.lost_at, now) + span) if self.lost_at else now
            offset = None
            record = Record(hashes, self.reading.clock, interval, span, self.reading.epoch, full_at, full_at)
        else:
            offset, record = found
            record = self.fitted(record)
            if (record.interval, record.span) != (interval, span):
                record = self.carried(record, interval, span, self.counted_since(record, bucket))
                for _, each in filter(None, others):
                    if (each.interval, each.span) == (interval, span):
                        full_at = max(record.full_at, self.fitted(each).full_at)
                        record = replace(
                            record, full_at=full_at, booked_at=max(record.booked_at, self.fitted(each).booked_at)
                        )
            os.pwrite(self.fd, record.raw(), offset)
        at = max([max(record.full_at, now) + min(charge, span) - span, *pauses])
        if at > now:
            return at
        full_at = max(record.full_at, now) + charge
        in_debt = full_at - span > now
        record = replace(record, full_at=full_at, booked_at=max(record.booked_at, full_at), in_debt=in_debt)
        os.pwrite(self.fd, record.raw(), self.spare(hashes) if offset is None else offset)
        return now

    def fitted(self, record: Record) -> Record:
        ahead = record.full_at - record.span - self.reading.now
        if record.in_debt or ahead <= 0:
            return replace(record, in_debt=record.in_debt and ahead > 0)
        return replace(record, full_at=record.full_at - ahead, booked_at=record.booked_at - ahead)

    def order(self, bucket: str, key: str | None, number: int) -> Record | None:
        """What stands under a number below 0."""
        found = self.find(self.hashes(bucket, key, number)) if self.orders else None
        assert found is None or found[1].interval < 0
        return found[1] if found and found[1].full_at > self.reading.now else None

    def give(self, numbers: Numbers, bucket: str, key: str | None, number: int, until: int) -> None:
        """An order."""
        hashes = self.hashes(bucket, key, number)
        found = self.find(hashes)
        known = hashes, self.reading.clock, -numbers.interval, numbers.span, self.reading.epoch
        order = Record(*known, until, until, kept=number < -1)
        os.pwrite(self.fd, order.raw(), found[0] if found else self.spare(hashes))
        self.orders += 1
        self.write_header()

    def claims(self, bucket: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """The longest interval and the fewest thousandths that others claim of the only limit, and when each ends."""
        found = self.find(self.hashes(bucket, None, -10)) if self.orders else None
        if found is None:
            return (0, 0), (2**61, 0)
        ends = [
            end if self.reading.now < end <= self.reading.now + 120 * SECOND else 0
            for end in (found[1].full_at, found[1].booked_at)
        ]
        slow, small = (-found[1].interval, ends[0]), (found[1].span, ends[1])
        return slow if slow[1] else (0, 0), small if small[1] else (2**61, 0)

    def narrowed(self, numbers: Numbers, bucket: str) -> tuple[int, int]:
        """Interval and span by what others claim, too."""
        (interval, _), (parts, _) = self.claims(bucket)
        if interval <= numbers.interval and parts >= numbers.parts:
            return numbers.interval, numbers.span
        capacity = Fraction(min(parts, numbers.parts), 1000)
        whole = capacity.denominator
        interval = whole * -(-max(interval, numbers.interval) // whole)
        return interval, int(capacity * interval)

    def claim(self, numbers: Numbers, bucket: str, hashes: bytes) -> None:
        now, hashes_of_claim = self.reading.now, self.hashes(bucket, None, -10)
        slow, small = self.claims(bucket)
        written, own = self.find(hashes), self.narrowed(numbers, bucket)
        is_laxer = written is not None and (
            written[1].interval < own[0] or written[1].span * own[0] > own[1] * written[1].interval
        )
        if not (slow[1] or small[1] or is_laxer):
            return
        new_slow, new_small = slow, small
        if numbers.interval >= slow[0] + (slow[1] - now > 30 * SECOND):
            new_slow = numbers.interval, now + 60 * SECOND
        if numbers.parts <= small[0] - (small[1] - now > 30 * SECOND):
            new_small = numbers.parts, now + 60 * SECOND
        if (new_slow, new_small) == (slow, small):
            return
        found = self.find(hashes_of_claim)
        offset = found[0] if found else self.spare(hashes_of_claim)
        if (new_slow[0], new_small[0]) != (slow[0], small[0]):
            self.orders += 1
            self.write_header()
        known = hashes_of_claim, self.reading.clock, -new_slow[0], new_small[0], self.reading.epoch
        os.pwrite(self.fd, Record(*known, new_slow[1], new_small[1], kept=True).raw(), offset)

    def counted_since(self, record: Record, bucket: str) -> int:
        """The instant at which the numbers ended that are in a record."""
        found = self.find(self.hashes(bucket, None, -2)) if self.orders else None
        if found is None or (-found[1].interval, found[1].span) != (record.interval, record.span):
            return self.reading.now
        ended = found[1].full_at
        return min(self.reading.now, ended if record.in_debt else max(ended, record.full_at - record.span))

    def carried(self, record: Record, interval: int, span: int, now: int) -> Record:
        kept = record.span
        if interval < record.interval:
            kept = min(kept, span * record.interval // interval)

        def held(instant: int) -> int:
            return (kept - (instant - now)) * interval // record.interval

        def changed(instant: int) -> int:
            overdrawn = 0 if record.in_debt else min(held(record.full_at), 0)
            return now + min(span - min(held(instant) - overdrawn, span), 2**61)

        full_at = changed(record.full_at)
        booked_at = max(full_at, changed(record.booked_at))
        in_debt = full_at - span > self.reading.now
        return replace(
            record, full_at=full_at, booked_at=booked_at, interval=interval, span=span, kept=True, in_debt=in_debt
        )


@contextmanager
def locked(path: Path, reading: Reading) -> Iterator[File]:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield File(fd, reading)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def made(path: Path, salt: bytes, levels: int = 1) -> None:
    new = path.with_name("another name")
    header = checked(struct.pack("<8s2HI16s3q", b"TBCELERY", 1, levels, 0, salt, 0, 0, 0))
    new.write_bytes(header + FREE * (64 * (2**levels - 1)))
    os.link(new, path)
    new.unlink()


# -- the same file in the hands of both


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(BOOT)


@pytest.fixture
def store(path: Path, clock: FakeClock) -> FileStore:
    return FileStore(path, clock)


LIMIT = Numbers(5, 0.5)


def read(clock: FakeClock) -> Reading:
    return Reading(clock.now(), clock.wall() - clock.now(), clock.identity)


def charge(
    numbers: Numbers = LIMIT, bucket: str = "api", key: str | None = None, cost: float = 1, number: int = 0
) -> Charge:
    limit = Limit(numbers.capacity, numbers.rate)
    return Charge(bucket, key, number, limit, limit.charge(cost))


@pytest.mark.parametrize(
    "numbers", [LIMIT, Numbers(2.5, 0.3), Numbers(0.001, 7.3), Numbers(1000, 1e6), Numbers(1, 1e-6)]
)
def test_the_numbers_of_a_limit(numbers: Numbers) -> None:
    limit = Limit(numbers.capacity, numbers.rate)
    assert (limit.interval, limit.span) == (numbers.interval, numbers.span)
    for cost in (numbers.capacity, numbers.capacity / 8):
        assert limit.charge(cost) == numbers.charge(cost)


@pytest.mark.parametrize(
    ("bucket", "key", "number"),
    [
        ("twitter_api", None, 0),
        ("twitter_api", "", 0),
        ("twitter_api", "-", 0),
        ("twitter_api", "ann", 7),
        ("Zwölf Büros", "\N{GRINNING FACE}", 0),
        ("a", "\udcff", 0),
    ],
)
def test_what_the_store_wrote_can_be_read(
    path: Path, store: FileStore, clock: FakeClock, bucket: str, key: str | None, number: int
) -> None:
    store.acquire([charge(LIMIT, bucket, key, 2, number)])
    with locked(path, read(clock)) as file:
        hashes = file.hashes(bucket, key, number)
        found = file.find(hashes)
    assert found is not None
    full_at = BOOT + 4 * SECOND
    assert found[1] == Record(hashes, 1, 2 * SECOND, 10 * SECOND, clock.wall() - BOOT, full_at, full_at)


def test_the_limits_of_a_bucket_are_numbered_from_the_slowest(path: Path, store: FileStore, clock: FakeClock) -> None:
    numbers = [Numbers(1000, 0.1), Numbers(20, 2), Numbers(10, 1), Numbers(3, 100)]
    bucket = Bucket("api", tuple(Limit(each.capacity, each.rate) for each in reversed(numbers)))
    store.acquire(bucket.draw(None, bucket.charge(1)))
    with locked(path, read(clock)) as file:
        found = [file.find(file.hashes("api", None, number)) for number in range(4)]
        assert file.find(file.hashes("api", None, 4)) is None
    in_order = sorted((-each.interval, each.span) for each in numbers)
    assert [place and (-place[1].interval, place[1].span) for place in found] == in_order


def test_every_record_of_a_file_of_many_levels_is_found_once(path: Path, store: FileStore, clock: FakeClock) -> None:
    for key in range(3000):
        store.acquire([charge(key=str(key))])
    with locked(path, read(clock)) as file:
        assert file.levels > 4
        assert path.stat().st_size == 64 + 4096 * (2**file.levels - 1)
        everything = path.read_bytes()
        used = [raw[:12] for at in range(64, len(everything), 64) if (raw := everything[at : at + 64]) != FREE]
        assert sorted(used) == sorted(file.hashes("api", str(key)) for key in range(3000))
        assert all(file.find(file.hashes("api", str(key))) for key in range(3000))
        assert file.find(file.hashes("api", "3000")) is None


def test_the_store_honours_what_others_took(path: Path, store: FileStore, clock: FakeClock) -> None:
    store.read([charge()])
    with locked(path, read(clock)) as file:
        assert file.take(LIMIT, "api", cost=3) == BOOT
    assert store.acquire([charge(cost=2)])
    assert not store.acquire([charge()])
    with locked(path, read(clock)) as file:
        assert file.take(LIMIT, "api") == BOOT + 2 * SECOND
    clock.advance(2 * SECOND)
    with locked(path, read(clock)) as file:
        assert file.take(LIMIT, "api") == clock.now()
    assert store.acquire([charge()]).wait == 2.0


def test_the_store_takes_a_file_that_others_made(path: Path, store: FileStore, clock: FakeClock) -> None:
    made(path, random.Random(1).randbytes(16), levels=3)
    with locked(path, read(clock)) as file:
        assert file.take(LIMIT, "api", cost=5) == BOOT
    assert not store.acquire([charge()])
    assert store.acquire([charge(key="ann")])
    assert path.stat().st_size == 64 + 4096 * 7


@pytest.mark.parametrize("seed", range(3))
def test_taking_turns_both_answer_as_one_store(path: Path, store: FileStore, clock: FakeClock, seed: int) -> None:
    """With new levels, and records that go from hand to hand."""
    dice, plain = random.Random(seed), MemoryStore(clock)
    store.read([charge()])
    for _ in range(2000):
        clock.advance(dice.choice([0, 1, 10**6, 10**8]))
        key, cost = str(dice.randrange(200)), dice.randint(1, 3)
        both_answer(path, store, clock, plain, LIMIT, key, cost, mine=dice.random() < 0.5)


@pytest.mark.parametrize("seed", range(3))
def test_both_see_other_numbers_and_a_clock_set_back_alike(
    path: Path, store: FileStore, clock: FakeClock, seed: int
) -> None:
    dice, plain = random.Random(seed), MemoryStore(clock)
    store.read([charge()])
    for _ in range(500):
        clock.advance(dice.choice([0, 1, 10**6, 10**8, 10**9, 10**9, -(3 * 10**9)]))
        numbers = dice.choice([LIMIT, LIMIT, Numbers(4, 7.3), Numbers(2.5, 0.3)])
        both_answer(path, store, clock, plain, numbers, None, dice.randint(1, 2), mine=dice.random() < 0.5)


def both_answer(
    path: Path,
    store: FileStore,
    clock: FakeClock,
    plain: MemoryStore,
    numbers: Numbers,
    key: str | None,
    cost: int,
    *,
    mine: bool,
) -> None:
    expected = plain.acquire([charge(numbers, "api", key, cost)])
    if mine:
        with locked(path, read(clock)) as file:
            assert file.take(numbers, "api", key, cost) == expected.at
    else:
        assert store.acquire([charge(numbers, "api", key, cost)]) == expected


@pytest.mark.parametrize("key", [None, "ann"])
def test_both_heed_pauses(path: Path, store: FileStore, clock: FakeClock, key: str | None) -> None:
    asked = [charge(key="ann")]
    store.order(pause("api", key), 60 * SECOND)
    until = store.orders(Bucket("api", (Limit(5, 0.5),)), key)[1].paused[key]
    with locked(path, read(clock)) as file:
        assert file.take(LIMIT, "api", "ann") == until
        month = Numbers(1, Fraction(10**9, 31 * 86_400 * SECOND))
        file.give(month, "api", key, -1, until + SECOND)
    clock.advance(SECOND // 100)
    assert store.acquire(asked).at == until + SECOND
    assert store.acquire(asked).paused
    clock.advance(until + SECOND - clock.now())
    assert store.acquire(asked)
    with locked(path, read(clock)) as file:
        assert file.take(LIMIT, "api", "ann") == clock.now()


def test_both_heed_other_numbers(path: Path, store: FileStore, clock: FakeClock) -> None:
    asked, other = (charge(cost=4),), Numbers(2, 1)
    store.order(change("api", 0, Limit(2, 1)), 60 * SECOND)
    with locked(path, read(clock)) as file:
        assert file.take(LIMIT, "api", cost=4) == clock.now()
        assert file.take(LIMIT, "api", cost=4) == clock.now() + 4 * SECOND
        file.give(other, "api", None, -2, clock.now() + 1)
    clock.advance(SECOND)
    with locked(path, read(clock)) as file:
        assert file.take(LIMIT, "api", cost=4) > clock.now() + 2 * SECOND
        file.give(other, "api", None, -2, clock.now() + 60 * SECOND)
    clock.advance(SECOND)
    assert store.acquire(asked).limit == Limit(2, 1)


def test_both_respect_debts(path: Path, store: FileStore, clock: FakeClock) -> None:
    store.acquire([charge(cost=5)])
    store.settle([charge()._replace(cost=40 * SECOND)])
    with locked(path, read(clock)) as file:
        assert file.take(LIMIT, "api") == clock.now() + 42 * SECOND
        assert file.take(Numbers(5, 5), "api") == clock.now() + 42 * SECOND // 10
    clock.advance(42 * SECOND // 10)
    assert store.acquire([charge(Numbers(5, 5))])


def test_both_count_the_declared_numbers_from_the_end_of_others(path: Path, store: FileStore, clock: FakeClock) -> None:
    """And not from the first ask after that: of the tokens 1 was refilled by then, and 2 since."""
    store.order(change("api", 0, Limit(5, 0.1)), 10 * SECOND)
    until = store.orders(Bucket("api", (Limit(5, 0.5),)))[1].limits[0][1]
    for key in (None, "a"):
        assert store.acquire([charge(key=key, cost=5)])
    clock.advance(until + 4 * SECOND - clock.now())
    assert not store.acquire([charge(cost=3)])
    assert store.acquire([charge(cost=2.9)])
    with locked(path, read(clock)) as file:
        assert file.take(LIMIT, "api", "a", 3) > clock.now()
        assert file.take(LIMIT, "api", "a", 2.9) == clock.now()


def test_both_find_what_is_known_under_another_number(path: Path, store: FileStore, clock: FakeClock) -> None:
    quick, daily = Limit(10, 1), Limit(1000, Fraction(1000, 86_400))
    store.acquire(Bucket("api", (quick, daily)).draw(None, (10 * quick.interval, daily.interval)))
    with locked(path, read(clock)) as file:
        assert file.take(Numbers(10, 1), "api") == clock.now() + SECOND
    assert not store.acquire([charge(Numbers(10, 1))])


def test_forgetting_a_record_makes_the_limit_full(path: Path, store: FileStore, clock: FakeClock) -> None:
    store.acquire([charge(cost=5)])
    with locked(path, read(clock)) as file:
        found = file.find(file.hashes("api"))
        assert found is not None
        os.pwrite(file.fd, FREE, found[0])
    assert store.acquire([charge(cost=5)])


def test_both_carry_instants_over_a_reboot(path: Path, store: FileStore, clock: FakeClock) -> None:
    store.acquire([charge(cost=5)])
    for identity, passed in [(2, 2 * SECOND), (3, 4 * SECOND), (4, 2 * SECOND)]:
        clock = FakeClock(7 * identity, clock.wall() + passed, identity)
        with locked(path, read(clock)) as file:
            assert file.take(LIMIT, "api") == clock.now()
        again = FileStore(path, FakeClock(9 * identity, clock.wall(), -identity % 2**32)).acquire([charge()])
        assert bool(again) == (passed == 4 * SECOND)


def test_neither_gives_away_a_pause_after_a_reboot_whatever_the_wall_clock_says(
    path: Path, store: FileStore, clock: FakeClock
) -> None:
    for number in range(60):
        store.order(pause("api", f"{number}"), SECOND)
    late = FakeClock(7, clock.wall() + 1000 * DAY, 2)
    others = [f"other {number}" for number in range(200)]
    with locked(path, read(late)) as file:
        for key in others[:100]:
            assert file.take(LIMIT, "api", key) == late.now()
    again = FileStore(path, late)
    for key in others[100:]:
        assert again.acquire([charge(key=key)])
    with locked(path, read(late)) as file:
        assert all(file.find(file.hashes("api", f"{number}", -1)) for number in range(60))


def test_the_clock_is_the_one_that_the_page_names() -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").removesuffix("\n")
    namespace = Path("/proc/self/ns/time").stat().st_ino
    assert SystemClock().identity == crc32(f"{boot}|{namespace}|boottime".encode("ascii"))


def test_damage_that_others_find_counts_for_the_store(path: Path, store: FileStore, clock: FakeClock) -> None:
    store.acquire([charge(cost=5)])
    with locked(path, read(clock)) as file:
        found = file.find(file.hashes("api"))
        assert found is not None
        os.pwrite(file.fd, b"noise", found[0] + 20)
        assert file.take(LIMIT, "api") == BOOT + 2 * SECOND
    for key in (None, "ann"):
        assert store.acquire([charge(key=key)]).wait == 2.0
    clock.advance(2 * SECOND)
    assert store.acquire([charge()])


def test_damage_that_the_store_finds_counts_for_others(path: Path, store: FileStore, clock: FakeClock) -> None:
    store.acquire([charge(cost=5)])
    os.truncate(path, 64)
    assert not store.acquire([charge()])
    with locked(path, read(clock)) as file:
        assert file.lost_at == BOOT
        assert {file.take(LIMIT, "api", key) for key in (None, "ann")} == {BOOT + 2 * SECOND}
        assert path.read_bytes()[64:] == FREE * 64


def test_after_a_damaged_header_every_record_is_free_and_the_salt_another(
    path: Path, store: FileStore, clock: FakeClock
) -> None:
    made(path, bytes(16), levels=2)
    store.acquire([charge(cost=5)])
    with path.open("r+b") as whole:
        whole.seek(16)
        whole.write(b"noise")
    store.read([charge(key="ann")])
    with locked(path, read(clock)) as file:
        assert (file.levels, file.lost_at) == (2, BOOT)
        assert file.salt[5:] != bytes(11)
        assert path.read_bytes()[64:] == FREE * 192


def test_another_version_is_refused_and_left_alone(path: Path, store: FileStore) -> None:
    whole = checked(struct.pack("<8s2HI16s3q", b"TBCELERY", 2, 1, 0, bytes(16), 0, 0, 0)) + FREE * 64
    path.write_bytes(whole)
    with pytest.raises(StoreError, match="newer version"):
        store.acquire([charge()])
    assert path.read_bytes() == whole


# -- the page's own example


def example() -> list[bytes]:
    """The 64 bytes of each block of hexadecimal digits in the example."""
    blocks = re.findall(r"(?:^    (?:[0-9a-f]{2} ?){16}\n){4}", PAGE.partition("## Example")[2], re.MULTILINE)
    return [bytes.fromhex(block) for block in blocks]


@pytest.fixture
def whole(path: Path) -> Path:
    """The file that the example describes."""
    header, *records = example()
    path.write_bytes(header + FREE * 64)
    offsets = re.findall(r"at offset (\d+)", PAGE.partition("## Example")[2])
    with path.open("r+b") as file:
        for offset, raw in zip(offsets, records, strict=True):
            file.seek(int(offset))
            file.write(raw)
    return path


def test_the_example_is_what_the_page_says_it_is(whole: Path) -> None:
    with locked(whole, Reading(10**12, 18 * 10**17, 0x12345678)) as file:
        assert (file.salt, file.levels, file.lost_at) == (bytes(range(16)), 1, 0)
        for key in (None, "ann"):
            hashes = file.hashes("twitter_api", key)
            found = file.find(hashes)
            assert found is not None
            full_at = 1_002_000_000_000
            assert found[1] == Record(hashes, 0x12345678, 2 * 10**9, 10**10, 18 * 10**17, full_at, full_at)
            assert hashes[:8].hex(" ") in PAGE


def test_the_store_reads_the_example(whole: Path) -> None:
    clock = FakeClock(10**12, 18 * 10**17 + 10**12, 0x12345678)
    store, limit = FileStore(whole, clock), Limit(5, 0.5)
    assert len(store.survey([Bucket("twitter_api", (limit,))])[1]["twitter_api"]) == 2
    for key in (None, "ann"):
        now, _, [state] = store.read([charge(LIMIT, "twitter_api", key)])
        assert limit.tokens(state.full_at, now) == 4


def test_the_store_writes_the_example(whole: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    made(mine, bytes(range(16)))
    store = FileStore(mine, FakeClock(10**12, 18 * 10**17 + 10**12, 0x12345678))
    for key in (None, "ann"):
        store.acquire([charge(LIMIT, "twitter_api", key)])
    assert mine.read_bytes() == whole.read_bytes()


def test_the_page_spells_out_a_free_record() -> None:
    assert bytes(56) + b"TBCELERY" == FREE
    assert "56 zero bytes and their check word (the letters `TBCELERY`," in PAGE
