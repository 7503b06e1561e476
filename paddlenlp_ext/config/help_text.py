"""Describe all keys, for `--help` and docs/configuration.md."""

from __future__ import annotations

import json
from typing import Any

from paddlenlp_ext.config.dataclass_options import Option, type_words
from paddlenlp_ext.config.known_keys import OptionTable

_COMPAT_TITLES = {
    "not yet": "PaddleNLP keys that are not available yet",
    "not here": "PaddleNLP keys that are not used here",
    "no effect": "PaddleNLP keys without effect",
}


def help_text(table: OptionTable, usage: str) -> str:
    """Return the text of `--help`: all keys in groups, one line per key."""
    lines = [f"usage: {usage}"]
    for title, options in groups(table):
        lines += ["", f"{title}:"]
        for option in options:
            limits = option.limits.describe()
            default = "required" if option.required else f"default {show_default(option.default)}"
            details = f"{type_words(option)}{', ' + limits if limits else ''}; {default}"
            if option.section in _COMPAT_TITLES:
                details = default
            lines.append(f"  --{option.key:<28} {option.help}{_remark(option, table)} [{details}]")
            if option.aliases:
                lines.append(f"    {'':<28} also --{', --'.join(option.aliases)}")
    return "\n".join(lines) + "\n"


def markdown_tables(table: OptionTable) -> str:
    """Return all keys in groups, as Markdown tables."""
    lines = []
    for title, options in groups(table):
        lines += [f"### {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for option in options:
            limits = option.limits.describe()
            kind = type_words(option) + (f": {limits}" if limits else "")
            also = f" (also `{'`, `'.join(option.aliases)}`)" if option.aliases else ""
            meaning = (option.help + _remark(option, table)).replace("|", r"\|")
            lines.append(f"| `{option.key}`{also} | {kind} | {show_default(option.default)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def groups(table: OptionTable) -> list[tuple[str, list[Option]]]:
    """Return the groups of keys, as (title, options): sections, adapter methods, then compatibility keys."""
    by_section: dict[str, list[Option]] = {}
    for option in table.options.values():
        by_section.setdefault(option.section, []).append(option)
    compat = {title: by_section.pop(outcome, []) for outcome, title in _COMPAT_TITLES.items()}
    return [(title, options) for title, options in {**by_section, **compat}.items() if options]


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
