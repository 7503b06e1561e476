"""Declare configuration keys as dataclass fields with `option(...)`, and convert values to their types.

A section declares its keys as fields:

    @dataclass(frozen=True, kw_only=True)
    class OptimConfig(OptionGroup):
        learning_rate: float = option(5e-5, minimum=0, help="peak learning rate")

    options_of(OptimConfig, "optim")   # [Option(key="learning_rate", kinds={float}, ...)], for the parser and docs
    OptimConfig(learning_rate=-1.0)    # ValueError: limits also apply to objects created in Python
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_ext.utils.json_reader import MAX_DIGITS, JsonError, read_value
from paddlenlp_ext.utils.suggest import nearest

_METADATA = "paddlenlp_ext.option"
_SCALARS = (bool, int, float, str)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the values of an option; None: no limit."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | None = None
    flags: tuple[str, ...] | None = None

    def describe(self) -> str:
        """Describe the limits, such as "at least 0"; return "" if there are none."""
        words = []
        for bound, word in ((self.minimum, "at least"), (self.above, "above"), (self.maximum, "at most")):
            if bound is not None:
                words.append(f"{word} {_number(bound)}")
        if self.below is not None:
            words.append(f"below {_number(self.below)}")
        text = ", ".join(words)
        if self.choices is not None:
            text = "one of " + ", ".join(self.choices)
        if self.flags is not None:
            text = f"one or more of {', '.join(self.flags)}, separated by spaces"
        return text

    def check(self, value: Any) -> None:
        """Check that a value of the right type is within the limits.

        Raises:
            ValueError: the value, or an element of a list or object, is outside the limits.
        """
        if self.flags is not None:
            for word in value.split():
                if word not in self.flags:
                    raise ValueError(f"{word!r} is not one of the allowed words: {', '.join(self.flags)}")
        for element in _elements(value):
            if self.choices is not None and isinstance(element, str) and element not in self.choices:
                match = nearest(element, self.choices)
                hint = f"; did you mean {match!r}?" if match else ""
                raise ValueError(f"{_show(element)} is not one of: {', '.join(self.choices)}{hint}")
            if isinstance(element, int | float) and not self._within(element):
                raise ValueError(f"{_show(element)} is out of range; allowed: {self.describe()}")

    def _within(self, number: float) -> bool:
        return (
            (self.minimum is None or number >= self.minimum)
            and (self.maximum is None or number <= self.maximum)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
            and math.isfinite(number)
        )


def option(
    default: Any,
    *,
    help: str,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: Sequence[str] | None = None,
    flags: Sequence[str] | None = None,
    aliases: Sequence[str] = (),
    winning_aliases: Sequence[str] = (),
    synonyms: Mapping[str, str] | None = None,
    key: str | None = None,
    arguments: Sequence[str] = (),
) -> Any:
    """Return a dataclass field that is also a configuration key.

    Args:
        default: value of an absent or `null` key; `dataclasses.MISSING` makes the key required.
        help: one-line description of the key, for `--help` and docs/configuration.md.
        minimum, maximum: inclusive bounds of a number, or of each number in a list.
        above, below: exclusive bounds of a number, or of each number in a list.
        choices: allowed strings, or allowed elements of a list.
        flags: allowed words in a string of space-separated words.
        aliases: other names of the key.
        winning_aliases: other names that take precedence over the key in the same file.
        synonyms: synonym -> choice.
        key: name of the key; None: name of the field, with the prefix `<switch>_` in an adapter method.
        arguments: other names of the field in the constructor of an adapter config; these names are not keys.
    """
    limits = Limits(
        minimum=minimum,
        maximum=maximum,
        above=above,
        below=below,
        choices=None if choices is None else tuple(choices),
        flags=None if flags is None else tuple(flags),
    )
    details = {
        "help": help,
        "limits": limits,
        "key": key,
        "synonyms": dict(synonyms or {}),
        "aliases": (*aliases, *winning_aliases),
        "winning_aliases": tuple(winning_aliases),
        "arguments": tuple(arguments),
    }
    metadata = {_METADATA: details}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Option:
    """Configuration key with its type, limits and help; `attribute` is the field of the section's dataclass."""

    key: str
    section: str
    attribute: str
    kinds: frozenset[type]
    """Accepted types: bool, int, float, str, list or tuple (of strings), Mapping (to strings or null), dict, object."""
    optional: bool
    default: Any
    help: str
    limits: Limits = Limits()
    aliases: tuple[str, ...] = ()
    winning_aliases: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    required: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return all names of the key."""
        return (self.key, *self.aliases)


class OptionGroup:
    """Base class of dataclasses whose fields are options; the constructor checks types and limits.

    A string is converted to a tuple if the type of the option is a tuple; if the option also has choices, commas
    separate the elements. A synonym is replaced with its choice.

    Raises:
        ValueError: a value has the wrong type or is outside the limits.
    """

    def __post_init__(self) -> None:
        for option_ in declared_options(type(self)):
            value = getattr(self, option_.attribute)
            if tuple in option_.kinds and isinstance(value, str | list | tuple | set | frozenset):
                object.__setattr__(self, option_.attribute, tuple(_listed(option_, value)))
            elif isinstance(value, str):
                object.__setattr__(self, option_.attribute, option_.synonyms.get(value, value))
            self.check_option(option_.attribute, getattr(self, option_.attribute))

    def check_option(self, attribute: str, *values: Any) -> None:
        """Check values of the field `attribute`.

        Raises:
            ValueError: a value has the wrong type or is outside the limits.
        """
        option_ = next(option_ for option_ in declared_options(type(self)) if option_.attribute == attribute)
        for value in values:
            if value is None and option_.optional:
                continue
            try:
                if not _has_kind(option_, value):
                    raise ValueError(f"expected {type_words(option_)}, got {value!r}")
                option_.limits.check(value)
            except ValueError as error:
                raise ValueError(f"{self.name_in_errors(option_)}: {error}") from None

    def name_in_errors(self, option_: Option) -> str:
        """Return the name of an option in error messages: the key."""
        return option_.key


@functools.cache
def declared_options(group: type) -> tuple[Option, ...]:
    """Return the options of a dataclass, with `section` set to ""."""
    return tuple(options_of(group, ""))


def _has_kind(option: Option, value: Any) -> bool:
    """Return whether a value has one of the option's types; an int is also a float, but a bool is not a number."""
    kinds = option.kinds
    if object in kinds:
        return True
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, (*kinds, int) if float in kinds else tuple(kinds))


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def kinds_of(annotation: Any) -> tuple[frozenset[type], bool]:
    """Return the types in an annotation such as `list[str] | None`, and whether None is one of them."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = typing.get_args(annotation)
    else:
        members = (annotation,)
    kinds = {typing.get_origin(member) or member for member in members if member is not type(None)}
    assert kinds <= {*_SCALARS, list, tuple, dict, Mapping, object}, f"unsupported type of an option: {annotation}"
    return frozenset(kinds), type(None) in members


_type_hints = functools.cache(typing.get_type_hints)


def options_of(group: type, section: str, prefix: str = "") -> list[Option]:
    """Return the options of a dataclass in field order; fields without `option(...)` are skipped."""
    hints = _type_hints(group)
    options = []
    for field_ in dataclasses.fields(group):
        details = field_.metadata.get(_METADATA)
        if details is None:
            continue
        kinds, optional = kinds_of(hints[field_.name])
        default = field_.default
        if default is dataclasses.MISSING and field_.default_factory is not dataclasses.MISSING:
            default = field_.default_factory()
        options.append(
            Option(
                key=details["key"] or prefix + field_.name,
                section=section,
                attribute=field_.name,
                kinds=kinds,
                optional=optional,
                default=None if default is dataclasses.MISSING else default,
                required=default is dataclasses.MISSING,
                help=details["help"],
                limits=details["limits"],
                aliases=details["aliases"],
                winning_aliases=details["winning_aliases"],
                synonyms=details["synonyms"],
                arguments=details["arguments"],
            )
        )
    return options


TRUE_WORDS = ("true", "yes", "1", "on")
FALSE_WORDS = ("false", "no", "0", "off")
UNSET_WORD = "null"
_KIND_WORDS = ((bool, "true or false"), (int, "a whole number"), (float, "a number"), (str, "a string"))
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_VALUE = object()


def type_words(option: Option) -> str:
    """Describe the type of an option in words."""
    if object in option.kinds:
        return "any value"
    words = [word for kind, word in _KIND_WORDS if kind in option.kinds]
    if not option.kinds.isdisjoint((list, tuple)):
        words.append("a list of strings")
    if Mapping in option.kinds:
        words.append("an object {name: string or null}")
    if dict in option.kinds:
        words.append("an object")
    return " or ".join(words)


def convert(option: Option, written: Any, from_command_line: bool) -> Any:
    """Convert a JSON value, or a word of the command line, to the type of an option.

    Raises:
        ValueError: the value has the wrong type, is out of range or is not a choice.
    """
    if isinstance(written, str) and not from_command_line and _LONE_SURROGATE.search(written):
        raise ValueError("invalid Unicode: unpaired surrogate (\\ud800 to \\udfff)")
    if isinstance(written, str) and "\0" in written:
        raise ValueError("the string has a NUL character (\\u0000); remove it")
    value = _from_word(option, written) if from_command_line else _from_json(option, written)
    if value is _NO_VALUE:
        raise ValueError(f"expected {type_words(option)}, got {_show(written)}{_hint(option, written)}")
    if isinstance(value, str):
        value = option.synonyms.get(value, value)
    option.limits.check(value)
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
    if str in kinds and isinstance(written, str):
        return written
    if not kinds.isdisjoint((list, tuple)):
        elements = _listed(option, written)
        if isinstance(elements, list) and all(isinstance(element, str) for element in elements):
            return list(elements)
    if dict in kinds and isinstance(written, dict):
        return written
    if Mapping in kinds and isinstance(written, dict):
        return written if all(value is None or isinstance(value, str) for value in written.values()) else _NO_VALUE
    return _NO_VALUE


def _listed(option: Option, written: Any) -> Any:
    """Return a list unchanged, split a string of choices at commas, and wrap any other string in a list."""
    if not isinstance(written, str):
        return written
    return [word.strip() for word in written.split(",")] if option.limits.choices is not None else [written]


def _from_word(option: Option, word: str) -> Any:
    kinds = option.kinds
    if bool in kinds and word.lower() in TRUE_WORDS + FALSE_WORDS:
        return word.lower() in TRUE_WORDS
    if int in kinds and re.fullmatch(rf"[-+]?\d{{1,{MAX_DIGITS}}}", word):
        return int(word)
    if float in kinds and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word) and math.isfinite(float(word)):
        return float(word)
    if not kinds.isdisjoint((dict, Mapping)) and word.startswith("{"):
        return _json_word(option, word)
    if not kinds.isdisjoint((list, tuple)) and (str not in kinds or word.startswith("[")):
        return _json_word(option, word) if word.startswith("[") else [part for part in word.split(",") if part]
    return word if str in kinds or object in kinds else _NO_VALUE


def _json_word(option: Option, word: str) -> Any:
    try:
        value, end = read_value(word)
    except JsonError:
        return _NO_VALUE
    return _NO_VALUE if word[end:].strip() else _from_json(option, value)


def _elements(value: Any) -> list[Any]:
    """Return the values in a list, tuple or object; otherwise `[value]`."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


def _hint(option: Option, written: Any) -> str:
    if isinstance(written, dict) and option.kinds.isdisjoint((dict, Mapping)):
        return "; configuration files are flat, so this value cannot be an object"
    if isinstance(written, str) and not {bool, int, float}.isdisjoint(option.kinds):
        value = _from_word(option, written)
        if isinstance(value, bool) and written not in ("true", "false"):
            return f"; write {json.dumps(value)} without quotes"
        return "; write it without quotes" if value is not _NO_VALUE else ""
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
