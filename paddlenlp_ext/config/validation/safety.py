"""Rules about NaN handling, skipped data and the time limit of a run."""

from __future__ import annotations

from paddlenlp_ext.config.durations import parse_time
from paddlenlp_ext.config.errors import Report
from paddlenlp_ext.config.sections.safety import SafetyConfig, parse_intervals
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.config.validation.rules import Rules

rules = Rules()


@rules("skip_data_intervals", "max_train_time")
def _intervals_and_time_can_be_parsed(safety: SafetyConfig, report: Report) -> None:
    for key, parse in (("skip_data_intervals", parse_intervals), ("max_train_time", parse_time)):
        value = getattr(safety, key)
        try:
            if value is not None:
                parse(value)
        except ValueError as error:
            report.error(str(error), key)


@rules("nan_policy", "save_strategy")
def _rollback_has_checkpoints(safety: SafetyConfig, train: TrainConfig, report: Report) -> None:
    if safety.nan_policy == "rollback" and train.save_strategy == "no":
        report.error(
            "nan_policy: rollback needs checkpoints; set save_strategy to steps or epoch",
            "nan_policy",
            "save_strategy",
        )
