"""Losses, gradients with respect to log-probabilities, and sampling corrections against formulas in NumPy."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.config.sections.grpo import GRPOConfig
from paddlenlp_ext.policy_optimization.advantages import group_advantages, group_deviations
from paddlenlp_ext.policy_optimization.policy_losses import (
    PolicyTokens,
    completion_weights,
    policy_loss,
    sampling_correction,
)

LENGTHS = (3, 1, 0, 4)
COMPLETIONS = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
ADVANTAGES = np.array([1.5, -0.5, 2.0, -1.0], np.float32)


def _tokens(seed: int = 0, scale: float = 0.4, **values: paddle.Tensor) -> PolicyTokens:
    generator = np.random.default_rng(seed)
    logps, old, reference = (-generator.uniform(0, scale, [3, len(COMPLETIONS)])).astype(np.float32)
    leaf = paddle.to_tensor(logps, stop_gradient=False)
    others = (paddle.to_tensor(COMPLETIONS), paddle.to_tensor(ADVANTAGES), paddle.to_tensor(reference))
    return PolicyTokens(leaf, paddle.to_tensor(old), *others, **values)


def _ratios(tokens: PolicyTokens, by_sequence: bool) -> np.ndarray:
    differences = (tokens.logps - tokens.old_logps).numpy()
    if by_sequence:
        differences = np.array([differences[index == COMPLETIONS].mean() for index in COMPLETIONS])
    return np.exp(differences)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [None, 1.2])
def test_policy_loss_is_the_clipped_surrogate_with_kl(level: str, delta: float | None) -> None:
    options = GRPOConfig(importance_sampling_level=level, epsilon=0.1, epsilon_high=0.15, delta=delta, beta=0.3)
    tokens = _tokens()
    ratios, advantages = _ratios(tokens, level == "sequence"), ADVANTAGES[COMPLETIONS]
    bounded = ratios if delta is None else np.minimum(ratios, delta)
    expected = -np.minimum(bounded * advantages, np.clip(ratios, 0.9, 1.15) * advantages)
    differences = (tokens.reference_logps - tokens.logps).numpy()
    kl = (np.exp(differences) - differences - 1) * ratios
    found = policy_loss(tokens, options)
    np.testing.assert_allclose(found.losses.numpy(), expected + 0.3 * kl, rtol=1e-5)
    np.testing.assert_allclose(found.kl.numpy(), kl, rtol=1e-4, atol=1e-6)
    is_high = (bounded > 1.15) & (advantages > 0)
    if level == "sequence":
        is_high = np.array([is_high[index == COMPLETIONS].any() for index in range(len(LENGTHS))])
    np.testing.assert_array_equal(found.is_high_clipped.numpy(), is_high.astype(np.float32))


def test_gradient_of_unclipped_tokens_is_minus_ratio_times_advantage() -> None:
    tokens = _tokens(scale=0.05)
    policy_loss(tokens, GRPOConfig(epsilon=0.5)).losses.sum().backward()
    expected = -_ratios(tokens, False) * ADVANTAGES[COMPLETIONS]
    np.testing.assert_allclose(tokens.logps.grad.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_sampling_correction_clips_or_masks_ratios(mode: str) -> None:
    tokens = _tokens()
    sampling = tokens.old_logps.numpy() + np.linspace(-0.3, 0.3, len(COMPLETIONS)).astype(np.float32)
    differences = tokens.old_logps.numpy() - sampling
    if mode.startswith("sequence"):
        differences = np.array([differences[index == COMPLETIONS].sum() for index in COMPLETIONS])
    ratios = np.exp(differences)
    within = (ratios >= 0.85) & (ratios <= 1.2)
    expected = np.clip(ratios, 0.85, 1.2) if mode.endswith("truncate") else np.where(within, ratios, 0)
    options = GRPOConfig(
        importance_sampling_mode=mode, importance_sampling_clip_min=0.85, importance_sampling_clip_max=1.2
    )
    found = sampling_correction(tokens, paddle.to_tensor(sampling), options).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert 0 < np.isclose(expected, ratios).sum() < len(expected)


def test_completion_weights_sum_to_the_loss_of_each_type() -> None:
    lengths = np.array([3, 1, 0, 4])
    for loss_type, expected in {
        "grpo": [1 / 3, 1, 1, 1 / 4],
        "dapo": [4 / 8] * 4,
        "bnpo": [4 / 8] * 4,
        "dr_grpo": [1 / 16] * 4,
    }.items():
        found = completion_weights(lengths, GRPOConfig(loss_type=loss_type), max_length=16)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_rloo_advantage_is_the_reward_minus_the_mean_of_the_others() -> None:
    rewards = np.array([[1.0, 0.0, 0.5], [2.0, np.nan, 1.0]])
    options = GRPOConfig(advantage_estimator="rloo", scale_rewards="none")
    expected = [[0.75, -0.75, 0.0], [1.0, 0.0, -1.0]]
    np.testing.assert_allclose(group_advantages(rewards, options), expected)


def test_group_advantages_of_equal_rewards_are_zero() -> None:
    rewards = np.full((2, 4), 0.3)
    for scale in ("group", "batch", "none"):
        np.testing.assert_allclose(group_advantages(rewards, GRPOConfig(scale_rewards=scale)), 0, atol=1e-12)
    np.testing.assert_allclose(group_deviations(rewards), 0, atol=1e-12)


def test_true_and_false_are_values_of_scale_rewards() -> None:
    assert GRPOConfig(scale_rewards=True).scale_rewards == "group"
    assert GRPOConfig(scale_rewards=False).scale_rewards == "none"
