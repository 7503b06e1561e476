"""Read the settings of a flat YAML file with the core schema of YAML 1.2: `3e-4` is a number, `no` is a string.

PyYAML parses the text, and this module converts plain scalars according to section 10.3.2 of https://yaml.org/spec/1.2.2.
PyYAML itself would apply YAML 1.1, where `no` is false and `3e-4` is a string. Aliases and tags are errors.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml
from yaml.reader import ReaderError

from paddlenlp_ext.config.setting import Setting
from paddlenlp_ext.utils.json_reader import MAX_DIGITS, JsonError, Location

MAX_DEPTH = 20
"""Maximum depth of nested lists and objects."""
_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"(true|True|TRUE)|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_SYNTAX_HINTS = (
    ("'\\t'", "a tab where YAML accepts only spaces; replace it with spaces"),
    ("found unhashable key", "this key is not a string"),
    ("mapping values are not allowed here", "a second ':' on this line; put a string with ': ' into quotes"),
    ("could not find expected ':'", "expected ':' after a key"),
    ("<stream end>", "the file ends inside a list or an object"),
    ("found unexpected end of stream", "this string has no closing quote"),
    ("found unknown escape character", r"a backslash begins an escape sequence; use single quotes, or \\"),
    ("cannot start any token", "this character cannot begin a value; put the string into quotes"),
)
"""Words in an error message of PyYAML -> message for the user."""


def read_yaml_settings(text: str, origin: Location, settings: list[Setting]) -> None:
    """Append the settings of a YAML text to `settings`.

    Raises:
        JsonError: the text is not YAML, is not one mapping, or has aliases, tags or a value that JSON cannot represent.
    """
    nodes = _compose(text)
    if not nodes:
        raise JsonError("the file is empty; write one `key: value` per line", text, len(text))
    if len(nodes) > 1:
        raise JsonError("a second document begins here (---); keep one document", text, nodes[1].start_mark.index)
    (root,) = nodes
    if not isinstance(root, yaml.MappingNode):
        raise JsonError("the file must contain one `key: value` per line", text, root.start_mark.index)
    for key, value in root.value:
        settings.append(
            Setting(
                _key(key, text),
                _value(value, text),
                origin.after(text[: key.start_mark.index]),
                origin.after(text[: value.start_mark.index]),
            )
        )


def _compose(text: str) -> list[yaml.Node]:
    """Return the root nodes of the documents in a text.

    Raises:
        JsonError: the text is not YAML, has aliases, or is nested deeper than `MAX_DEPTH`.
    """
    try:
        _check_events(text)
        return list(yaml.compose_all(text, Loader=yaml.BaseLoader))
    except ReaderError as error:
        message = f"the character U+{ord(text[error.position]):04X} is not accepted; remove it"
        raise JsonError(message, text, error.position) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem)
        hint = next((hint for words, hint in _SYNTAX_HINTS if words in problem), problem)
        raise JsonError(hint, text, mark.index if mark else 0) from None


def _check_events(text: str) -> None:
    """Check that a text has no aliases and is not nested too deeply, before PyYAML builds nodes."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.BaseLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise JsonError("aliases (*name) are not accepted; write the value again", text, event.start_mark.index)
        if depth > MAX_DEPTH:
            raise JsonError(
                f"lists and objects are nested more than {MAX_DEPTH} levels deep", text, event.start_mark.index
            )


def _key(node: yaml.Node, text: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise JsonError("a key must be a string", text, node.start_mark.index)
    _check_tag(node, text)
    return node.value


def _value(node: yaml.Node, text: str) -> Any:
    """Convert a node to JSON types."""
    _check_tag(node, text)
    if isinstance(node, yaml.ScalarNode):
        # A scalar with quotes, | or > is a string.
        return node.value if node.style else _plain_scalar(node, text)
    if isinstance(node, yaml.SequenceNode):
        return [_value(element, text) for element in node.value]
    members: dict[str, Any] = {}
    for key, value in node.value:
        name = _key(key, text)
        if name in members:
            raise JsonError(f"duplicate key {name!r}; keep one", text, key.start_mark.index)
        members[name] = _value(value, text)
    return members


def _plain_scalar(node: yaml.ScalarNode, text: str) -> Any:
    word = node.value
    if _NULL.fullmatch(word):
        return None
    if match := _BOOL.fullmatch(word):
        return match[1] is not None
    if _INT.fullmatch(word):
        if len(word) > MAX_DIGITS:
            message = f"a whole number of {len(word)} digits; use at most {MAX_DIGITS}"
            raise JsonError(message, text, node.start_mark.index)
        return int(word, 0 if word[1:2] in ("o", "x") else 10)
    if _NOT_FINITE.fullmatch(word) or (_FLOAT.fullmatch(word) and not math.isfinite(float(word))):
        raise JsonError(f"{word} is not a finite number", text, node.start_mark.index)
    return float(word) if _FLOAT.fullmatch(word) else word


def _check_tag(node: yaml.Node, text: str) -> None:
    """Check that the user wrote no tag, such as `!!python/object`."""
    at = node.start_mark.index
    if text.startswith("!", at):
        raise JsonError("tags (!name) are not accepted; write the value without the tag", text, at)
