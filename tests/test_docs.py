"""The pages of docs/: what they show is run, and Sphinx finds nothing wrong with them."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from pages import STARTS, Sandbox, blocks
from servers import LONGEST, ROOT

import tb_celery

if TYPE_CHECKING:
    from pathlib import Path

DOCS = ROOT / "docs"
PAGES = {
    name: shown
    for path in sorted(DOCS.rglob("*.md"))
    if (name := path.relative_to(DOCS).as_posix()) != "operating.md"  # benchmarks.operating runs it, and wrote it
    and (shown := blocks(path.read_text("utf-8")))
}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_runs(tmp_path: Path, page: str) -> None:
    sandbox = Sandbox(tmp_path)
    for example in (ROOT / "examples").iterdir():
        if example.is_file():
            sandbox.write(example.name, example.read_text("utf-8"))
    for block in PAGES[page]:
        if block.name:
            sandbox.write(block.name, block.text)
    if modules := [f"import {block.module}" for block in PAGES[page] if block.module]:
        assert sandbox.python("\n".join([*modules, STARTS])) == (0, "", "")
    for block in PAGES[page]:
        if not block.not_run and not block.module:
            done = sandbox.show(block)
            assert (done.code, done.err) == (0, ""), f"{block.text}\n{done}"
            assert block.prints in {None, done.out}, block.text


def test_the_picture_is_what_the_arithmetic_says(tmp_path: Path) -> None:
    picture = tmp_path / "arithmetic.svg"
    subprocess.run([sys.executable, DOCS / "pictures.py", picture], check=True, cwd=ROOT)
    assert picture.read_text("utf-8") == (DOCS / "concepts" / "arithmetic.svg").read_text("utf-8")


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning_and_lists_all_that_is_public(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LONGEST)
    assert (done.returncode, done.stderr) == (0, "")
    command = [sys.executable, "-m", "sphinx.ext.intersphinx", str(tmp_path / "objects.inv")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {*tb_celery.__all__} <= {*re.findall(r"^ +tb_celery\.(\w+) ", listed, re.MULTILINE)}
