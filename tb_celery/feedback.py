"""What the other side says of its limits: in the headers of a response, or by an exception that a task's body raised.

Nothing here raises over what the other side sent: what cannot be read says nothing, and no time is longer than
``LONGEST_PAUSE``. Read are

- ``Retry-After`` (seconds or a date) and its spellings in milliseconds;
- ``X-RateLimit-Limit``, ``-Remaining``, ``-Reset`` and ``-Reset-After``, with or without ``X-`` and the second hyphen,
  and with what is counted behind or before it (``-Requests``, ``-Tokens``, ``-Minute``): GitHub, Discord, Kong, Envoy,
  OpenAI, Anthropic and most others;
- ``RateLimit`` and ``RateLimit-Policy``, in the newest draft of the IETF and in those before it.
"""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from email.utils import parsedate_to_datetime
from enum import Enum
from http import HTTPStatus
from typing import Any, Protocol

from tb_celery.errors import ConfigurationError, RateLimited, shown

LONGEST_PAUSE = 86400.0
"""Seconds. Nothing that the other side says stops anybody for longer."""
EXAMPLE = '{"requests.HTTPError:429": "pause", "proj.errors.TooFast": "pause:30", "proj.errors.Gone": "ignore"}'

_LONGEST_TEXT = 1000
_DECADE = 10 * 365 * 86400
_EARLIEST = 1e9  # seconds since 1970: a smaller number is never an instant
_SPANS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "month": 30 * 86400, "year": 365 * 86400}
_UNITS = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}
_RETRY_MILLISECONDS = ("retry-after-ms", "x-ms-retry-after-ms")
_RETRY_SECONDS = ("retry-after", "x-retry-after", "x-ratelimit-retry-after")
_SOMETIMES = {HTTPStatus.FORBIDDEN, HTTPStatus.SERVICE_UNAVAILABLE}  # may mean that a call came too soon
_STATUSES = ("status_code", "status", "http_status", "smtp_code", "code")

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e\+?\d{1,3})?", re.ASCII | re.IGNORECASE)
_SPAN = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(_UNITS)})", re.ASCII)
_ZONE = re.compile(r"\b(?:GMT|UTC)([+-]\d{4}).*")  # JavaScript's, which would be read as Greenwich time
_WHAT = "reset-after|reset|limit|remaining"
_NAME = re.compile(rf"((?:x-|anthropic-)?rate-?limit)-(?:({_WHAT})(?:-([\w-]+))?|([\w-]+)-({_WHAT}))")
_QUOTED = r'"(?:[^"\\]|\\.)*+"'
_ITEM = re.compile(rf'(?:{_QUOTED}|[^",])+')
_PART = re.compile(rf'(?:{_QUOTED}|[^";])+')
_KEY = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*)(?::(.*\S.*))?")


class Headers(Protocol):
    """A mapping, or whatever else lists its names and values, as text, bytes, numbers or lists of them."""

    def items(self) -> Iterable[tuple[Any, Any]]: ...


@dataclass(frozen=True, slots=True)
class Feedback:
    """What the other side said; ``None`` where it said nothing."""

    rejected: bool = False
    """The call was turned down for coming too soon. Where ``pause`` is not above 0, the caller has to choose one."""
    pause: float | None = None
    """Seconds until which nobody should call, up to ``LONGEST_PAUSE``; 0 if they are over already."""
    remaining: int | None = None
    """Calls left, of the quota that binds."""
    resets_in: float | None = None
    """Seconds until there are more, up to ``LONGEST_PAUSE``."""
    limit: int | None = None
    """Calls that this quota allows ..."""
    window: float | None = None
    """... in so many seconds."""
    reason: str | None = None
    """Which limit was met, in the other side's words."""


def observe(
    headers: Headers,
    status: int | None,
    *,
    now: float,
    rejected: Callable[[Mapping[str, str], int | None], bool | None] | None = None,
) -> Feedback:
    """What a response says.

    A time that is told for a rejected call (``Retry-After``) comes before the reset of a quota that is used up. A quota
    that is used up is a pause for successful calls too, except where its reset is when it will be full again (what
    OpenAI and Anthropic send): there the next call may go long before.

    Args:
        headers: names in upper or lower case.
        status: of HTTP.
        now: seconds since 1970.
        rejected: tells from headers (names in lower case) and status whether the call was turned down for coming too
            soon, or ``None`` for the default: 429; 503 with ``Retry-After``; 403 with ``Retry-After`` or no call left.
    """
    fields = _fields(headers)
    retry_after = _retry_after(fields, now)
    # Of a response out of a cache the counts are old.
    quotas = [] if (_number(fields.get("age", "")) or 0) > 0 else _quotas(fields, now)
    used_up = [quota for quota in quotas if quota.remaining == 0]
    turned_down = rejected(fields, status) if rejected else None
    if turned_down is None:
        told = retry_after is not None or (status == HTTPStatus.FORBIDDEN and any(quota.of_calls for quota in used_up))
        turned_down = status == HTTPStatus.TOO_MANY_REQUESTS or (told and status in _SOMETIMES)
    if turned_down:
        # What one call takes of another unit is not known, so what is left of it may have been too little.
        suspects = used_up or [quota for quota in quotas if quota.of_calls == (quota.remaining is None)]
    else:
        retry_after = None  # which then speaks of something else, such as a result that is not ready
        suspects = [quota for quota in used_up if not quota.gradual]
    reset = max((quota.resets_in for quota in suspects if quota.resets_in is not None), default=None)
    binding = min((quota for quota in quotas if quota.of_calls or quota.remaining == 0), key=_rank, default=_Quota())
    return Feedback(
        rejected=turned_down,
        pause=reset if not retry_after and reset is not None else retry_after,
        remaining=binding.remaining,
        resets_in=binding.resets_in,
        limit=binding.limit if binding.of_calls else None,
        window=binding.window if binding.of_calls else None,
        reason=fields.get("stripe-rate-limited-reason"),
    )


def read_response(response: object) -> tuple[Headers, int | None]:
    """Headers and status of a response of requests, httpx, aiohttp, urllib or boto3, or of an error that has them."""
    if isinstance(response, Mapping):
        metadata = _entry(response, "ResponseMetadata")
        headers, statuses = _entry(metadata, "HTTPHeaders"), [_entry(metadata, "HTTPStatusCode")]
    else:
        headers, statuses = _attribute(response, "headers"), [_attribute(response, name) for name in _STATUSES]
    status = next((int(each) for each in statuses if isinstance(each, int)), None)
    return headers if hasattr(headers, "items") else {}, status


def rejection_of(error: BaseException, table: Mapping[str, str], *, now: float) -> Feedback | None:
    """The rejection that an exception stands for: :class:`~tb_celery.errors.RateLimited`, or what ``table`` calls one.

    The exception's class comes before its bases, and for each of them an entry with a code before one without.

    Args:
        error: what a task's body raised.
        table: as :func:`check_table` takes it.
        now: seconds since 1970.
    """
    if isinstance(error, RateLimited):
        return Feedback(rejected=True, pause=_seconds(_text(error.retry_after), now))
    word, _, seconds = _meaning(error, table).partition(":")
    if word != "pause":
        return None
    if seconds:
        return Feedback(rejected=True, pause=_clamped(float(seconds)))
    response = _attribute(error, "response")
    # Not by its truth: a response of requests with a status of 400 or more is false.
    headers, status = read_response(error if response is None else response)
    return observe(headers, status, now=now, rejected=lambda *_: True)


def check_table(table: object, owner: str = "rejections") -> None:
    """Check a table of exceptions.

    A key is an exception's name with its module, or with a package that its module is in, and after a colon maybe a
    code: a status of HTTP, or an error's code such as boto3's. A value is ``"pause"`` (for as long as the response
    says), ``"pause:30"`` (seconds) or ``"ignore"``.

    Args:
        table: what is to be checked.
        owner: what to call it in an error.

    Raises:
        ConfigurationError: it is no such table.
    """
    if not isinstance(table, Mapping):
        message = f"{owner} must say for exceptions what they mean, as in {EXAMPLE}, not {shown(table)}"
        raise ConfigurationError(message)
    for key, meaning in table.items():
        found = _KEY.fullmatch(key) if isinstance(key, str) else None
        if not found or not ("." in found[1] or hasattr(builtins, found[1])):
            right = "must be an exception's name with its module, and after a colon maybe a code"
            message = f"{owner}: {shown(key)} {right}, as in {EXAMPLE}"
            raise ConfigurationError(message)
        word, colon, seconds = meaning.partition(":") if isinstance(meaning, str) else ("", "", "")
        timed = word == "pause" and 0 < (_number(seconds) or 0) <= LONGEST_PAUSE
        if not timed and (colon or word not in {"pause", "ignore"}):
            right = f'must be "pause", "pause:SECONDS" (above 0, {LONGEST_PAUSE:.0f} at most) or "ignore"'
            message = f"{owner}: {shown(key)} {right}, as in {EXAMPLE}, not {shown(meaning)}"
            raise ConfigurationError(message)


# -- exceptions


def _meaning(error: BaseException, table: Mapping[str, str]) -> str:
    for cls in type(error).__mro__:
        named = [key for key in table if _names(key.partition(":")[0], cls)]
        codes = set(_codes(error)) if any(":" in key for key in named) else ()
        for key in sorted(named, key=lambda key: ":" not in key):
            if ":" not in key or key.partition(":")[2].strip() in codes:
                return table[key]
    return ""


def _names(name: str, cls: type) -> bool:
    """Whether ``name`` means this class: its module may be cut short, since packages export from further down."""
    name = name if "." in name else f"builtins.{name}"
    module = name.removesuffix(cls.__qualname__)
    return module.endswith(".") and f"{cls.__module__}.".startswith(module)


def _codes(error: BaseException) -> Iterator[str]:
    response = _attribute(error, "response")
    found = [_attribute(each, name) for each in (response, error) for name in _STATUSES]
    if isinstance(response, Mapping):
        found += [_entry(_entry(response, "Error"), "Code"), read_response(response)[1]]
    for code in found:
        if isinstance(code, int):
            yield str(int(code))
        elif isinstance(code, str | Enum):
            yield code.name if isinstance(code, Enum) else code


def _attribute(thing: object, name: str) -> Any:  # noqa: ANN401
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001 - a property, in which anything may happen, and httpx raises RuntimeError
        return None


def _entry(thing: object, name: str) -> Any:  # noqa: ANN401
    return thing.get(name) if isinstance(thing, Mapping) else None


# -- headers


@dataclass(slots=True)
class _Quota:
    """One of the other side's quotas, as far as headers tell."""

    of_calls: bool = True
    gradual: bool = False
    """It is refilled all the time, and its reset is when it will be full."""
    remaining: int | None = None
    resets_in: float | None = None
    limit: int | None = None
    window: float | None = None


def _rank(quota: _Quota) -> tuple[float, float, float]:
    """Lowest for the quota that binds: the fewest calls left, the longest wait for more, the lowest rate."""
    left = math.inf if quota.remaining is None else quota.remaining
    rate = quota.limit / quota.window if quota.limit and quota.window else math.inf
    return left, -(quota.resets_in or 0), rate


def _quotas(fields: Mapping[str, str], now: float) -> list[_Quota]:
    quotas: dict[tuple[str, str], _Quota] = {}
    windows: dict[int, float] = {}
    for name, text in fields.items():
        if found := _NAME.fullmatch(name):
            family, what, of, of_before, what_behind = found.groups()
            of = of or of_before or ""
            quota = quotas.setdefault((family, of), _counting(of))
            _tell(quota, what or what_behind, text, now)
            if what == "limit":  # "10, 10;w=1, 100;w=60"
                windows |= _windows(_items(text))
    for value, parameters in _items(fields.get("ratelimit", "")):
        what, older, text = value.partition("=")  # in an older draft "limit=100, remaining=50, reset=30"
        quota = quotas.setdefault(("ratelimit", "" if older else value), _Quota())
        if older:
            _tell(quota, what.strip().lower(), text, now)
        else:
            _tell(quota, "remaining", parameters.get("r", ""), now)
            _tell(quota, "reset", parameters.get("t", ""), now)
    policies = list(_items(fields.get("ratelimit-policy", "")))
    windows |= _windows(policies)
    for value, parameters in policies:
        if "q" in parameters:
            quota = quotas.setdefault(("ratelimit", value), _Quota())
            _tell(quota, "limit", parameters["q"], now)
            quota.window = _positive(parameters.get("w", ""))
            quota.of_calls = parameters.get("qu", "requests") == "requests"
    for quota in quotas.values():
        if quota.limit is not None and quota.window is None:
            quota.window = windows.get(quota.limit)
    return list(quotas.values()) or [_Quota(limit=limit, window=window) for limit, window in windows.items()]


def _counting(of: str) -> _Quota:
    """A quota of what the name of a header says is counted: nothing, ``requests``, ``tokens-day``, ``minute``."""
    words = [word for word in of.split("-") if word]
    unit = [word for word in words if word not in _SPANS]
    window = next((float(_SPANS[word]) for word in words if word in _SPANS), None)
    return _Quota(of_calls=unit in ([], ["requests"]), gradual=bool(unit), window=window)


def _tell(quota: _Quota, what: str, text: str, now: float) -> None:
    """Take in one header; of several values the strictest."""
    if what in {"reset", "reset-after"}:
        seconds = _seconds(text, now)
        # The one that needs no clock wins.
        if seconds is not None and (quota.resets_in is None or what == "reset-after"):
            quota.resets_in = seconds
        return
    numbers = [_number(value) for value, _ in _items(text)]
    counts = [math.floor(number) for number in numbers if number is not None and 0 <= number < math.inf]
    if what == "remaining":
        quota.remaining = min(counts, default=None)
    elif what == "limit":
        quota.limit = counts[0] if counts and counts[0] > 0 else None


def _windows(items: Iterable[tuple[str, dict[str, str]]]) -> dict[int, float]:
    """The window of each limit, of items such as ``100;w=60``."""
    found: dict[int, float] = {}
    for value, parameters in items:
        limit, window = _positive(value), _positive(parameters.get("w") or parameters.get("window") or "")
        if limit is not None and window is not None:
            found.setdefault(math.floor(limit), window)
    return found


def _items(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The items of a structured field, such as ``"default";r=50;t=30``, with their parameters."""
    for item in _ITEM.findall(text):
        value, *parts = _PART.findall(item) or [""]
        pairs = [part.partition("=") for part in parts]
        yield value.strip(' "'), {name.strip().lower(): rest.strip(' "') for name, _, rest in pairs}


def _retry_after(fields: Mapping[str, str], now: float) -> float | None:
    for name in _RETRY_MILLISECONDS:
        if (number := _number(fields.get(name, ""))) is not None:
            return _clamped(number / 1000)
    told = (_seconds(fields[name], now) for name in _RETRY_SECONDS if name in fields)
    return next((seconds for seconds in told if seconds is not None), None)


def _seconds(text: str, now: float) -> float | None:
    """Seconds until what ``text`` says: a number of them, or an instant since 1970 in any unit, ``1m30.5s``, a date."""
    if (number := _number(text)) is not None:
        instants = (number / unit for unit in (1, 1e3, 1e6, 1e9))
        instant = next((each for each in instants if each >= _EARLIEST and abs(each - now) < _DECADE), None)
        return _clamped(number if instant is None else instant - now)
    spans = _SPAN.findall(text)
    if spans and not _SPAN.sub("", text).strip():
        return _clamped(sum(float(amount) * _UNITS[unit] for amount, unit in spans))
    if (date := _date(text)) is not None:
        return _clamped(date - now)
    several = text.split(",") if "," in text else []  # the header was sent more than once
    return max((each for part in several if (each := _seconds(part, now)) is not None), default=None)


def _date(text: str) -> float | None:
    """Seconds since 1970 of a date as RFC 3339 or HTTP has it; in UTC if it names no zone."""
    try:
        date = datetime.fromisoformat(text.strip())
    except ValueError:
        try:
            date = parsedate_to_datetime(_ZONE.sub(r"\1", text))
        except (ValueError, TypeError, IndexError, OverflowError):
            return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def _positive(text: str) -> float | None:
    number = _number(text)
    return number if number is not None and 0 < number < math.inf else None


def _number(text: str) -> float | None:
    found = _NUMBER.fullmatch(text.strip())
    return float(found[0]) if found else None


def _clamped(seconds: float) -> float:
    return min(max(seconds, 0.0), LONGEST_PAUSE)


def _fields(headers: Headers) -> dict[str, str]:
    """The headers by name in lower case; several values of one name stand behind each other, as HTTP has it."""
    fields: dict[str, str] = {}
    for header, values in headers.items():
        name = _text(header).strip().lower()
        for value in values if isinstance(values, list | tuple) else [values]:
            fields[name] = f"{fields[name]}, {_text(value)}" if name in fields else _text(value)
    return {name: text[:_LONGEST_TEXT] for name, text in fields.items()}


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, int):  # not by str(), which refuses huge ones
        return str(min(max(value, -1), 10**30))
    value = value.total_seconds() if isinstance(value, timedelta) else value
    return str(value) if isinstance(value, str | float | Decimal | datetime) else ""
