"""The command line: JSON files and `--key value` settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paddlenlp_ext.config.errors import COMMAND_LINE_ORDER, Location, Problem
from paddlenlp_ext.config.json_reader import Setting
from paddlenlp_ext.config.keys import KnownKeys
from paddlenlp_ext.config.options import FALSE_WORDS, TRUE_WORDS, UNSET_WORD


@dataclass
class CommandLine:
    """A command line taken apart."""

    files: list[str] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    wants_help: bool = False


def read_command_line(argv: Sequence[str], known: KnownKeys) -> CommandLine:
    """Sort the arguments into files and settings.

    `--key value` and `--key=value`; a key of true or false may stand alone (`--lora`) or be denied (`--no_lora`);
    `-` and `_` are one in keys; of a repeated key the last wins; null unsets a key.
    """
    line = CommandLine()
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if argument in ("-h", "--help"):
            line.wants_help = True
        elif argument.startswith("--"):
            _read_setting(argument, arguments, known, line)
        elif argument.startswith("-"):
            message = f"{argument!r} is not a file and not a --key; keys begin with two dashes"
            line.problems.append(Problem("", message, _place(argument, len(line.settings))))
        else:
            line.files.append(argument)
    return line


def _read_setting(argument: str, rest: list[str], known: KnownKeys, line: CommandLine) -> None:
    name, equals, word = argument[2:].partition("=")
    key = name.replace("-", "_")
    place = _place(f"--{name}", len(line.settings))
    denied = key.removeprefix("no_")
    if key not in known.keys and denied != key and _is_switch(denied, known):
        if equals:
            line.problems.append(Problem(key, f"--{name} takes no value", place))
        line.settings.append(Setting(denied, "false", place, place))
        return
    if not equals:
        can_stand_alone = _is_switch(key, known)
        if rest and not rest[0].startswith("--") and _is_value(rest[0], key, known, can_stand_alone):
            word = rest.pop(0)
        elif can_stand_alone:
            word = "true"
        elif key in known.keys:
            line.problems.append(Problem(key, f"a value is missing after --{name}", place))
            return
    line.settings.append(Setting(key, None if word == UNSET_WORD else word, place, place))


def _is_switch(key: str, known: KnownKeys) -> bool:
    return key in known.keys and bool in known.options[known.keys[key]].kinds


def _is_value(word: str, key: str, known: KnownKeys, can_stand_alone: bool) -> bool:
    """Whether the word after `--key` belongs to it: a true-or-false key leaves a file name alone."""
    if not can_stand_alone:
        # The value of an unknown key would otherwise be taken for a file and reported a second time.
        return key in known.keys or not word.endswith(".json")
    takes_text = str in known.options[known.keys[key]].kinds
    return takes_text or word.lower() in TRUE_WORDS + FALSE_WORDS or word == UNSET_WORD or not word.endswith(".json")


def _place(argument: str, index: int) -> Location:
    return Location(None, argument=argument, order=COMMAND_LINE_ORDER + index)
