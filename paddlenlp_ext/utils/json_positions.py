"""Where in a JSON text a part of its value stands. The standard library gives no positions for keys that parse well."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def locate(text: str, path: Sequence[str | int], start: int = 0) -> int:
    """The offset in `text` of the value at `path`; where the path leads nowhere, of the last part that exists.

    Args:
        text: JSON that parses.
        path: keys of objects and indices of arrays, outermost first.
        start: where the outermost value begins.
    """
    start = _skip_space(text, start)
    if not path:
        return start
    step, rest = path[0], path[1:]
    child = _member(text, start, step) if isinstance(step, str) else _element(text, start, step)
    return start if child is None else locate(text, rest, child)


def _member(text: str, start: int, key: str) -> int | None:
    if text[start] != "{":
        return None
    position = _skip_space(text, start + 1)
    while text[position] != "}":
        name, position = _DECODER.raw_decode(text, position)
        position = _skip_space(text, _skip_space(text, position) + 1)
        if name == key:
            return position
        position = _next_item(text, position)
    return None


def _element(text: str, start: int, index: int) -> int | None:
    if text[start] != "[":
        return None
    position = _skip_space(text, start + 1)
    while text[position] != "]":
        if index == 0:
            return position
        index -= 1
        position = _next_item(text, position)
    return None


def _next_item(text: str, position: int) -> int:
    """Past the value at `position` and the comma behind it, if there is one."""
    _, position = _DECODER.raw_decode(text, position)
    position = _skip_space(text, position)
    return _skip_space(text, position + 1) if text[position] == "," else position


def _skip_space(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()
