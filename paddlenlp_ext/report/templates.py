"""Fill the HTML templates of this package; every value is escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from paddlenlp_ext.utils.page_style import page_style

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = Path(__file__).parent


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # not needed before the first page

    return Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        cache_size=-1,
    )


def fill(template: str, **values: Any) -> Markup:
    """Return a template of this package, filled with values; values that are not `Markup` are escaped."""
    return Markup(_environment().get_template(template).render(values))


def fill_page(template: str, title: str, **values: Any) -> str:
    """Return a complete page from a template that extends `base.html`."""
    style = page_style() + (_FOLDER / "page.css").read_text(encoding="utf-8")
    return str(fill(template, title=title, style=Markup(style), **values))
