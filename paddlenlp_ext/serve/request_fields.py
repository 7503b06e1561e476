"""Typed access to the fields in the JSON body of a request; null is treated as an absent field."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from paddlenlp_ext.data.rows.checked_values import type_name
from paddlenlp_ext.serve.errors import ApiError, invalid
from paddlenlp_ext.utils.json_reader import SYNTAX, JsonError, Location, decode_utf8, read_value
from paddlenlp_ext.utils.suggest import did_you_mean


def parse_body(data: bytes) -> Fields:
    """Parse the body of a request.

    Raises:
        ApiError: the body is not a JSON object.
    """
    try:
        text = decode_utf8(data)
        start = len(text) - len(text.lstrip(" \t\r\n"))
        value, end = read_value(text, start)
    except JsonError as error:
        where = error.location(Location(None, 1, 1))
        problem = "is not JSON" if error.reason == SYNTAX else "cannot be read"
        raise ApiError(400, f"the body {problem}: {where}: {error}", "invalid_json") from None
    if text[end:].strip(" \t\r\n"):
        raise ApiError(400, "the body is not JSON: there is text after the value", "invalid_json")
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {type_name(value)}; send a JSON object", "invalid_json")
    return Fields(value)


class Fields:
    """Fields of a JSON object; each method raises an `ApiError` that names the field if its value is invalid.

    Args:
        values: the JSON object.
        path: prefix of the field names in errors.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._path = path
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return a value of any type, or None if the field is absent."""
        self._read.add(name)
        return self._values.get(name)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean, or `default` if the field is absent."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong_type(name, "true or false", value)
        return value

    def integer(self, name: str, minimum: int, maximum: int) -> int | None:
        """Return an integer from `minimum` to `maximum`, or None if the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(name, "a whole number", value)
        if not minimum <= value <= maximum:
            raise invalid(self._path + name, f"{value} is not a whole number from {minimum} to {maximum}")
        return value

    def number(self, name: str, default: float, minimum: float, maximum: float) -> float:
        """Return a number from `minimum` to `maximum`, or `default` if the field is absent."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(name, "a number", value)
        if not minimum <= value <= maximum:
            raise invalid(self._path + name, f"{value} is not a number from {minimum:g} to {maximum:g}")
        return float(value)

    def text(self, name: str) -> str | None:
        """Return a string, or None if the field is absent."""
        value = self.get(name)
        return None if value is None else checked_text(self._path + name, value)

    def object(self, name: str) -> Fields | None:
        """Return the fields of a nested object, or None if the field is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong_type(name, "an object", value)
        return Fields(value, f"{self._path}{name}.")

    def path_of(self, name: str) -> str:
        """Return the full name of a field for error messages: the names of the enclosing objects, then the name."""
        return self._path + name

    def require(self, name: str, accepted: Collection[Any], remedy: str) -> None:
        """Check that an unsupported field is absent or has one of the `accepted` values, which have no effect."""
        value = self.get(name)
        if value is not None and value not in accepted:
            raise invalid(self._path + name, f"the server does not support this value; {remedy}")

    def check_all_read(self) -> None:
        """Reject fields that no method has read."""
        for name in self._values:
            if name not in self._read:
                hint = did_you_mean(name, self._read)
                raise invalid(self._path + name[:100], f"unknown field{hint.removesuffix('.')}", "unknown_parameter")

    def _wrong_type(self, name: str, expected: str, value: Any) -> ApiError:
        return invalid(self._path + name, f"the value is {type_name(value)}; send {expected}", "invalid_type")


def checked_text(path: str, value: Any) -> str:
    """Return a string that UTF-8 can encode.

    Raises:
        ApiError: the value is not a string, or has an unpaired surrogate.
    """
    if not isinstance(value, str):
        raise invalid(path, f"the value is {type_name(value)}; send a string", "invalid_type")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(path, "the text has an unpaired surrogate (\\ud800 to \\udfff)") from None
    return value


def check_texts(value: Any, path: str) -> None:
    """Check that UTF-8 can encode every string in a JSON value; the JSON reader has limited the depth of the value."""
    if isinstance(value, str):
        checked_text(path, value)
    elif isinstance(value, dict):
        for key, each in value.items():
            checked_text(path or "a key", key)
            check_texts(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            check_texts(each, f"{path}.{index}")
