"""What is public is what docs/reference lists: it changes on purpose, and its types are what users of mypy see."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import tb_celery

if TYPE_CHECKING:
    from collections.abc import Iterator

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
KNOWN = Path(__file__).parent / "public.txt"
DIRECTIVE = re.compile(r"^\.\. auto\w+:: ([\w.]+)(\(.*\))?\n((?:   :.*\n)*)", re.MULTILINE)


def listing() -> str:
    """Every name that the reference lists, with what it is called with; ``public.txt`` as it should be."""
    pages = [page.read_text("utf-8") for page in sorted(REFERENCE.glob("*.md"))]
    lines = [line for page in pages for found in DIRECTIVE.finditer(page) for line in described(found)]
    return "".join(f"{line}\n" for line in sorted(lines))


def described(directive: re.Match[str]) -> Iterator[str]:
    name, signature, rest = directive.groups()
    options = dict(re.findall(r":([\w-]+):(.*)\n", rest))
    listed = names(options["members"]) if "members" in options else set()
    everything = "members" in options and not listed
    hidden = names(options.get("exclude-members", ""))
    thing = resolved(name)
    if not inspect.ismodule(thing):
        yield name + (signature or called_with(thing))
    if everything or listed:
        yield from members(name, thing, listed, hidden)


def members(name: str, owner: object, listed: set[str], hidden: set[str]) -> Iterator[str]:
    for member, value in vars(owner).items():
        is_there = member in listed if listed else not member.startswith("_") and member not in hidden
        # What a module has imported is not its own.
        if is_there and (inspect.isclass(owner) or getattr(value, "__module__", None) == name):
            yield f"{name}.{member}{called_with(value)}"
            if inspect.ismodule(owner) and inspect.isclass(value):
                yield from members(f"{name}.{member}", value, set(), set())


def called_with(thing: object) -> str:
    """The names, kinds and defaults of its parameters: types are mypy's business."""
    thing = getattr(thing, "__func__", thing)
    if not callable(thing) or getattr(thing, "_is_protocol", False):  # nobody calls a protocol
        return ""
    try:
        signature = inspect.signature(thing)
    except ValueError:  # of an exception that takes what every exception takes
        return "(*args)"
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r"<([\w.]+) object at \w+>", r"<\1>", text)


def names(option: str) -> set[str]:
    return {name.strip() for name in option.split(",") if name.strip()}


def resolved(name: str) -> object:
    """The module of that name, or what a module has under it."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(import_module(module), attribute)


def test_what_is_public_is_called_as_it_was() -> None:
    assert listing() == KNOWN.read_text("utf-8"), "if that is meant: python tests/test_public.py, and CHANGELOG.md"


def test_every_exported_name_is_there_and_in_the_reference() -> None:
    listed = re.findall(r"^tb_celery\.(\w+)(?!\.)\b", KNOWN.read_text("utf-8"), re.MULTILINE)
    assert set(tb_celery.__all__) <= set(listed)
    for name in tb_celery.__all__:
        assert getattr(tb_celery, name).__name__ == name
    assert {name for name in vars(tb_celery) if name[0].isupper()} <= set(tb_celery.__all__) | {"TYPE_CHECKING"}


if __name__ == "__main__":
    KNOWN.write_text(listing(), "utf-8")
