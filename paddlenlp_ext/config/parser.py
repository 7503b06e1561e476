"""From the command line to a checked `RunConfig`: read, merge, convert, build, check. All problems come at once.

The adapter method that the switches choose, built from its keys.

Defaults that follow from other keys or from the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import expanduser
from typing import Any

from paddlenlp_ext.config.command_line import CommandLine, read_command_line
from paddlenlp_ext.config.device import has_gpu
from paddlenlp_ext.config.docs import help_text
from paddlenlp_ext.config.errors import ConfigError, Location, Problem
from paddlenlp_ext.config.json_reader import Setting, read_file
from paddlenlp_ext.config.keys import KnownKeys, known_keys
from paddlenlp_ext.config.options import Option, convert
from paddlenlp_ext.config.parse_state import ParseState
from paddlenlp_ext.config.run_config import SECTIONS, RunConfig, method_options, switches_of
from paddlenlp_ext.config.sections import METRIC_SPELLINGS, PrecisionConfig, TrainConfig
from paddlenlp_ext.config.validation import run_checks
from paddlenlp_ext.utils.registry import nearest


def build_method(given: ParseState) -> tuple[str | None, Any]:
    """The chosen switch and its config, (None, None) where no method is on or its keys have problems."""
    methods = given.known.methods
    on = [switch for switch in methods if given.value(switch) is True]
    refined = {name for switch in on for name in switches_of(switch, methods[switch]) if name != switch}
    chosen = [switch for switch in on if switch not in refined]
    for switch in chosen:
        for needed in switches_of(switch, methods[switch]):
            if needed in given.broken:
                return None, None
            if needed not in on:
                given.refuse(f"{switch} needs {needed}: true as well", switch, needed)
                return None, None
    if len(chosen) > 1:
        given.refuse(f"{' and '.join(chosen)} are both on; an adapter has one method, keep one", *reversed(chosen))
        return None, None
    _note_idle_keys(given, chosen)
    if not chosen:
        return None, None
    return _build_method_config(given, chosen[0])


def _build_method_config(given: ParseState, switch: str) -> tuple[str | None, Any]:
    method = given.known.methods[switch]
    values = {}
    for option in method_options(switch, method):
        if option.key in given.broken:
            return None, None
        if option.key in given.values:
            values[option.attribute] = given.values[option.key]
    try:
        return switch, method(**values)
    except ValueError as error:
        given.refuse(f"{switch}: {error}", *_keys_set(given, switch), switch)
        return None, None


def _keys_set(given: ParseState, switch: str) -> list[str]:
    """The keys of a method that were set, the last written first."""
    keys = [option.key for option in method_options(switch, given.known.methods[switch])]
    return sorted(
        (key for key in keys if key in given.settings),
        key=lambda key: given.settings[key].place.sort_key(),
        reverse=True,
    )


def _note_idle_keys(given: ParseState, chosen: list[str]) -> None:
    for key, switches in given.known.method_keys.items():
        known_idle = given.broken.isdisjoint((key, *switches)) and not set(switches) & set(chosen)
        if key in given.settings and known_idle:
            unread = next((switch for switch in switches if given.value(switch) is True), None)
            reason = f"{switches[0]} is false" if unread is None else f"{chosen[0]} does not use it"
            given.note(f"{key} has no effect: {reason}", key)


LOWER_IS_BETTER = ("loss", "perplexity")


def resolve(config: RunConfig, given: ParseState) -> RunConfig:
    """Fill in what was left open; what a user would not expect becomes a note."""
    model = config.model
    if model.tokenizer_name_or_path is None:
        model = replace(model, tokenizer_name_or_path=model.model_name_or_path)
    return replace(
        config,
        model=model,
        train=_resolve_train(config.train, given),
        precision=_resolve_device(config.precision),
    )


def _resolve_train(train: TrainConfig, given: ParseState) -> TrainConfig:
    metric = train.metric_for_best_model
    if metric is not None:
        metric = metric.removeprefix("eval_")
        metric = METRIC_SPELLINGS.get(metric, metric)
    if metric is None or metric == "no":
        metric = "loss"
    greater = train.greater_is_better
    if train.evaluation_strategy != "no" and not train.do_eval and "do_eval" not in given.settings:
        given.note(f"do_eval is on, because evaluation_strategy is {train.evaluation_strategy}", "evaluation_strategy")
        train = replace(train, do_eval=True)
    resume = train.resume_from_checkpoint or None
    return replace(
        train,
        output_dir=None if train.output_dir is None else expanduser(train.output_dir),
        eval_steps=train.eval_steps or train.logging_steps,
        metric_for_best_model=metric,
        greater_is_better=metric not in LOWER_IS_BETTER if greater is None else greater,
        resume_from_checkpoint=expanduser(resume) if isinstance(resume, str) else resume,
        report_to=tuple(place for place in train.report_to if place != "none"),
    )


def _resolve_device(precision: PrecisionConfig) -> PrecisionConfig:
    if precision.device != "auto":
        return precision
    return replace(precision, device="gpu" if has_gpu() else "cpu")


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
        raise ConfigError([Problem("", f"nothing was given; usage: {USAGE}", Location())])
    given, unreadable = _read(line, known)
    config = _build(given)
    if not unreadable:
        config = resolve(config, given)
        run_checks(config, given)
    if given.problems:
        raise ConfigError(given.problems)
    config.notes.extend(given.notes)
    return config


def _read(line: CommandLine, known: KnownKeys) -> tuple[ParseState, bool]:
    """Merge all settings, later ones over earlier ones; the flag says that a file broke off."""
    given = ParseState(known, problems=list(line.problems))
    if line.files:
        given.home = Location(line.files[-1], order=len(line.files) - 1)
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


def _take_source(settings: list[Setting], given: ParseState) -> None:
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


def _take(option: Option, setting: Setting, given: ParseState) -> None:
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


def _build(given: ParseState) -> RunConfig:
    """The tree of what could be read; keys with problems have their defaults."""
    sections = {}
    for section, section_class in SECTIONS.items():
        options = [option for option in given.known.options.values() if option.section == section]
        values = {option.attribute: given.values[option.key] for option in options if option.key in given.values}
        sections[section] = section_class(**values)
    switch, method = build_method(given)
    return RunConfig(**sections, peft=method, peft_switch=switch)
