"""Advantages of the completions of a group: their rewards relative to the rewards of the other completions.

    advantage = (reward - baseline) / (standard deviation + 1e-4)

| advantage_estimator | baseline |
|---|---|
| grpo | mean reward of the group (arXiv:2402.03300) |
| rloo | mean reward of the other completions of the group (arXiv:2402.14740) |

| scale_rewards | standard deviation |
|---|---|
| group | of the rewards of the group |
| batch | of the rewards of all groups that were sampled together (arXiv:2508.08221) |
| none | none: advantages are not divided (Dr. GRPO, arXiv:2503.20783) |

A completion without a reward (NaN) has the advantage 0 and does not count in means and standard deviations.

Shapes: P prompts, G completions of a prompt.
"""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.config.sections.grpo import GRPOConfig

_EPSILON = 1e-4


def group_advantages(rewards_PG: np.ndarray, options: GRPOConfig) -> np.ndarray:
    """Return the advantage of each completion, float64 [P, G].

    Args:
        rewards_PG: total reward of each completion; NaN: no reward.
        options: `config.grpo` of a run.
    """
    rewards_PG = np.asarray(rewards_PG, np.float64)
    counts_P1 = np.isfinite(rewards_PG).sum(axis=1, keepdims=True)
    advantages_PG = rewards_PG - np.nansum(rewards_PG, axis=1, keepdims=True) / np.maximum(counts_P1, 1)
    if options.advantage_estimator == "rloo":  # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
        advantages_PG = advantages_PG * counts_P1 / np.maximum(counts_P1 - 1, 1)
    if options.scale_rewards == "group":
        advantages_PG = advantages_PG / (group_deviations(rewards_PG)[:, None] + _EPSILON)
    elif options.scale_rewards == "batch":
        advantages_PG = advantages_PG / (group_deviations(rewards_PG.reshape([1, -1])) + _EPSILON)
    return np.nan_to_num(advantages_PG, nan=0.0)


def group_deviations(rewards_PG: np.ndarray) -> np.ndarray:
    """Return the standard deviation of the rewards of each group, float64 [P]; NaN with fewer than two rewards."""
    counts_P1 = np.isfinite(rewards_PG).sum(axis=1, keepdims=True)
    means_P1 = np.nansum(rewards_PG, axis=1, keepdims=True) / np.maximum(counts_P1, 1)
    squares_P = np.nansum(np.square(rewards_PG - means_P1), axis=1)
    counts_P = counts_P1[:, 0]
    return np.where(counts_P > 1, np.sqrt(squares_P / np.maximum(counts_P - 1, 1)), np.nan)


def lack_gradient(deviations_P: np.ndarray) -> np.ndarray:
    """Return which groups have only advantages of 0, bool [P].

    Args:
        deviations_P: result of `group_deviations`; NaN, with fewer than two rewards, counts as 0.
    """
    return np.isclose(np.nan_to_num(deviations_P), 0.0)
