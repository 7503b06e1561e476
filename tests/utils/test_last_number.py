"""The last number in a text."""

from __future__ import annotations

from decimal import Decimal

import pytest

from paddlenlp_ext.utils.last_number import last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 16 - 3 = 13.\n#### 13", "13"),
        ("$70,000", "70000"),
        ("1,234,567.50 dollars", "1234567.5"),
        ("16-3", "3"),
        ("(4)-3", "3"),
        ("it is -5.", "-5"),
        ("12 of 3", "3"),
        ("18.00", "18"),
        ("none", None),
    ],
)
def test_last_number_reads_signs_separators_and_decimals(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))
