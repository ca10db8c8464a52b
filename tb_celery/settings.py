"""What an operator sets: read from the environment, the application and a file, and checked before anything runs."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    InstanceOf,
    SkipValidation,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from tb_celery.bucket import Bucket  # noqa: TC001 - pydantic reads the annotation
from tb_celery.declaration import FIELDS, declare, from_origins, parse_json, parse_route, refuse, refuse_unknown
from tb_celery.errors import ConfigurationError, hint, shown
from tb_celery.feedback import EXAMPLE, check_table
from tb_celery.grantlog import LoggedStore
from tb_celery.limiter import Limiter
from tb_celery.rules import ON_REJECT, Rule
from tb_celery.shadow import ShadowStore, is_enforce
from tb_celery.stores.file import FileStore
from tb_celery.stores.memory import MemoryStore

if TYPE_CHECKING:
    from tb_celery.clock import Clock
    from tb_celery.stores import Store

PREFIX = "TB_CELERY_"
CONFIG = f"{PREFIX}CONFIG"

_TEXTS = {"store", "key_prefix", "state_file", "on_store_error", "grant_log"}
_ON_REJECT_FORM = '"retry", "hold", "fail" or "drop", or a dict of those by bucket'
_ENFORCE_FORM = 'true, false, a percentage such as 20, or a dict of those by bucket such as {"twitter_api": false}'
_BUCKETS_FORM = '{"buckets": {"twitter_api": {"capacity": 5, "refill_rate": 0.5}}}'
_STORE_FORM = '"file", "memory", or the address of a server such as "redis://host:6379/0"'
_DICTS = {"buckets": _BUCKETS_FORM, "routes": '{"routes": {"proj.twitter.*": "twitter_api"}}'}
# What Kubernetes sets in every pod for services that are called tb-celery, tb-celery-redis and the like.
_FOREIGN = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT|PORT)(_\w+)?")


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
            refuse(
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


def _store(name: str) -> str:
    if name not in {"file", "memory"} and "://" not in name:
        raise ValueError
    return name


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
        store: where the state lives: ``"file"`` for every process of this host, ``"memory"`` for this process alone, or
            the address of a Redis or Valkey server, such as ``"redis://host:6379/0"``, for everyone who names it.
        key_prefix: what the names of all keys on such a server begin with; two of them are two quotas.
        state_file: the state file, absolute; :func:`default_state_file` unless set.
        lock_timeout: seconds to wait for the state file's lock, or the server's answer, before that counts as a failure
            of the store.
        on_store_error: what a task does when the store fails: ``"defer"`` (ask later), ``"fail"`` or ``"allow"`` (run).
        max_countdown: seconds after which a task is back at the latest; less than the broker waits to redeliver it.
        min_countdown: seconds that a task is sent away for at least.
        routes: what tasks draw that are not :class:`~tb_celery.RateLimitedTask` themselves: the name or glob of tasks,
            or ``"queue:"`` and that of queues, and for each a bucket, several, or a dict of a rule's options.
        on_reject: what happens to a task that is refused (``"retry"``, ``"hold"``, ``"fail"``, ``"drop"``, or a
            function of the decision), or a dict of that by bucket; what a task or route says itself is stronger.
        rejections: which exceptions of a task's body mean that the other side turned it down for coming too soon, and
            for how long its buckets are paused then; see :func:`tb_celery.feedback.check_table`.
        enabled: whether tasks ask at all; turn it off in tests.
        enforce: whether the refused have to wait; where not, they are let through, counted and told in the log; or for
            how many percent of the tasks, or a dict of that by bucket.
        max_held: most tasks that ``"hold"`` keeps in one worker node; those beyond it go back to the queue.
        max_eager_wait: seconds that a task run eagerly waits in line for at most.
        grant_log: the file to which every grant is appended, absolute; ``None``: none are logged.
        metrics_port: the port at which a worker node serves metrics for Prometheus; 0: it counts nothing.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    # A description ends the sentence "setting ... must be ...".
    buckets: dict[str, InstanceOf[Bucket] | None] = Field({}, description="a dict of buckets by name")
    routes: dict[str, InstanceOf[Rule]] = Field({}, description="a dict of buckets by task name or queue")
    on_reject: Any = Field("retry", description=_ON_REJECT_FORM)
    rejections: SkipValidation[dict[str, str]] = Field({}, description=f"a dict such as {EXAMPLE}")
    enabled: bool = Field(default=True, strict=True, description="true or false")
    enforce: Any = Field(default=True, description=_ENFORCE_FORM)
    # It may hold a password, so it is not shown.
    store: Annotated[str, AfterValidator(_store)] = Field("file", description=_STORE_FORM, repr=False)
    key_prefix: str = Field("tb_celery", description='a text such as "tb_celery"')
    state_file: Annotated[Path, AfterValidator(_absolute)] = Field(
        default_factory=default_state_file, description='the path of a file, such as "/var/lib/tb-celery/buckets.state"'
    )
    lock_timeout: _Seconds = Field(10.0, description="a number of seconds above 0, such as 10.0")
    on_store_error: Literal["defer", "fail", "allow"] = Field("defer", description='"defer", "fail" or "allow"')
    max_countdown: _Seconds = Field(900.0, description="a number of seconds above 0, such as 900.0")
    min_countdown: _Seconds = Field(0.1, description="a number of seconds above 0, such as 0.1")
    max_held: int = Field(1000, strict=True, ge=1, description="a number of tasks above 0, such as 1000")
    max_eager_wait: _Seconds = Field(60.0, description="a number of seconds above 0, such as 60.0")
    grant_log: Annotated[Path, AfterValidator(_absolute)] | None = Field(
        None, description='the path of a file, such as "/var/log/tb-celery/grants"'
    )
    metrics_port: int = Field(0, strict=True, ge=0, le=65535, description="the number of a port, such as 9464, or 0")

    def __init__(self, /, **declared: Any) -> None:
        try:
            super().__init__(**declared)
        except ValidationError as error:
            raise ConfigurationError("; ".join(map(_sentence, error.errors(include_url=False)))) from None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_countdown > self.max_countdown:
            refuse(
                f"{_place('min_countdown')} must be at most max_countdown ({self.max_countdown}), such as 0.1, "
                f"not {self.min_countdown}"
            )
        return self

    @model_validator(mode="after")
    def _readable(self) -> Self:
        check_table(self.rejections, _place("rejections"))
        return self

    @model_validator(mode="after")
    def _of_buckets(self) -> Self:
        for field in ("on_reject", "enforce"):
            by_bucket = getattr(self, field)
            # Without any, they are in a file of services.
            for name in by_bucket if isinstance(by_bucket, Mapping) and self.buckets else ():
                if name not in self.buckets:
                    refuse(
                        f"{_place(field)} names bucket {shown(name)}, which is not declared in the setting buckets; "
                        + hint(name, self.buckets)
                    )
        return self

    @field_validator("on_reject", mode="before")
    @classmethod
    def _known(cls, on_reject: object) -> object:
        for each in on_reject.values() if isinstance(on_reject, Mapping) else (on_reject,):
            if each not in ON_REJECT and not callable(each):
                raise ValueError
        return on_reject

    @field_validator("enforce", mode="before")
    @classmethod
    def _share(cls, enforce: object) -> object:
        if not is_enforce(enforce):
            raise ValueError
        return enforce

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
        refuse(f"setting tb_celery must be a dict such as {_BUCKETS_FORM}, not {shown(declared)}")
    # Before they become keyword arguments: not every key can be one, and some mean something else to BaseSettings.
    refuse_unknown("setting", declared, Settings.model_fields)
    return Settings(**declared)


def open_store(settings: Settings, clock: Clock | None = None) -> Store:
    """The store that ``settings`` name.

    Raises:
        ConfigurationError: the address of a server cannot be understood, or what it takes to ask one is missing, or
            there is no directory for the grants' log.
    """
    state = _open_state(settings, clock)
    store = LoggedStore(state, settings.grant_log) if settings.grant_log else state
    return store if settings.enforce is True else ShadowStore(store, settings.enforce, state)


def _open_state(settings: Settings, clock: Clock | None) -> Store:
    if settings.store == "memory":
        return MemoryStore(clock)
    if settings.store == "file":
        return FileStore(settings.state_file, clock, lock_timeout=settings.lock_timeout)
    from tb_celery.stores.redis import RedisStore  # noqa: PLC0415 - the package redis is an extra, and takes its time

    if clock is not None:
        refuse("a server has a clock of its own: another one can only be used with the stores 'file' and 'memory'")
    return RedisStore(settings.store, settings.lock_timeout, settings.key_prefix)


def open_limiter(
    settings: Settings | None = None, *, store: Store | None = None, clock: Clock | None = None
) -> Limiter:
    """A limiter of the buckets that the settings declare.

    Args:
        settings: those in force now unless given.
        store: where the state lives; unless given, where the settings say.
        clock: where "now" comes from, for the store that the settings name; the host's clock unless given.

    Raises:
        ConfigurationError: a setting is unknown or wrong.
    """
    settings = load_settings() if settings is None else settings
    return Limiter(settings.buckets, open_store(settings, clock) if store is None else store)


class _Sources(InitSettingsSource):
    """All sources as one: merging two forms of a bucket takes knowing what they mean."""

    def __call__(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        forms: dict[object, list[tuple[object, str]]] = {}
        for values, origin in (*_from_file(), (super().__call__(), ""), *_from_environment()):
            refuse_unknown("setting", values, Settings.model_fields, origin)
            for setting, example in _DICTS.items():
                if not isinstance(values.get(setting, {}), Mapping):
                    where = f"setting {setting}{from_origins(origin)}"
                    refuse(f"{where} must be a dict as in {example}, not {shown(values[setting])}")
            settings |= values
            if "routes" in values:
                routes = values["routes"].items()
                settings["routes"] = {pattern: parse_route(pattern, form, origin) for pattern, form in routes}
            for name, form in values.get("buckets", {}).items():
                forms.setdefault(name, []).append((form, origin))
        return settings | {"buckets": {name: declare(name, given) for name, given in forms.items()}}


def _from_file() -> Iterator[tuple[Mapping[str, Any], str]]:
    """What the settings file holds, if there is one, and its name."""
    name = os.environ.get(CONFIG, "").strip()
    if not name:
        return
    source = f"settings file {name!r} ({CONFIG})"
    parsers: dict[str, Callable[[str], Any]] = {".json": lambda text: parse_json(text, source), ".toml": tomllib.loads}
    parse = parsers.get(Path(name).suffix.lower())
    if parse is None:
        refuse(f"{source} must have a name that ends in .json or .toml")
    try:
        values = parse(Path(name).expanduser().read_text("utf-8-sig"))
    except ConfigurationError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        refuse(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}")
    if not isinstance(values, dict):
        refuse(f"{source} must hold an object such as {_BUCKETS_FORM}, not {shown(values)}")
    yield values, name


def _from_environment() -> Iterator[tuple[Mapping[str, Any], str]]:
    """What each variable sets, and its name, the more specific ones later."""
    for variable, text in sorted(os.environ.items(), key=lambda item: item[0].count("__")):
        if not variable.startswith(PREFIX) or not text.strip() or variable == CONFIG:
            continue
        if _FOREIGN.fullmatch(variable) and "://" in text:  # as for a service that is called tb-celery-metrics
            continue
        start, nested, rest = variable.removeprefix(PREFIX).partition("__")
        key = start.lower()
        if key not in Settings.model_fields or (nested and key != "buckets"):
            known = [CONFIG, *(PREFIX + name.upper() for name in Settings.model_fields)]
            if not _FOREIGN.fullmatch(variable):
                refuse_unknown("variable", [variable], known)
            continue
        # Text stays text: a path may look like a number.
        value = text if key in _TEXTS else _decoded(text, variable)
        yield {key: _within(rest, value, variable) if nested else value}, variable


def _within(path: str, value: object, variable: str) -> dict[str, Any]:
    """``value`` where the rest of a variable's name has it: a whole bucket, or one field of it."""
    name, nested, field = path.rpartition("__")
    if not nested:
        return {path: value}
    if "__" in name or field.lower() not in FIELDS:
        refuse(
            f"variable {variable!r} must name a bucket that has no '__' in its name, and after it nothing or "
            f"{', '.join('__' + each.upper() for each in FIELDS)}; declare others as JSON in {PREFIX}BUCKETS"
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


def _sentence(problem: Mapping[str, Any]) -> str:
    if not problem["loc"]:
        return str(problem["ctx"]["error"])
    field = str(problem["loc"][0])
    found = problem["input"]
    # An address without its beginning may be one with a password.
    value = "this" if field == "store" and "@" in str(found) else shown(found)
    return f"{_place(field)} must be {Settings.model_fields[field].description}, not {value}"


def _place(field: str) -> str:
    """Where to look for the value in force: no source is stronger than the environment."""
    return next((f"variable {origin}" for values, origin in _from_environment() if field in values), f"setting {field}")
