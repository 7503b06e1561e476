"""Fill prompt templates such as "Q: {question}" with the fields of a row.

This module does not import Paddle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.data.rows.checked_values import FieldPath, read_member, read_text

_FIELD = re.compile(r"\{(\w+)\}")


def fields_of(text: str) -> list[str]:
    """Return the field names that occur as {field} in a text."""
    return _FIELD.findall(text)


def fill_fields(text: str, values: Mapping[str, str]) -> str:
    """Replace each {field} in a text with the value of the field in `values`. Other braces are kept."""
    return _FIELD.sub(lambda match: values[match[1]], text)


def read_field(row: dict[str, Any], name: str) -> str:
    """Return the value of a row's field, a string or a number, as text.

    Raises:
        InvalidRowError: the field is missing, or is neither a string nor a number.
    """
    return as_text(read_member(row, name, ()), (name,))


def as_text(value: Any, path: FieldPath) -> str:
    """Return a string unchanged, or a number as text.

    Raises:
        InvalidRowError: the value is neither a string nor a number.
    """
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else read_text(value, path)


def fill_from_row(text: str, row: dict[str, Any]) -> str:
    """Replace each {field} in a text with the value of the field in a row.

    Raises:
        InvalidRowError: a field is missing, or is neither a string nor a number.
    """
    return fill_fields(text, {name: read_field(row, name) for name in fields_of(text)})
