"""How Sphinx makes the documentation of these pages and the docstrings: `make docs`."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from pygments.lexers.special import TextLexer

import tb_celery

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "tb_celery"
project_copyright = "the tb_celery authors"
release = version = tb_celery.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
nitpicky = True
# No inventory of Python's or Celery's names is at hand without a network; ours have to lead somewhere.
nitpick_ignore_regex = [(r"py:.*", r"(?!tb_celery\b).*")]

myst_heading_anchors = 3
smartquotes = False  # an option is --app, and JSON has straight quotes
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"tb_celery {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]

ROOT = Path(__file__).parent.parent
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "deploy/README.md": "deployment.md",
    "docs/decisions": "decisions/index.md",
}
"""What is no page of this folder, and the page that shows it."""


def follow_links(_: Sphinx, included: Path, _page: str, text: list[str]) -> None:
    """Have the links of a file from outside this folder lead to pages here, or to the files themselves."""
    folder = posixpath.join("docs", included.parent.as_posix())

    def led(link: re.Match[str]) -> str:
        words, target, anchor = link.groups(default="")
        path = posixpath.normpath(posixpath.join(folder, target))
        if path not in PAGES and (ROOT / path).is_dir():
            return words
        return f"[{words}](/{PAGES.get(path) or posixpath.relpath(path, 'docs')}{anchor})"

    text[0] = re.sub(r"\[([^]]*)\]\((?!\w+:)([^)#\s]+)(#[^)]*)?\)", led, text[0])


def dash(_: Sphinx, page: nodes.document) -> None:
    """Write the dash behind an argument's name as one, which Sphinx leaves to `smartquotes`."""
    for text in list(page.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_lexer("crontab", TextLexer)
    app.connect("include-read", follow_links)
    app.connect("doctree-read", dash)
