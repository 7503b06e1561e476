"""Parse the command lines of all programs: `--key value` settings and, for some programs, configuration files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paddlenlp_ext.config.config_files import FILE_SUFFIXES
from paddlenlp_ext.config.dataclass_options import FALSE_WORDS, TRUE_WORDS, UNSET_WORD, Option
from paddlenlp_ext.config.errors import ArgumentLocation, ConfigError, Problem
from paddlenlp_ext.config.help_text import ALL_FLAGS, HELP_FLAGS, print_help
from paddlenlp_ext.config.known_keys import OptionTable, program_options
from paddlenlp_ext.config.merge_settings import ParseState
from paddlenlp_ext.config.paddlenlp_keys import CompatKey
from paddlenlp_ext.config.setting import Setting


@dataclass
class CommandLine:
    """Command-line arguments, split into files and settings."""

    files: list[str] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    wants_help: bool = False
    wants_all: bool = False


def parse_arguments(
    argv: Sequence[str],
    options: Iterable[Option],
    usage: str,
    compat: Iterable[CompatKey] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Parse the command line of a program that takes no files.

    Args:
        argv: the arguments after the program's name.
        options: the accepted arguments.
        usage: first lines of the help text.
        compat: entries for arguments of PaddleNLP's program that are not implemented.

    Returns:
        A dict from the field of each passed argument to its value, and notes for the user.

    Raises:
        ConfigError: arguments are unknown, missing or invalid; the message lists all problems.
        SystemExit: after `--help`.
    """
    options = list(options)
    table = program_options(options, compat)
    line = read_command_line(argv, table)
    if line.wants_help:
        from paddlenlp_ext.config.key_schema import describe_keys

        print_help(describe_keys(program_options(options)), usage, line.wants_all)
    state = ParseState(table)
    state.report.problems += line.problems
    state.report.invalid_keys.update(problem.key for problem in line.problems)
    for file in line.files:
        state.report.error(f"unexpected argument {file!r}; write --key value", "")
    state.merge(line.settings)
    for key, option in table.options.items():
        if option.required and key not in state.values and key not in state.report.invalid_keys:
            state.report.error(f"--{key} is required", key)
    state.check_compat()
    if state.report.problems:
        raise ConfigError(state.report.problems, subject="the arguments")
    by_key = {key: value for key, value in state.values.items() if key not in table.compat}
    return {table.options[key].attribute: value for key, value in by_key.items()}, state.report.notes


def read_command_line(argv: Sequence[str], table: OptionTable) -> CommandLine:
    """Split the arguments into files and settings.

    Settings are `--key value` or `--key=value`. A boolean key needs no value (`--lora`), and can be negated
    (`--no_lora`). `-` and `_` are equivalent in keys, and a unique prefix of a key is accepted. The value `null` unsets
    a key.
    """
    line = CommandLine()
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if argument in HELP_FLAGS:
            line.wants_help = True
            line.wants_all = line.wants_all or argument in ALL_FLAGS
        elif argument.startswith("--"):
            _read_setting(argument, arguments, table, line)
        elif argument.startswith("-"):
            message = f"{argument!r} is neither a file nor a --key; keys begin with two dashes"
            line.problems.append(Problem("", message, _location(argument, line)))
        else:
            line.files.append(argument)
    return line


def _read_setting(argument: str, rest: list[str], table: OptionTable, line: CommandLine) -> None:
    name, equals, word = argument[2:].partition("=")
    key = name.replace("-", "_")
    location = _location(f"--{name}", line)
    negated = key.removeprefix("no_")
    if key not in table.keys and negated != key and negated in table.keys and _is_switch(negated, table):
        if equals:
            line.problems.append(Problem(key, f"--{name} takes no value", location))
        line.settings.append(Setting(negated, "false", location, location))
        return
    if not equals:
        value_is_optional = _is_switch(key, table)
        if rest and not rest[0].startswith("--") and _is_value(rest[0], key, table, value_is_optional):
            word = rest.pop(0)
        elif value_is_optional:
            word = "true"
        elif len(table.find(key)) == 1:
            line.problems.append(Problem(key, f"a value is missing after --{name}", location))
            return
    line.settings.append(Setting(key, None if word == UNSET_WORD else word, location, location))


def _is_switch(key: str, table: OptionTable) -> bool:
    found = table.find(key)
    return len(found) == 1 and bool in table.options[found[0]].kinds


def _is_value(word: str, key: str, table: OptionTable, value_is_optional: bool) -> bool:
    """Return whether the word after `--key` is the value of the key, and not a file."""
    if not value_is_optional:
        # Read the word after an unknown key as its value, because the error would otherwise name a missing file.
        return bool(table.find(key)) or not word.endswith(FILE_SUFFIXES)
    takes_text = str in table.options[table.find(key)[0]].kinds
    return (
        takes_text or word.lower() in TRUE_WORDS + FALSE_WORDS or word == UNSET_WORD or not word.endswith(FILE_SUFFIXES)
    )


def _location(argument: str, line: CommandLine) -> ArgumentLocation:
    return ArgumentLocation(argument=argument, index=len(line.settings))
