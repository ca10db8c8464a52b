"""The layers, read off the imports: a module imports only what stands before it."""

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tb_celery"
ORDER = [  # modules of one folder, such as stores, may import each other
    "errors",
    "bucket",
    "feedback",
    "state",
    "arithmetic",
    "clock",
    "stores",
    "grantlog",
    "shadow",
    "periods",
    "verify",
    "status",
    "waiting",
    "following",
    "limiter",
    "report",
    "rules",
    "terms",
    "declaration",
    "services",
    "settings",
    "migrate",
    "doctor",
    "usage",
    "metrics",
    "page",
    "reschedule",
    "quota",
    "delivery",
    "admission",
    "reaction",
    "task",
    "spreading",
    "slots",
    "line",
    "hasty",
    "gate",
    "worker",
    "explain",
    "options",
    "steering",
    "top",
    "control",
    "cli",
    "testing",
    "__init__",
    "__main__",
]
CELERY = ORDER[ORDER.index("reschedule") :]
HOMES = {  # the modules that may import it
    "celery": CELERY,
    "click": ["options", "steering", "control", "cli"],
    "filelock": ["stores.file*", "stores.hosting", "grantlog"],
    "kombu": CELERY,
    "prometheus_client": ["metrics", "page"],
    "pydantic": ["settings"],
    "pydantic_settings": ["settings"],
    "pytest": ["testing"],
    "redis": ["stores.redis*"],
    "rich": ["top"],
}
IMPURE = {"datetime", "json", "logging", "os", "random", "threading", "time"}
LONGEST = 400


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Every import with its line, wherever it stands: in a function and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Any name of `from tb_celery import ...` may be a module; a relative import starts with a dot.
            origin = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{origin}.{name.name}") for name in node.names)


def fault(module: str, imported: str) -> str | None:
    """Why ``module`` (without the package's name) may not import ``imported``."""
    layer = module.split(".", 1)[0]
    top, _, rest = imported.partition(".")
    if not top:
        return "is relative: write the full name"
    if top == PACKAGE.name:
        target = rest.split(".", 1)[0]
        target = target if target in ORDER else "__init__"
        return f"{target} does not stand before {layer}" if ORDER.index(target) > ORDER.index(layer) else None
    if layer in {"bucket", "arithmetic"} and top in IMPURE:
        return f"{layer} is pure arithmetic"
    if top in HOMES:
        home = HOMES[top]
        at_home = layer in home or any(fnmatch(module, name) for name in home)
        return None if at_home else f"only {', '.join(home)} may import {top}"
    if top not in sys.stdlib_module_names:
        return "a dependency without a home: decide who may import it, in HOMES"
    return None


def violations(module: str, source: str) -> Iterator[str]:
    if module.split(".", 1)[0] not in ORDER:
        yield f"{module}: belongs to no layer: give it a place in ORDER"
        return
    if (lines := len(source.splitlines())) > LONGEST:
        yield f"{module}: has {lines} lines, {LONGEST} are the most"
    for line, imported in imports(source):
        if reason := fault(module, imported):
            yield f"{module}:{line}: import of {imported}: {reason}"


def modules() -> dict[str, str]:
    """The package's modules with their sources; ``stores/__init__.py`` is ``stores``."""
    names = {path: ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path.read_text("utf-8") for path, name in names.items()}


def test_every_module_imports_only_what_stands_before_it() -> None:
    found = modules()
    assert {"__init__", "bucket", "stores", "stores.file"} <= found.keys()
    assert [line for module, source in found.items() for line in violations(module, source)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("errors", "from __future__ import annotations\nimport os"),
        ("bucket", "import math\nfrom tb_celery.errors import ConfigurationError"),
        ("stores", "from tb_celery.clock import Clock"),
        ("stores.file", "from filelock import lock_descriptor\nfrom tb_celery.stores.record import SIZE"),
        ("stores.redis", "def connect():\n    import redis.asyncio"),
        ("settings", "import pydantic_settings\nfrom tb_celery import limiter, stores"),
        ("reschedule", "import kombu\nfrom celery.app.task import Task"),
        ("cli", "import click\nimport tb_celery.limiter as limiter"),
        ("cli.progress", "import click\nfrom tb_celery.cli import main"),
        ("__init__", "from tb_celery.testing import frozen\nfrom celery import Task"),
        ("__main__", "from tb_celery.cli import main"),
    ],
)
def test_an_arrow_that_runs_down_passes(module: str, source: str) -> None:
    assert list(violations(module, source)) == []


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("clock", "import tb_celery.stores", "stores does not stand before clock"),
        ("clock", "from tb_celery.stores.file import FileStore", "stores does not stand before clock"),
        ("stores.file", "from tb_celery.limiter import Limiter", "limiter does not stand before stores"),
        ("limiter", "from tb_celery import errors, task", "task does not stand before limiter"),
        ("limiter", "from tb_celery import Bucket", "__init__ does not stand before limiter"),
        ("limiter", "import tb_celery", "__init__ does not stand before limiter"),
        ("limiter", "from tb_celery import *", "__init__ does not stand before limiter"),
        ("limiter", "async def f():\n    from tb_celery.cli import main", "cli does not stand before limiter"),
        ("limiter", "if TYPE_CHECKING:\n    from tb_celery.task import Task", "task does not stand before limiter"),
        ("limiter", "from . import errors", "is relative"),
        ("stores.file", "from ..bucket import State", "is relative"),
        ("bucket", "import time", "pure arithmetic"),
        ("bucket", "from os.path import join", "pure arithmetic"),
        ("stores.memory", "import filelock", "only stores.file*, stores.hosting, grantlog may import filelock"),
        ("stores.file", "import redis", "only stores.redis* may import redis"),
        ("limiter", "if TYPE_CHECKING:\n    from redis import Redis", "only stores.redis* may import redis"),
        ("task", "from pydantic import BaseModel", "only settings may import pydantic"),
        ("settings", "from celery import Celery", "may import celery"),
        ("limiter", "import kombu.utils", "may import kombu"),
        ("task", "import requests", "decide who may import it"),
        ("helpers", "", "belongs to no layer"),
        ("helpers.more", "", "belongs to no layer"),
        ("clock", "\n" * 401, "has 401 lines"),
    ],
)
def test_the_check_can_fail(module: str, source: str, reason: str) -> None:
    (line,) = violations(module, source)
    assert line.startswith(module)
    assert reason in line
