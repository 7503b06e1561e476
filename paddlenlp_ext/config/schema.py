"""How a section says what its keys are: `option(...)` in place of a dataclass field, read back as `Option`s."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_METADATA = "paddlenlp_ext.option"
_SCALARS = (bool, int, float, str)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Which values of the right type are allowed; every bound is optional."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] | None = None
    flags: tuple[str, ...] | None = None

    def describe(self) -> str:
        """The limits in words, "" where there are none."""
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
            text = "words of " + ", ".join(self.flags)
        return text


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
    key: str | None = None,
    arguments: Sequence[str] = (),
) -> Any:
    """A dataclass field that is also a configuration key.

    Args:
        default: value when the key is absent or `null`.
        help: one line that tells a user what the key does.
        minimum, maximum: inclusive bounds of a number (of every number, where the type is a list).
        above, below: exclusive bounds of a number.
        choices: allowed strings (for a list: allowed elements).
        flags: allowed words of a string that holds words separated by spaces.
        aliases: other spellings of the key.
        key: the whole key in the file, where it is not the field's name (in an adapter method: not `<switch>_<name>`).
        arguments: further names of the field in an adapter config's constructor; no keys of the file.
    """
    limits = Limits(
        minimum=minimum,
        maximum=maximum,
        above=above,
        below=below,
        choices=None if choices is None else tuple(choices),
        flags=None if flags is None else tuple(flags),
    )
    details = {"help": help, "limits": limits, "aliases": tuple(aliases), "key": key, "arguments": tuple(arguments)}
    metadata = {_METADATA: details}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One key: its type, limits and help, and where its value goes (`section`, `attribute`)."""

    key: str
    section: str
    attribute: str
    kinds: frozenset[type]
    """bool, int, float, str, list or tuple (of strings), Mapping (to strings or null); object for any value."""
    optional: bool
    default: Any
    help: str
    limits: Limits = Limits()
    aliases: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """The key and its aliases."""
        return (self.key, *self.aliases)


def _number(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def kinds_of(annotation: Any) -> tuple[frozenset[type], bool]:
    """The plain types in an annotation such as `list[str] | None`, and whether None is among them."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = typing.get_args(annotation)
    else:
        members = (annotation,)
    kinds = {typing.get_origin(member) or member for member in members if member is not type(None)}
    assert kinds <= {*_SCALARS, list, tuple, Mapping, object}, f"no rule reads {annotation} from a configuration file"
    return frozenset(kinds), type(None) in members


def options_of(section_class: type, section: str, prefix: str = "") -> list[Option]:
    """The options of a dataclass in their order; fields made without `option(...)` are not keys."""
    hints = typing.get_type_hints(section_class)
    options = []
    for field in dataclasses.fields(section_class):
        details = field.metadata.get(_METADATA)
        if details is None:
            continue
        kinds, optional = kinds_of(hints[field.name])
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        options.append(
            Option(
                key=details["key"] or prefix + field.name,
                section=section,
                attribute=field.name,
                kinds=kinds,
                optional=optional,
                default=default,
                help=details["help"],
                limits=details["limits"],
                aliases=details["aliases"],
                arguments=details["arguments"],
            )
        )
    return options
