"""Parse configuration files and the command line into a checked `RunConfig`, and report all problems in one error.

argv -> settings -> values -> implied keys -> sections and adapter config -> derived defaults -> rules between keys
     -> RunConfig
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import expanduser
from typing import Any

from paddlenlp_ext.config.command_line import read_command_line
from paddlenlp_ext.config.config_files import read_file
from paddlenlp_ext.config.dev_sets import best_metric, dev_set_names
from paddlenlp_ext.config.errors import ArgumentLocation, ConfigError, Problem
from paddlenlp_ext.config.help_text import USAGE, file_keys, print_help
from paddlenlp_ext.config.implied_keys import adjust, translate_toolkit_keys
from paddlenlp_ext.config.key_schema import program_schema
from paddlenlp_ext.config.known_keys import KnownKeys, known_keys
from paddlenlp_ext.config.merge_settings import ParseState
from paddlenlp_ext.config.programs import find_program
from paddlenlp_ext.config.run_config import SECTIONS, RunConfig, method_options, switches_of
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.precision import PrecisionConfig
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.config.setting import SCHEMA_KEY, Setting
from paddlenlp_ext.config.validation import check_run
from paddlenlp_ext.config.validation.ptq import check_quantization
from paddlenlp_ext.config.validation.rules import AdapterChoice
from paddlenlp_ext.devices import resolve_auto
from paddlenlp_ext.utils.json_reader import Location


def load_run_config(
    argv: Sequence[str],
    peft_methods: Mapping[str, type],
    sections: Mapping[str, type] = SECTIONS,
    program: str = "run_finetune.py",
    defaults: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Parse JSON or YAML files and `--key value` settings.

    Args:
        argv: the arguments after the script's name.
        peft_methods: switch of an adapter method -> config class, for every method.
        sections: name -> class, for every section of the program (config/run_config.py).
        program: name of the script, for the help text.
        defaults: defaults that replace the defaults of the sections.

    Raises:
        ConfigError: the configuration has problems; the message lists all problems with their locations.
        SystemExit: after `--help`.
    """
    known, usage = known_keys(peft_methods, sections), USAGE.format(program)
    line = read_command_line(argv, known)
    if line.wants_help:
        print_help(file_keys(program_schema(find_program(program), peft_methods)), usage, line.wants_all)
    if not argv:
        raise ConfigError([Problem("", f"no arguments; usage: {usage}", ArgumentLocation())])
    state = ParseState(known)
    state.merge(_settings_of(defaults or {}, program))
    state.report.problems += line.problems
    state.report.invalid_keys.update(problem.key for problem in line.problems)
    return _parse(state, known, line.files, [line.settings])


def run_config_from(
    config: Mapping[str, Any] | str | os.PathLike[str],
    overrides: Mapping[str, Any],
    peft_methods: Mapping[str, type],
    sections: Mapping[str, type] = SECTIONS,
) -> RunConfig:
    """Build the configuration of a run from a dict or file.

    Args:
        config: keys and values, or the path of a JSON or YAML file.
        overrides: keys that override `config`.
        peft_methods: switch of an adapter method -> config class, for every method.
        sections: name -> class, for every section of the program.

    Raises:
        ConfigError: the configuration has problems; the message lists all problems with their keys.
    """
    known = known_keys(peft_methods, sections)
    if isinstance(config, Mapping):
        return _parse(
            ParseState(known), known, [], [_settings_of(config, "config"), _settings_of(overrides, "overrides")]
        )
    return _parse(ParseState(known), known, [os.fspath(config)], [_settings_of(overrides, "overrides")])


def _settings_of(keys: Mapping[str, Any], source: str) -> list[Setting]:
    """Return the settings of a dict, with values converted to JSON types."""
    location = Location(source)
    return [Setting(key, _as_json(value), location, location) for key, value in keys.items() if key != SCHEMA_KEY]


def _as_json(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return list(value) if isinstance(value, tuple) else value


def _parse(state: ParseState, known: KnownKeys, files: Sequence[str], sources: Sequence[list[Setting]]) -> RunConfig:
    """Return the checked configuration; `sources` override files, and later sources override earlier sources."""
    report = state.report
    is_complete = _read_files(state, files)
    for settings in sources:
        state.merge(settings)
    if is_complete:
        translate_toolkit_keys(state)
        adjust(state)
    sections = _build_sections(state, known.sections)
    switch, adapter = _build_adapter(state, known)
    if is_complete:
        _derive_defaults(sections)
        state.check_compat()
        if "ptq" in sections:
            check_quantization(sections, state.values, report)
        else:
            check_run(sections, _adapter_choice(state, known, switch), report)
    if report.problems:
        raise ConfigError(report.problems, files)
    return RunConfig(**sections, peft=adapter, peft_switch=switch, notes=report.notes)


def _read_files(state: ParseState, files: Sequence[str]) -> bool:
    """Merge the settings of files; return False if a file cannot be read completely."""
    is_complete = True
    for path in files:
        settings, problems = read_file(path)
        is_complete = is_complete and all(problem.key for problem in problems)
        state.report.default_location = Location(path)
        state.report.problems += problems
        state.merge(settings)
    return is_complete


def _build_sections(state: ParseState, section_classes: Mapping[str, type]) -> dict[str, Any]:
    """Build the sections by name; keys with invalid values keep their defaults."""
    sections = {}
    for section, section_class in section_classes.items():
        options = [option for option in state.table.options.values() if option.section == section]
        values = {option.attribute: state.values[option.key] for option in options if option.key in state.values}
        sections[section] = section_class(**values)
    return sections


def _build_adapter(state: ParseState, known: KnownKeys) -> tuple[str | None, Any]:
    """Return the switch and config of the chosen adapter method; (None, None) without a method or with invalid keys."""
    report, methods = state.report, known.methods
    enabled = [switch for switch in methods if state.value(switch) is True]
    refined = {name for switch in enabled for name in switches_of(switch, methods[switch]) if name != switch}
    chosen = [switch for switch in enabled if switch not in refined]
    for switch in chosen:
        for needed in switches_of(switch, methods[switch]):
            if needed in report.invalid_keys:
                return None, None
            if needed not in enabled:
                report.error(f"{switch} also needs {needed}: true", switch, needed)
                return None, None
    if len(chosen) > 1:
        report.error(f"several adapter methods are on: {', '.join(chosen)}; keep one", *reversed(chosen))
        return None, None
    _note_unused_method_keys(state, known, chosen)
    if not chosen:
        return None, None
    return _build_adapter_config(state, chosen[0], methods[chosen[0]])


def _build_adapter_config(state: ParseState, switch: str, method: type) -> tuple[str | None, Any]:
    for key, reason in _unavailable_keys(method).items():
        if state.value(key) not in (state.table.options[key].default, None, ()):
            state.report.error(f"{switch}: {key} is not available: {reason}", key)
            return None, None
    options = method_options(switch, method)
    if not state.report.invalid_keys.isdisjoint(option.key for option in options):
        return None, None
    try:
        return switch, method(
            **{option.attribute: state.values[option.key] for option in options if option.key in state.values}
        )
    except ValueError as error:
        last_first = [key for key in reversed(state.settings) if key in {option.key for option in options}]
        state.report.error(f"{switch}: {error}", *last_first, switch)
        return None, None


def _unavailable_keys(method: type) -> Mapping[str, str]:
    """Return the keys of the base method that a variant rejects, with the reasons: key -> reason."""
    return getattr(method, "unavailable_keys", {})


def _note_unused_method_keys(state: ParseState, known: KnownKeys, chosen: list[str]) -> None:
    for key, switches in known.method_keys.items():
        is_unused = state.report.invalid_keys.isdisjoint((key, *switches)) and not set(switches) & set(chosen)
        is_unused = is_unused and not any(key in _unavailable_keys(known.methods[switch]) for switch in chosen)
        if key in state.settings and is_unused:
            is_off = not any(state.value(switch) is True for switch in switches)
            names_method = is_off and (len(switches) == 1 or not chosen)
            reason = f"{switches[0]} is false" if names_method else f"{chosen[0]} does not use it"
            state.report.note(f"{key} has no effect: {reason}", key)


def _adapter_choice(state: ParseState, known: KnownKeys, switch: str | None) -> AdapterChoice:
    is_requested = any(state.value(name) or name in state.report.invalid_keys for name in known.methods)
    return AdapterChoice(switch, known.methods[switch] if switch else None, is_requested)


def _derive_defaults(sections: dict[str, Any]) -> None:
    """Replace defaults that depend on other keys or on the machine, such as `device: auto`."""
    model, precision = sections["model"], sections["precision"]
    if model.tokenizer_name_or_path is None:
        sections["model"] = replace(model, tokenizer_name_or_path=model.model_name_or_path)
    train = sections["train"]
    if train.metric_for_best_model is None and "grpo" in sections and sections["rewards"].reward_funcs:
        train = replace(train, metric_for_best_model="reward")
    sections["train"] = _derive_train_defaults(train, sections["data"])
    sections["precision"] = _derive_device(precision)


def _derive_train_defaults(train: TrainConfig, data: DataConfig) -> TrainConfig:
    resume = train.resume_from_checkpoint or None
    best = best_metric(train, dev_set_names(data))
    return replace(
        train,
        output_dir=None if train.output_dir is None else expanduser(train.output_dir),
        eval_steps=train.eval_steps or train.logging_steps,
        metric_for_best_model=best.name,
        greater_is_better=best.greater_is_better,
        resume_from_checkpoint=expanduser(resume) if isinstance(resume, str) else resume,
        report_to=tuple(name for name in train.report_to if name != "none"),
    )


def _derive_device(precision: PrecisionConfig) -> PrecisionConfig:
    return replace(precision, device=resolve_auto(precision.device))
