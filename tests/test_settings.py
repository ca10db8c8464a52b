"""What an operator may set, and what is said to one who sets something else."""

import json
import math
import os
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import tb_celery.declaration
import tb_celery.settings
from tb_celery.bucket import LONGEST_SPAN, SECOND, Bucket, Limit
from tb_celery.clock import FakeClock
from tb_celery.declaration import parse_bucket, parse_json
from tb_celery.errors import ConfigurationError, shown
from tb_celery.limiter import Limiter
from tb_celery.rules import Rule
from tb_celery.settings import Settings, default_state_file, load_settings, open_limiter
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore

Write: TypeAlias = Callable[[str, str | bytes], Path]

TWITTER = {"buckets": {"twitter_api": {"capacity": 5, "refill_rate": 0.5}}}
EXACT = settings(
    max_examples=100, deadline=None, database=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
UNITS = {
    1: ["s", "sec", "second", "seconds"],
    60: ["m", "min", "minute", "minutes"],
    3600: ["h", "hour", "hours"],
    86400: ["d", "day", "days"],
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """There is a home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return monkeypatch


def one(capacity: float, rate: float | Fraction) -> tuple[Limit, ...]:
    return (Limit(capacity, rate),)


def limits(form: object) -> tuple[Limit, ...]:
    bucket = parse_bucket("api", form)
    assert bucket is not None
    assert bucket.name == "api"
    return bucket.limits


def refusal(declared: object = None) -> str:
    """The sentence that ``declared`` is refused with, in the present environment."""
    with pytest.raises(ConfigurationError) as caught:
        load_settings(declared)  # type: ignore[arg-type]
    return sentence(caught.value)


def sentence(error: ConfigurationError) -> str:
    """What an error says, if it says it as this library promises to."""
    text = str(error)
    assert type(error) is ConfigurationError
    assert text
    assert text.isprintable()
    assert "pydantic" not in text.lower()
    assert "validation error" not in text
    assert str(pickle.loads(pickle.dumps(error))) == text  # noqa: S301
    return text


T = TypeVar("T")


def check(make: Callable[[], T], refused: list[str] | None = None) -> T | None:
    """What ``make`` makes, or ``None`` when it refuses to, with one sentence that is added to ``refused``."""
    try:
        return make()
    except ConfigurationError as error:
        (refused if refused is not None else []).append(sentence(error))
        return None


# -- forms of a bucket


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"capacity": 5, "refill_rate": 0.5}, one(5, 0.5)),
        ({"capacity": 1, "refill_rate": 0.001}, one(1, 0.001)),
        ({"capacity": 2.5, "refill_rate": 0.28}, one(2.5, 0.28)),
        ({"capacity": 3, "refill_rate": Fraction(1, 3)}, one(3, Fraction(1, 3))),
        ({"capacity": 1000, "per": "1d"}, one(1000, Fraction(1000, 86400))),
        ({"capacity": 2.5, "per": "d"}, one(2.5, Fraction(5, 2 * 86400))),
        ({"capacity": 300, "per": " 15m "}, one(300, Fraction(1, 3))),
        ("10/m", one(1, Fraction(1, 6))),
        (" 10/m\n", one(1, Fraction(1, 6))),
        ("1/m", one(1, Fraction(1, 60))),
        ("0.5/s", one(1, Fraction(1, 2))),
        ("0.1/s", one(1, Fraction(1, 10))),
        ("100/h", one(1, Fraction(1, 36))),
        ("5000/h", one(1, Fraction(5000, 3600))),
        ("1000/d", one(1, Fraction(1000, 86400))),
        ("300/15m", one(1, Fraction(1, 3))),
        ("1/3m", one(1, Fraction(1, 180))),
        ("10/2h", one(1, Fraction(1, 720))),
        ("5/minute", one(1, Fraction(1, 12))),
        ("5/30seconds", one(1, Fraction(1, 6))),
        ("700/s", one(1, 700)),
        ("10/60s:5", one(5, Fraction(1, 6))),
        ("10/m:2.5", one(2.5, Fraction(1, 6))),
        ({"limits": ["10/s", {"capacity": 1000, "per": "1d"}]}, (Limit(1, 10), Limit(1000, Fraction(1000, 86400)))),
        (["10/s", "1000/d"], (Limit(1, 10), Limit(1, Fraction(1000, 86400)))),
        (("10/s:10", Limit(100, 1)), (Limit(10, 10), Limit(100, 1))),
        (["10/s"], one(1, 10)),
        (Limit(5, 0.5), one(5, 0.5)),
        (Bucket("api", (Limit(5, 0.5), Limit(100, 0.1))), (Limit(5, 0.5), Limit(100, 0.1))),
    ],
)
def test_forms(form: object, expected: tuple[Limit, ...]) -> None:
    assert limits(form) == expected
    assert load_settings({"buckets": {"api": form}}).buckets == {"api": Bucket("api", expected)}


def test_none_is_the_one_way_to_switch_a_bucket_off(environment: pytest.MonkeyPatch) -> None:
    assert parse_bucket("api", None) is None
    assert load_settings({"buckets": {"api": None}}).buckets == {"api": None}
    environment.setenv("TB_CELERY_BUCKETS__twitter_api", "null")
    assert load_settings(TWITTER).buckets == {"twitter_api": None}


@pytest.mark.parametrize("off", [0, False, "0", [], {"capacity": 0, "refill_rate": 1}, {"enabled": False}], ids=repr)
def test_nothing_else_switches_a_bucket_off(off: object) -> None:
    with pytest.raises(ConfigurationError, match=r"None \(null\) for no limit"):
        parse_bucket("api", off)


@EXACT
@given(
    amount=st.integers(1, 10**8),
    decimals=st.integers(0, 3),
    count=st.none() | st.integers(1, 1000),
    unit=st.sampled_from([(unit, seconds) for seconds, units in UNITS.items() for unit in units]),
    burst=st.none() | st.integers(1, 1000),
)
def test_a_string_means_what_it_spells(
    amount: int, decimals: int, count: int | None, unit: tuple[str, int], burst: int | None
) -> None:
    number = f"{amount // 10**decimals}.{amount % 10**decimals:0{decimals}}" if decimals else str(amount)
    form = f"{number}/{count or ''}{unit[0]}" + (f":{burst}" if burst else "")
    rate = Fraction(amount, 10**decimals * (count or 1) * unit[1])
    assume((burst or 1) / rate < LONGEST_SPAN // SECOND)
    assert limits(form) == one(burst or 1, rate)
    if burst == amount and not decimals:
        assert limits({"capacity": amount, "per": f"{count or ''}{unit[0]}"}) == one(burst, rate)


@EXACT
@given(capacity=st.integers(1, 10**6), count=st.integers(1, 1000), unit=st.sampled_from("smhd"))
def test_per_is_the_string_whose_burst_is_its_amount(capacity: int, count: int, unit: str) -> None:
    assert limits({"capacity": capacity, "per": f"{count}{unit}"}) == limits(f"{capacity}/{count}{unit}:{capacity}")


@pytest.mark.parametrize(("form", "first_minute"), [("10/m", 10), ({"capacity": 10, "per": "1m"}, 19)])
def test_how_much_a_form_lets_through_in_its_first_window(form: object, first_minute: int) -> None:
    clock = FakeClock()
    limiter = Limiter({"api": parse_bucket("api", form)}, MemoryStore(clock))
    admitted = 0
    while clock.now() < 60 * SECOND:
        admitted += bool(limiter.acquire("api"))
        clock.advance(SECOND // 10)
    assert admitted == first_minute


def test_rates_below_one_a_second_wait_as_long_as_they_say() -> None:
    limiter = Limiter({"api": parse_bucket("api", {"capacity": 1, "refill_rate": 0.001})}, MemoryStore(FakeClock()))
    assert limiter.acquire("api")
    assert limiter.acquire("api").wait == 1000.0


# -- what is refused


@pytest.mark.parametrize(
    "form",
    [
        *("", "10", "10/", "/m", "10/x", "10 / m", "10/M", "10/ms", "10/m:", "10/m:x", "10/m:-1", "10/m:0", "10/m 5"),
        *("0/s", "0.0/s", "10/0s", "10/-1s", "10/0.5m", "-5/m", "+5/m", "inf/s", "nan/s", "1e3/s", "1_0/s", "\u0661/s"),
        *("1 per hour; 10 per day", "10/s; 100/m", "10/s,100/m", "10K/5h", "10 per hour", "1/1/s", "9" * 16 + "/s"),
    ],
)
def test_strings_that_are_no_rates(form: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_bucket("api", form)
    text = sentence(caught.value)
    assert text.startswith(f"bucket 'api': {form!r} is not a rate such as ")
    assert '"10/m"' in text


@pytest.mark.parametrize("field", ["capacity", "refill_rate"])
@pytest.mark.parametrize(
    "number",
    [
        *(
            0,
            -1,
            0.0,
            -0.5,
            math.nan,
            math.inf,
            -math.inf,
            Fraction(-1, 2),
            1j,
            True,
            False,
            None,
            "5",
            "",
            b"5",
            [5],
            {},
        ),
        pytest.param(10**400, id="above every float"),
        pytest.param(10**5000, id="more digits than Python prints"),
        pytest.param(-(10**5000), id="minus those"),
    ],
    ids=repr,
)
def test_what_is_no_number(field: str, number: object) -> None:
    text = refusal({"buckets": {"api": {"capacity": 5, "refill_rate": 0.5} | {field: number}}})
    assert text.startswith(f"bucket 'api': {field} must be a finite number above 0, not ")
    assert '{"capacity": 5, "refill_rate": 0.5}' in text
    assert len(text) < 250


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({}, "capacity is missing"),
        ({"refill_rate": 1}, "capacity is missing"),
        ({"per": "1d"}, "capacity is missing"),
        ({"capacity": 5}, "refill_rate (or per) is missing"),
        ({"capacity": 5, "refill_rate": 1, "per": "1d"}, "refill_rate is given twice, as per as well"),
        ({"capacity": 5, "per": "1x"}, 'per must be a time such as "1d", "15m" or "60s", not \'1x\''),
        ({"capacity": 5, "per": 60}, "per must be a time"),
        ({"capacity": 5, "per": None}, "per must be a time"),
        ({"capacity": 5, "per": "0s"}, "per must be a time"),
        ({"capacity": "x", "per": "1d"}, "capacity must be a finite number above 0, not 'x'"),
        ({"capacity": 5, "refil_rate": 1}, "field 'refil_rate' is not known, did you mean 'refill_rate'?"),
        ({"Capacity": 5, "refill_rate": 1}, "field 'Capacity' is not known, did you mean 'capacity'?"),
        ({"bucket_capacity": 5, "refill_rate": 1}, "field 'bucket_capacity' is not known"),
        ({"capacity": 5, "refill_rate": 1, "enabled": False}, "(known: capacity, refill_rate, per, limits)"),
        ({"capacity": 5, "refill_rate": 1, 3: 4}, "field 3 is not known"),
        ({"capacity": 0.3333, "refill_rate": 1}, "capacity may have at most three decimals, not 0.3333"),
        ({"capacity": 5, "refill_rate": 2e9}, "refill_rate must be at most 1000000000 tokens a second"),
        ({"capacity": 1e300, "refill_rate": 1}, "takes over 73 years to fill"),
        ({"capacity": 5, "refill_rate": 5e-324}, "takes over 73 years to fill"),
        ({"limits": []}, "not as []"),
        ({"limits": "10/s"}, "limits must be a list, and the only field"),
        ({"limits": None}, "limits must be a list, and the only field"),
        ({"limits": ["10/s"], "capacity": 5}, "limits must be a list, and the only field"),
        ({"limits": [{"limits": ["10/s"]}]}, "capacity is missing"),
        ([], "not as []"),
        ([["10/s"]], "not as ['10/s']"),
        ([None], "not as None"),
        (["10/s", {"capacity": 5}], "refill_rate (or per) is missing"),
        (5, "must be given as a dict or a string, not as 5"),
        (True, "must be given as a dict or a string, not as True"),
        (b"10/m", "not as b'10/m'"),
    ],
)
def test_forms_that_are_wrong(form: object, reason: str) -> None:
    text = refusal({"buckets": {"api": form}})
    assert text.startswith("bucket 'api': ")
    assert reason in text
    assert text.endswith(
        'the right form is {"capacity": 5, "refill_rate": 0.5}, or "10/m", or None (null) for no limit'
    )


@pytest.mark.parametrize(
    "wrap", [lambda huge: huge, lambda huge: [huge], lambda huge: {huge: 1}], ids=["it", "in", "key"]
)
def test_what_cannot_even_be_printed(wrap: Callable[[int], object]) -> None:
    wrong = wrap(10**5000)  # more digits than Python prints
    for tried in ({"buckets": {"api": wrong}}, {"lock_timeout": wrong}, wrong):
        assert re.search("a huge |roughly 5001 digits", refusal(tried))  # Python 3.14 finds words of its own


@pytest.mark.parametrize("name", ["", "a\nb", "\x00", "a\x7f", "x" * 201, "\ud800", 5, None, ("a",)])
def test_names_that_no_bucket_can_have(name: object) -> None:
    assert "the name must be 1 to 200 printable characters" in refusal({"buckets": {name: "10/m"}})


@pytest.mark.parametrize("name", ["x", "x" * 200, "Twitter API", "a__b", "_", "größe", "日本", "%(x)s", "{x}"])
def test_names_are_kept_to_the_letter(name: str) -> None:
    assert load_settings({"buckets": {name: "10/m"}}).buckets == {name: parse_bucket(name, "10/m")}


@pytest.mark.parametrize(
    ("setting", "values", "right"),
    [
        ("store", ["redis", "File", "", None, 1, []], '"file", "memory", or the address of a server such as "redis://'),
        ("on_store_error", ["raise", "", None, True], '"defer", "fail" or "allow"'),
        ("state_file", ["", "/", "a\0b", "~no-such-user/x", None, 3, b"x", []], "the path of a file, such as "),
        (
            "lock_timeout",
            [0, -1, math.nan, math.inf, True, "3", None, [], 10**400, 10**5000],
            "a number of seconds above 0",
        ),
        ("max_countdown", [0, -1.5, math.inf, "900"], "a number of seconds above 0, such as 900.0"),
        ("min_countdown", [0, -0.1, math.nan, False], "a number of seconds above 0, such as 0.1"),
    ],
)
def test_settings_that_are_wrong(setting: str, values: list[object], right: str) -> None:
    for value in values:
        assert refusal({setting: value}).startswith(f"setting {setting} must be {right}")


def test_several_wrong_settings_are_named_at_once() -> None:
    text = refusal({"store": "redis", "lock_timeout": 0})
    assert "setting store must be" in text
    assert "; setting lock_timeout must be" in text


def test_the_shortest_countdown_is_no_longer_than_the_longest(environment: pytest.MonkeyPatch) -> None:
    assert load_settings({"min_countdown": 5, "max_countdown": 5}).min_countdown == 5.0
    assert refusal({"min_countdown": 5, "max_countdown": 4}).startswith(
        "setting min_countdown must be at most max_countdown (4.0)"
    )
    environment.setenv("TB_CELERY_MIN_COUNTDOWN", "1000")
    assert refusal().startswith("variable TB_CELERY_MIN_COUNTDOWN must be at most max_countdown (900.0)")


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"bukets": {}}, "setting 'bukets' is not known, did you mean 'buckets'? (known: buckets, routes, on_reject, "),
        ({"BUCKETS": {}}, "setting 'BUCKETS' is not known, did you mean 'buckets'?"),
        ({"rate": 1}, "setting 'rate' is not known"),
        ({1: 2}, "setting 1 is not known (known: buckets"),
        ({"_env_file": ".env"}, "setting '_env_file' is not known"),
        ({"self": 1}, "setting 'self' is not known"),
        ({"buckets": None}, "setting buckets must be a dict as in "),
        ({"buckets": ["10/m"]}, "setting buckets must be a dict as in "),
        ({"buckets": {"buckets": TWITTER["buckets"]}}, "field 'twitter_api' is not known"),
        ([("buckets", {})], "setting tb_celery must be a dict such as "),
        ("10/m", "setting tb_celery must be a dict such as "),
        (False, "setting tb_celery must be a dict such as "),
    ],
)
def test_declarations_that_are_wrong(declared: object, said: str) -> None:
    assert said in refusal(declared)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.fractions()
    | st.complex_numbers()
    | st.binary(max_size=5)
    | st.text(max_size=20)
    | st.from_regex(r"[0-9.]{0,3}/[0-9]?[smhdx](:[0-9.]{1,3})?", fullmatch=True)
    | st.sampled_from([10**400, Limit(1, 1), Bucket("x", (Limit(2, 2),)), object()]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["capacity", "refill_rate", "per", "limits"]), inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.none(), inner, max_size=3)
    ),
    max_leaves=8,
)


@EXACT
@given(form=JUNK, stronger=JUNK)
def test_junk_makes_a_bucket_or_a_sentence(form: object, stronger: object) -> None:
    check(lambda: parse_bucket("x", form))
    bucket = check(lambda: Settings(buckets={"x": form, "y": stronger}).buckets["x"])
    assert bucket is None or bucket == Bucket("x", bucket.limits)


@EXACT
@given(
    declared=st.dictionaries(st.sampled_from(list(Settings.model_fields)) | st.text(max_size=5), JUNK, max_size=3)
    | st.dictionaries(st.integers() | st.none() | st.text(max_size=3), JUNK, min_size=1, max_size=2)
    | JUNK
)
def test_junk_makes_settings_or_a_sentence(declared: object) -> None:
    made = check(lambda: load_settings(declared))  # type: ignore[arg-type]
    assert made is None or 0 < made.min_countdown <= made.max_countdown < math.inf


@EXACT
@given(
    suffix=st.sampled_from(["", "__x", "__x__CAPACITY", "__x__PER"]),
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0")),
)
@example("__x__CAPACITY", "9" * 5000)
@example("", '{"x": {"capacity": 1e999, "refill_rate": 1}}')
def test_junk_in_the_environment_makes_settings_or_a_sentence(suffix: str, text: str) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(f"TB_CELERY_BUCKETS{suffix}", text)
        refused: list[str] = []
        check(lambda: load_settings({"buckets": {"x": "10/m"}}), refused)
        assert all(f"TB_CELERY_BUCKETS{suffix}" in each for each in refused)


# -- the environment


class Case(NamedTuple):
    variables: Mapping[str, str]
    expected: Mapping[str, object]


@pytest.mark.parametrize(
    "case",
    [
        Case({"twitter_api__CAPACITY": "7"}, {"twitter_api": Limit(7, 0.5)}),
        Case({"twitter_api__capacity": "7"}, {"twitter_api": Limit(7, 0.5)}),
        Case({"twitter_api__Refill_Rate": "0.25"}, {"twitter_api": Limit(5, 0.25)}),
        Case({"twitter_api__PER": "10s"}, {"twitter_api": Limit(5, 0.5)}),
        Case({"twitter_api__PER": "1d"}, {"twitter_api": Limit(5, Fraction(5, 86400))}),
        Case({"twitter_api__PER": "1d", "twitter_api__CAPACITY": "86400"}, {"twitter_api": Limit(86400, 1)}),
        Case({"twitter_api__CAPACITY": "2.5"}, {"twitter_api": Limit(2.5, 0.5)}),
        Case({"twitter_api__CAPACITY": ""}, {"twitter_api": Limit(5, 0.5)}),
        Case({"twitter_api__CAPACITY": "  "}, {"twitter_api": Limit(5, 0.5)}),
        Case({"twitter_api": "10/m"}, {"twitter_api": Limit(1, Fraction(1, 6))}),
        Case({"twitter_api": '{"capacity": 9}'}, {"twitter_api": Limit(9, 0.5)}),
        Case({"twitter_api": "10/m", "twitter_api__CAPACITY": "3"}, {"twitter_api": Limit(3, Fraction(1, 6))}),
        Case({"twitter_api": "null"}, {"twitter_api": None}),
        Case({"Twitter_API": "10/m"}, {"twitter_api": Limit(5, 0.5), "Twitter_API": Limit(1, Fraction(1, 6))}),
        Case({"_x_": "1/s", "_x___CAPACITY": "2"}, {"twitter_api": Limit(5, 0.5), "_x_": Limit(2, 1)}),
        Case({"x__CAPACITY": "2", "x__REFILL_RATE": "1"}, {"twitter_api": Limit(5, 0.5), "x": Limit(2, 1)}),
    ],
)
def test_variables_override_what_they_name_and_nothing_else(case: Case, environment: pytest.MonkeyPatch) -> None:
    for name, text in case.variables.items():
        environment.setenv(f"TB_CELERY_BUCKETS__{name}", text)
    found = {name: bucket and bucket.limits for name, bucket in load_settings(TWITTER).buckets.items()}
    assert found == {name: limit and (limit,) for name, limit in case.expected.items()}


def test_all_buckets_as_json(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TB_CELERY_BUCKETS", '{"twitter_api": {"capacity": 7}, "a__b": ["10/s", "1000/d"], "c": null}')
    environment.setenv("TB_CELERY_BUCKETS__twitter_api__CAPACITY", "8")
    buckets = load_settings(TWITTER).buckets
    assert buckets == {
        "twitter_api": Bucket("twitter_api", one(8, 0.5)),
        "a__b": parse_bucket("a__b", ["10/s", "1000/d"]),
        "c": None,
    }


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("BUCKETS__twitter_api__CAPACITY", "0", "capacity must be a finite number above 0, not 0"),
        ("BUCKETS__twitter_api__CAPACITY", "five", "capacity must be a finite number above 0, not 'five'"),
        ("BUCKETS__twitter_api__CAPACITY", '"5"', "capacity must be a finite number above 0, not '5'"),
        ("BUCKETS__twitter_api__CAPACITY", "true", "capacity must be a finite number above 0, not True"),
        ("BUCKETS__twitter_api__CAPACITY", "NaN", "capacity must be a finite number above 0, not 'NaN'"),
        ("BUCKETS__twitter_api__REFILL_RATE", "Infinity", "refill_rate must be a finite number above 0"),
        ("BUCKETS__twitter_api__REFILL_RATE", "1e999", "refill_rate must be a finite number above 0, not inf"),
        ("BUCKETS__twiter_api__CAPACITY", "7", "bucket 'twiter_api' (from "),
        ("BUCKETS__TWITTER_API__CAPACITY", "7", "bucket 'TWITTER_API' (from "),
        ("BUCKETS__twitter_api", "10/x", "'10/x' is not a rate"),
        ("BUCKETS__twitter_api", "5", "not as 5"),
        ("BUCKETS__twitter_api", '{"capacity": 5, "capacity": 6}', "the key 'capacity' is written twice"),
        ("BUCKETS", '{"twitter_api": {"capacity": 5, "capacity": 6}}', "'capacity' is written twice in 'twitter_api'"),
        ("BUCKETS__twitter_api", '["10/s",', "is not valid JSON"),
        ("BUCKETS__twitter_api__CAPACTY", "7", "must name a bucket that has no '__' in its name"),
        ("BUCKETS__twitter_api__ENABLED", "false", "must name a bucket that has no '__' in its name"),
        ("BUCKETS__a__b", "10/m", "must name a bucket that has no '__' in its name"),
        ("BUCKETS__a__b__CAPACITY", "7", "must name a bucket that has no '__' in its name"),
        ("BUCKETS____CAPACITY", "7", "the name must be 1 to 200 printable characters"),
        ("BUCKETS__", "10/m", "the name must be 1 to 200 printable characters"),
        ("BUCKETS", "10/m", "setting buckets (from 'TB_CELERY_BUCKETS') must be a dict"),
        ("BUCKETS", "{", "is not valid JSON"),
        ("BUKETS", "{}", "is not known, did you mean 'TB_CELERY_BUCKETS'?"),
        ("BUCKETS_twitter_api_CAPACITY", "7", "is not known"),
        ("STATE_DIR", "/tmp", "is not known, did you mean 'TB_CELERY_STATE_FILE'?"),  # noqa: S108
        ("LOCK_TIMEOUT__X", "3", "is not known, did you mean 'TB_CELERY_LOCK_TIMEOUT'?"),
        ("LOCK_TIMEOUT", "ten", "must be a number of seconds above 0, such as 10.0, not 'ten'"),
        ("lock_timeout", "0", "must be a number of seconds above 0, such as 10.0, not 0"),
        ("MAX_COUNTDOWN", "true", "must be a number of seconds above 0, such as 900.0, not True"),
        ("STORE", "redis", 'must be "file", "memory", or the address of a server such as'),
        ("ON_STORE_ERROR", "Defer", 'must be "defer", "fail" or "allow", not \'Defer\''),
        ("STATE_FILE", "/", "must be the path of a file"),
        ("REJECTIONS", "pause", "must say for exceptions what they mean, as in {"),
        ("REJECTIONS", '{"requests.HTTPError": "stop"}', """must be "pause", "pause:SECONDS" (above 0"""),
    ],
)
def test_wrong_variables_are_named(variable: str, text: str, said: str, environment: pytest.MonkeyPatch) -> None:
    environment.setenv(f"TB_CELERY_{variable}", text)
    found = refusal(TWITTER)
    assert f"TB_CELERY_{variable}" in found
    assert said in found


def test_every_setting_has_a_variable(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in {
        "BUCKETS": '{"a": "1/s"}',
        "ROUTES": '{"proj.*": ["a"]}',
        "ON_REJECT": '{"a": "hold"}',
        "REJECTIONS": '{"requests.HTTPError:429": "pause"}',
        "ENABLED": "false",
        "ENFORCE": "25",
        "STORE": "memory",
        "KEY_PREFIX": "5",
        "STATE_FILE": str(tmp_path / "1"),
        "lock_timeout": "3",
        "ON_STORE_ERROR": "fail",
        "MAX_COUNTDOWN": "1e2",
        "MIN_COUNTDOWN": "0.5",
        "MAX_HELD": "7",
        "MAX_EAGER_WAIT": "8",
        "GRANT_LOG": str(tmp_path / "2"),
        "METRICS_PORT": "9464",
    }.items():
        environment.setenv(f"TB_CELERY_{name}", text)
    assert load_settings({"lock_timeout": 4, "store": "file"}).model_dump(exclude={"buckets"}) == {
        "routes": {"proj.*": asdict(Rule(["a"]))},
        "on_reject": {"a": "hold"},
        "rejections": {"requests.HTTPError:429": "pause"},
        "enabled": False,
        "enforce": 25,
        "store": "memory",
        "key_prefix": "5",
        "state_file": tmp_path / "1",
        "lock_timeout": 3.0,
        "on_store_error": "fail",
        "max_countdown": 100.0,
        "min_countdown": 0.5,
        "max_held": 7,
        "max_eager_wait": 8.0,
        "grant_log": tmp_path / "2",
        "metrics_port": 9464,
    }


def test_empty_variables_count_as_unset(environment: pytest.MonkeyPatch) -> None:
    expected = load_settings(TWITTER)
    for name in ("BUCKETS", "LOCK_TIMEOUT", "STORE", "CONFIG", "NO_SUCH_SETTING", "BUCKETS__a__b"):
        environment.setenv(f"TB_CELERY_{name}", "")
    assert load_settings(TWITTER) == expected


def test_variables_that_kubernetes_sets_for_its_services_are_let_be(environment: pytest.MonkeyPatch) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_6379_TCP_ADDR", "REDIS_SERVICE_HOST", "REDIS_PORT"):
        environment.setenv(f"TB_CELERY_{name}", "tcp://10.0.0.1:6379")
    assert load_settings(TWITTER) == load_settings(TWITTER)
    environment.setenv("TB_CELERY_METRICS_PORT", "tcp://10.0.0.1:9464")  # a service that is called tb-celery-metrics
    assert load_settings({"metrics_port": 9465}).metrics_port == 9465
    environment.setenv("TB_CELERY_REPORT", "1")
    assert "'TB_CELERY_REPORT' is not known" in refusal(TWITTER)


def test_the_environment_is_read_when_settings_are_made(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert load_settings().state_file != tmp_path / "a"
    environment.setenv("TB_CELERY_STATE_FILE", str(tmp_path / "a"))
    assert load_settings().state_file == tmp_path / "a"
    environment.setenv("TB_CELERY_STATE_FILE", str(tmp_path / "b"))
    assert Settings().state_file == tmp_path / "b"


# -- the file, and who overrides whom


@pytest.fixture
def config(environment: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """Makes a settings file and names it in the environment."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        environment.setenv("TB_CELERY_CONFIG", str(path))
        return path

    return write


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tb.json", '{"lock_timeout": 3, "buckets": {"a": {"capacity": 2, "refill_rate": 1}, "b": "10/m"}}'),
        ("tb.JSON", '\ufeff{"lock_timeout": 3, "buckets": {"a": {"capacity": 2, "refill_rate": 1}, "b": "10/m"}}'),
        ("tb.toml", 'lock_timeout = 3\n[buckets]\nb = "10/m"\n[buckets.a]\ncapacity = 2\nrefill_rate = 1\n'),
    ],
)
def test_a_file_has_the_shape_of_the_dict(config: Write, name: str, content: str) -> None:
    config(name, content)
    found = load_settings()
    assert found.lock_timeout == 3.0
    assert found.buckets == {"a": Bucket("a", one(2, 1)), "b": Bucket("b", one(1, Fraction(1, 6)))}


def test_a_file_in_the_home_directory(config: Write, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config("tb.json", '{"lock_timeout": 3}')
    environment.setenv("HOME", str(tmp_path))
    environment.setenv("TB_CELERY_CONFIG", "~/tb.json")
    assert load_settings().lock_timeout == 3.0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tb.json", '{"buckets": {"a": "1/s", "a": "2/s"}}', "is not valid JSON: the key 'a' is written twice"),
        ("tb.json", '{"lock_timeout": NaN}', "is not valid JSON: NaN is not a JSON number"),
        ("tb.json", '{"lock_timeout": -Infinity}', "-Infinity is not a JSON number"),
        ("tb.json", '{"a": 1,}', "is not valid JSON: "),
        ("tb.json", "", "is not valid JSON: "),
        ("tb.json", "[1]", "must hold an object such as "),
        ("tb.json", b"\xff\xfe", "cannot be read: 'utf-8' codec can't decode"),
        ("tb.json", "[" * 100_000, "is not valid JSON: "),
        ("tb.json", "9" * 5000, "is not valid JSON: "),
        ("tb.json", '{"bukets": {}}', "setting 'bukets' (from "),
        ("tb.json", '{"buckets": []}', "setting buckets (from "),
        ("tb.json", '{"buckets": {"a": 5}}', "bucket 'a' (from "),
        ("tb.toml", "a = 1\na = 2\n", "cannot be read: "),
        ("tb.toml", "a =", "cannot be read: "),
        ("tb.toml", "a = " + "[" * 100_000, "cannot be read: "),
        ("tb.toml", "[buckets]\na = {capacity = inf, refill_rate = 1}\n", "capacity must be a finite number above 0"),
        ("tb.toml", "[buckets]\na = 2020-01-01\n", "bucket 'a' (from "),
        ("tb.yaml", "buckets: {}", "must have a name that ends in .json or .toml"),
        ("tb", "{}", "must have a name that ends in .json or .toml"),
    ],
)
def test_files_that_are_wrong_are_named(config: Write, name: str, content: str | bytes, said: str) -> None:
    path = config(name, content)
    found = refusal(TWITTER)
    assert repr(str(path)) in found
    assert said in found


def test_files_that_cannot_be_read_are_named(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = tmp_path / "directory.json"
    directory.mkdir()
    for path in (tmp_path / "missing.json", directory, "~no-such-user/tb.toml"):
        environment.setenv("TB_CELERY_CONFIG", str(path))
        found = refusal()
        assert found.startswith(f"settings file {str(path)!r} (TB_CELERY_CONFIG) cannot be read: ")
        assert "[Errno" not in found


def test_the_environment_overrides_the_dict_and_the_dict_the_file(
    config: Write, environment: pytest.MonkeyPatch
) -> None:
    path = config(
        "tb.json",
        '{"lock_timeout": 1, "max_countdown": 100, "min_countdown": 1, "buckets": '
        '{"both": "10/m", "all": {"capacity": 1, "refill_rate": 1}, "file": "1/s", "off": "1/s"}}',
    )
    environment.setenv("TB_CELERY_LOCK_TIMEOUT", "3")
    environment.setenv("TB_CELERY_BUCKETS__all__REFILL_RATE", "3")
    declared = {
        "lock_timeout": 2,
        "max_countdown": 200,
        "buckets": {"both": {"capacity": 2}, "all": {"capacity": 2, "refill_rate": 2}, "off": None, "own": "2/s"},
    }
    before = json.dumps(declared)
    found = load_settings(declared)
    assert (found.lock_timeout, found.max_countdown, found.min_countdown) == (3.0, 200.0, 1.0)
    assert found.buckets == {
        "both": Bucket("both", one(2, Fraction(1, 6))),
        "all": Bucket("all", one(2, 3)),
        "file": Bucket("file", one(1, 1)),
        "off": None,
        "own": Bucket("own", one(1, 2)),
    }
    assert json.dumps(declared) == before

    environment.setenv("TB_CELERY_BUCKETS__all__CAPACITY", "0")
    found_out = refusal(declared)
    for origin in (str(path), "TB_CELERY_BUCKETS__all__REFILL_RATE", "TB_CELERY_BUCKETS__all__CAPACITY"):
        assert repr(origin) in found_out


@pytest.mark.parametrize(
    ("weaker", "stronger", "expected"),
    [
        ({"capacity": 5, "refill_rate": 1}, {"per": "1m"}, one(5, Fraction(1, 12))),
        ({"capacity": 5, "per": "1m"}, {"refill_rate": 1}, one(5, 1)),
        ({"capacity": 5, "per": "1m"}, {"capacity": 10}, one(10, Fraction(1, 6))),
        ({"capacity": 5}, {"refill_rate": 1}, one(5, 1)),
        ("10/m:5", {"refill_rate": 1}, one(5, 1)),
        (Limit(5, 1), {"capacity": 7}, one(7, 1)),
        (Bucket("api", one(5, 1)), {"capacity": 7}, one(7, 1)),
        (["10/s"], {"capacity": 7}, one(7, 10)),
        ({"capacity": 5, "refill_rate": 1}, ["10/s", "1000/d"], limits(["10/s", "1000/d"])),
        (["10/s", "1000/d"], "1/s", one(1, 1)),
        (["10/s", "1000/d"], ["20/s", "100/h"], limits(["20/s", "100/h"])),
        (None, "1/s", one(1, 1)),
    ],
)
def test_a_bucket_is_merged_field_by_field(
    weaker: object, stronger: object, expected: tuple[Limit, ...], config: Write, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("TB_CELERY_BUCKETS", json.dumps({"api": stronger}))
    assert load_settings({"buckets": {"api": weaker}}).buckets == {"api": Bucket("api", expected)}
    if not isinstance(weaker, Limit | Bucket):
        environment.delenv("TB_CELERY_BUCKETS")
        config("tb.json", json.dumps({"buckets": {"api": weaker}}))
        assert load_settings({"buckets": {"api": stronger}}).buckets == {"api": Bucket("api", expected)}


def test_one_field_cannot_override_several_limits(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TB_CELERY_BUCKETS__api__CAPACITY", "7")
    environment.setenv("TB_CELERY_BUCKETS__api__REFILL_RATE", "7")
    found = refusal({"buckets": {"api": ["10/s", "1000/d"]}})
    assert "several limits can only be overridden as a whole" in found
    assert "TB_CELERY_BUCKETS__api__CAPACITY" in found


# -- JSON


@EXACT
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_is_read_as_it_is(value: object) -> None:
    assert parse_json(json.dumps(value), "it") == value


@EXACT
@given(st.text() | st.from_regex(r'[\[\]{}",:0-9ntrue ]{0,20}', fullmatch=True))
def test_json_is_read_or_refused_with_its_source(text: str) -> None:
    refused: list[str] = []
    check(lambda: parse_json(text, "services.json"), refused)
    assert all(each.startswith("services.json is not valid JSON: ") for each in refused)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": 3}}]', '{"\\u0061": 1, "a": 2}'])
def test_json_says_nothing_twice(text: str) -> None:
    where = " in 'b'" if "b" in text else ""
    sentence = f"services.json is not valid JSON: the key 'a' is written twice{where}"
    with pytest.raises(ConfigurationError, match=f"^{sentence}$"):
        parse_json(text, "services.json")


# -- where the state lives


@pytest.fixture
def person(environment: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An ordinary user whom no data base of users knows, as in many containers."""
    for function in ("geteuid", "getuid"):
        environment.setattr(os, function, lambda: 54321, raising=False)
    return environment


def test_the_state_of_an_ordinary_user(person: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert default_state_file() == tmp_path / "home/.local/state/tb-celery/buckets.state"
    person.setenv("XDG_STATE_HOME", "relative")
    assert load_settings().state_file == tmp_path / "home/.local/state/tb-celery/buckets.state"
    person.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert load_settings().state_file == tmp_path / "state/tb-celery/buckets.state"


def test_the_state_of_root(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setattr(os, "geteuid", lambda: 0, raising=False)
    environment.setenv("XDG_STATE_HOME", str(tmp_path))
    assert load_settings().state_file == Path("/var/lib/tb-celery/buckets.state").absolute()


@pytest.mark.skipif(sys.platform == "win32", reason="HOME is not where Windows keeps the home")
@pytest.mark.parametrize("home", [None, "", "/", "relative"])
def test_nobody_is_given_the_temp_directory_for_want_of_a_home(person: pytest.MonkeyPatch, home: str | None) -> None:
    if home is None:
        person.delenv("HOME")
    else:
        person.setenv("HOME", home)
    assert "TB_CELERY_STATE_FILE" in refusal()
    person.setenv("TB_CELERY_STATE_FILE", "/state/buckets.state")
    assert load_settings().state_file == Path("/state/buckets.state")


def test_a_state_file_is_absolute(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.chdir(tmp_path)
    environment.setenv("HOME", str(tmp_path / "me"))
    environment.setenv("USERPROFILE", str(tmp_path / "me"))
    assert load_settings({"state_file": "a/b"}).state_file == tmp_path / "a/b"
    assert load_settings({"state_file": Path("~/b")}).state_file == tmp_path / "me/b"


# -- the whole


def test_defaults() -> None:
    found = load_settings()
    assert found == load_settings({}) == Settings()
    assert found.model_dump(exclude={"state_file"}) == {
        "buckets": {},
        "routes": {},
        "on_reject": "retry",
        "rejections": {},
        "enabled": True,
        "enforce": True,
        "store": "file",
        "key_prefix": "tb_celery",
        "lock_timeout": 10.0,
        "on_store_error": "defer",
        "max_countdown": 900.0,
        "min_countdown": 0.1,
        "max_held": 1000,
        "max_eager_wait": 60.0,
        "grant_log": None,
        "metrics_port": 0,
    }


def test_settings_do_not_change() -> None:
    found = load_settings(TWITTER)
    with pytest.raises(ValueError, match="frozen"):
        found.lock_timeout = 3
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301


def test_settings_made_by_hand_are_checked_too() -> None:
    wrongs: list[dict[str, Any]] = [{"bukets": {}}, {"store": "redis"}, {"buckets": {"a": "10/x"}}]
    for wrong in wrongs:
        with pytest.raises(ConfigurationError) as caught:
            Settings(**wrong)
        sentence(caught.value)


def test_a_limiter_on_the_store_that_the_settings_name(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_memory = open_limiter(load_settings({"store": "memory", "buckets": {"api": "1/d", "free": None}}))
    assert isinstance(in_memory.store, MemoryStore)
    assert [bool(in_memory.acquire(name)) for name in ("api", "api", "free", "free")] == [True, False, True, True]

    environment.setenv("TB_CELERY_STATE_FILE", str(tmp_path / "buckets.state"))
    environment.setenv("TB_CELERY_LOCK_TIMEOUT", "3")
    environment.setenv("TB_CELERY_BUCKETS__api", "1/d")
    on_file = open_limiter()
    assert isinstance(on_file.store, FileStore)
    assert (on_file.store.path, on_file.store.lock_timeout) == (tmp_path / "buckets.state", 3.0)
    assert not (tmp_path / "buckets.state").exists()
    assert [bool(on_file.acquire("api")) for _ in range(2)] == [True, False]
    with pytest.raises(ConfigurationError, match="'ap' is not declared"):
        on_file.acquire("ap")


def test_every_form_is_documented() -> None:
    assert tb_celery.declaration.__doc__ is not None
    for form in ('"10/m"', '"0.5/s"', '"300/15m"', '"1/3m"', '"10/60s:5"', '"per": "1d"', "None", "capacity 1"):
        assert form in tb_celery.declaration.__doc__


def test_a_server_is_asked_by_its_address_with_the_settings_that_go_with_it() -> None:
    store = open_limiter(Settings(store="redis://:s3cret@host:1/2", key_prefix="mine", lock_timeout=0.5)).store
    assert repr(store) == "RedisStore('redis://host:1/2', prefix='mine')"
    assert "s3cret" not in repr(Settings(store="redis://:s3cret@host:1/2"))
    with pytest.raises(ConfigurationError, match="a server has a clock of its own"):
        open_limiter(Settings(store="redis://host"), clock=FakeClock())


@pytest.mark.parametrize("address", ["redi://:s3cret@host", "redis://:s3/cret@host", ":s3cret@host"])
def test_no_password_is_shown_of_an_address_that_is_wrong(address: str) -> None:
    with pytest.raises(ConfigurationError, match="setting store") as refused:
        open_limiter(Settings(store=address))
    assert "s3" not in "".join(traceback.format_exception(refused.value))


def test_without_the_package_redis_one_sentence_says_how_to_install_it() -> None:
    script = (
        "import sys; sys.modules['redis'] = None\n"
        "from tb_celery import ConfigurationError, Settings, open_limiter\n"
        "try: open_limiter(Settings(store='redis://host'))\n"
        "except ConfigurationError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("a Redis server in the setting store (TB_CELERY_STORE) needs the package redis;")


@pytest.mark.parametrize(
    "text",
    [
        "redis://user:hunter2@example.com/0",
        f"redis://user:hunter2{'x' * 200}@example.com",
        {"redis://:hunter2@example.com": 1},
        ["rediss://hunter2@example.com"],
    ],
)
def test_no_password_is_shown_wherever_an_address_is_written(text: object) -> None:
    assert "hunter2" not in shown(text)
    assert "hunter2" not in refusal(text)
    assert "hunter2" not in refusal({"buckets": {"a": text}})


@pytest.mark.parametrize(("field", "said"), [("enforce", False), ("on_reject", "drop")])
def test_a_bucket_that_is_not_declared_is_refused_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch, field: str, said: object
) -> None:
    sentence = "names bucket 'wtitter', which is not declared in the setting buckets; did you mean 'twitter'?"
    with pytest.raises(ConfigurationError, match=re.escape(f"setting {field} {sentence}")):
        load_settings({"buckets": {"twitter": "1/s"}, field: {"wtitter": said}})
    variable = f"TB_CELERY_{field.upper()}"
    monkeypatch.setenv(variable, json.dumps({"wtitter": said}))
    with pytest.raises(ConfigurationError, match=re.escape(f"variable {variable} {sentence}")):
        load_settings({"buckets": {"twitter": "1/s"}})
    load_settings()  # the buckets are in a file of services
