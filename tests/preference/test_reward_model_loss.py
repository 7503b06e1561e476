"""Loss and metrics of reward models against their formulas in NumPy, forward and backward; TRL's: tests/trainer."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.config.sections.reward import RewardConfig
from paddlenlp_ext.preference.reward_model_loss import reward_losses, reward_metrics, reward_sums

REWARDS = np.array([0.5, -1.0, 2.0, 2.5, -40.0, 60.0], np.float32)
MARGINS = np.array([0.0, 0.75, 1.5], np.float32)


@pytest.mark.parametrize(("center", "regularization"), [(0.0, 0.0), (0.05, 0.0), (0.0, 0.3), (0.02, 0.1)])
def test_reward_losses_match_the_formula(center, regularization):
    rewards = paddle.to_tensor(REWARDS, stop_gradient=False)
    options = RewardConfig(center_rewards_coefficient=center, regularization=regularization)
    losses = reward_losses(rewards, paddle.to_tensor(MARGINS), options)
    losses.sum().backward()
    chosen, rejected = REWARDS[0::2].astype(np.float64), REWARDS[1::2].astype(np.float64)
    distance = chosen - rejected - MARGINS
    expected = np.logaddexp(0, -distance) + center * (chosen + rejected) ** 2
    expected += regularization * (chosen**2 + rejected**2) / 2
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-6)
    pull = -1 / (1 + np.exp(distance))
    shared = 2 * center * (chosen + rejected)
    by_answer = np.stack([pull + shared + regularization * chosen, -pull + shared + regularization * rejected], 1)
    np.testing.assert_allclose(rewards.grad.numpy(), by_answer.ravel(), rtol=1e-5, atol=1e-7)


def test_reward_metrics_of_summed_batches_are_means():
    first, second = REWARDS[:4], REWARDS[4:]
    metrics = reward_metrics(reward_sums(first) + reward_sums(second))
    assert metrics == pytest.approx(
        {
            "accuracy": 1 / 3,
            "margin": (1.5 - 0.5 - 100) / 3,
            "mean_reward": 24 / 6,
            "min_reward": (-1 - 40) / 2,
            "max_reward": (2.5 + 60) / 2,
        }
    )
