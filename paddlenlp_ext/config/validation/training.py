"""Rules about data, training length, evaluation and checkpoints, and notes about keys without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.config.dataclass_options import options_of
from paddlenlp_ext.config.dev_sets import best_metric, dev_set_names, dev_sets
from paddlenlp_ext.config.errors import Report
from paddlenlp_ext.config.metric_names import GENERATION_METRICS, LABEL_METRICS
from paddlenlp_ext.config.recompute_options import parse_layers, parse_refined
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.generation import GenerationConfig
from paddlenlp_ext.config.sections.grpo import SamplingConfig
from paddlenlp_ext.config.sections.model import ModelConfig
from paddlenlp_ext.config.sections.optim import SCHEDULES, OptimConfig
from paddlenlp_ext.config.sections.parallel import ParallelConfig
from paddlenlp_ext.config.sections.safety import SafetyConfig
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.config.trackers import TRACKER_MODULES, chosen_trackers
from paddlenlp_ext.config.validation.precision import BLOCKWISE_KEYS
from paddlenlp_ext.config.validation.rules import Rules
from paddlenlp_ext.utils.optional_packages import is_installed, missing_package

run_rules = Rules()
"""Rules that do not apply to a `Trainer` created in Python."""
rules = Rules()


@run_rules()
def _run_has_a_task(model: ModelConfig, data: DataConfig, train: TrainConfig, report: Report) -> None:
    # A switch with an invalid value counts as on, so that missing keys are reported in the same run.
    switches = ("do_train", "do_eval", "do_predict")
    on = [switch for switch in switches if getattr(train, switch) or switch in report.invalid_keys]
    if not on:
        report.error("there is nothing to do; set do_train, do_eval or do_predict to true", "do_train", "do_eval")
        return
    needed = {
        "model_name_or_path": model.model_name_or_path,
        **data.paths(train="do_train" in on or "do_predict" in on, evaluate="do_eval" in on),
        "output_dir": train.output_dir,
    }
    for key, value in needed.items():
        if value is None and key not in report.invalid_keys:
            switch = on[-1] if key.startswith("dev_") else on[0]
            report.error(f"{switch} needs {key}, which is not set", key, switch)


@rules("use_gradient_checkpointing")
def _gradient_checkpointing_is_known(train: TrainConfig, report: Report) -> None:
    if train.use_gradient_checkpointing:  # config/implied_keys.py has already replaced true and "unsloth"
        report.error(
            f"use_gradient_checkpointing: {train.use_gradient_checkpointing!r} is not true, false or unsloth; set "
            "recompute",
            "use_gradient_checkpointing",
        )


@rules("report_to")
def _trackers_are_installed(train: TrainConfig, report: Report) -> None:
    for name in chosen_trackers(train.report_to):
        if not is_installed(TRACKER_MODULES[name]):
            report.error(missing_package(TRACKER_MODULES[name], name, name), "report_to")


@run_rules("resume_from_checkpoint", "do_train")
def _resume_needs_training(train: TrainConfig, report: Report) -> None:
    if train.resume_from_checkpoint and not train.do_train:
        report.error(
            "resume_from_checkpoint needs do_train: true; to evaluate a trained model, set model_name_or_path, or for "
            "an adapter the path key of its method, such as lora_path",
            "resume_from_checkpoint",
            "do_train",
        )


@run_rules("push_to_hub", "do_train")
def _push_needs_training(train: TrainConfig, report: Report) -> None:
    if train.push_to_hub and not train.do_train:
        message = "push_to_hub needs do_train: true; to upload the model of an earlier run, run pnx push RUN"
        report.error(message, "push_to_hub", "do_train")


@run_rules(
    "load_best_model_at_end", "evaluation_strategy", "save_strategy", "eval_steps", "save_steps", "logging_steps"
)
def _best_model_has_a_checkpoint(train: TrainConfig, report: Report) -> None:
    if not train.load_best_model_at_end or train.evaluation_strategy == "no":
        return
    if train.evaluation_strategy != train.save_strategy:
        report.error(
            f"load_best_model_at_end needs evaluation_strategy ({train.evaluation_strategy}) and save_strategy "
            f"({train.save_strategy}) to be the same; set save_strategy: {train.evaluation_strategy}",
            "save_strategy",
            "evaluation_strategy",
            "load_best_model_at_end",
        )
    elif train.save_strategy == "steps" and train.save_steps % (train.eval_steps or train.logging_steps) != 0:
        report.error(
            f"load_best_model_at_end needs an evaluation at every checkpoint: save_steps {train.save_steps} is not a "
            f"multiple of eval_steps {train.eval_steps}",
            "save_steps",
            "eval_steps",
            "load_best_model_at_end",
        )


@rules("src_length", "max_length")
def _max_length_has_room_for_answers(data: DataConfig, report: Report) -> None:
    # A note, not an error, because PaddleNLP's configs for LoKr and ReFT contain such lengths.
    if data.src_length >= data.max_length:
        report.note(
            f"a prompt of src_length {data.src_length} tokens leaves no room for an answer within max_length "
            f"{data.max_length}; set src_length below max_length",
            "src_length",
            "max_length",
        )


@rules("max_steps")
def _max_steps_is_not_zero(train: TrainConfig, report: Report) -> None:
    if train.max_steps == 0:
        report.error("max_steps: 0 trains nothing; set max_steps: -1 to train for num_train_epochs", "max_steps")


@rules("lazy", "max_steps")
def _stream_has_a_number_of_steps(data: DataConfig, train: TrainConfig, report: Report) -> None:
    if data.is_stream and train.do_train and train.max_steps < 0:
        report.error("lazy: the number of rows in a stream is unknown; set max_steps", "lazy", "max_steps")


@rules("max_steps", "warmup_steps")
def _warmup_fits_max_steps(train: TrainConfig, optim: OptimConfig, report: Report) -> None:
    if 0 < train.max_steps < optim.warmup_steps:
        report.note(
            f"warmup_steps {optim.warmup_steps} is more than max_steps {train.max_steps}: the learning rate rises "
            f"until the end of the run and never reaches learning_rate {optim.learning_rate:g}",
            "warmup_steps",
            "max_steps",
        )


@rules("learning_rate", "min_learning_rate", "lr_end", "lr_scheduler_type")
def _final_learning_rate_is_below_peak(optim: OptimConfig, report: Report) -> None:
    final, peak = optim.final_learning_rate, optim.learning_rate
    if final > peak:
        key = "min_learning_rate" if optim.min_learning_rate else "lr_end"
        report.error(f"{key} {final:g} is above learning_rate {peak:g}; lower {key}", key, "learning_rate")


@rules("load_best_model_at_end", "evaluation_strategy")
def _best_model_needs_evaluations(train: TrainConfig, report: Report) -> None:
    if train.load_best_model_at_end and train.evaluation_strategy == "no":
        message = "load_best_model_at_end needs evaluation_strategy: steps or epoch"
        report.error(message, "load_best_model_at_end", "evaluation_strategy")


@rules("autoregressive", "eval_with_do_generation")
def _generation_needs_answers(data: DataConfig, generation: GenerationConfig, report: Report) -> None:
    if data.autoregressive and generation.eval_with_do_generation:
        report.error(
            "eval_with_do_generation needs questions and answers, but with autoregressive: true rows are plain text; "
            "set one of the two keys to false",
            "eval_with_do_generation",
            "autoregressive",
        )


@rules("metric_for_best_model", "eval_with_do_generation", "evaluation_strategy")
def _generation_metric_needs_generation(
    data: DataConfig, train: TrainConfig, generation: GenerationConfig, report: Report
) -> None:
    if train.evaluation_strategy == "no":
        return
    metric = best_metric(train, dev_set_names(data)).metric
    if metric in GENERATION_METRICS and not generation.eval_with_do_generation:
        report.error(
            f"metric_for_best_model {metric} is measured on generated answers and needs eval_with_do_generation: true",
            "metric_for_best_model",
            "eval_with_do_generation",
        )


@rules("metric_for_best_model", "eval_labels", "eval_with_do_generation", "evaluation_strategy")
def _label_metric_needs_labels(
    data: DataConfig, train: TrainConfig, generation: GenerationConfig, report: Report
) -> None:
    if train.evaluation_strategy == "no":
        return
    metric = best_metric(train, dev_set_names(data)).metric
    if metric in LABEL_METRICS and not (generation.eval_labels and generation.eval_with_do_generation):
        report.error(
            f"metric_for_best_model {metric} is measured on generated labels and needs "
            "eval_with_do_generation: true and eval_labels: true",
            "metric_for_best_model",
            "eval_labels",
        )


@rules("dev_ratio", "eval_dataset_path")
def _eval_rows_have_one_source(data: DataConfig, report: Report) -> None:
    if data.dev_ratio and data.eval_dataset_path is not None:
        report.error(
            "dev_ratio and eval_dataset_path both select eval rows; keep one",
            "dev_ratio",
            "eval_dataset_path",
        )


@rules("dev_ratio", "lazy")
def _held_out_rows_can_be_counted(data: DataConfig, report: Report) -> None:
    ratio = data.dev_ratio
    if ratio > 1 and not float(ratio).is_integer():
        report.error(f"dev_ratio: {ratio:g} is neither a fraction below 1 nor a whole number of rows", "dev_ratio")
    elif ratio >= 1 and data.is_stream:
        message = f"dev_ratio: {ratio:g} is a number of rows, but lazy rows are not counted; set a fraction below 1"
        report.error(message, "dev_ratio", "lazy")


@rules("eval_dataset_path")
def _dev_sets_have_names_and_paths(data: DataConfig, report: Report) -> None:
    try:
        dev_sets(data)
    except ValueError as error:
        report.error(str(error), "eval_dataset_path")


@run_rules("metric_for_best_model", "compute_metrics", "eval_dataset_path", "eval_with_do_generation")
def _best_metric_is_known(data: DataConfig, train: TrainConfig, generation: GenerationConfig, report: Report) -> None:
    try:
        has_own = generation.compute_metrics is not None and generation.eval_with_do_generation
        best_metric(train, dev_set_names(data)).require_known(has_own)
    except ValueError as error:
        report.error(str(error), "metric_for_best_model")


@rules("early_stopping", "early_stopping_patience", "evaluation_strategy")
def _early_stopping_needs_evaluations(train: TrainConfig, report: Report) -> None:
    if train.patience is not None and train.evaluation_strategy == "no":
        switch = "early_stopping_patience" if train.early_stopping is None else "early_stopping"
        message = f"{switch} needs evaluation_strategy: steps or epoch"
        report.error(message, switch, "evaluation_strategy")


@rules("recompute", "recompute_granularity", "refined_recompute", "no_recompute_layers", "offload_recompute_inputs")
def _recompute_options_can_be_parsed(train: TrainConfig, report: Report) -> None:
    for key, parse in (("refined_recompute", parse_refined), ("no_recompute_layers", parse_layers)):
        try:
            parse(getattr(train, key))
        except ValueError as error:
            report.error(str(error), key)
    granularity = train.recompute_granularity
    for key in ("refined_recompute", "offload_recompute_inputs"):
        if train.recompute and getattr(train, key) and granularity != "full":
            message = f"{key} needs recompute_granularity: full, not {granularity}; leave out one of the two keys"
            report.error(message, key, "recompute_granularity")


idle_rules = Rules()
"""Rules that note keys without effect; applied last, so that invalid keys get no note."""
_SAMPLING = ("top_k", "top_p", "temperature")
_OF_SAMPLED_ANSWERS = ("max_new_tokens", "temperature")


def _schedules_except(*names: str) -> tuple[str, ...]:
    return tuple(name for name in SCHEDULES if name not in names)


# (keys without effect, other key, values of the other key that disable them, reason)
_IDLE: tuple[tuple[tuple[str, ...], str, tuple[Any, ...], str], ...] = (
    (
        ("eval_labels", "save_generation_output", "compute_metrics", "max_new_tokens", *_SAMPLING),
        "eval_with_do_generation",
        (False,),
        "eval_with_do_generation is false",
    ),
    (_SAMPLING[1:], "top_k", (1,), "top_k: 1 always takes the most likely token"),
    (
        ("chat_template", "chat_template_kwargs", "learn_empty_think", "mask_reasoning"),
        "autoregressive",
        (True,),
        "autoregressive rows are plain text, without a chat template",
    ),
    (("greedy_zero_padding",), "zero_padding", (False,), "zero_padding is false"),
    (("eval_steps",), "evaluation_strategy", ("no", "epoch"), "evaluation_strategy is not steps"),
    (("metric_for_best_model", "greater_is_better"), "evaluation_strategy", ("no",), "evaluation_strategy is no"),
    (
        ("early_stopping_patience", "early_stopping_threshold"),
        "early_stopping",
        (False,),
        "early_stopping is false",
    ),
    (("eval_dataset_path",), "do_eval", (False,), "do_eval is false"),
    (("save_steps",), "save_strategy", ("no", "epoch"), "save_strategy is not steps"),
    (("sequence_parallel",), "tensor_parallel_degree", (-1, 0, 1), "tensor_parallel_degree is off"),
    (
        ("recompute_granularity", "refined_recompute", "no_recompute_layers", "offload_recompute_inputs"),
        "recompute",
        (False,),
        "recompute is false",
    ),
    (("shuffle_buffer_size", "dataloader_num_workers"), "lazy", (False,), "lazy is false"),
    (("hub_model_id", "hub_private_repo"), "push_to_hub", (False,), "push_to_hub is false"),
    (("neftune_noise_alpha",), "neftune", (False,), "neftune is false"),
    (
        ("strategy_type", "strategy_name", "rope_scaling_factor", "strategy_parameters"),
        "use_long_sequence_strategies",
        (False,),
        "use_long_sequence_strategies is false",
    ),
    (BLOCKWISE_KEYS, "weight_quantize_algo", (None,), "weight_quantize_algo is off"),
    (
        ("muon_momentum", "muon_scale"),
        "optim",
        ("adamw", "adamw_mini", "adamw_8bit"),
        "optim is not muon",
    ),
    (
        ("num_cycles",),
        "lr_scheduler_type",
        _schedules_except("cosine", "cosine_with_restarts"),
        "the learning rate schedule has no cycles",
    ),
    (("power", "lr_end"), "lr_scheduler_type", _schedules_except("polynomial"), "lr_scheduler_type is not polynomial"),
    (
        ("num_decay_steps",),
        "lr_scheduler_type",
        _schedules_except("warmup_stable_decay"),
        "lr_scheduler_type is not warmup_stable_decay",
    ),
    (BLOCKWISE_KEYS[2:], "weight_double_quant", (False,), "weight_double_quant is false"),
    (("max_nan_steps",), "nan_policy", ("raise",), "nan_policy is raise"),
)


def reasons_without_effect() -> dict[str, list[str]]:
    """Return a dict from keys to reasons why a key may have no effect, such as "push_to_hub is false"."""
    found: dict[str, list[str]] = {}
    for keys, _, _, reason in _IDLE:
        for key in keys:
            found.setdefault(key, []).append(reason)
    return found


@idle_rules()
def _note_idle_keys(
    model: ModelConfig,
    data: DataConfig,
    train: TrainConfig,
    safety: SafetyConfig,
    optim: OptimConfig,
    generation: GenerationConfig,
    parallel: ParallelConfig,
    report: Report,
) -> None:
    written, defaults = _values_by_key(model, data, train, safety, optim, generation, parallel)
    noted: set[str] = set()
    for keys, switch, values, reason in _IDLE:
        if switch == "eval_with_do_generation" and isinstance(generation, SamplingConfig):
            continue  # GRPO samples in training
        for key in keys:
            if key in _OF_SAMPLED_ANSWERS and report.is_set("distillation_lmbda"):
                continue  # distillation samples in training
            is_changed = report.is_set(key) and written[key] != defaults[key]
            if is_changed and written[switch] in values and (noted | report.invalid_keys).isdisjoint((key, switch)):
                report.note(f"{key} has no effect: {reason}", key)
                noted.add(key)


@idle_rules()
def _note_unused_threshold(train: TrainConfig, report: Report) -> None:
    key = "early_stopping_threshold"
    if train.patience is None and train.early_stopping is None and report.is_set(key):
        report.note(f"{key} has no effect: early_stopping is off", key)


def _values_by_key(*sections: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the values and the defaults of all options of the sections, by key."""
    options = [(section, option) for section in sections for option in options_of(type(section), "")]
    values = {option.key: getattr(section, option.attribute) for section, option in options}
    return values, {option.key: option.default for _, option in options}
