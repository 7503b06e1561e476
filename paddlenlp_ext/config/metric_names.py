"""Evaluation metrics that `metric_for_best_model` accepts: their names, and whether greater values are better."""

from __future__ import annotations

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
POLICY_METRICS = ("reward",)
METRICS = (
    *("loss", "accuracy", "perplexity", *GENERATION_METRICS, *LABEL_METRICS, *PREFERENCE_METRICS),
    *(*REWARD_METRICS[1:], *POLICY_METRICS),  # accuracy is listed above
)
_LOWER_IS_BETTER = ("loss", "perplexity", "unknown_labels")


def is_greater_better(metric: str) -> bool:
    """Return whether greater values of a metric are better, for a run without `greater_is_better`."""
    return not metric.endswith(_LOWER_IS_BETTER)
