"""Evaluation metrics that `metric_for_best_model` accepts: their names, and whether greater values are better."""

from __future__ import annotations

import re

GENERATION_METRICS = ("rouge1", "rouge2", "rougel", "bleu4", "exact_match")
LABEL_METRICS = (
    "precision_macro",
    "recall_macro",
    "f1_macro",
    "precision_micro",
    "recall_micro",
    "f1_micro",
    "unknown_labels",
)
PREFERENCE_METRICS = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected", "nll_loss")
REWARD_METRICS = ("accuracy", "margin", "mean_reward")
POLICY_METRICS = ("reward", "completions/mean_length", "completions/clipped_ratio")
_REWARD_OF_FUNCTION = re.compile(r"rewards/([^/]+)/mean")
METRICS = (
    *("loss", "accuracy", "perplexity", *GENERATION_METRICS, *LABEL_METRICS, *PREFERENCE_METRICS),
    *(*REWARD_METRICS[1:], *POLICY_METRICS),  # accuracy is listed above
)
_LOWER_IS_BETTER = ("loss", "perplexity", "unknown_labels", "completions/clipped_ratio")


def is_known(metric: str) -> bool:
    """Return whether a metric is in METRICS, or is the mean reward of a function of GRPO: `rewards/NAME/mean`."""
    return metric in METRICS or reward_function_of(metric) is not None


def reward_function_of(metric: str) -> str | None:
    """Return the name of the reward function whose mean reward a metric is; None for other metrics."""
    match = _REWARD_OF_FUNCTION.fullmatch(metric)
    return None if match is None else match[1]


def is_greater_better(metric: str) -> bool:
    """Return whether greater values of a metric are better, for a run without `greater_is_better`."""
    return not metric.endswith(_LOWER_IS_BETTER)
