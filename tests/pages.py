"""What README and the pages of docs/ show, and a place to run it as a reader would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

from servers import LONGEST, ROOT

from tb_celery.settings import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PRINTED = "text"
"""The language of a block that shows what the one before it prints."""
STARTS = """
from celery._state import _get_active_apps
from tb_celery.worker import check_at_start
for each in list(_get_active_apps()):
    check_at_start(each)
"""
"""Put behind an example: a worker of the applications that it makes would start."""


class Block(NamedTuple):
    """One fenced block.

    Attributes:
        name: the file that the sentence before it says it is, as in "`proj.py`:".
        not_run: why not, as a comment right before it says: ``<!-- not run: the reason -->``.
        prints: the text of a ``text`` block behind it.
    """

    language: str
    text: str
    name: str | None = None
    not_run: str | None = None
    prints: str | None = None

    @property
    def module(self) -> str | None:
        """How others import it, where it is for that: it prints nothing, and is no test."""
        if not self.name or not self.name.endswith(".py") or self.name.startswith("test_") or self.prints:
            return None
        return self.name.removesuffix(".py").replace("/", ".")


class Done(NamedTuple):
    code: int
    out: str
    err: str


def blocks(page: str) -> list[Block]:
    """What is shown on a page, in the order in which it stands there; directives of MyST are no such blocks."""
    found: list[Block] = []
    for match in re.finditer(r"^(?:<!-- not run: ([^\n]*) -->\n)?```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        not_run, language, text = match.groups()
        name = re.search(r"`([\w./-]+\.\w+)`:\s*\Z", page[: match.start()])
        if language == PRINTED and found:
            found[-1] = found[-1]._replace(prints=text)
        else:
            found.append(Block(language, text, name and name[1], not_run))
    return found


def texts(page: str, language: str) -> list[str]:
    return [block.text for block in blocks(page) if block.language == language]


def jobs(crontab: str, folder: Path) -> Iterator[str]:
    """The commands of cron jobs in /srv/proj, as cron would run them if that were ``folder``."""
    variables = ""
    for line in crontab.replace("/srv/proj", shlex.quote(str(folder))).splitlines():
        if re.match(r"\w+=", line):
            variables += f"export {line}; "
        else:
            command = re.sub(r"^([0-9*/]+ ){5}", "", line)
            assert command != line
            assert "%" not in command, "cron ends the command there"
            yield variables + command


class Sandbox:
    """A folder with a state file of its own, and the programs that the commands shown call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (
            ("tb-celery", f'exec {shlex.quote(sys.executable)} -m tb_celery "$@"'),
            ("celery", f'exec {shlex.quote(sys.executable)} -m celery "$@"'),
            ("python", f'exec {shlex.quote(sys.executable)} "$@"'),
            ("curl", 'echo "called $*"'),
        ):
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        self.environment = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)} | {
            "HOME": str(folder),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
            "XDG_STATE_HOME": str(folder / "state"),
            "TB_CELERY_STATE_FILE": str(folder / "state" / "buckets.state"),  # root's is elsewhere by default
        }

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *command: str) -> Done:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def sh(self, text: str) -> Done:
        return self.run("sh", "-c", text)

    def python(self, text: str, *args: str) -> Done:
        self.write("script.py", text)
        return self.run(sys.executable, "script.py", *args)

    def show(self, block: Block) -> Done:
        """Run a block as its reader would."""
        match block.language:
            case "python" if block.name and block.name.startswith("test_"):
                return self.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", block.name)
            case "python":
                return self.python(block.text + STARTS)
            case "crontab":
                return self.sh("\n".join(["set -e", *jobs(block.text, self.folder)]))
            case "sh":
                return self.sh(f"set -e\n{block.text}")
        message = f"{block.language} cannot be run: say why, right before the block: <!-- not run: the reason -->"
        raise AssertionError(message)
