"""Rules about preference training and reward models; notes about keys that the loss does not use."""

from __future__ import annotations

from collections.abc import Collection

from paddlenlp_ext.config.dataclass_options import options_of
from paddlenlp_ext.config.dev_sets import best_metric, dev_set_names
from paddlenlp_ext.config.errors import Report
from paddlenlp_ext.config.metric_names import POLICY_METRICS, PREFERENCE_METRICS, REWARD_METRICS, reward_function_of
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.generation import GenerationConfig
from paddlenlp_ext.config.sections.preference import PreferenceConfig, PreferenceDataConfig
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.config.validation.rules import Rules

row_rules = Rules()
"""Rules about rows of preference data, for run_dpo.py and run_reward.py."""
rules = Rules()
"""Rules about preference training."""
reward_rules = Rules()
"""Rules about reward models."""
other_rules = Rules()
"""Rules about runs without preference data."""
UNREAD_KEYS = frozenset(
    {
        *("do_predict", "lazy", "shuffle_buffer_size", "dataloader_num_workers", "train_dataset_prob"),
        *("autoregressive", "use_pose_convert", "share_prefix"),
        *(option.key for option in options_of(GenerationConfig, "")),
    }
)
"""Keys that programs with preference data do not read."""
_USED_BY = {
    "label_smoothing": ("sigmoid", "simpo", "robust"),
    "simpo_gamma": ("simpo",),
    "dpop_lambda": ("dpop",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Key -> losses that use the key."""


def rules_of(sections: Collection[str]) -> tuple[Rules, ...]:
    """Return the rules for a program with the given sections."""
    if "preference" in sections:
        return row_rules, rules
    if "grpo" in sections:
        return (row_rules,)
    return (row_rules, reward_rules) if "reward" in sections else (other_rules,)


@row_rules("dataset_name_or_path", "train_dataset_path")
def _rows_are_named_once(data: PreferenceDataConfig, report: Report) -> None:
    if data.dataset_name_or_path is not None and data.train_dataset_path is not None:
        report.error(
            "train_dataset_path and dataset_name_or_path are both set; keep one of them",
            "train_dataset_path",
            "dataset_name_or_path",
        )


@row_rules("do_predict")
def _there_are_no_test_rows(train: TrainConfig, report: Report) -> None:
    if train.do_predict:
        report.error(
            "do_predict: this program reads no test rows; to evaluate on a test file, set dev_dataset_path to the "
            "file, and do_eval: true",
            "do_predict",
        )


@row_rules("lazy", "train_dataset_prob")
def _rows_are_stored(data: PreferenceDataConfig, report: Report) -> None:
    if data.lazy:
        report.note("lazy has no effect: preference data is tokenized once and memory-mapped", "lazy")
    if data.train_dataset_prob is not None:
        report.error(
            "train_dataset_prob: preference data cannot be mixed by weights yet; leave the key out",
            "train_dataset_prob",
        )


@row_rules("autoregressive", "eval_with_do_generation", "use_pose_convert")
def _rows_are_compared(data: PreferenceDataConfig, generation: GenerationConfig, report: Report) -> None:
    reason = "but this program reads preference data; leave the key out"
    if data.autoregressive:
        report.error(f"autoregressive is for plain text, {reason}", "autoregressive")
    if data.use_pose_convert:
        report.error(f"use_pose_convert is for rows with one answer, {reason}", "use_pose_convert")
    if generation.eval_with_do_generation:
        report.error(f"eval_with_do_generation is for rows with one answer, {reason}", "eval_with_do_generation")


@rules("metric_for_best_model", "eval_dataset_path", "evaluation_strategy")
def _best_metric_is_one_of_preferences(data: PreferenceDataConfig, train: TrainConfig, report: Report) -> None:
    _require_metric(PREFERENCE_METRICS, "by pnx dpo", data, train, report)


@reward_rules("metric_for_best_model", "eval_dataset_path", "evaluation_strategy")
def _best_metric_is_one_of_rewards(data: PreferenceDataConfig, train: TrainConfig, report: Report) -> None:
    _require_metric(REWARD_METRICS, "by pnx reward", data, train, report)


def _require_metric(
    known: tuple[str, ...], where: str, data: PreferenceDataConfig, train: TrainConfig, report: Report
) -> None:
    metric = best_metric(train, dev_set_names(data)).metric
    if train.evaluation_strategy != "no" and metric not in ("loss", *known):
        message = f"metric_for_best_model {metric} is not measured {where}; use one of loss, {', '.join(known)}"
        report.error(message, "metric_for_best_model")


@other_rules("metric_for_best_model", "eval_dataset_path", "evaluation_strategy")
def _best_metric_is_not_one_of_preferences(data: DataConfig, train: TrainConfig, report: Report) -> None:
    metric = best_metric(train, dev_set_names(data)).metric
    commands = {"dpo": PREFERENCE_METRICS, "reward": REWARD_METRICS[1:], "grpo": POLICY_METRICS}
    command = next((name for name, metrics in commands.items() if metric in metrics), None)
    command = "grpo" if reward_function_of(metric) is not None else command
    if train.evaluation_strategy != "no" and command is not None:
        message = f"metric_for_best_model {metric} is measured only by pnx {command}; use loss"
        report.error(message, "metric_for_best_model")


@rules("loss_type", "per_device_train_batch_size", "zero_padding")
def _kto_needs_several_rows(
    preference: PreferenceConfig, data: PreferenceDataConfig, train: TrainConfig, report: Report
) -> None:
    if preference.loss_type == "kto" and train.per_device_train_batch_size == 1 and not data.zero_padding:
        report.error(
            "loss_type: kto needs several rows in a micro-batch; set per_device_train_batch_size to at least 2, or "
            "zero_padding: true",
            "per_device_train_batch_size",
            "loss_type",
        )


@rules("loss_type", "reference_free", "ref_model_update_steps", *_USED_BY)
def _note_idle_keys(preference: PreferenceConfig, report: Report) -> None:
    loss_type = preference.loss_type
    defaults = {option.key: option.default for option in options_of(PreferenceConfig, "")}
    for key, users in _USED_BY.items():
        if loss_type not in users and getattr(preference, key) != defaults[key]:
            report.note(f"{key} has no effect: it applies only to loss_type: {', '.join(users)}", key)
    if loss_type == "orpo" and report.is_set("beta") and preference.beta != defaults["beta"]:
        message = "with loss_type: orpo, beta only scales the logged rewards; pref_loss_ratio weights the odds ratio"
        report.note(message, "beta")
    if preference.ref_model_update_steps > 0 and not preference.has_reference:
        reason = "reference_free is true" if preference.reference_free else f"{loss_type} uses no reference model"
        report.note(f"ref_model_update_steps has no effect: {reason}", "ref_model_update_steps")
