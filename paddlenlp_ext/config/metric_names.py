"""Names of the evaluation metrics that `metric_for_best_model` accepts."""

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
METRICS = (
    *("loss", "accuracy", "perplexity", *GENERATION_METRICS, *LABEL_METRICS, *PREFERENCE_METRICS),
    *REWARD_METRICS[1:],  # accuracy is listed above
)
