"""Read the settings of a flat JSON file; comments and trailing commas are accepted.

{
    // smaller than in the paper
    "lora_rank": 8, /* also for the 1.7B model */
}
"""

from __future__ import annotations

import re

from paddlenlp_ext.config.setting import Setting
from paddlenlp_ext.utils.json_reader import JsonError, Location, expected, read_value, skip_space

_STRING = r'"(?:[^"\\\n]|\\.)*"?'
_STRING_OR_COMMENT = re.compile(rf"{_STRING}|(?P<blank>//[^\n]*|/\*.*?\*/)|(?P<open>/\*)", re.DOTALL)
_STRING_OR_LAST_COMMA = re.compile(rf"{_STRING}|(?<=[^\s,\[{{:])(?P<blank>\s*,)(?=\s*[\]}}])", re.DOTALL)


def read_json_settings(text: str, origin: Location, settings: list[Setting]) -> None:
    """Append the settings of a JSON text to `settings`, up to the first error.

    Raises:
        JsonError: the text is not JSON, is not one object, or has a value that `read_value` rejects.
    """
    for match in _STRING_OR_COMMENT.finditer(text):
        if match["open"]:
            raise JsonError("this comment is not closed; end it with */", text, match.start())
    text = _blanked(_STRING_OR_LAST_COMMA, _blanked(_STRING_OR_COMMENT, text))
    at = skip_space(text, 0)
    if at == len(text):
        raise JsonError('the file is empty; write one object, {"key": value, ...}', text, at)
    if text[at] != "{":
        if text[at] in '["-0123456789' or text.startswith(("true", "false", "null"), at):
            raise JsonError('the file must contain one object, {"key": value, ...}', text, at)
        raise expected("'{'", text, at)
    at = skip_space(text, at + 1)
    while not text.startswith("}", at):
        at = _read_pair(text, at, origin, settings)
        if text.startswith(",", at):
            at = skip_space(text, at + 1)
            if text.startswith("}", at):
                raise expected("a key in double quotes", text, at)
        elif not text.startswith("}", at):
            raise expected("',' or '}'", text, at)
    at = skip_space(text, at + 1)
    if at != len(text):
        raise JsonError("more text after the closing '}'; remove it", text, at)


def _blanked(pattern: re.Pattern[str], text: str) -> str:
    """Replace each match that has the group `blank` with spaces, so that line and column numbers stay the same."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]) if match["blank"] else match[0], text)


def _read_pair(text: str, at: int, origin: Location, settings: list[Setting]) -> int:
    """Append the pair `"key": value` at offset `at` to `settings`, and return the offset after the pair."""
    if not text.startswith('"', at):
        raise expected("a key in double quotes", text, at)
    location = origin.after(text[:at])
    key, at = read_value(text, at)
    at = skip_space(text, at)
    if not text.startswith(":", at):
        raise expected(f"':' after the key {key!r}", text, at)
    at = skip_space(text, at + 1)
    value, end = read_value(text, at)
    settings.append(Setting(key, value, location, origin.after(text[:at])))
    return skip_space(text, end)
