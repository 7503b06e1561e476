"""Rules about keys and their combinations; the limits of a single key are declared in its `option(...)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.config.dataclass_options import options_of
from paddlenlp_ext.config.errors import ConfigError, Report
from paddlenlp_ext.config.paddlenlp_keys import SECTION_KEYS
from paddlenlp_ext.config.run_config import RunConfig
from paddlenlp_ext.config.validation import (
    distillation,
    grpo,
    long_context,
    parallel,
    precision,
    preference,
    safety,
    share_prefix,
    training,
)
from paddlenlp_ext.config.validation.rules import AdapterChoice, Rules
from paddlenlp_ext.utils.json_reader import Location

SECTION_COMPAT = {entry.key: entry for entry in SECTION_KEYS}


def check_run(sections: Mapping[str, Any], adapter: AdapterChoice, report: Report) -> None:
    """Apply all rules, and add problems and notes to `report`.

    A rule is skipped if one of its keys is already invalid.
    """
    arguments = {**sections, "adapter": adapter}
    for rules in (
        *(training.run_rules, training.rules, long_context.rules, precision.training_rules, precision.rules),
        *(safety.rules, parallel.rules, share_prefix.rules),
        *preference.rules_of(sections),
        *((grpo.rules,) if "grpo" in sections else ()),
        *((distillation.rules,) if "distillation" in sections else ()),
        training.idle_rules,
    ):
        rules.apply(arguments, report)


def keys_of_rules() -> list[tuple[str, ...]]:
    """Return the keys of each rule of the training programs."""
    modules = (training, long_context, precision, safety, parallel, share_prefix, preference, grpo, distillation)
    registries = (registry for module in modules for registry in vars(module).values() if isinstance(registry, Rules))
    return [keys for registry in registries for keys in registry.keys]


def check_trainer_config(config: RunConfig) -> None:
    """Check a configuration that was created in Python.

    Raises:
        ConfigError: the configuration violates rules; the message lists all violations.
    """
    report = Report(default_location=Location())
    arguments = config.sections
    for section, values in arguments.items():
        for option in options_of(type(values), section):
            entry = SECTION_COMPAT.get(option.key)
            value = getattr(values, option.attribute)
            if entry is not None and entry.outcome == "not yet" and value not in entry.neutral:
                report.error(entry.message(str(value)), option.key)
    for rules in (
        training.rules,
        safety.rules,
        long_context.rules,
        precision.training_rules,
        share_prefix.rules,
        *preference.rules_of(arguments),
        *((grpo.rules,) if "grpo" in arguments else ()),
        *((distillation.rules,) if "distillation" in arguments else ()),
    ):
        rules.apply(arguments, report)
    if report.problems:
        raise ConfigError(report.problems)
