"""Command `pnx help`: explain a key of configurations, or find keys by words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddlenlp_ext.commands.arguments import wants_help
from paddlenlp_ext.commands.pnx import COMMANDS, find_function
from paddlenlp_ext.config.help_text import (
    BASIC_KEYS,
    USAGE,
    Keys,
    help_text,
    read_aliases,
    read_keys,
    show_default,
    wrapped,
)
from paddlenlp_ext.utils.suggest import nearest

PROGRAMS = {
    "sft": "run_finetune",
    "dpo": "run_dpo",
    "reward": "run_reward",
    "grpo": "run_grpo",
    "quantize": "run_quantization",
}
"""Command that reads a configuration -> its script in llm/."""
_USAGE = """usage: pnx help KEY | WORDS | COMMAND [--all]

Explain a key of configurations, by its name here or in another toolkit; find the keys whose names,
descriptions and values contain all WORDS; or print the help text of a command.

  --all                         also find keys that have no effect

examples: pnx help lora_rank; pnx help cutoff_len; pnx help learning rate; pnx help sft
"""
_PAGES = {
    "preference": "docs/reference/preference.md#preference",
    "reward": "docs/reference/preference.md#reward",
    "grpo": "docs/reference/grpo.md#grpo",
    "rewards": "docs/reference/grpo.md#rewards",
    "ptq": "docs/reference/quantization.md",
}
"""Section -> page with its keys; the keys of other sections are in docs/configuration.md."""
_MOST_FOUND = 25
_INDENT = 14


def run(argv: Sequence[str]) -> None:
    """Explain the key or command that the arguments name, or list the keys that contain all words.

    Raises:
        ValueError: no key has all words.
    """
    words = [word for word in argv if word not in ("--all", "-h", "--help")]
    with_idle = "--all" in argv
    if wants_help(argv) or not (words or with_idle):
        print(_USAGE)
        print(_basic_keys() if not wants_help(argv) else "", end="")
    elif not words:
        print(help_text(read_keys("sft"), USAGE.format("pnx sft"), with_idle=True), end="")
    elif (command := " ".join(words)) in COMMANDS:
        find_function(command)(["--help"])
    else:
        print(explain(words, with_idle))


def explain(words: Sequence[str], with_idle: bool = False) -> str:
    """Return the explanation of a key, or the list of the keys whose names, descriptions or values contain all words.

    Args:
        words: a key, one of its other names, or words to look for.
        with_idle: whether to list keys without effect too.

    Raises:
        ValueError: no key has all words.
    """
    programs: dict[str, Keys] = {name: read_keys(name) for name in PROGRAMS}
    written = words[0].lstrip("-").replace("-", "_")
    if len(words) == 1:
        for name, keys in programs.items():
            key = written if written in keys else read_aliases(name).get(written)
            if key is not None:
                return _card(key, programs, written)
    found = _find([word.lstrip("-").lower() for word in words], programs, with_idle)
    if found:
        return _list(found)
    names = {spelling for name, keys in programs.items() for spelling in (*keys, *read_aliases(name))}
    match = nearest("_".join(words).lstrip("-"), names)
    remedy = f"did you mean {match!r}?" if match else "`pnx help` lists the basic keys"
    raise ValueError(f"pnx help: no key has {' '.join(words)!r} in its name or description; {remedy}")


def _card(key: str, programs: dict[str, Keys], written: str) -> str:
    """Return the description of a key, with its type, default, programs, other names and page."""
    entries = {name: keys[key] for name, keys in programs.items() if key in keys}
    active = {name: each for name, each in entries.items() if not each.get("x-idle")}
    entry = next(iter((active or entries).values()))
    aliases = [alias for alias, other in read_aliases(next(iter(entries))).items() if other == key]
    lines = [f"{written} is another name of {key}", ""] if written != key else []
    lines += [key, *wrapped(entry["description"], 2), ""]
    readers = ", ".join(f"pnx {name} (llm/{PROGRAMS[name]}.py)" for name in active)
    facts = {
        "type": entry.get("x-type"),
        "default": _defaults(active or entries) if "x-type" in entry else None,
        "read by": readers or "no program; the key is accepted for compatibility",
        "needs": _needed(entry.get("x-methods", ())),
        "checked with": ", ".join(entry.get("x-with", ())),
        "no effect if": "; ".join(entry.get("x-no-effect-if", ())),
        "other names": ", ".join(aliases),
        "section": entry["x-section"],
    }
    if "x-toolkit" in entry:
        means = (f"{value}: {_pairs(keys)}" for value, keys in entry.get("x-means", {}).items())
        accepted = ", ".join(show_default(value) for value in entry.get("enum", ()))
        facts = {"read as": "; ".join(means), "accepted": accepted, "section": entry["x-section"]}
    facts["page"] = _page(entry)
    for name, value in facts.items():
        lines += wrapped(value, _INDENT + 2, f"  {name}") if value else []
    return "\n".join(lines)


def _defaults(entries: Keys) -> str:
    """Return the default of a key; if programs have different defaults, the default in each program."""
    defaults = {name: show_default(entry["default"]) for name, entry in entries.items()}
    if len(set(defaults.values())) == 1:
        return next(iter(defaults.values()))
    return ", ".join(f"{default} ({name})" for name, default in defaults.items())


def _needed(methods: Sequence[str]) -> str:
    """Return the switch of the adapter method that reads a key, and the names of its variants that read the key."""
    if not methods:
        return ""
    variants = f"; its variants {', '.join(methods[1:])} have the key too" if methods[1:] else ""
    return f"{methods[0]}: true{variants}"


def _pairs(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {show_default(value)}" for key, value in keys.items()) or "accepted"


def _page(entry: Mapping[str, Any]) -> str:
    """Return the link to the section of the page that describes a key."""
    section = entry["x-section"]
    if section in _PAGES:
        return _PAGES[section]
    return f"docs/configuration.md#{section.lower().replace(' ', '-')}"


def _find(words: Sequence[str], programs: dict[str, Keys], with_idle: bool) -> dict[str, str]:
    """Return a dict from keys that contain all words to their descriptions; matches in names come first."""
    found: dict[bool, dict[str, str]] = {True: {}, False: {}}
    for keys in programs.values():
        for key, entry in keys.items():
            values = (value for value in entry.get("enum", ()) if isinstance(value, str))
            text = " ".join([key, *entry.get("x-aliases", ()), entry["description"], *values]).lower()
            is_shown = with_idle or not entry.get("x-idle")
            if is_shown and all(word in text for word in words):
                found[all(word in key for word in words)].setdefault(key, entry["description"])
    return found[True] | {key: text for key, text in found[False].items() if key not in found[True]}


def _list(found: dict[str, str]) -> str:
    lines = []
    for key, description in list(found.items())[:_MOST_FOUND]:
        lines += wrapped(description, 32, f"  {key}")
    if len(found) > _MOST_FOUND:
        lines += ["", f"{len(found) - _MOST_FOUND} more keys; add a word to see fewer"]
    return "\n".join([*lines, "", "`pnx help KEY` explains one key"])


def _basic_keys() -> str:
    keys = read_keys("sft")
    lines = ["basic keys:"]
    for key in BASIC_KEYS:
        lines += wrapped(keys[key]["description"], 32, f"  {key}") if key in keys and "x-idle" not in keys[key] else []
    return "\n".join(lines) + "\n"
