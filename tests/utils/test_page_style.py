"""Style sheets of the HTML pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paddlenlp_ext

SHEETS = sorted(Path(paddlenlp_ext.__file__).parent.rglob("*.css"))


@pytest.mark.parametrize("sheet", SHEETS, ids=lambda sheet: sheet.name)
def test_page_style_columns_of_cards_fit_a_screen_of_400_pixels(sheet):
    widths = re.findall(r"minmax\((?!min\(100%)(\d+)px", sheet.read_text(encoding="utf-8"))
    assert all(int(width) <= 160 for width in widths), widths
