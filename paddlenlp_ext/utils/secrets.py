"""Hide passwords and tokens in configurations and command lines that are written to reports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(r"(token|key)s?(?![a-z])|secret|passw|credential", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_NOT_TEXT = re.compile(r"-?[\d.]+(e-?\d+)?|true|false|null|none", re.IGNORECASE)


def without_secrets(value: Any, name: str = "") -> Any:
    """Return a copy of a JSON value in which secrets are replaced with "(hidden)".

    A string is a secret if its key contains "secret", "passw", "credential", or a word that ends with "token(s)" or
    "key(s)". User names and passwords in URLs are also secrets. Numbers, such as the value of `max_new_tokens`, are not
    secrets.

    Args:
        value: a JSON value.
        name: the key of the value.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(item, f"{name} {key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if _SECRET_NAME.search(name) and not _NOT_TEXT.fullmatch(value):
        return HIDDEN
    return _CREDENTIALS.sub(HIDDEN, value)


def command_without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command with "(hidden)" in place of the values of options whose names indicate a secret."""
    shown, option = [], ""
    for word in command:
        is_option = word.startswith("-") and not _NOT_TEXT.fullmatch(word)
        name, equals, value = word.partition("=")
        if not is_option:
            shown.append(without_secrets(word, option))
        else:
            shown.append(f"{name}={without_secrets(value, name)}" if equals else word)
            option = "" if equals else word
    return shown
