"""Describe the keys of a program as a JSON schema (2020-12): for editors, `--help` and `pnx help`.

docs/make_configuration.py writes the schemas to `paddlenlp_ext/config/schema`, so that `--help` does not import Paddle.

| annotation of a key | meaning |
|---|---|
| `x-section` | section of the configuration, or switch of the adapter method |
| `x-type` | type and limits in words |
| `x-aliases` | other names of the key |
| `x-methods` | switches of the adapter methods that have the key |
| `x-with` | other keys in the rules that check the key (config/validation) |
| `x-no-effect-if` | conditions under which the key has no effect |
| `x-idle` | true: the key has no effect in the program |
| `x-toolkit` | true: a key of another toolkit |
| `x-means` | text of a toolkit key's value -> keys and values of this project with the same meaning |
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from paddlenlp_ext.config.dataclass_options import Option, type_words
from paddlenlp_ext.config.key_tables import COMPAT_TITLES, groups, own_aliases, remark
from paddlenlp_ext.config.known_keys import OptionTable, known_keys
from paddlenlp_ext.config.paddlenlp_keys import CompatKey
from paddlenlp_ext.config.programs import Program
from paddlenlp_ext.config.setting import SCHEMA_KEY
from paddlenlp_ext.config.validation import keys_of_rules
from paddlenlp_ext.config.validation.training import reasons_without_effect

Schema = dict[str, Any]
_TYPES = {bool: ("boolean", "integer"), int: ("integer",), float: ("number",), str: ("string",), dict: ("object",)}
"""Type of an option -> JSON types of its values; 0 and 1 are also accepted for a boolean."""


def program_schema(program: Program, methods: Mapping[str, type]) -> Schema:
    """Return the JSON schema of a program's configuration files.

    Args:
        program: the program.
        methods: switch -> config class, for every adapter method.
    """
    known = known_keys(methods if program.has_adapters else {}, program.sections)
    keys = describe_keys(known, program.unread)
    for key, switches in known.method_keys.items():
        keys[key]["x-methods"] = switches
    for key, others in _keys_in_rules().items():
        if key in keys and (present := sorted(others & keys.keys())):
            keys[key]["x-with"] = present
    for key, reasons in reasons_without_effect().items():
        if key in keys and "x-idle" not in keys[key]:
            keys[key]["x-no-effect-if"] = reasons
    in_files = {key: entry for key, entry in keys.items() if entry["x-section"] != "command"}
    aliases = {alias: key for alias, key in known.keys.items() if alias != key and key in in_files}
    references = {alias: {"$ref": f"#/properties/{key}"} for alias, key in aliases.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Configuration of {program.script}",
        "type": "object",
        "properties": {SCHEMA_KEY: {"type": "string"}, **in_files, **references},
        "additionalProperties": False,
        "x-command-line": {key: entry for key, entry in keys.items() if key not in in_files},
    }


def describe_keys(table: OptionTable, unread: Collection[str] = ()) -> dict[str, Schema]:
    """Return a dict from keys to schemas, in the order of the groups; keys of other toolkits come last.

    Args:
        table: keys that the program accepts.
        unread: keys of sections that the program does not read.
    """
    keys = {}
    for title, options in groups(table):
        for option in options:
            entry = table.compat.get(option.key)
            is_idle = option.key in unread or title in COMPAT_TITLES.values()
            is_idle = is_idle or (entry is not None and entry.outcome == "no effect")
            keys[option.key] = {
                "description": option.help + remark(option, table),
                **_values(option),
                **_accepted(entry, option),
                "default": list(option.default) if isinstance(option.default, tuple) else option.default,
                "x-section": title,
                "x-type": _type_and_limits(option),
                **({"x-required": True} if option.required else {}),
                **({"x-aliases": aliases} if (aliases := own_aliases(option, table)) else {}),
                **({"x-idle": True} if is_idle else {}),
            }
    answered = (option for option in table.options.values() if option.key in table.toolkit)
    return keys | {option.key: _toolkit_key(option, table.compat[option.key]) for option in answered}


def _toolkit_key(option: Option, entry: CompatKey) -> Schema:
    means = {value: dict(keys) for value, keys in entry.sets.items()}
    described = {"description": option.help, "x-section": "keys of other toolkits", "x-idle": True, "x-toolkit": True}
    return described | _accepted(entry, option) | ({"x-means": means} if means else {})


def _type_and_limits(option: Option) -> str:
    limits = option.limits.describe()
    return type_words(option) + (f": {limits}" if limits else "")


def _accepted(entry: CompatKey | None, option: Option) -> Schema:
    """Return the `enum` of the accepted values of a key that is not fully implemented; {} if any value is accepted."""
    if entry is None or entry.outcome == "no effect" or entry.needs is not None:
        return {}
    neutral = [value for value in entry.neutral if value is not None]
    others: list[Any] = [word for word, value in option.synonyms.items() if value in neutral]
    others += [int(value) for value in neutral if isinstance(value, bool) and bool in option.kinds]
    if option.optional and not option.kinds.isdisjoint((str, object)) and "" not in neutral:
        others.append("")  # read as null
    return {"enum": [None, *neutral, *others, *map(_from_text, entry.sets)]}


def _from_text(value: str) -> Any:
    """Convert the text of a boolean to the boolean; return other texts unchanged."""
    return json.loads(value) if value in ("true", "false") else value


def _values(option: Option) -> Schema:
    """Return the JSON schema keywords for the values of an option, including null."""
    if object in option.kinds:
        return {}
    limits, is_list = option.limits, not option.kinds.isdisjoint((list, tuple))
    types = [name for kind, names in _TYPES.items() if kind in option.kinds for name in names]
    types += ["array"] if is_list else []
    types += ["string"] if is_list and "string" not in types else []
    types += ["object"] if Mapping in option.kinds else []
    bounds = (
        ("minimum", limits.minimum),
        ("exclusiveMinimum", limits.above),
        ("maximum", limits.maximum),
        ("exclusiveMaximum", limits.below),
    )
    schema: Schema = {"type": [*types, "null"], **{name: bound for name, bound in bounds if bound is not None}}
    if bool in option.kinds and int not in option.kinds:
        schema |= {"minimum": 0, "maximum": 1}
    if limits.choices is not None:
        schema |= _chosen([*limits.choices, *option.synonyms], option, is_list)
    else:
        schema |= {"items": {"type": "string"}} if is_list else {}
        schema |= {"additionalProperties": {"type": ["string", "null"]}} if Mapping in option.kinds else {}
    if limits.flags is not None:
        words = "|".join(limits.flags)
        schema["pattern"] = rf"^\s*(({words})(\s+|$))*$"
    return schema


def _chosen(choices: list[str], option: Option, is_list: bool) -> Schema:
    """Return the JSON schema keywords for a choice, a list of choices or an object whose values are choices."""
    if is_list:
        return {"anyOf": [{"enum": [*choices, None]}, {"type": "array", "items": {"enum": choices}}]}
    if Mapping in option.kinds:
        in_object = {"type": "object", "additionalProperties": {"enum": [*choices, None]}}
        return {"anyOf": [{"enum": [*choices, None]}, in_object]}
    return {"enum": [*choices, None, *([False, True, 0, 1] if bool in option.kinds else [])]}


@cache
def _keys_in_rules() -> dict[str, set[str]]:
    """Return a dict from each key to the other keys in the rules that check it."""
    found: dict[str, set[str]] = {}
    for keys in keys_of_rules():
        for key in keys:
            found.setdefault(key, set()).update(set(keys) - {key})
    return found


def schema_text(schema: Schema) -> str:
    """Return a schema as JSON with one line per key."""
    lines = []
    for name, value in schema.items():
        if name in ("properties", "x-command-line"):
            members = (f"    {_line(key)}: {_line(entry)}" for key, entry in value.items())
            lines.append(f"  {_line(name)}: {{\n" + ",\n".join(members) + "\n  }")
        else:
            lines.append(f"  {_line(name)}: {_line(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
