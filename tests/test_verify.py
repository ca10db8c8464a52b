from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations_with_replacement

import pytest

from tb_celery import Bucket, ConfigurationError, Limit
from tb_celery.bucket import SECOND
from tb_celery.grantlog import Entry
from tb_celery.verify import Violation, exact, first_violation, verify

BOOT = 17 * 3600 * SECOND


def test_no_grants_break_nothing() -> None:
    assert first_violation([], 1, 1) is None


def test_all_that_is_allowed_may_be_granted() -> None:
    burst = [(BOOT, 1)] * 5
    later = [(BOOT + second * SECOND, Fraction(1, 2)) for second in range(1, 100)]
    assert first_violation([*burst, *later], 5, 0.5) is None


def test_one_token_too_many_in_one_instant_is_found() -> None:
    assert first_violation([(BOOT, 1)] * 6, 5, 0.5) == Violation(BOOT, BOOT, Fraction(6), Fraction(5))


def test_a_nanosecond_too_early_is_found() -> None:
    third = -(-10 * SECOND // 3)  # a token at 0.3 a second takes this many nanoseconds, rounded up
    on_time = [(BOOT + n * third, 1) for n in range(1000)]
    assert first_violation(on_time, 1, 0.3) is None
    doctored = [*on_time[:700], (on_time[700][0] - 1, 1), *on_time[701:]]
    found = first_violation(doctored, 1, 0.3)
    assert found is not None
    assert (found.begin, found.end) == (on_time[699][0], on_time[700][0] - 1)
    assert found.granted == 2


def test_a_log_of_true_grants_with_one_line_added_is_found() -> None:
    """A bucket run dry for an hour: wherever a grant is added, some window becomes too full."""
    honest = [(BOOT, 1)] * 5 + [(BOOT + 2 * n * SECOND, 1) for n in range(1, 1800)]
    assert first_violation(honest, 5, 0.5) is None
    for at in (0, 1, 1799 * SECOND, 3598 * SECOND):
        assert first_violation([*honest, (BOOT + at, 1)], 5, 0.5) is not None


def test_the_order_of_the_log_does_not_matter() -> None:
    grants = [(BOOT + 2 * n * SECOND, 1) for n in range(100)] + [(BOOT + 150 * SECOND, 1)] * 5
    expected = first_violation(grants, 5, 0.5)
    random.Random(1).shuffle(grants)
    assert expected is not None
    assert first_violation(grants, 5, 0.5) == expected


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_trying_every_window_finds(seed: int) -> None:
    dice = random.Random(seed)
    limits: list[tuple[float, float | Fraction]] = [(1, 0.3), (2.5, Fraction(1, 3)), (5, 7)]
    costs: list[float | Fraction] = [1, 0.5, Fraction(1, 3)]
    capacity, rate = dice.choice(limits)
    grants = [(dice.randrange(20) * SECOND // 3, dice.choice(costs)) for _ in range(dice.randrange(40))]
    instants = sorted({at for at, _ in grants})
    too_full = [
        (begin, end)
        for begin, end in combinations_with_replacement(instants, 2)
        if sum((exact(cost) for at, cost in grants if begin <= at <= end), Fraction(0))
        > exact(capacity) + exact(rate) * (end - begin) / SECOND
    ]
    found = first_violation(grants, capacity, rate)
    assert (found is None) == (not too_full)
    if found is not None:
        assert found.end == min(end for _, end in too_full)
        assert (found.begin, found.end) in too_full
        assert found.granted > found.allowed


# -- a log


API = Bucket("api", (Limit(5, 0.5),))


def entry(at: int, cost: float = 1, key: str | None = None, clock: int = 1, bucket: str = "api") -> Entry:
    return Entry(bucket, key, clock, BOOT + at, exact(cost))


def test_each_key_clock_and_bucket_has_windows_of_its_own() -> None:
    entries = [entry(0, 5), entry(0, 5, key="a"), entry(0, 5, clock=2), entry(0, 5, bucket="other")]
    (verdict,) = verify(entries, {"api": API})
    assert verdict.violation is None
    assert (verdict.keys, verdict.grants, verdict.tokens) == (2, 3, Fraction(15))
    for added in entries[:3]:
        (verdict,) = verify([*entries, added._replace(at=BOOT + 1, cost=1)], {"api": API})
        assert verdict.violation == Violation(BOOT, BOOT + 1, Fraction(6), 5 + Fraction(1, 2 * SECOND))
        assert verdict.key == added.key
        assert str(verdict).startswith("OVER  api: 5 and 0.5 a second: 16 tokens in 4 grants, keys: 2; 6 tokens in the")


def test_each_limit_of_a_bucket_is_checked() -> None:
    entries = [entry(number * SECOND) for number in range(6)]
    minute, both = Limit(5, 1 / 60), Limit(5, 1)
    found = verify(entries, {"api": Bucket("api", (minute, both)), "off": None})
    assert [(verdict.limit, bool(verdict.violation)) for verdict in found] == [(both, False), (minute, True)]


@pytest.mark.parametrize("buckets", [{"other": API}, {"api": None}, {}])
def test_a_log_that_shows_nothing_is_an_error(buckets: dict[str, Bucket | None]) -> None:
    with pytest.raises(ConfigurationError, match="holds no grant of"):
        verify([entry(0)], buckets)
