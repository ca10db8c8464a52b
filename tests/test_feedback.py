"""What the other side says, in header sets as real services send them, and in whatever else may stand there."""

from __future__ import annotations

import math
import pickle
import time
import urllib.error
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from email.message import Message
from enum import Enum
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import requests
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tb_celery.errors import ConfigurationError, RateLimited, TBCeleryError
from tb_celery.feedback import LONGEST_PAUSE, Feedback, check_table, observe, read_response, rejection_of

if TYPE_CHECKING:
    from collections.abc import Mapping

NOW = datetime(2026, 9, 21, 12, 0, tzinfo=UTC).timestamp()
EPOCH = int(NOW)


GITHUB = {
    "x-ratelimit-limit": "5000",
    "x-ratelimit-remaining": "4987",
    "x-ratelimit-reset": str(EPOCH + 1800),
    "x-ratelimit-used": "13",
    "x-ratelimit-resource": "core",
}
OPENAI = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-limit-tokens": "150000",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-remaining-tokens": "149984",
    "x-ratelimit-reset-requests": "1s",
    "x-ratelimit-reset-tokens": "6ms",
}
ANTHROPIC = {
    "anthropic-ratelimit-requests-limit": "1000",
    "anthropic-ratelimit-requests-remaining": "999",
    "anthropic-ratelimit-requests-reset": "2026-09-21T12:00:01Z",
    "anthropic-ratelimit-tokens-limit": "96000",
    "anthropic-ratelimit-tokens-remaining": "95000",
    "anthropic-ratelimit-tokens-reset": "2026-09-21T12:00:02Z",
    "anthropic-ratelimit-input-tokens-limit": "80000",
    "anthropic-ratelimit-input-tokens-remaining": "79000",
    "anthropic-ratelimit-input-tokens-reset": "2026-09-21T12:00:02Z",
}
KONG = {"X-RateLimit-Limit-Minute": "10", "X-RateLimit-Remaining-Minute": "8", "RateLimit-Limit": "10"}


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        pytest.param(200, {}, {}, id="nothing"),
        pytest.param(429, {}, {"rejected": True}, id="a bare 429"),
        pytest.param(500, {"Retry-After": "5"}, {}, id="broken"),
        pytest.param(202, {"Retry-After": "5"}, {}, id="not ready"),
        pytest.param(None, {"Retry-After": "5"}, {}, id="no status"),
        # Retry-After
        pytest.param(429, {"Retry-After": "120"}, {"rejected": True, "pause": 120.0}, id="seconds"),
        pytest.param(429, {"retry-after": "0.65"}, {"rejected": True, "pause": 0.65}, id="part of a second"),
        pytest.param(
            429, {"RETRY-AFTER": "Mon, 21 Sep 2026 12:01:30 GMT"}, {"rejected": True, "pause": 90.0}, id="date"
        ),
        pytest.param(
            429, {"Retry-After": "Monday, 21-Sep-26 12:01:30 GMT"}, {"rejected": True, "pause": 90.0}, id="RFC 850"
        ),
        pytest.param(429, {"Retry-After": "Mon Sep 21 12:01:30 2026"}, {"rejected": True, "pause": 90.0}, id="asctime"),
        pytest.param(
            429,
            {"Retry-After": "Mon, 21 Sep 2026 14:01:30 +0200"},
            {"rejected": True, "pause": 90.0},
            id="date of another zone",
        ),
        pytest.param(503, {"Retry-After": "30"}, {"rejected": True, "pause": 30.0}, id="503 with a time"),
        pytest.param(503, {}, {}, id="503"),
        pytest.param(403, {"Retry-After": "60"}, {"rejected": True, "pause": 60.0}, id="403 with a time"),
        pytest.param(403, {}, {}, id="403"),
        pytest.param(429, {"Retry-After": str(EPOCH + 7)}, {"rejected": True, "pause": 7.0}, id="an instant instead"),
        # GitHub
        pytest.param(200, GITHUB, {"remaining": 4987, "resets_in": 1800.0, "limit": 5000}, id="GitHub"),
        pytest.param(
            403,
            GITHUB | {"x-ratelimit-remaining": "0", "x-ratelimit-used": "5000"},
            {"rejected": True, "pause": 1800.0, "remaining": 0, "resets_in": 1800.0, "limit": 5000},
            id="GitHub, used up",
        ),
        pytest.param(
            200,
            GITHUB | {"x-ratelimit-remaining": "0", "x-ratelimit-used": "5000"},
            {"pause": 1800.0, "remaining": 0, "resets_in": 1800.0, "limit": 5000},
            id="GitHub, the last call",
        ),
        pytest.param(
            403,
            GITHUB | {"retry-after": "60"},
            {"rejected": True, "pause": 60.0, "remaining": 4987, "resets_in": 1800.0, "limit": 5000},
            id="GitHub, secondary limit",
        ),
        pytest.param(
            429,
            GITHUB,
            {"rejected": True, "remaining": 4987, "resets_in": 1800.0, "limit": 5000},
            id="GitHub, secondary limit without a time",
        ),
        pytest.param(
            403, GITHUB, {"remaining": 4987, "resets_in": 1800.0, "limit": 5000}, id="GitHub, not allowed at all"
        ),
        pytest.param(
            403,
            OPENAI | {"x-ratelimit-remaining-tokens": "0"},
            {"remaining": 0, "resets_in": 0.006},
            id="403, no tokens",
        ),
        # Twitter, Okta, Reddit, Discord, Kong, RapidAPI
        pytest.param(
            429,
            {"x-rate-limit-limit": "300", "x-rate-limit-remaining": "0", "x-rate-limit-reset": str(EPOCH + 421)},
            {"rejected": True, "pause": 421.0, "remaining": 0, "resets_in": 421.0, "limit": 300},
            id="Twitter",
        ),
        pytest.param(
            200,
            {"X-Ratelimit-Used": "2", "X-Ratelimit-Remaining": "98.0", "X-Ratelimit-Reset": "312"},
            {"remaining": 98, "resets_in": 312.0},
            id="Reddit",
        ),
        pytest.param(
            200,
            {
                "X-RateLimit-Limit": "5",
                "X-RateLimit-Remaining": "0",
                "X-RateLimit-Reset": f"{EPOCH + 9}.123",
                "X-RateLimit-Reset-After": "1.250",
                "X-RateLimit-Bucket": "abcd1234",
            },
            {"pause": 1.25, "remaining": 0, "resets_in": 1.25, "limit": 5},
            id="Discord",
        ),
        pytest.param(
            429,
            {"Retry-After": "65", "X-RateLimit-Global": "true", "X-RateLimit-Scope": "global"},
            {"rejected": True, "pause": 65.0},
            id="Discord, everything",
        ),
        pytest.param(
            200, KONG | {"RateLimit-Remaining": "8"}, {"remaining": 8, "limit": 10, "window": 60.0}, id="Kong"
        ),
        pytest.param(
            429,
            KONG | {"X-RateLimit-Remaining-Minute": "0", "RateLimit-Remaining": "0", "RateLimit-Reset": "23"},
            {"rejected": True, "pause": 23.0, "remaining": 0, "resets_in": 23.0, "limit": 10},
            id="Kong, used up",
        ),
        pytest.param(
            200,
            {
                "X-RateLimit-Requests-Limit": "500",
                "X-RateLimit-Requests-Remaining": "498",
                "X-RateLimit-Requests-Reset": "86100",
            },
            {"remaining": 498, "resets_in": 86100.0, "limit": 500},
            id="RapidAPI",
        ),
        pytest.param(
            200,
            {"x-ratelimit-limit": "10, 10;w=1, 100;w=60", "x-ratelimit-remaining": "9", "x-ratelimit-reset": "1"},
            {"remaining": 9, "resets_in": 1.0, "limit": 10, "window": 1.0},
            id="Envoy",
        ),
        pytest.param(
            429,
            {"X-RateLimit-Limit": "20", "X-RateLimit-Remaining": "0", "X-RateLimit-Reset": f"{EPOCH + 3}500"},
            {"rejected": True, "pause": 3.5, "remaining": 0, "resets_in": 3.5, "limit": 20},
            id="milliseconds since 1970",
        ),
        pytest.param(
            429,
            {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2026-09-21T14:00:45+02:00"},
            {"rejected": True, "pause": 45.0, "remaining": 0, "resets_in": 45.0},
            id="RFC 3339",
        ),
        pytest.param(
            429,
            {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "2026-09-21 12:00:45"},
            {"rejected": True, "pause": 45.0, "remaining": 0, "resets_in": 45.0},
            id="a date without a zone",
        ),
        pytest.param(
            429,
            {"X-RateLimit-Reset": "Mon Sep 21 2026 13:00:45 GMT+0100 (Central European Standard Time)"},
            {"rejected": True, "pause": 45.0, "resets_in": 45.0},
            id="JavaScript's date",
        ),
        pytest.param(
            200,
            {"X-RateLimit-Remaining": ["7", "3"], "X-RateLimit-Reset": ["5", "9"]},
            {"remaining": 3, "resets_in": 9.0},
            id="two proxies",
        ),
        # IETF
        pytest.param(
            200,
            {"RateLimit": '"default";r=50;t=30', "RateLimit-Policy": '"default";q=100;w=60'},
            {"remaining": 50, "resets_in": 30.0, "limit": 100, "window": 60.0},
            id="IETF",
        ),
        pytest.param(
            429,
            {"RateLimit": '"default";r=0;t=5;pk=:QXBwLTk5OQ==:', "Retry-After": "Mon, 21 Sep 2026 12:00:06 GMT"},
            {"rejected": True, "pause": 6.0, "remaining": 0, "resets_in": 5.0},
            id="IETF, used up, with a time",
        ),
        pytest.param(
            200,
            {
                "RateLimit-Policy": '"hour";q=1000;w=3600, "day, UTC; \\"all\\"";q=5000;w=86400',
                "RateLimit": '"hour";r=400;t=1800, "day, UTC; \\"all\\"";r=100;t=36000',
            },
            {"remaining": 100, "resets_in": 36000.0, "limit": 5000, "window": 86400.0},
            id="IETF, the one of two that binds",
        ),
        pytest.param(
            200,
            {"RateLimit-Policy": ['"burst";q=100;w=60', '"daily";q=1000;w=86400'], "RateLimit": '"daily";r=700'},
            {"remaining": 700, "limit": 1000, "window": 86400.0},
            id="IETF, in several lines",
        ),
        pytest.param(
            200,
            {"RateLimit-Policy": '"burst";q=100;w=60,"daily";q=1000;w=86400'},
            {"limit": 1000, "window": 86400.0},
            id="IETF, policies alone: the lowest rate",
        ),
        pytest.param(
            200,
            {"RateLimit-Policy": '"peruser";q=65535;qu="content-bytes";w=10', "RateLimit": '"peruser";r=12;t=3'},
            {},
            id="IETF, bytes are no calls",
        ),
        pytest.param(
            429,
            {"RateLimit-Policy": '"peruser";q=65535;qu="content-bytes";w=10', "RateLimit": '"peruser";r=12;t=3'},
            {"rejected": True, "pause": 3.0},
            id="IETF, too few bytes",
        ),
        pytest.param(
            429,
            {"RateLimit-Policy": "quota;q=100;w=1", "RateLimit": "quota;t=1"},
            {"rejected": True, "pause": 1.0, "resets_in": 1.0, "limit": 100, "window": 1.0},
            id="IETF, tokens instead of strings, nothing of what is left",
        ),
        pytest.param(
            200,
            {"RateLimit": "limit=100, remaining=50, reset=30", "RateLimit-Policy": "100;w=60"},
            {"remaining": 50, "resets_in": 30.0, "limit": 100, "window": 60.0},
            id="IETF, draft 7",
        ),
        pytest.param(
            200,
            {
                "RateLimit-Limit": "100, 10;w=1, 100;w=60",
                "RateLimit-Remaining": "50",
                "RateLimit-Reset": "30",
                "RateLimit-Policy": '100;w=60;burst=1000;comment="all, of it"',
            },
            {"remaining": 50, "resets_in": 30.0, "limit": 100, "window": 60.0},
            id="IETF, draft 6",
        ),
        pytest.param(200, {"RateLimit-Policy": "100;w=60"}, {"limit": 100, "window": 60.0}, id="IETF, an old policy"),
        pytest.param(200, {"RateLimit": '"default";r=0;t=30', "Age": "17"}, {}, id="IETF, out of a cache"),
        # OpenAI and those that speak like it
        pytest.param(200, OPENAI, {"remaining": 59, "resets_in": 1.0, "limit": 60}, id="OpenAI"),
        pytest.param(
            200,
            OPENAI | {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m30.5s"},
            {"remaining": 0, "resets_in": 90.5, "limit": 60},
            id="OpenAI, no pause until it is full again",
        ),
        pytest.param(
            429,
            OPENAI | {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m30.5s"},
            {"rejected": True, "pause": 90.5, "remaining": 0, "resets_in": 90.5, "limit": 60},
            id="OpenAI, out of requests",
        ),
        pytest.param(
            429,
            OPENAI | {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"},
            {"rejected": True, "pause": 360.0, "remaining": 0, "resets_in": 360.0},
            id="OpenAI, out of tokens",
        ),
        pytest.param(
            429,
            OPENAI | {"x-ratelimit-remaining-tokens": "12", "x-ratelimit-reset-tokens": "20s"},
            {"rejected": True, "pause": 20.0, "remaining": 59, "resets_in": 1.0, "limit": 60},
            id="OpenAI, too few tokens",
        ),
        pytest.param(
            429,
            OPENAI | {"retry-after-ms": "1250", "retry-after": "2", "x-ratelimit-remaining-tokens": "0"},
            {"rejected": True, "pause": 1.25, "remaining": 0, "resets_in": 0.006},
            id="OpenAI, with a time",
        ),
        pytest.param(
            200,
            {
                "x-ratelimit-limit-tokens": "-1",
                "x-ratelimit-remaining-tokens": "-1",
                "x-ratelimit-reset-tokens": "0",
            },
            {},
            id="Azure, numbers that are none",
        ),
        pytest.param(
            200,
            {
                "x-ratelimit-limit-requests-day": "14400",
                "x-ratelimit-remaining-requests-day": "14370",
                "x-ratelimit-reset-requests-day": "33011.382867",
                "x-ratelimit-limit-tokens-minute": "60000",
                "x-ratelimit-remaining-tokens-minute": "59000",
                "x-ratelimit-reset-tokens-minute": "11.38",
            },
            {"remaining": 14370, "resets_in": 33011.382867, "limit": 14400, "window": 86400.0},
            id="Cerebras",
        ),
        # Anthropic
        pytest.param(200, ANTHROPIC, {"remaining": 999, "resets_in": 1.0, "limit": 1000}, id="Anthropic"),
        pytest.param(
            429,
            ANTHROPIC | {"anthropic-ratelimit-input-tokens-remaining": "0", "retry-after": "17"},
            {"rejected": True, "pause": 17.0, "remaining": 0, "resets_in": 2.0},
            id="Anthropic, out of tokens",
        ),
        pytest.param(
            429,
            {"anthropic-ratelimit-unified-7d-reset": str(EPOCH + 500_000), "anthropic-ratelimit-unified-status": "no"},
            {"rejected": True},
            id="Anthropic, of a subscription",
        ),
        # Stripe
        pytest.param(
            429,
            {"Stripe-Rate-Limited-Reason": "global-rate", "Request-Id": "req_1"},
            {"rejected": True, "reason": "global-rate"},
            id="Stripe",
        ),
    ],
)
def test_what_services_send_is_understood(status: int, headers: dict[str, str], expected: dict[str, Any]) -> None:
    assert observe(headers, status, now=NOW) == Feedback(**expected)


@pytest.mark.parametrize(
    ("text", "pause"),
    [
        ("-1", 0.0),
        ("-1e300", 0.0),
        ("0", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("1999-12-31T23:59:59Z", 0.0),
        (str(EPOCH - 5), 0.0),
        ("86401", LONGEST_PAUSE),
        ("1e12", LONGEST_PAUSE),
        ("1e999", LONGEST_PAUSE),
        ("9" * 50, LONGEST_PAUSE),
        ("99999h", LONGEST_PAUSE),
        ("Fri, 31 Dec 9999 23:59:59 GMT", LONGEST_PAUSE),
        (" 30 ", 30.0),
        ("30, 60", 60.0),
        ("30, soon", 30.0),
        (["30", b"60"], 60.0),
        (b"30", 30.0),
        (30, 30.0),
        (0.5, 0.5),
        pytest.param(10**5000, LONGEST_PAUSE, id="huge"),
        (math.inf, None),
        (math.nan, None),
        ("NaN", None),
        ("Infinity", None),
        ("1_000", None),
        ("\u0663\u0660", None),  # digits, but not HTTP's
        ("0x10", None),
        ("soon", None),
        ("1m soon", None),
        ("", None),
        (None, None),
        ("Wed, 99 Foo 2015 07:28:00 GMT", None),
        ("Wed, 21 Oct 99999 07:28:00 GMT", None),
    ],
    ids=ascii,
)
def test_a_time_is_within_a_day_or_none(text: object, pause: float | None) -> None:
    found = observe({"Retry-After": text}, 429, now=NOW)
    assert (found.rejected, found.pause) == (True, pause)


def test_a_time_that_says_nothing_leaves_it_to_the_reset() -> None:
    used_up = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "40"}
    for retry_after in ("soon", "0", "-3"):
        assert observe(used_up | {"Retry-After": retry_after}, 429, now=NOW).pause == 40


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone cannot be set")
def test_a_date_without_a_zone_is_not_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        found = observe({"Retry-After": "2026-09-21T12:00:45"}, 429, now=NOW)
    time.tzset()
    assert found.pause == 45


def test_small_numbers_are_never_instants() -> None:
    """Where the clock is a test's."""
    assert observe({"Retry-After": "30"}, 429, now=10.0).pause == 30
    assert observe({"Retry-After": str(EPOCH)}, 429, now=10.0).pause == LONGEST_PAUSE


def test_a_predicate_decides_what_a_rejection_is() -> None:
    headers = {"X-Error": b"Throttled", "Retry-After": "3"}
    seen = []

    def throttled(fields: Mapping[str, str], status: int | None) -> bool | None:
        seen.append((dict(fields), status))
        return True if fields.get("x-error") == "Throttled" else None

    assert observe(headers, 200, now=NOW, rejected=throttled) == Feedback(rejected=True, pause=3.0)
    assert seen == [({"x-error": "Throttled", "retry-after": "3"}, 200)]
    assert observe({}, 429, now=NOW, rejected=throttled).rejected  # it does not know
    assert observe({"Retry-After": "3"}, 429, now=NOW, rejected=lambda *_: False) == Feedback()


NAMES = st.sampled_from(
    [
        "Retry-After",
        "retry-after-ms",
        "Age",
        "RateLimit",
        "RateLimit-Policy",
        "RateLimit-Limit",
        "RateLimit-Remaining",
        "RateLimit-Reset",
        "X-RateLimit-Limit",
        "X-Rate-Limit-Remaining",
        "X-RateLimit-Reset",
        "X-RateLimit-Reset-After",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-requests",
        "x-ratelimit-limit-requests-day",
        "anthropic-ratelimit-requests-reset",
        "anthropic-ratelimit-requests-remaining",
    ]
)
PIECES = st.lists(
    st.sampled_from(
        [
            *'"\\;,=:-+. 0179ehmswrtq',
            '"a"',
            "1e9",
            "ms",
            "limit",
            "remaining",
            "reset",
            "GMT",
            "Mon",
            "Sep",
            "2026",
            "T12:00",
            "Z",
            "+9999",
            "nan",
            "inf",
            "\x00",
            "é",
            "²",
        ]
    ),
    max_size=12,
).map("".join)
VALUES = st.one_of(
    PIECES,
    st.text(max_size=30),
    st.binary(max_size=30),
    st.integers(),
    st.floats(),
    st.datetimes().map(str),
    st.none(),
    st.booleans(),
)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(
    headers=st.dictionaries(
        NAMES | st.text(max_size=12) | st.binary(max_size=5), VALUES | st.lists(VALUES, max_size=3)
    ),
    status=st.sampled_from([200, 403, 429, 503, None]),
    now=st.floats(0, 4e9),
)
@example(headers={"Retry-After": "0\x1f"}, status=429, now=NOW)  # white space to str, but not to float
@example(headers={"RateLimit": '"' * 5000}, status=429, now=NOW)
@example(headers={"RateLimit": '"\\' * 5000}, status=429, now=NOW)
@example(headers={"X-RateLimit-Reset": "1" * 5000 + "x"}, status=429, now=NOW)
def test_no_header_does_harm(headers: dict[Any, Any], status: int | None, now: float) -> None:
    found = observe(headers, status, now=now)
    for seconds in (found.pause, found.resets_in):
        assert seconds is None or 0 <= seconds <= LONGEST_PAUSE
    assert found.remaining is None or (type(found.remaining) is int and found.remaining >= 0)
    assert found.limit is None or (type(found.limit) is int and found.limit > 0)
    assert found.window is None or 0 < found.window < math.inf
    assert found.rejected or status != 429
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301


# -- responses


def response_of_requests(status: int, **headers: str) -> requests.Response:
    response = requests.Response()
    response.status_code = status
    response.headers.update({name.replace("_", "-"): text for name, text in headers.items()})
    return response


def http_error(code: int, **headers: str) -> urllib.error.HTTPError:
    message = Message()
    for name, text in headers.items():
        message[name.replace("_", "-")] = text
    error = urllib.error.HTTPError("http://localhost/", code, "", message, None)
    error.close()  # else Python 3.14 warns that nobody did
    return error


def boto_response(code: str, status: int, **headers: str) -> dict[str, Any]:
    return {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers}}


@pytest.mark.parametrize(
    "response",
    [
        pytest.param(response_of_requests(429, Retry_After="7"), id="requests"),
        pytest.param(SimpleNamespace(status=429, headers={"Retry-After": "7"}), id="aiohttp"),
        pytest.param(http_error(429, Retry_After="7"), id="urllib"),
        pytest.param({"ResponseMetadata": {"HTTPStatusCode": 429, "HTTPHeaders": {"retry-after": "7"}}}, id="boto3"),
        pytest.param(SimpleNamespace(code="rate_limit", http_status=429, headers={"retry-after": "7"}), id="Stripe"),
        pytest.param(SimpleNamespace(status_code=HTTPStatus(429), headers={b"retry-after": b"7"}), id="an enum, bytes"),
    ],
)
def test_responses_are_read(response: object) -> None:
    headers, status = read_response(response)
    assert type(status) is int
    assert observe(headers, status, now=NOW) == Feedback(rejected=True, pause=7.0)


def test_a_header_that_is_there_twice_counts_twice() -> None:
    error = http_error(429, Retry_After="30")
    error.headers["retry-after"] = "60"
    assert observe(*read_response(error), now=NOW).pause == 60


@pytest.mark.parametrize(
    "response", [None, {}, {"ResponseMetadata": None}, "429", SimpleNamespace(headers=5), object()]
)
def test_what_is_no_response_says_nothing(response: object) -> None:
    headers, status = read_response(response)
    assert status is None
    assert observe(headers, status, now=NOW) == Feedback()


# -- exceptions


class TooFastError(Exception):
    """With the attributes that a test gives it."""

    def __init__(self, **attributes: object) -> None:
        super().__init__()
        vars(self).update(attributes)


class MuchTooFastError(TooFastError):
    pass


class UnreadyError(Exception):
    @property
    def response(self) -> object:
        raise RuntimeError

    @property
    def code(self) -> object:
        raise DeprecationWarning


class Outer:
    class Error(Exception):
        pass


class Code(Enum):
    RESOURCE_EXHAUSTED = 8


HERE = __name__
NAMESAKE = type("TimeoutError", (Exception,), {})
THROTTLED = TooFastError(response=boto_response("ThrottlingException", 400, **{"retry-after": "4"}))
NO_PAUSE = Feedback(rejected=True)


@pytest.mark.parametrize(
    ("error", "table", "expected"),
    [
        pytest.param(ValueError(), {}, None, id="an empty table"),
        pytest.param(TooFastError(), {f"{HERE}.TooFastError": "pause"}, NO_PAUSE, id="a name"),
        pytest.param(
            TooFastError(), {f"{HERE}.TooFastError": "pause:30"}, Feedback(rejected=True, pause=30.0), id="seconds"
        ),
        pytest.param(TooFastError(), {f"{HERE}.TooFastError": "ignore"}, None, id="ignored"),
        pytest.param(TooFastError(), {f"{HERE}.MuchTooFastError": "pause"}, None, id="a subclass's name"),
        pytest.param(MuchTooFastError(), {f"{HERE}.TooFastError": "pause"}, NO_PAUSE, id="a base's name"),
        pytest.param(
            MuchTooFastError(),
            {f"{HERE}.TooFastError": "pause:30", f"{HERE}.MuchTooFastError": "ignore"},
            None,
            id="the class comes before its base",
        ),
        pytest.param(
            TooFastError(status=429),
            {f"{HERE}.TooFastError": "ignore", f"{HERE}.TooFastError:429": "pause"},
            NO_PAUSE,
            id="a code comes before none",
        ),
        pytest.param(
            MuchTooFastError(status=429),
            {f"{HERE}.TooFastError:429": "pause", f"{HERE}.MuchTooFastError": "ignore"},
            None,
            id="the class comes before its base's code",
        ),
        pytest.param(TooFastError(status=500), {f"{HERE}.TooFastError:429": "pause"}, None, id="another code"),
        pytest.param(TooFastError(), {f"{HERE}.TooFastError:429": "pause"}, None, id="no code"),
        pytest.param(
            TooFastError(), {"elsewhere.TooFastError": "pause", f"{HERE}.Fast": "pause"}, None, id="another module"
        ),
        pytest.param(Outer.Error(), {f"{HERE}.Outer.Error": "pause"}, NO_PAUSE, id="a nested class"),
        pytest.param(Outer.Error(), {f"{HERE}.Error": "pause"}, None, id="not the nested class"),
        pytest.param(TimeoutError(), {"TimeoutError": "pause"}, NO_PAUSE, id="a builtin"),
        pytest.param(ConnectionResetError(), {"builtins.OSError": "pause"}, NO_PAUSE, id="a builtin's base"),
        pytest.param(NAMESAKE(), {"TimeoutError": "pause"}, None, id="not a builtin"),
        pytest.param(
            requests.HTTPError(response=response_of_requests(429, Retry_After="7")),
            {"requests.HTTPError:429": "pause"},
            Feedback(rejected=True, pause=7.0),
            id="requests, exported further up",
        ),
        pytest.param(
            requests.HTTPError(response=response_of_requests(404)),
            {"requests.exceptions.HTTPError:429": "pause"},
            None,
            id="requests, another status",
        ),
        pytest.param(
            requests.ConnectionError(),
            {"requests.RequestException": "pause", "requests.HTTPError": "ignore"},
            NO_PAUSE,
            id="requests, without a response",
        ),
        pytest.param(
            http_error(429, Retry_After="7"),
            {"urllib.error.HTTPError:429": "pause"},
            Feedback(rejected=True, pause=7.0),
            id="urllib, which is its own response",
        ),
        pytest.param(
            THROTTLED,
            {f"{HERE}.TooFastError:ThrottlingException": "pause"},
            Feedback(rejected=True, pause=4.0),
            id="boto3",
        ),
        pytest.param(
            THROTTLED, {f"{HERE}.TooFastError:400": "pause"}, Feedback(rejected=True, pause=4.0), id="boto3, by status"
        ),
        pytest.param(THROTTLED, {f"{HERE}.TooFastError:AccessDenied": "pause"}, None, id="boto3, another code"),
        pytest.param(
            TooFastError(code="rate_limit", http_status=429, headers={"Stripe-Rate-Limited-Reason": "endpoint-rate"}),
            {f"{HERE}.TooFastError:rate_limit": "pause"},
            Feedback(rejected=True, reason="endpoint-rate"),
            id="Stripe",
        ),
        pytest.param(
            TooFastError(code=Code.RESOURCE_EXHAUSTED),
            {f"{HERE}.TooFastError: RESOURCE_EXHAUSTED": "pause"},
            NO_PAUSE,
            id="an enum",
        ),
        pytest.param(
            TooFastError(status_code=HTTPStatus.TOO_MANY_REQUESTS),
            {f"{HERE}.TooFastError:429": "pause"},
            NO_PAUSE,
            id="HTTPStatus",
        ),
        pytest.param(UnreadyError(), {f"{HERE}.UnreadyError:429": "pause"}, None, id="properties that raise"),
        pytest.param(UnreadyError(), {f"{HERE}.UnreadyError": "pause"}, NO_PAUSE, id="properties that raise, no code"),
    ],
)
def test_a_table_tells_what_an_exception_means(
    error: BaseException, table: dict[str, str], expected: Feedback | None
) -> None:
    check_table(table)
    assert rejection_of(error, table, now=NOW) == expected


@pytest.mark.parametrize(
    ("retry_after", "pause"),
    [
        (12.5, 12.5),
        (None, None),
        ("30", 30.0),
        (b"30", 30.0),
        (-1, 0.0),
        (math.nan, None),
        (1e12, LONGEST_PAUSE),
        (Decimal("1E+2"), 100.0),
        (Decimal("NaN"), None),
        (timedelta(minutes=2), 120.0),
        (timedelta.min, 0.0),
        (datetime.fromtimestamp(NOW + 45, timezone(timedelta(hours=9))), 45.0),
    ],
    ids=ascii,
)
def test_rate_limited_needs_no_table(retry_after: Any, pause: float | None) -> None:  # noqa: ANN401
    error = RateLimited("slow down", retry_after=retry_after)
    assert rejection_of(error, {}, now=NOW) == Feedback(rejected=True, pause=pause)


def test_rate_limited_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(RateLimited("slow down", retry_after=12.5, bucket="twitter_api")))  # noqa: S301
    assert (str(error), error.retry_after, error.bucket) == ("slow down", 12.5, "twitter_api")
    assert isinstance(error, TBCeleryError)
    assert str(RateLimited(retry_after=3))
    rebuilt = RateLimited(*error.args)  # as result backends in JSON do
    assert rebuilt.args == error.args


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (None, "None"),
        ([], "[]"),
        ("requests.HTTPError", "'requests.HTTPError'"),
        ({429: "pause"}, "429"),
        ({"": "pause"}, "''"),
        ({"HTTPError": "pause"}, "'HTTPError' must be an exception's name with its module"),
        ({"requests.HTTPError:": "pause"}, "'requests.HTTPError:'"),
        ({"requests.HTTPError: ": "pause"}, "'requests.HTTPError: '"),
        ({"requests..HTTPError": "pause"}, "'requests..HTTPError'"),
        ({"requests HTTPError": "pause"}, "'requests HTTPError'"),
        ({"requests.HTTPError:429": "stop"}, "'stop'"),
        ({"requests.HTTPError:429": None}, "None"),
        ({"requests.HTTPError:429": "ignore:3"}, "'ignore:3'"),
        ({"requests.HTTPError:429": "pause:"}, "'pause:'"),
        ({"requests.HTTPError:429": "pause:0"}, "'pause:0'"),
        ({"requests.HTTPError:429": "pause:-5"}, "'pause:-5'"),
        ({"requests.HTTPError:429": "pause:nan"}, "'pause:nan'"),
        ({"requests.HTTPError:429": "pause:30s"}, "'pause:30s'"),
        ({"requests.HTTPError:429": "pause:86401"}, "86400 at most"),
    ],
)
def test_a_wrong_table_is_refused_with_one_sentence(table: object, named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_table(table, "the setting rejections")
    text = str(caught.value)
    assert named in text
    assert text.startswith("the setting rejections")
    assert "as in {" in text
    assert text.isprintable()
