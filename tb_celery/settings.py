"""What an operator sets: read from the environment, the application and a file, and checked before anything runs.

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
import os
import re
import reprlib
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import AfterValidator, Field, InstanceOf, ValidationError, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from tb_celery.bucket import Bucket, Limit
from tb_celery.errors import ConfigurationError
from tb_celery.limiter import Limiter
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore

PREFIX = "TB_CELERY_"
CONFIG = f"{PREFIX}CONFIG"
LONGEST_NAME = 200  # characters

_BUCKET_FORM = '{"capacity": 5, "refill_rate": 0.5}, or "10/m", or None (null) for no limit'
_BUCKETS_FORM = '{"buckets": {"twitter_api": {"capacity": 5, "refill_rate": 0.5}}}'
_RATES = ("refill_rate", "per")
_FIELDS = ("capacity", *_RATES)
_UNITS = {1: "s sec second seconds", 60: "m min minute minutes", 3600: "h hour hours", 86400: "d day days"}
_SECONDS = {unit: seconds for seconds, units in _UNITS.items() for unit in units.split()}
# Above 0, and bounded, or a string could hold a number that takes minutes to work out.
_NUMBER = r"(?=[0.]*[1-9])[0-9]{1,15}(?:\.[0-9]{1,15})?"
_SPAN = rf"([1-9][0-9]{{0,8}})?({'|'.join(_SECONDS)})"
_RATE = rf"({_NUMBER})/{_SPAN}(?::({_NUMBER}))?"
# What Kubernetes sets in every pod for services that are called tb-celery, tb-celery-redis and the like.
_FOREIGN = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?")
_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 80


def default_state_file() -> Path:
    """Where the state lives unless told otherwise: a place of the user's own that outlives reboots and temp cleaners.

    Raises:
        ConfigurationError: the user has no home directory.
    """
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        return Path("/var/lib/tb-celery/buckets.state")
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # the XDG base directory specification has it ignored then
        home = Path()
        with suppress(RuntimeError):
            home = Path.home()
        if not home.is_absolute() or home == home.parent:  # "/" is the home of users whom a container does not know
            _refuse(
                "the user has no home directory to keep the state in; name a file that outlives reboots in the setting "
                f"state_file ({PREFIX}STATE_FILE), such as /var/lib/tb-celery/buckets.state"
            )
        base = home / ".local" / "state"
    return base / "tb-celery" / "buckets.state"


def _absolute(path: Path) -> Path:
    if path.name and "\0" not in str(path):
        with suppress(RuntimeError):
            return path.expanduser().absolute()
    raise ValueError


_Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class Settings(BaseSettings):
    """Everything that can be set, complete and valid. Making one reads the environment and the file anew.

    Sources, strongest first: the environment, the keyword arguments, the file (JSON or TOML) that ``TB_CELERY_CONFIG``
    names. A bucket is merged field by field: it is what one dict with the strongest value of each field would declare.
    A string counts as its ``capacity`` and ``refill_rate``; ``refill_rate`` and ``per`` displace each other; several
    limits and ``None`` are replaced as a whole.

    In the environment, ``TB_CELERY_LOCK_TIMEOUT=3`` is a setting, ``TB_CELERY_BUCKETS__twitter_api__CAPACITY=7`` one
    field of a bucket, ``TB_CELERY_BUCKETS__twitter_api=10/m`` a bucket (a string, or JSON), and ``TB_CELERY_BUCKETS``
    all of them as JSON. Bucket names keep their case; an empty variable counts as unset.

    Attributes:
        buckets: the declared buckets by name; ``None`` in place of one means that it is not limited.
        store: where the state lives: ``"file"`` for every process of this host, ``"memory"`` for this process alone.
        state_file: the state file, absolute; :func:`default_state_file` unless set.
        lock_timeout: seconds to wait for the state file's lock before that counts as a failure of the store.
        on_store_error: what a task does when the store fails: ``"defer"`` (ask later), ``"fail"`` or ``"allow"`` (run).
        max_countdown: seconds after which a task is back at the latest; less than the broker waits to redeliver it.
        min_countdown: seconds that a task is sent away for at least.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    # A description ends the sentence "setting ... must be ...".
    buckets: dict[str, InstanceOf[Bucket] | None] = Field({}, description="a dict of buckets by name")
    store: Literal["file", "memory"] = Field("file", description='"file" or "memory"')
    state_file: Annotated[Path, AfterValidator(_absolute)] = Field(
        default_factory=default_state_file, description='the path of a file, such as "/var/lib/tb-celery/buckets.state"'
    )
    lock_timeout: _Seconds = Field(10.0, description="a number of seconds above 0, such as 10.0")
    on_store_error: Literal["defer", "fail", "allow"] = Field("defer", description='"defer", "fail" or "allow"')
    max_countdown: _Seconds = Field(900.0, description="a number of seconds above 0, such as 900.0")
    min_countdown: _Seconds = Field(0.1, description="a number of seconds above 0, such as 0.1")

    def __init__(self, /, **declared: Any) -> None:
        try:
            super().__init__(**declared)
        except ValidationError as error:
            raise ConfigurationError("; ".join(map(_sentence, error.errors(include_url=False)))) from None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_countdown > self.max_countdown:
            _refuse(
                f"{_place('min_countdown')} must be at most max_countdown ({self.max_countdown}), such as 0.1, "
                f"not {self.min_countdown}"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: object, **__: object
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (_Sources(settings_cls, init_settings()),)


def load_settings(declared: Mapping[str, Any] | None = None) -> Settings:
    """The settings in force now, where ``declared`` is what the application sets (``app.conf.tb_celery``).

    Raises:
        ConfigurationError: a setting is unknown or wrong, in any of the sources.
    """
    declared = {} if declared is None else declared
    if not isinstance(declared, Mapping):
        _refuse(f"setting tb_celery must be a dict such as {_BUCKETS_FORM}, not {_shown(declared)}")
    # Before they become keyword arguments: not every key can be one, and some mean something else to BaseSettings.
    _refuse_unknown("setting", declared, Settings.model_fields)
    return Settings(**declared)


def open_limiter(settings: Settings | None = None) -> Limiter:
    """A limiter of the buckets that ``settings`` (those in force now unless given) declare, on the store they name.

    Raises:
        ConfigurationError: a setting is unknown or wrong.
    """
    settings = load_settings() if settings is None else settings
    in_memory = settings.store == "memory"
    store = MemoryStore() if in_memory else FileStore(settings.state_file, lock_timeout=settings.lock_timeout)
    return Limiter(settings.buckets, store)


def parse_bucket(name: str, form: object) -> Bucket | None:
    """The bucket that ``form``, as in the description of this module, declares; ``None`` when it is not limited.

    Raises:
        ConfigurationError: the form is wrong, or the name is not 1 to 200 printable characters.
    """
    return _declare(name, [(form, "")])


def parse_json(text: str, source: str) -> Any:  # noqa: ANN401
    """What a JSON text says; ``source`` tells readers of an error where it stands.

    Raises:
        ConfigurationError: bad syntax, a key written twice in one object, ``NaN`` or ``Infinity``.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(keys) > len(set(keys)):
            _refuse(f"the key {_shown(max(keys, key=keys.count))} is written twice")
        return dict(pairs)

    def refuse(constant: str) -> NoReturn:
        _refuse(f"{constant} is not a JSON number")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        _refuse(f"{source} is not valid JSON: {error}")


class _Sources(InitSettingsSource):
    """All sources as one: merging two forms of a bucket takes knowing what they mean."""

    def __call__(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        forms: dict[object, list[tuple[object, str]]] = {}
        for values, origin in (*_from_file(), (super().__call__(), ""), *_from_environment()):
            _refuse_unknown("setting", values, Settings.model_fields, origin)
            settings |= values
            buckets = values.get("buckets", {})
            if not isinstance(buckets, Mapping):
                _refuse(f"setting buckets{_from(origin)} must be a dict as in {_BUCKETS_FORM}, not {_shown(buckets)}")
            for name, form in buckets.items():
                forms.setdefault(name, []).append((form, origin))
        return settings | {"buckets": {name: _declare(name, given) for name, given in forms.items()}}


def _from_file() -> Iterator[tuple[Mapping[str, Any], str]]:
    """What the settings file holds, if there is one, and its name."""
    name = os.environ.get(CONFIG, "").strip()
    if not name:
        return
    source = f"settings file {name!r} ({CONFIG})"
    parsers: dict[str, Callable[[str], Any]] = {".json": lambda text: parse_json(text, source), ".toml": tomllib.loads}
    parse = parsers.get(Path(name).suffix.lower())
    if parse is None:
        _refuse(f"{source} must have a name that ends in .json or .toml")
    try:
        values = parse(Path(name).expanduser().read_text("utf-8-sig"))
    except ConfigurationError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        _refuse(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}")
    if not isinstance(values, dict):
        _refuse(f"{source} must hold an object such as {_BUCKETS_FORM}, not {_shown(values)}")
    yield values, name


def _from_environment() -> Iterator[tuple[Mapping[str, Any], str]]:
    """What each variable sets, and its name, the more specific ones later."""
    for variable, text in sorted(os.environ.items(), key=lambda item: item[0].count("__")):
        if not variable.startswith(PREFIX) or not text.strip() or variable == CONFIG:
            continue
        start, nested, rest = variable.removeprefix(PREFIX).partition("__")
        key = start.lower()
        if key not in Settings.model_fields or (nested and key != "buckets"):
            known = [CONFIG, *(PREFIX + name.upper() for name in Settings.model_fields)]
            if not _FOREIGN.fullmatch(variable):
                _refuse_unknown("variable", [variable], known)
            continue
        # Text stays text: a path may look like a number.
        is_text = key != "buckets" and Settings.model_fields[key].annotation is not float
        value = text if is_text else _decoded(text, variable)
        yield {key: _within(rest, value, variable) if nested else value}, variable


def _within(path: str, value: object, variable: str) -> dict[str, Any]:
    """``value`` where the rest of a variable's name has it: a whole bucket, or one field of it."""
    name, nested, field = path.rpartition("__")
    if not nested:
        return {path: value}
    if "__" in name or field.lower() not in _FIELDS:
        _refuse(
            f"variable {variable!r} must name a bucket that has no '__' in its name, and after it nothing or "
            f"{', '.join('__' + each.upper() for each in _FIELDS)}; declare others as JSON in {PREFIX}BUCKETS"
        )
    return {name: {field.lower(): value}}


def _decoded(text: str, variable: str) -> Any:  # noqa: ANN401
    """The JSON in a variable; other text, such as a rate, stands for itself."""
    try:
        return parse_json(text, f"variable {variable!r}")
    except ConfigurationError:
        if text.lstrip().startswith(("{", "[")):
            raise
        return text


def _declare(name: object, given: Sequence[tuple[object, str]]) -> Bucket | None:
    """The bucket that forms, weakest first and each with its origin, declare together."""
    try:
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
            _refuse(f"the name must be 1 to {LONGEST_NAME} printable characters")
        merged: dict[str, Any] | tuple[Limit, ...] | None = None
        for form, _ in given:
            parts = _parts(form)
            if isinstance(merged, tuple) and isinstance(parts, dict) and len(parts) == 1:
                _refuse("several limits can only be overridden as a whole")
            if isinstance(merged, dict) and isinstance(parts, dict):
                displaced = _RATES if parts.keys() & _RATES else ()
                parts = {field: value for field, value in merged.items() if field not in displaced} | parts
            merged = parts
        if merged is None:
            return None
        return Bucket(name, merged if isinstance(merged, tuple) else (_limit(merged),))
    except ConfigurationError as error:
        origins = _from(*(origin for _, origin in given))
        _refuse(f"bucket {_shown(name)}{origins}: {error}; the right form is {_BUCKET_FORM}")


def _parts(form: object) -> dict[str, Any] | tuple[Limit, ...] | None:
    """What a form consists of: the fields of one limit, which can be merged with others, or several limits."""
    if form is None:
        return None
    if isinstance(form, Bucket):
        form = form.limits
    elif isinstance(form, Mapping) and "limits" in form:
        if len(form) > 1 or not isinstance(form["limits"], list | tuple):
            _refuse("limits must be a list, and the only field")
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
        _refuse_unknown("field", form, [*_FIELDS, "limits"])
        return dict(form)
    if not isinstance(form, str):
        _refuse(f"a limit must be given as a dict or a string, not as {_shown(form)}")
    found = re.fullmatch(_RATE, form.strip())
    if found is None:
        _refuse(f'{_shown(form)} is not a rate such as "10/m", "0.5/s", "300/15m", "1000/d" or "10/60s:5"')
    amount, count, unit, burst = found.groups(default="1")
    capacity = float(burst) if "." in burst else int(burst)
    return {"capacity": capacity, "refill_rate": Fraction(amount) / (int(count) * _SECONDS[unit])}


def _limit(fields: Mapping[str, Any]) -> Limit:
    if "capacity" not in fields:
        _refuse("capacity is missing")
    if ("refill_rate" in fields) == ("per" in fields):
        _refuse("refill_rate is given twice, as per as well" if "per" in fields else "refill_rate (or per) is missing")
    for field in fields.keys() - {"per"}:
        number = fields[field]
        # By type, for a bool is an int; by bound, for infinity and integers that no float can hold are above 0.
        if type(number) not in {int, float, Fraction} or not 0 < number <= sys.float_info.max:
            _refuse(f"{field} must be a finite number above 0, not {_shown(number)}")
    capacity = fields["capacity"]
    if "per" not in fields:
        return Limit(capacity, fields["refill_rate"])
    found = re.fullmatch(_SPAN, fields["per"].strip()) if isinstance(fields["per"], str) else None
    if found is None:
        _refuse(f'per must be a time such as "1d", "15m" or "60s", not {_shown(fields["per"])}')
    count, unit = found.groups(default="1")
    return Limit(capacity, Fraction(str(capacity)) / (int(count) * _SECONDS[unit]))


def _refuse_unknown(what: str, keys: Iterable[object], known: Iterable[str], origin: str = "") -> None:
    names = {name.lower(): name for name in known}
    for key in keys:
        if key not in names.values():
            close = get_close_matches(_shown(key).strip("'").lower(), names, 1)
            hint = f", did you mean {names[close[0]]!r}?" if close else ""
            _refuse(f"{what} {_shown(key)}{_from(origin)} is not known{hint} (known: {', '.join(names.values())})")


def _refuse(sentence: str) -> NoReturn:
    raise ConfigurationError(sentence) from None


def _sentence(problem: Mapping[str, Any]) -> str:
    if not problem["loc"]:
        return str(problem["ctx"]["error"])
    field = str(problem["loc"][0])
    return f"{_place(field)} must be {Settings.model_fields[field].description}, not {_shown(problem['input'])}"


def _place(field: str) -> str:
    """Where to look for the value in force: no source is stronger than the environment."""
    return next((f"variable {origin}" for values, origin in _from_environment() if field in values), f"setting {field}")


def _from(*origins: str) -> str:
    named = ", ".join(repr(origin) for origin in origins if origin)
    return f" (from {named})" if named else ""


def _shown(value: object) -> str:
    """``value`` on one short line, whatever it is."""
    try:
        return _shortened.repr(value)
    except ValueError:  # an integer that Python refuses to print
        return f"a huge {type(value).__name__}"
