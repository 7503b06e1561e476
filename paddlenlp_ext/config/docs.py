"""The keys in words: for `--help` and for the documentation."""

from __future__ import annotations

import json
from typing import Any

from paddlenlp_ext.config.keys import KnownKeys
from paddlenlp_ext.config.options import Option, type_words
from paddlenlp_ext.config.run_config import SECTIONS

_TITLES = {
    "not yet": "known, not available yet",
    "not here": "known, with another place here",
    "no effect": "known, without effect here",
}


def help_text(known: KnownKeys, usage: str) -> str:
    """All keys in groups, one line a key."""
    lines = [f"usage: {usage}"]
    for title, options in groups(known):
        lines += ["", f"{title}:"]
        for option in options:
            limits = option.limits.describe()
            facts = f"{type_words(option)}{', ' + limits if limits else ''}; default {show_default(option.default)}"
            if option.section in _TITLES:
                facts = f"default {show_default(option.default)}"
            lines.append(f"  --{option.key:<28} {option.help}{_remark(option, known)} [{facts}]")
            if option.aliases:
                lines.append(f"    {'':<28} also --{', --'.join(option.aliases)}")
    return "\n".join(lines) + "\n"


def markdown_tables(known: KnownKeys) -> str:
    """All keys in groups, as Markdown tables."""
    lines = []
    for title, options in groups(known):
        lines += [f"### {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for option in options:
            limits = option.limits.describe()
            kind = type_words(option) + (f": {limits}" if limits else "")
            also = f" (also `{'`, `'.join(option.aliases)}`)" if option.aliases else ""
            meaning = option.help + _remark(option, known)
            lines.append(f"| `{option.key}`{also} | {kind} | {show_default(option.default)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def groups(known: KnownKeys) -> list[tuple[str, list[Option]]]:
    """(title, options) of the sections, then of the adapter methods, then of the keys that only wait."""
    order = [*SECTIONS, *known.methods, *_TITLES]
    result = []
    for section in order:
        options = [option for option in known.options.values() if option.section == section]
        if options:
            result.append((_TITLES.get(section, section), options))
    return result


def _remark(option: Option, known: KnownKeys) -> str:
    """What the availability table says about a section's key, "" where it works."""
    row = known.rows.get(option.key)
    if row is None or row.kind is not None:
        return ""
    if row.outcome == "no effect" or row.of is not None:
        return f" (no effect: {row.reason if row.of is None else row.of + ' is not available yet'})"
    return f" (only {', '.join(show_default(value) for value in row.neutral)} so far: {row.reason})"


def show_default(default: Any) -> str:
    """A default as it would stand in the file, "unset" for null."""
    if default is None:
        return "unset"
    if isinstance(default, float) and 0 < abs(default) < 1e-3:
        return f"{default:g}"
    return json.dumps(default, ensure_ascii=False)
