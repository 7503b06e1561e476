"""Check the types of values in a row; errors name the path of the value and the remedy."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.data.rows.errors import InvalidRowError
from paddlenlp_ext.utils.json_reader import DUPLICATE, JsonError, read_document

FieldPath = tuple[str | int, ...]
"""Keys and indices that lead from a row to a value in it."""

WRONG_TYPE = "wrong type"
MISSING_KEY = "missing key"
EMPTY_TARGET = "empty target"


def read_text(value: Any, path: FieldPath) -> str:
    """Return `value` if it is a string of valid Unicode.

    Raises:
        InvalidRowError: the value is not a string, or has an unpaired surrogate.
    """
    if not isinstance(value, str):
        raise InvalidRowError(WRONG_TYPE, f"{dotted(path)} is {type_name(value)}; write a string", path)
    if any("\ud800" <= character <= "\udfff" for character in value) if not value.isascii() else False:
        raise InvalidRowError(
            "not UTF-8", f"{dotted(path)} holds an unpaired surrogate, which is not a character; remove it", path
        )
    return value


def read_texts(value: Any, path: FieldPath) -> list[str]:
    """Return a list of strings; a single string becomes a list of one item."""
    if isinstance(value, list):
        return [read_text(item, (*path, index)) for index, item in enumerate(value)]
    return [read_text(value, path)]


def read_list(value: Any, path: FieldPath) -> list[Any]:
    """Return `value` if it is a list.

    Raises:
        InvalidRowError: the value is not a list.
    """
    if not isinstance(value, list):
        raise InvalidRowError(WRONG_TYPE, f"{dotted(path)} is {type_name(value)}; write a list", path)
    return value


def read_object(value: Any, path: FieldPath) -> dict[str, Any]:
    """Return `value` if it is a JSON object.

    Raises:
        InvalidRowError: the value is not an object.
    """
    if not isinstance(value, dict):
        raise InvalidRowError(WRONG_TYPE, f"{dotted(path)} is {type_name(value)}; write an object", path)
    return value


def read_member(item: Any, key: str, path: FieldPath) -> Any:
    """Return the value of `key` in an object.

    Raises:
        InvalidRowError: `item` is not an object, or lacks the key.
    """
    if key not in read_object(item, path):
        raise InvalidRowError(MISSING_KEY, f"{dotted(path)} has {describe_keys(item)}; add {key!r}", path)
    return item[key]


def read_json(value: Any, path: FieldPath) -> Any:
    """Return a JSON value; a string is parsed as JSON text.

    Raises:
        InvalidRowError: the string is not JSON or contains an object with a duplicate key, or a string in the value has
            an unpaired surrogate.
    """
    if isinstance(value, str):
        try:
            value = read_document(read_text(value, path))
        except JsonError as error:
            if error.reason == DUPLICATE:
                raise InvalidRowError(DUPLICATE, f"{dotted(path)}: {error}", path) from error
            raise InvalidRowError(WRONG_TYPE, f"{dotted(path)} is a string, but not JSON: {error}", path) from error
    remaining = [value]
    while remaining:
        part = remaining.pop()
        if isinstance(part, str):
            read_text(part, path)
        elif isinstance(part, list):
            remaining += part
        elif isinstance(part, dict):
            remaining += [*part, *part.values()]
    return value


def check_target(text: str, path: FieldPath) -> None:
    """Check that an answer is not empty.

    Raises:
        InvalidRowError: the answer is empty.
    """
    if not text.strip():
        raise InvalidRowError(EMPTY_TARGET, f"{dotted(path)} is empty; write an answer or remove the row", path)


def describe_keys(row: dict[str, Any]) -> str:
    """Return the keys of a row as text for error messages."""
    return f"the keys {', '.join(map(repr, row))}" if row else "no keys"


def dotted(path: FieldPath) -> str:
    """Return a path as text, such as `messages[2].content`; the empty path is "the row"."""
    joined = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return joined.removeprefix(".") or "the row"


def type_name(value: Any) -> str:
    """Return the JSON type of a value with an article, or its Python type if JSON has no such type."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
