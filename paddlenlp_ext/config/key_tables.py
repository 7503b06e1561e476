"""Tables of a program's keys in Markdown, for docs/configuration.md."""

from __future__ import annotations

from paddlenlp_ext.config.dataclass_options import Option, type_words
from paddlenlp_ext.config.help_text import show_default
from paddlenlp_ext.config.known_keys import OptionTable

_COLUMNS = 100
COMPAT_TITLES = {
    "not yet": "PaddleNLP keys that are not available yet",
    "not here": "PaddleNLP keys that are not used here",
    "no effect": "PaddleNLP keys without effect",
}
"""Outcome of a PaddleNLP key (config/paddlenlp_keys.py) -> title of its group."""


def markdown_tables(table: OptionTable) -> str:
    """Return a Markdown table for each group of keys."""
    lines = []
    for title, options in groups(table):
        lines += [f"### {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for option in options:
            limits = option.limits.describe()
            kind = type_words(option) + (f": {limits}" if limits else "")
            aliases = own_aliases(option, table)
            also = f" (also `{'`, `'.join(aliases)}`)" if aliases else ""
            meaning = (option.help + remark(option, table)).replace("|", r"\|")
            lines.append(f"| `{option.key}`{also} | {kind} | {show_default(option.default)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def groups(table: OptionTable) -> list[tuple[str, list[Option]]]:
    """Return the groups of keys, as (title, options): sections, adapter methods, then PaddleNLP's keys."""
    by_section: dict[str, list[Option]] = {}
    for option in table.options.values():
        if option.key not in table.toolkit:
            by_section.setdefault(option.section, []).append(option)
    compat = {title: by_section.pop(outcome, []) for outcome, title in COMPAT_TITLES.items()}
    return [(title, options) for title, options in {**by_section, **compat}.items() if options]


def own_aliases(option: Option, table: OptionTable) -> list[str]:
    """Return the aliases of a key, without its names in other toolkits."""
    return [alias for alias in option.aliases if alias not in table.toolkit]


def remark(option: Option, table: OptionTable) -> str:
    """Return a remark about the supported values of a section's key; "" if all values are supported."""
    entry = table.compat.get(option.key)
    if entry is None or entry.kind is not None:
        return ""
    if entry.outcome == "no effect" or entry.needs is not None:
        reason = entry.reason if entry.needs is None else f"{entry.needs} is not available yet"
        return f" (no effect: {reason})"
    return f" (available: {', '.join(show_default(value) for value in entry.neutral)}; other values: {entry.reason})"
