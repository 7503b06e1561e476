"""Style sheet that all HTML pages share: colors for light and dark screens, cards, tables."""

from pathlib import Path


def page_style() -> str:
    """Return the style sheet."""
    return Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
