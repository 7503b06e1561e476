"""Sphinx settings for the site, which `make docs` writes to build/site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent

project, author = "paddlenlp_ext", "the paddlenlp_ext contributors"
extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = project
copybutton_exclude = ".linenos, .gp, .go"


def _link_repository(app: Any, page: str, text: list[str]) -> None:
    """Turn links to files outside of docs/, which GitHub follows, into names; a site does not contain these files."""
    up = r"\.\./" * (page.count("/") + 1)
    text[0] = re.sub(rf"\[([^\]]+)\]\({up}(?!docs/)[^)]*\)", r"\1", text[0])


def setup(app: Any) -> None:
    """Connect the changes of pages before they are parsed."""
    app.connect("source-read", _link_repository)
