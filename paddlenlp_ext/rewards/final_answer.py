r"""Read and compare the final answers of mathematical texts: numbers, sets, and other texts.

"... so it costs \boxed{1,000}"   --final_answer-->  "1,000"     --value_of-->  Fraction(1000)
"9 * 2 = 18\n#### 18"             --final_answer-->  "18"        --value_of-->  Fraction(18)
"<answer>{2, 1.0}</answer>"       --final_answer-->  "{2, 1.0}"  --value_of-->  frozenset({1, 2})
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from paddlenlp_ext.utils.last_number import last_number

Value = Fraction | str | frozenset[Fraction | str]
"""Number, text without differences of case and spaces, or set of both."""
_MARKS = (
    re.compile(r"\\f?boxed\s*\{"),
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    re.compile(r"^####[ \t]*(.+)$", re.MULTILINE),
)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:e[-+]?\d{1,3})?|[-+]?\.\d+", re.IGNORECASE)
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}|([-+]?\d+)\s*/\s*(\d+)")
_DROPPED = re.compile(r"\\[!,;: ]|\\?[$%]|\\left(?![a-z])|\\right(?![a-z])")
"""Spaces of LaTeX, signs of currencies and percent, and sizes of parentheses."""
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(_TEXT.pattern + r"(?:\^(?:\d|\{\d\}))?$")
"""Text of LaTeX after a number, with the exponent of a unit: 5 \\text{ cm}^2."""
_SEPARATOR = re.compile(r";|,(?=\s)|,(?!\d{3}(?!\d))")
"""Separator of the elements of a set that may have thousands separators."""
_MAX_DIGITS = 1000


def final_answer(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, <answer>...</answer> or line "#### ..."; None without a mark."""
    found = [match for mark in _MARKS for match in mark.finditer(text)]
    if not found:
        return None
    last = max(found, key=lambda match: match.start())
    return last[1].strip() if last.re.groups else _until_brace(text, last.end())


def _until_brace(text: str, start: int) -> str:
    """Return the text from `start` to the brace that closes the group; to the end of the text if it is missing."""
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start:place].strip()
    return text[start:].strip()


def value_of(answer: Any) -> Value:
    """Return the value of an answer: a number, a set (a list, or a text in braces), or a text."""
    if isinstance(answer, Iterable) and not isinstance(answer, str):
        return frozenset(map(_element, answer))
    text = _clean(str(answer))
    for start, end in (("\\{", "\\}"), ("{", "}")):
        if text.startswith(start) and text.endswith(end):
            return frozenset(map(_element, _elements(text[len(start) : -len(end)])))
    return _element(text)


def _elements(text: str) -> list[str]:
    has_spaces = re.search(r",\s|;", text) is not None
    parts = _SEPARATOR.split(text) if has_spaces else text.split(",")
    return [part for part in parts if part.strip()]


def _element(value: Any) -> Fraction | str:
    text = _clean(str(value))
    found = number(text)
    return " ".join(text.casefold().split()) if found is None else found


def _clean(text: str) -> str:
    text = _TEXT.sub(r"\1", text.replace("{,}", ","))
    return _DROPPED.sub("", text).strip().removesuffix(".").strip()


def number(text: str) -> Fraction | None:
    """Return the exact value of a text that is a number or a fraction; None for other texts."""
    if len(text) > _MAX_DIGITS:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    match = _FRACTION.fullmatch(text)
    if match is None or not int(match[3] or match[5]):
        return None
    return Fraction(int((match[1] or "") + (match[2] or match[4])), int(match[3] or match[5]))


def is_correct(text: str, expected: Any) -> bool:
    """Return whether the final answer of a text has the value of the expected answer.

    An expected text may have a mark of its own. A text without a mark is compared as a whole; if a number is expected,
    its last number is compared.
    """
    if isinstance(expected, str):
        expected = final_answer(expected) or expected
    right, marked = value_of(expected), final_answer(text)
    answer = text if marked is None else marked
    if value_of(answer) == right:
        return True
    if not isinstance(right, Fraction) or isinstance(value_of(answer), Fraction):
        return False
    last = last_number(_clean(_UNIT.sub("", answer.strip())))
    return last is not None and Fraction(last) == right
