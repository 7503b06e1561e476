"""Describe all keys, for `--help` and docs/configuration.md."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection
from typing import Any

from paddlenlp_ext.config.dataclass_options import Option, type_words
from paddlenlp_ext.config.known_keys import OptionTable

_COLUMNS = 100
_COMPAT_TITLES = {
    "not yet": "PaddleNLP keys that are not available yet",
    "not here": "PaddleNLP keys that are not used here",
    "no effect": "PaddleNLP keys without effect",
}


def help_text(table: OptionTable, usage: str, read: Collection[str] | None = None) -> str:
    """Return the text of `--help`: the keys that have an effect, in groups, in lines of at most 100 columns.

    Args:
        table: keys that the program accepts.
        usage: first lines of the text.
        read: keys that the program reads; None: all keys of the table that are not in the compatibility table.
    """
    lines = [f"usage: {usage}"]
    for title, options in groups(table):
        options = [option for option in options if (read is None or option.key in read) and _has_effect(option, table)]
        lines += ["", f"{title}:"] if options else []
        for option in options:
            limits = option.limits.describe()
            default = "required" if option.required else f"default {show_default(option.default)}"
            details = f"{type_words(option)}{', ' + limits if limits else ''}; {default}"
            lines += _entry(f"--{option.key}", f"{option.help}{_remark(option, table)} [{details}]")
            if aliases := _aliases(option, table):
                lines += _entry("", f"also --{', --'.join(aliases)}")
    if table.toolkit:
        lines += ["", "docs/configuration.md lists the keys of other toolkits that are accepted or explained."]
    if table.compat:
        lines += ["", "docs/configuration.md lists PaddleNLP's keys that have no effect or are not available."]
    return "\n".join(lines) + "\n"


def _entry(name: str, text: str) -> list[str]:
    """Return the lines of a key: its name, and its text in a column of its own."""
    start = f"  {name:<30} "
    wrap = textwrap.TextWrapper(
        _COLUMNS, initial_indent=start, subsequent_indent=" " * 33, break_on_hyphens=False, break_long_words=False
    )
    return wrap.wrap(text)


def markdown_tables(table: OptionTable) -> str:
    """Return all keys in groups, as Markdown tables."""
    lines = []
    for title, options in groups(table):
        lines += [f"### {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for option in options:
            limits = option.limits.describe()
            kind = type_words(option) + (f": {limits}" if limits else "")
            aliases = _aliases(option, table)
            also = f" (also `{'`, `'.join(aliases)}`)" if aliases else ""
            meaning = (option.help + _remark(option, table)).replace("|", r"\|")
            lines.append(f"| `{option.key}`{also} | {kind} | {show_default(option.default)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def groups(table: OptionTable) -> list[tuple[str, list[Option]]]:
    """Return the groups of keys, as (title, options): sections, adapter methods, then PaddleNLP's keys."""
    by_section: dict[str, list[Option]] = {}
    for option in table.options.values():
        if option.key not in table.toolkit:
            by_section.setdefault(option.section, []).append(option)
    compat = {title: by_section.pop(outcome, []) for outcome, title in _COMPAT_TITLES.items()}
    return [(title, options) for title, options in {**by_section, **compat}.items() if options]


def _aliases(option: Option, table: OptionTable) -> list[str]:
    return [alias for alias in option.aliases if alias not in table.toolkit]


def _has_effect(option: Option, table: OptionTable) -> bool:
    """Return whether some value of a key changes what the program does."""
    entry = table.compat.get(option.key)
    return option.section not in _COMPAT_TITLES and (entry is None or entry.outcome != "no effect")


def _remark(option: Option, table: OptionTable) -> str:
    """Return how the compatibility table limits a section's key; "" if the key is fully supported."""
    entry = table.compat.get(option.key)
    if entry is None or entry.kind is not None:
        return ""
    if entry.outcome == "no effect" or entry.needs is not None:
        reason = entry.reason if entry.needs is None else f"{entry.needs} is not available yet"
        return f" (no effect: {reason})"
    return f" (available: {', '.join(show_default(value) for value in entry.neutral)}; other values: {entry.reason})"


def show_default(default: Any) -> str:
    """Format a default as in a JSON file, with "unset" for null."""
    if default is None:
        return "unset"
    if isinstance(default, float) and 0 < abs(default) < 1e-3:
        return f"{default:g}"
    return json.dumps(default, ensure_ascii=False)
