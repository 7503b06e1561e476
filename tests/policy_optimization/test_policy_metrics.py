"""Metrics of sampled batches: counts of groups without a gradient, and lengths of completions."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.policy_optimization.policy_metrics import completion_metrics, reward_metrics


def test_groups_with_fewer_than_two_rewards_count_as_groups_without_a_gradient():
    rewards, none = np.array([0.0, 1.0, np.nan, np.nan, np.nan, 1.0, 0.0, 0.0]), np.full(8, np.nan)
    metrics = reward_metrics(rewards, np.array([0.7, np.nan, np.nan, 0.0]), {"a": rewards, "b": none})
    assert metrics["frac_reward_zero_std"] == 0.75
    assert metrics["reward"] == metrics["rewards/a/mean"] == pytest.approx(0.4)
    assert "rewards/b/mean" not in metrics
    assert reward_metrics(none, np.full(2, np.nan), {}) == {"frac_reward_zero_std": 1.0}


def test_metrics_of_completions_count_tokens_and_missing_ends():
    truncated = np.array([False, True, False, False])
    assert completion_metrics(np.array([3, 12, 1, 5]), truncated) == {
        "completions/mean_length": 5.25,
        "completions/min_length": 1.0,
        "completions/max_length": 12.0,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 3.0,
        "completions/min_terminated_length": 1.0,
        "completions/max_terminated_length": 5.0,
    }
