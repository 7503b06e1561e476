"""All keys that a run may use: those of the sections, of the given adapter methods, and the known but idle ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from paddlenlp_ext.config.options import Option
from paddlenlp_ext.config.paddlenlp_compat import ROWS, Row
from paddlenlp_ext.config.run_config import SECTIONS, method_options, options_of, switches_of


@dataclass(frozen=True)
class KnownKeys:
    """Look-up tables, made by `known_keys`."""

    options: dict[str, Option]
    """Key -> its option, in the order of the sections."""
    keys: dict[str, str]
    """Every spelling, aliases too -> its key."""
    rows: dict[str, Row]
    """Key -> its row of the availability table."""
    methods: Mapping[str, type]
    method_keys: dict[str, list[str]]
    """Key of an adapter method -> the switches of the methods that have it."""


def known_keys(methods: Mapping[str, type]) -> KnownKeys:
    """The keys of the sections, of the methods (switch -> config class) and of the rows that no method claims."""
    options: dict[str, Option] = {}
    for section, section_class in SECTIONS.items():
        for option in options_of(section_class, section):
            assert option.key not in options, f"two sections have the key {option.key}"
            options[option.key] = option
    method_keys: dict[str, list[str]] = {}
    for switch, method in methods.items():
        options[switch] = _switch_option(switch, method)
        for option in method_options(switch, method):
            earlier = options.get(option.key)
            assert earlier is None or earlier.kinds == option.kinds, f"two types for the key {option.key}"
            options.setdefault(option.key, option)
            method_keys.setdefault(option.key, []).append(switch)
    rows = {}
    claimed = {spelling for option in options.values() if option.section in methods for spelling in option.spellings}
    for row in ROWS:
        if row.kind is None:
            rows[row.key] = row
        elif claimed.isdisjoint((row.key, *row.aliases)):
            assert row.key not in options, f"{row.key} is a section's key: its row says no type"
            rows[row.key] = row
            options[row.key] = row.option()
    keys: dict[str, str] = {}
    for option in options.values():
        for spelling in option.spellings:
            assert spelling not in keys, f"two keys are spelled {spelling}"
            keys[spelling] = option.key
    return KnownKeys(options, keys, rows, methods, method_keys)


def _switch_option(switch: str, method: type) -> Option:
    needed = [name for name in switches_of(switch, method) if name != switch]
    doc = (method.__doc__ or "").strip()
    # A dataclass without a docstring gets its signature as one, which helps nobody.
    summary = "" if not doc or doc.startswith(f"{method.__name__}(") else doc.splitlines()[0].rstrip(".")
    assert dataclasses.is_dataclass(method), f"{method.__name__} should be a dataclass"
    return Option(
        key=switch,
        section=switch,
        attribute="",
        kinds=frozenset({bool}),
        optional=False,
        default=False,
        help=f"train an adapter{': ' + summary if summary else ''}" + "".join(f" (with {name})" for name in needed),
    )
