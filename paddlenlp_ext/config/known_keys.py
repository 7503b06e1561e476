"""Tables of the known keys: keys of sections, of adapter methods, of PaddleNLP and of other toolkits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paddlenlp_ext.config.dataclass_options import Option
from paddlenlp_ext.config.paddlenlp_keys import COMPAT_KEYS, CompatKey
from paddlenlp_ext.config.run_config import SECTIONS, SHARED_SECTIONS, method_options, options_of, switches_of
from paddlenlp_ext.config.toolkit_keys import ANSWERED_KEYS, RENAMED_KEYS


@dataclass(frozen=True)
class OptionTable:
    """Options of a program by key and by alias.

    Attributes:
        options: key -> option, in the order of the help text.
        keys: key or alias -> key.
        compat: key -> entry, for keys of PaddleNLP and of other toolkits that are not fully implemented.
        toolkit: keys and aliases of other toolkits, which cannot be abbreviated.
    """

    options: dict[str, Option]
    keys: dict[str, str] = field(init=False)
    compat: dict[str, CompatKey] = field(default_factory=dict)
    toolkit: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        keys: dict[str, str] = {}
        for option in self.options.values():
            for spelling in option.spellings:
                assert spelling not in keys, f"two keys are spelled {spelling}"
                keys[spelling] = option.key
        object.__setattr__(self, "keys", keys)

    def find(self, written: str) -> list[str]:
        """Return the key whose name or alias is `written`; otherwise all keys with the prefix `written`."""
        if written in self.keys:
            return [self.keys[written]]
        spellings = [spelling for spelling in self.keys if spelling not in self.toolkit and written]
        return sorted({self.keys[spelling] for spelling in spellings if spelling.startswith(written)})


@dataclass(frozen=True)
class KnownKeys(OptionTable):
    """Options of a run.

    Attributes:
        sections: name -> class, for every section.
        methods: switch -> config class, for every adapter method.
        method_keys: key of an adapter method -> switches of all methods with this key.
    """

    sections: Mapping[str, type] = field(default_factory=dict)
    methods: Mapping[str, type] = field(default_factory=dict)
    method_keys: dict[str, list[str]] = field(default_factory=dict)


def program_options(options: Iterable[Option], compat: Iterable[CompatKey] = ()) -> OptionTable:
    """Return the table of a program's options and compatibility keys."""
    compat = list(compat)
    all_options = [*options, *(entry.option() for entry in compat)]
    return OptionTable({option.key: option for option in all_options}, {entry.key: entry for entry in compat})


def known_keys(methods: Mapping[str, type], sections: Mapping[str, type] = SECTIONS) -> KnownKeys:
    """Return the table of a program's options.

    Args:
        methods: switch -> config class, for every adapter method.
        sections: name -> class, for every section of the program.
    """
    options: dict[str, Option] = {}
    for section, section_class in sections.items():
        for option in options_of(section_class, section):
            assert option.key not in options, f"two sections have the key {option.key}"
            options[option.key] = option
    method_keys: dict[str, list[str]] = {}
    # A method precedes its variants (LoRA precedes PiSSA), so that shared keys are in the group of the method.
    for switch, method in sorted(methods.items(), key=lambda item: len(switches_of(*item))):
        options[switch] = _switch_option(switch, method)
        for option in method_options(switch, method):
            earlier = options.get(option.key)
            assert earlier is None or earlier.kinds == option.kinds, f"two types for the key {option.key}"
            options.setdefault(option.key, option)
            method_keys.setdefault(option.key, []).append(switch)
    compat = {}
    # Skip PaddleNLP's entries for keys of adapter methods, and for keys that the shared sections lack.
    shared = {option.key for name, section in SHARED_SECTIONS.items() for option in options_of(section, name)}
    claimed = {spelling for option in options.values() for spelling in option.spellings if spelling not in shared}
    for entry in COMPAT_KEYS:
        if entry.kind is None:
            compat[entry.key] = entry
        elif entry.key not in claimed:
            assert entry.key not in options, f"{entry.key} is a section's key: its entry must not have a type"
            compat[entry.key] = entry
            options[entry.key] = entry.option()
    toolkit = _add_toolkit_keys(options, compat)
    return KnownKeys(options, compat, toolkit, sections, methods, method_keys)


def _add_toolkit_keys(options: dict[str, Option], compat: dict[str, CompatKey]) -> frozenset[str]:
    """Add the keys of other toolkits whose counterparts are in `options`, and return the added keys."""
    declared = {spelling for option in options.values() for spelling in option.spellings}
    renamed = {key: here for key, here in RENAMED_KEYS.items() if key not in declared and here in options}
    for key, here in renamed.items():
        options[here] = dataclasses.replace(options[here], aliases=(*options[here].aliases, key))
    answered = [entry for entry in ANSWERED_KEYS if entry.key not in declared]
    answered = [entry for entry in answered if all(options.keys() >= keys.keys() for keys in entry.sets.values())]
    for entry in answered:
        compat[entry.key] = entry
        options[entry.key] = dataclasses.replace(entry.option(), section="toolkit")
    return frozenset(renamed) | {entry.key for entry in answered}


def _switch_option(switch: str, method: type) -> Option:
    needed = [name for name in switches_of(switch, method) if name != switch]
    doc = (method.__doc__ or "").strip()
    # The default docstring of a dataclass is its signature, which is useless as help.
    summary = (
        ""
        if not doc or doc.startswith(f"{method.__name__}(")
        else doc.splitlines()[0].removeprefix("Options of ").rstrip(".")
    )
    assert dataclasses.is_dataclass(method), f"{method.__name__} should be a dataclass"
    return Option(
        key=switch,
        section=switch,
        attribute="",
        kinds=frozenset({bool}),
        optional=False,
        default=False,
        help=f"train {'with ' + summary if summary else 'an adapter'}"
        + "".join(f" (requires {name}: true)" for name in needed),
    )
