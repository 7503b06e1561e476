"""From the command line to a checked `RunConfig`: read, merge, convert, build, check. All problems come at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from paddlenlp_ext.config.checks import run_checks
from paddlenlp_ext.config.command_line import CommandLine, read_command_line
from paddlenlp_ext.config.describe import help_text
from paddlenlp_ext.config.given import Given
from paddlenlp_ext.config.known import KnownKeys, known_keys
from paddlenlp_ext.config.methods import build_method
from paddlenlp_ext.config.problems import ConfigError, Place, Problem
from paddlenlp_ext.config.reader import Setting, read_file
from paddlenlp_ext.config.resolve import resolve
from paddlenlp_ext.config.schema import Option
from paddlenlp_ext.config.tree import SECTIONS, RunConfig
from paddlenlp_ext.config.values import convert
from paddlenlp_ext.utils.registry import nearest

USAGE = "run_finetune.py CONFIG.json [MORE.json ...] [--key value ...]   (--help lists the keys)"


def load_run_config(argv: Sequence[str], peft_methods: Mapping[str, type]) -> RunConfig:
    """Read JSON files and `--key value` settings into a tree.

    Args:
        argv: the arguments after the script's name.
        peft_methods: JSON switch -> config class of every adapter method there is.

    Raises:
        ConfigError: everything that is wrong, each problem with its place.
        SystemExit: after `--help`.
    """
    known = known_keys(peft_methods)
    line = read_command_line(argv, known)
    if line.wants_help:
        sys.stdout.write(help_text(known, USAGE))
        raise SystemExit(0)
    if not argv:
        raise ConfigError([Problem("", f"nothing was given; usage: {USAGE}", Place())])
    given, unreadable = _read(line, known)
    config = _build(given)
    if not unreadable:
        config = resolve(config, given)
        run_checks(config, given)
    if given.problems:
        raise ConfigError(given.problems)
    config.notes.extend(given.notes)
    return config


def _read(line: CommandLine, known: KnownKeys) -> tuple[Given, bool]:
    """Merge all settings, later ones over earlier ones; the flag says that a file broke off."""
    given = Given(known, problems=list(line.problems))
    if line.files:
        given.home = Place(line.files[-1], order=len(line.files) - 1)
    given.broken.update(problem.key for problem in line.problems)
    sources = []
    unreadable = False
    for order, path in enumerate(line.files):
        settings, problems = read_file(path, order)
        unreadable = unreadable or any(problem.key == "" for problem in problems)
        given.problems += problems
        sources.append(settings)
    sources.append(line.settings)
    for settings in sources:
        _take_source(settings, given)
    return given, unreadable


def _take_source(settings: list[Setting], given: Given) -> None:
    """Take the settings of one file, or of the command line, over what was given before."""
    here: dict[str, Setting] = {}
    for setting in settings:
        key = given.known.keys.get(setting.key)
        if key is None:
            match = nearest(setting.key, given.known.keys)
            given.problems.append(Problem(setting.key, _unknown_key(setting, match), setting.place))
            if match is not None:
                # What was meant is not called absent as well.
                given.broken.add(given.known.keys[match])
            continue
        earlier = here.setdefault(key, setting)
        if earlier.key != setting.key and earlier.value != setting.value:
            message = f"{setting.key} and {earlier.key} are one key, here with two values; keep one of them"
            given.problems.append(Problem(setting.key, message, setting.place))
            given.broken.add(key)
            continue
        _take(given.known.options[key], setting, given)


def _take(option: Option, setting: Setting, given: Given) -> None:
    given.settings[option.key] = setting
    given.values.pop(option.key, None)
    if setting.value is None:
        del given.settings[option.key]
    elif option.section == "command" and not setting.from_command_line:
        message = f"{setting.key} belongs on the command line: --{setting.key}"
        given.problems.append(Problem(setting.key, message, setting.place))
    else:
        try:
            given.values[option.key] = convert(option, setting.value, setting.from_command_line)
        except ValueError as error:
            given.problems.append(Problem(setting.key, f"{setting.key}: {error}", setting.value_place))
            given.broken.add(option.key)


def _unknown_key(setting: Setting, match: str | None) -> str:
    message = f"unknown key {setting.key!r}"
    if match is not None:
        return f"{message}; did you mean {match!r}?"
    if isinstance(setting.value, dict):
        return f"{message}; the file is flat: write the keys of this object one level up"
    return f"{message}; --help lists the keys"


def _build(given: Given) -> RunConfig:
    """The tree of what could be read; keys with problems have their defaults."""
    sections = {}
    for section, section_class in SECTIONS.items():
        options = [option for option in given.known.options.values() if option.section == section]
        values = {option.attribute: given.values[option.key] for option in options if option.key in given.values}
        sections[section] = section_class(**values)
    switch, method = build_method(given)
    return RunConfig(**sections, peft=method, peft_switch=switch)
