"""Find the last number in a text."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None. The number may have thousands separators, as in 1,234.5."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
