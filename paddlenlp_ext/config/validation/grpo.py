"""Rules about GRPO: batch sizes, reward functions, and what it cannot be combined with."""

from __future__ import annotations

from paddlenlp_ext.config.dataclass_options import options_of
from paddlenlp_ext.config.dev_sets import best_metric, dev_set_names
from paddlenlp_ext.config.errors import Report
from paddlenlp_ext.config.metric_names import POLICY_METRICS, reward_function_of
from paddlenlp_ext.config.sections.grpo import GRPOConfig, PromptDataConfig, SamplingConfig
from paddlenlp_ext.config.sections.model import ModelConfig
from paddlenlp_ext.config.sections.parallel import ParallelConfig
from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.config.validation.parallel import LAYOUT_KEYS, check_whole_model
from paddlenlp_ext.config.validation.preference import UNREAD_KEYS
from paddlenlp_ext.config.validation.rules import Rules

rules = Rules()
UNREAD_GRPO_KEYS = (UNREAD_KEYS - {option.key for option in options_of(SamplingConfig, "")}) | {
    *("compute_metrics", "eval_with_do_generation", "eval_labels", "save_generation_output"),
    *("zero_padding", "greedy_zero_padding", "pad_to_max_length", "max_length"),
    *("learn_empty_think", "mask_reasoning", "max_lost_targets", "audit", "audit_only", "int8_training"),
}
"""Keys that GRPO does not read."""


@rules("num_generations", "per_device_train_batch_size")
def _micro_batches_have_full_groups(grpo: GRPOConfig, train: TrainConfig, report: Report) -> None:
    size, group = train.per_device_train_batch_size, grpo.num_generations
    if size % group:
        report.error(
            f"per_device_train_batch_size: {size} completions are not a multiple of num_generations: {group}; a "
            f"micro-batch has all completions of a prompt, which share its computation; set {group} or a multiple",
            "per_device_train_batch_size",
            "num_generations",
        )


@rules("steps_per_generation", "gradient_accumulation_steps")
def _sampled_batches_have_full_steps(grpo: GRPOConfig, train: TrainConfig, report: Report) -> None:
    count, accumulated = grpo.steps_per_generation, train.gradient_accumulation_steps
    if count is not None and count % accumulated:
        report.error(
            f"steps_per_generation: {count} micro-batches are not a multiple of gradient_accumulation_steps: "
            f"{accumulated}, the micro-batches of an optimizer step; set {accumulated} or a multiple",
            "steps_per_generation",
            "gradient_accumulation_steps",
        )


@rules("top_k", "rollouts_path", "do_train")
def _completions_differ(generation: SamplingConfig, data: PromptDataConfig, train: TrainConfig, report: Report) -> None:
    if generation.top_k == 1 and train.do_train and data.rollouts_path is None:
        report.error(
            "top_k: 1 always takes the most likely token, so that all completions of a prompt are equal; set top_k: 0",
            "top_k",
        )


@rules("reward_funcs", "rollouts_path", "do_train")
def _completions_have_rewards(
    rewards: RewardsConfig, data: PromptDataConfig, train: TrainConfig, report: Report
) -> None:
    if train.do_train and data.rollouts_path is None and not rewards.reward_funcs:
        report.error(
            "reward_funcs is not set; name functions that score completions, or set rollouts_path", "reward_funcs"
        )


@rules(*LAYOUT_KEYS)
def _layout_samples_on_each_process(parallel: ParallelConfig, report: Report) -> None:
    check_whole_model(parallel, "GRPO samples with the full model", report)


@rules("int8_training")
def _int8_layers_are_chosen_from_rows(model: ModelConfig, report: Report) -> None:
    if model.int8_training:
        report.error(
            "int8_training measures its layers on the first training rows, which are not sampled yet; leave it out",
            "int8_training",
        )


@rules("audit")
def _prompts_are_not_audited(data: PromptDataConfig, report: Report) -> None:
    if data.audit:
        report.error("audit checks rows with answers, but GRPO reads prompts; leave it out", "audit")


@rules("metric_for_best_model", "eval_dataset_path", "evaluation_strategy", "reward_funcs")
def _best_metric_is_measured(
    data: PromptDataConfig, rewards: RewardsConfig, train: TrainConfig, report: Report
) -> None:
    metric = best_metric(train, dev_set_names(data)).metric
    if train.evaluation_strategy == "no":
        return
    means = [f"rewards/{name}/mean" for name in rewards.reward_names]
    if metric not in ("loss", *POLICY_METRICS, *means) and (rewards.reward_funcs or not reward_function_of(metric)):
        known = ", ".join((*POLICY_METRICS, *means))
        message = f"metric_for_best_model {metric} is not measured by this run; use one of {known}"
        report.error(message, "metric_for_best_model")
    elif metric != "loss" and not rewards.reward_funcs:
        message = f"metric_for_best_model {metric} needs reward_funcs, which score the completions of the dev set"
        report.error(message, "metric_for_best_model", "reward_funcs")


@rules("metric_for_best_model", "load_best_model_at_end", "early_stopping_patience", "evaluation_strategy")
def _best_metric_ranks_models(
    data: PromptDataConfig, rewards: RewardsConfig, train: TrainConfig, report: Report
) -> None:
    is_default = train.metric_for_best_model is None and bool(rewards.reward_funcs)
    is_read = train.evaluation_strategy != "no" and (train.load_best_model_at_end or train.patience is not None)
    if is_read and not is_default and best_metric(train, dev_set_names(data)).metric == "loss":
        report.error(
            "metric_for_best_model: the loss of sampled completions is near 0 for every model; set reward_funcs and "
            "metric_for_best_model: reward",
            "metric_for_best_model",
        )


@rules("use_bias_correction_kl", "beta")
def _note_idle_keys(grpo: GRPOConfig, report: Report) -> None:
    if grpo.beta == 0 and report.is_set("use_bias_correction_kl"):
        report.note("use_bias_correction_kl has no effect: beta is 0", "use_bias_correction_kl")


@rules("max_gen_batches", "dynamic_sampling")
def _note_idle_rounds(grpo: GRPOConfig, report: Report) -> None:
    if not grpo.dynamic_sampling and report.is_set("max_gen_batches"):
        report.note("max_gen_batches has no effect: dynamic_sampling is false", "max_gen_batches")


@rules("delta", "epsilon", "epsilon_high")
def _delta_is_above_the_clip_range(grpo: GRPOConfig, report: Report) -> None:
    if grpo.delta is not None and grpo.delta < 1 + grpo.upper_epsilon:
        report.error(
            f"delta: {grpo.delta} is below 1 + epsilon_high = {1 + grpo.upper_epsilon:g}; set a greater bound",
            "delta",
            "epsilon_high",
        )
