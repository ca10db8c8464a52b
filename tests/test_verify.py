from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tb_celery import Bucket, ConfigurationError, Limit
from tb_celery.bucket import SECOND
from tb_celery.grantlog import Entry
from tb_celery.periods import exact
from tb_celery.verify import Violation, first_violation, verify

BOOT = 17 * 3600 * SECOND


def test_no_grants_break_nothing() -> None:
    assert first_violation([], 1, 1) is None


def test_all_that_is_allowed_may_be_granted() -> None:
    burst = [(BOOT, 1)] * 5
    later = [(BOOT + second * SECOND, Fraction(1, 2)) for second in range(1, 100)]
    assert first_violation([*burst, *later], 5, 0.5) is None


def test_one_token_too_many_in_one_instant_is_found() -> None:
    assert first_violation([(BOOT, 1)] * 6, 5, 0.5) == Violation(BOOT, BOOT, Fraction(6), Fraction(5))


def test_the_smallest_part_of_a_token_too_many_is_found() -> None:
    third = Fraction(1, 3)
    assert first_violation([(BOOT, third)] * 3, 1, 1) is None
    assert first_violation([(BOOT, third), (BOOT, third), (BOOT, third + third / 10**9)], 1, 1) is not None


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


spans = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from(["grant", "grant", "back", "more"]), st.integers(1, 12)), max_size=25
)
"""Each an instant in thirds of a second, what was done then, and to how many quarters of a token."""


@given(spans)
def test_what_calls_cost_after_all_is_judged_as_trying_every_window_does(done: list[tuple[int, str, int]]) -> None:
    capacity, rate = Fraction(5, 2), Fraction(3, 4)
    grants = [(at * SECOND // 3, Fraction(parts, 4)) for at, kind, parts in done if kind == "grant"]
    signs = {"back": -1, "more": 1}
    settled = [(at * SECOND // 3, Fraction(signs[kind] * parts, 4)) for at, kind, parts in done if kind in signs]

    def spent(first: int, last: int) -> Fraction:
        """By the grants from ``first`` to ``last``: what is drawn at the last instant may be drawn after them."""
        of_grants = sum((cost for at, cost in grants if first <= at <= last), Fraction(0))
        return of_grants + sum(cost for at, cost in settled if first <= at <= last and (cost < 0 or at < last))

    ends = {at for at, _ in grants}
    instants = sorted(ends | {at for at, _ in settled})
    too_full = [
        (first, last)
        for first, last in combinations_with_replacement(instants, 2)
        if last in ends and spent(first, last) > capacity + rate * (last - first) / SECOND
    ]
    found = first_violation(grants, capacity, rate, settled)
    assert (found is None) == (not too_full)
    if found is not None:
        assert (found.begin, found.end) in too_full
        assert found.end == min(last for _, last in too_full)
        assert found.granted > found.allowed


@given(spans)
def test_it_passes_exactly_what_a_bucket_can_have_granted(done: list[tuple[int, str, int]]) -> None:
    """One that is full at first, and of which at each instant first is done what lets most be granted."""
    capacity, rate = Fraction(5, 2), Fraction(3, 4)
    told = {kind: [(at, Fraction(parts, 4)) for at, each, parts in done if each == kind] for _, kind, _ in done}
    level, before, fits = capacity, 0, True
    for now in sorted({at for at, *_ in done}):
        grants, back, more = (sum(cost for at, cost in told.get(k, []) if at == now) for k in ("grant", "back", "more"))
        level = min(capacity, level + rate * (now - before) / 3) + back - grants
        fits = fits and (level >= 0 or not grants)
        level, before = min(capacity, level) - more, now
    at_thirds = {kind: [(at * SECOND, cost) for at, cost in each] for kind, each in told.items()}
    settled = [*at_thirds.get("more", []), *((at, -cost) for at, cost in at_thirds.get("back", []))]
    assert (first_violation(at_thirds.get("grant", []), capacity, rate / 3, settled) is None) == fits


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


def test_what_is_settled_counts_for_its_limit() -> None:
    second, minute = Limit(5, 1), Limit(10, 0.1)
    bucket = Bucket("api", (second, minute))
    entries = [entry(0, 5), *(entry(at, -3)._replace(limit=number) for number, at in ((0, 1), (1, 2))), entry(3, 3)]
    found = verify(entries, {"api": bucket})
    assert [(each.tokens, bool(each.violation)) for each in found] == [(Fraction(5), False)] * 2
    for left_out, over in ((entries[2], [True, False]), (entries[1], [False, False])):
        found = verify([each for each in entries if each is not left_out], {"api": bucket})
        assert [bool(each.violation) for each in found] == over


def test_what_is_owed_is_paid_before_the_next_grant() -> None:
    entries = [entry(0, 5), entry(1, 5)._replace(limit=0)]
    (verdict,) = verify(entries, {"api": API})
    assert (verdict.violation, verdict.tokens, verdict.grants) == (None, Fraction(10), 1)
    for late, is_over in ((12 * SECOND, False), (12 * SECOND - 1, True)):
        (verdict,) = verify([*entries, entry(late, 1)], {"api": API})
        assert bool(verdict.violation) == is_over


@pytest.mark.parametrize("instant", [1, 2])
def test_a_grant_at_an_instant_at_which_a_bucket_may_have_been_made_full_is_left_out(instant: int) -> None:
    grants = [Entry("api", None, 1, BOOT, 1)] * 5 + [Entry("api", None, 1, BOOT + instant, 1)]
    reset = Entry("api", None, 1, BOOT + 2, None, BOOT + 1)
    [verdict] = verify([*grants, reset], {"api": Bucket("api", (Limit(5, 0.5),))})
    assert verdict.violation is None


def test_a_bucket_that_is_made_full_again_owes_nothing() -> None:
    full = Entry("api", None, 1, BOOT + 3, None, BOOT + 2)
    entries = [entry(0, 5), entry(1, 50)._replace(limit=0), full, entry(4, 5)]
    (verdict,) = verify(entries, {"api": API})
    assert verdict.violation is None
    (verdict,) = verify([*entries, entry(5, 1)], {"api": API})
    assert verdict.violation == Violation(BOOT + 4, BOOT + 5, Fraction(6), 5 + Fraction(1, 2 * SECOND))


@pytest.mark.parametrize("buckets", [{"other": API}, {"api": None}, {}])
def test_a_log_that_shows_nothing_is_an_error(buckets: dict[str, Bucket | None]) -> None:
    with pytest.raises(ConfigurationError, match="holds no grant of"):
        verify([entry(0)], buckets)
