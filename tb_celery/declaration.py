"""The forms that people declare a bucket in, and how they are told of a wrong one.

A bucket is declared in one of these forms; everything else is refused with a sentence that shows a right one:

===================================================  ================================================================
``{"capacity": 5, "refill_rate": 0.5}``              5 tokens at most, one more every two seconds
``{"capacity": 1000, "per": "1d"}``                  1000 tokens at most, refilled at 1000 a day
``"10/m"``, ``"0.5/s"``, ``"300/15m"``, ``"1/3m"``   capacity 1: evenly spaced, as Celery's own ``rate_limit``
``"10/60s:5"``                                       the same with a capacity (burst) of 5
``["10/s", {"capacity": 1000, "per": "1d"}]``        several limits at once; ``{"limits": [...]}`` says the same
``Limit(5, 0.5)``, ``Bucket("name", (limit, ...))``  ready-made objects
``None`` (``null`` in JSON)                          not limited: the one way to switch a bucket off
===================================================  ================================================================

Units are s, sec, second(s), m, min, minute(s), h, hour(s), d and day(s), with a whole number before them or not. A
service that allows n calls in every window w is never asked too often at ``"n/w"``, which has capacity 1; capacity n at
the same rate lets nearly 2n through in the first window.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, NoReturn

from tb_celery.bucket import Bucket, Limit
from tb_celery.errors import ConfigurationError, shown
from tb_celery.rules import OPTIONS, QUEUE, Rule

LONGEST_NAME = 200  # characters

_BUCKET_FORM = '{"capacity": 5, "refill_rate": 0.5}, or "10/m", or None (null) for no limit'
_ROUTE_FORM = '{"proj.twitter.*": "twitter_api", "queue:mail": {"bucket": "smtp", "on_reject": "hold"}}'
_RATES = ("refill_rate", "per")
FIELDS = ("capacity", *_RATES)
_UNITS = {1: "s sec second seconds", 60: "m min minute minutes", 3600: "h hour hours", 86400: "d day days"}
_SECONDS = {unit: seconds for seconds, units in _UNITS.items() for unit in units.split()}
# Above 0, and bounded, or a string could hold a number that takes minutes to work out.
_NUMBER = r"(?=[0.]*[1-9])[0-9]{1,15}(?:\.[0-9]{1,15})?"
_SPAN = rf"([1-9][0-9]{{0,8}})?({'|'.join(_SECONDS)})"
_RATE = rf"({_NUMBER})/{_SPAN}(?::({_NUMBER}))?"
_DURATION = rf"({_NUMBER}) ?({'|'.join(_SECONDS)})?"


def parse_bucket(name: str, form: object) -> Bucket | None:
    """The bucket that ``form``, as in the description of this module, declares; ``None`` when it is not limited.

    Raises:
        ConfigurationError: the form is wrong, or the name is not 1 to 200 printable characters.
    """
    return declare(name, [(form, "")])


def parse_route(pattern: object, form: object, origin: str = "") -> Rule:
    """The rule that a route declares: a bucket's name, several names, or a dict of a rule's options.

    Raises:
        ConfigurationError: the pattern is not text, or the form is wrong.
    """
    owner = f"route {shown(pattern)}{from_origins(origin)}"
    if not isinstance(pattern, str) or not pattern.removeprefix(QUEUE):
        refuse(f"{owner} must be a task's name, a glob, or such a one of a queue after {QUEUE!r}, as in {_ROUTE_FORM}")
    options: dict[Any, Any] = dict(form) if isinstance(form, Mapping) else {"bucket": form}
    refuse_unknown(f"{owner}: option", options, OPTIONS)
    if options.get("bucket") is None:
        refuse(f"{owner} names no bucket, as in {_ROUTE_FORM}")
    rule = Rule(**options)
    rule.check(owner)
    return rule


def parse_duration(form: object) -> float:
    """The seconds that a duration such as ``120``, ``"120"``, ``"90s"``, ``"1.5h"`` or ``"1d"`` stands for.

    Raises:
        ConfigurationError: it is not one.
    """
    text = str(form) if type(form) in {int, float} else form
    found = re.fullmatch(_DURATION, text.strip()) if isinstance(text, str) else None
    if found is None:
        refuse(f'a duration must be a time above 0 such as "120" (seconds), "90s", "2h" or "1d", not {shown(form)}')
    amount, unit = found.groups(default="s")
    return float(Fraction(amount) * _SECONDS[unit])


def parse_json(text: str, source: str) -> Any:  # noqa: ANN401
    """What a JSON text says; ``source`` tells readers of an error where it stands.

    Raises:
        ConfigurationError: bad syntax, a key written twice in one object, ``NaN`` or ``Infinity``.
    """
    try:
        value = json.loads(text, object_pairs_hook=_Ambiguous.of, parse_constant=_refuse_constant)
        return _refuse_twice(value)
    except (ValueError, RecursionError) as error:
        refuse(f"{source} is not valid JSON: {error}")


class _Ambiguous(dict[str, Any]):
    """A JSON object in which one key is written twice."""

    twice: str

    @classmethod
    def of(cls, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        keys = [key for key, _ in pairs]
        marked = cls(found)
        marked.twice = max(keys, key=keys.count)
        return marked


def _refuse_twice(value: Any, place: str = "") -> Any:  # noqa: ANN401
    """``value``, unless an object in it has a key twice: only from outside can one tell which object that is."""
    if isinstance(value, _Ambiguous):
        refuse(f"the key {shown(value.twice)} is written twice{place and f' in {place}'}")
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        _refuse_twice(part, shown(name))
    return value


def _refuse_constant(constant: str) -> NoReturn:
    refuse(f"{constant} is not a JSON number")


def declare(name: object, given: Sequence[tuple[object, str]]) -> Bucket | None:
    """The bucket that forms, weakest first and each with its origin, declare together."""
    try:
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
            refuse(f"the name must be 1 to {LONGEST_NAME} printable characters")
        merged: dict[str, Any] | tuple[Limit, ...] | None = None
        for form, _ in given:
            parts = _parts(form)
            if isinstance(merged, tuple) and isinstance(parts, dict) and len(parts) == 1:
                refuse("several limits can only be overridden as a whole")
            if isinstance(merged, dict) and isinstance(parts, dict):
                displaced = _RATES if parts.keys() & _RATES else ()
                parts = {field: value for field, value in merged.items() if field not in displaced} | parts
            merged = parts
        if merged is None:
            return None
        return Bucket(name, merged if isinstance(merged, tuple) else (_limit(merged),))
    except ConfigurationError as error:
        origins = from_origins(*(origin for _, origin in given))
        refuse(f"bucket {shown(name)}{origins}: {error}; the right form is {_BUCKET_FORM}")


def _parts(form: object) -> dict[str, Any] | tuple[Limit, ...] | None:
    """What a form consists of: the fields of one limit, which can be merged with others, or several limits."""
    if form is None:
        return None
    if isinstance(form, Bucket):
        form = form.limits
    elif isinstance(form, Mapping) and "limits" in form:
        if len(form) > 1 or not isinstance(form["limits"], list | tuple):
            refuse("limits must be a list, and the only field")
        form = form["limits"]
    if not isinstance(form, list | tuple) or not form:
        return _fields(form)
    parts = [_fields(each) for each in form]
    return parts[0] if len(parts) == 1 else tuple(_limit(each) for each in parts)


def _fields(form: object) -> dict[str, Any]:
    """The fields of one limit, as far as they are given."""
    if isinstance(form, Limit):
        return {"capacity": form.capacity, "refill_rate": form.refill_rate}
    if isinstance(form, Mapping):
        refuse_unknown("field", form, [*FIELDS, "limits"])
        return dict(form)
    if not isinstance(form, str):
        refuse(f"a limit must be given as a dict or a string, not as {shown(form)}")
    found = re.fullmatch(_RATE, form.strip())
    if found is None:
        refuse(f'{shown(form)} is not a rate such as "10/m", "0.5/s", "300/15m", "1000/d" or "10/60s:5"')
    amount, count, unit, burst = found.groups(default="1")
    capacity = float(burst) if "." in burst else int(burst)
    return {"capacity": capacity, "refill_rate": Fraction(amount) / (int(count) * _SECONDS[unit])}


def _limit(fields: Mapping[str, Any]) -> Limit:
    if "capacity" not in fields:
        refuse("capacity is missing")
    if ("refill_rate" in fields) == ("per" in fields):
        refuse("refill_rate is given twice, as per as well" if "per" in fields else "refill_rate (or per) is missing")
    for field in fields.keys() - {"per"}:
        number = fields[field]
        # By type, for a bool is an int; by bound, for infinity and integers that no float can hold are above 0.
        if type(number) not in {int, float, Fraction} or not 0 < number <= sys.float_info.max:
            refuse(f"{field} must be a finite number above 0, not {shown(number)}")
    capacity = fields["capacity"]
    if "per" not in fields:
        return Limit(capacity, fields["refill_rate"])
    found = re.fullmatch(_SPAN, fields["per"].strip()) if isinstance(fields["per"], str) else None
    if found is None:
        refuse(f'per must be a time such as "1d", "15m" or "60s", not {shown(fields["per"])}')
    count, unit = found.groups(default="1")
    return Limit(capacity, Fraction(str(capacity)) / (int(count) * _SECONDS[unit]))


def refuse_unknown(what: str, keys: Iterable[object], known: Iterable[str], origin: str = "") -> None:
    """Refuse the first of ``keys`` that is not ``known``, and suggest the one that was probably meant."""
    names = {name.lower(): name for name in known}
    for key in keys:
        if key not in names.values():
            close = get_close_matches(shown(key).strip("'").lower(), names, 1)
            hint = f", did you mean {names[close[0]]!r}?" if close else ""
            refuse(f"{what} {shown(key)}{from_origins(origin)} is not known{hint} (known: {', '.join(names.values())})")


def refuse(sentence: str) -> NoReturn:
    """Raise a :class:`~tb_celery.errors.ConfigurationError` that shows nothing of how it was found out."""
    raise ConfigurationError(sentence) from None


def from_origins(*origins: str) -> str:
    """Where a value comes from, to stand after its name in a sentence; nothing where that is not worth telling."""
    named = ", ".join(repr(origin) for origin in origins if origin)
    return f" (from {named})" if named else ""
