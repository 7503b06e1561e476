"""From what was written to a value of the option's type, or a sentence about why not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.config.schema import Limits, Option

TRUE_WORDS = ("true", "yes", "1", "on")
FALSE_WORDS = ("false", "no", "0", "off")
UNSET_WORD = "null"
_KIND_WORDS = ((bool, "true or false"), (int, "a whole number"), (float, "a number"), (str, "a string"))
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_VALUE = object()


def type_words(option: Option) -> str:
    """The option's type as a user would say it."""
    if object in option.kinds:
        return "any value"
    words = [word for kind, word in _KIND_WORDS if kind in option.kinds]
    if not option.kinds.isdisjoint((list, tuple)):
        words.append("a list of strings")
    if Mapping in option.kinds:
        words.append("an object {pattern: string or null}")
    return " or ".join(words)


def convert(option: Option, written: Any, from_command_line: bool) -> Any:
    """The value of an option from a JSON value or from a word of the command line.

    Raises:
        ValueError: wrong type, out of range or not among the choices; the message names what is allowed.
    """
    if isinstance(written, str) and not from_command_line and _LONE_SURROGATE.search(written):
        raise ValueError("half of a surrogate pair (\\ud800 to \\udfff) is no character")
    value = _from_word(option, written) if from_command_line else _from_json(option, written)
    if value is _NO_VALUE:
        raise ValueError(f"expected {type_words(option)}, got {_show(written)}{_hint(option, written)}")
    _check_limits(option.limits, value)
    if value == "" and option.optional:
        return None
    return tuple(value) if isinstance(value, list) and tuple in option.kinds else value


def _from_json(option: Option, written: Any) -> Any:
    kinds = option.kinds
    if object in kinds:
        return written
    if bool in kinds and (isinstance(written, bool) or (type(written) is int and written in (0, 1))):
        return bool(written)
    if isinstance(written, bool):
        return _NO_VALUE
    if int in kinds and isinstance(written, int):
        return written
    if float in kinds and isinstance(written, int | float) and math.isfinite(written):
        return float(written)
    if not kinds.isdisjoint((list, tuple)):
        elements = [written] if isinstance(written, str) else written
        if isinstance(elements, list) and all(isinstance(element, str) for element in elements):
            return list(elements)
    if Mapping in kinds and isinstance(written, dict):
        return written if all(value is None or isinstance(value, str) for value in written.values()) else _NO_VALUE
    if str in kinds and isinstance(written, str):
        return written
    return _NO_VALUE


def _from_word(option: Option, word: str) -> Any:
    kinds = option.kinds
    if bool in kinds and word.lower() in TRUE_WORDS + FALSE_WORDS:
        return word.lower() in TRUE_WORDS
    if int in kinds and re.fullmatch(r"[-+]?\d{1,100}", word):
        return int(word)
    if float in kinds and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word) and math.isfinite(float(word)):
        return float(word)
    if not kinds.isdisjoint((list, tuple)):
        return _list_from_word(word)
    if Mapping in kinds and word.startswith("{"):
        return _object_from_word(option, word)
    return word if str in kinds or object in kinds else _NO_VALUE


def _list_from_word(word: str) -> Any:
    """`a,b` or a JSON list, which also takes elements that hold commas."""
    if not word.startswith("["):
        return [part for part in word.split(",") if part]
    try:
        elements = json.loads(word)
    except json.JSONDecodeError:
        return _NO_VALUE
    return elements if all(isinstance(element, str) for element in elements) else _NO_VALUE


def _object_from_word(option: Option, word: str) -> Any:
    try:
        return _from_json(option, json.loads(word))
    except json.JSONDecodeError:
        return _NO_VALUE


def _check_limits(limits: Limits, value: Any) -> None:
    if limits.flags is not None:
        for word in value.split():
            if word not in limits.flags:
                raise ValueError(f"{word!r} is not one of the allowed words: {', '.join(limits.flags)}")
    for element in _elements(value):
        if limits.choices is not None and isinstance(element, str) and element not in limits.choices:
            raise ValueError(f"{_show(element)} is not one of: {', '.join(limits.choices)}")
        if isinstance(element, int | float) and not _within(limits, element):
            raise ValueError(f"{_show(element)} is out of range; allowed: {limits.describe()}")


def _elements(value: Any) -> list[Any]:
    """What the limits hold for: the elements of a list, the values of an object, or the value."""
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]


def _within(limits: Limits, number: float) -> bool:
    return not (
        (limits.minimum is not None and number < limits.minimum)
        or (limits.maximum is not None and number > limits.maximum)
        or (limits.above is not None and number <= limits.above)
        or (limits.below is not None and number >= limits.below)
    )


def _hint(option: Option, written: Any) -> str:
    if isinstance(written, dict) and Mapping not in option.kinds:
        return "; the file is flat, this value is no object"
    if isinstance(written, str) and not {bool, int, float}.isdisjoint(option.kinds):
        return "; write it without quotes" if _from_word(option, written) is not _NO_VALUE else ""
    if isinstance(written, float) and int in option.kinds and written.is_integer():
        return f"; write {int(written)}"
    if isinstance(written, int | float) and str in option.kinds:
        return "; put it in double quotes"
    return ""


def _show(written: Any) -> str:
    if isinstance(written, dict):
        return "an object"
    text = json.dumps(written, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
