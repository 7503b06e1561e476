"""Parse words that all commands accept: short names of arguments, and the folder of a run as first argument."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext.config.help_text import ALL_FLAGS, HELP_FLAGS

SHORT_NAMES = {"-m": "--model", "-a": "--adapter", "-d": "--data", "-o": "--out"}
"""Short name of an argument -> long name, which the parsers of the programs accept."""


def with_long_names(argv: Sequence[str]) -> list[str]:
    """Replace the short names of arguments with their long names, in both forms: `-m VALUE` and `-m=VALUE`."""
    split = [word.partition("=") for word in argv]
    return [
        "".join((SHORT_NAMES[name], *rest)) if name in SHORT_NAMES else name + "".join(rest) for name, *rest in split
    ]


def names(argv: Sequence[str], *keys: str) -> bool:
    """Return whether a command line sets one of the keys `keys`."""
    written = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return not written.isdisjoint(keys)


def wants_help(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for the help text."""
    return not set(HELP_FLAGS).isdisjoint(argv)


def wants_all_keys(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for a help text with all keys."""
    return not set(ALL_FLAGS).isdisjoint(argv)


def take_first(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the first word and the remaining words; if the first word begins with "-", return None and all words."""
    if argv and not argv[0].startswith("-"):
        return argv[0], list(argv[1:])
    return None, list(argv)
