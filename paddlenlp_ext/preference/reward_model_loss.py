"""Loss and metrics of a reward model, computed from the scores of answer pairs.

Let r_w be the reward of the chosen answer, r_l the reward of the rejected answer, m the margin of the row, and s the
logistic function. The loss of a pair is

    -log s(r_w - r_l - m) + center_rewards_coefficient (r_w + r_l)^2 + regularization (r_w^2 + r_l^2) / 2

The first term is the negative log-likelihood of a Bradley-Terry model (arXiv:2203.02155, eq. 1; with a margin
arXiv:2307.09288, eq. 2). The second term is from arXiv:2312.09244 and TRL, the third term from PaddleNLP.

Shapes: P pairs, A answers of a batch: pair i has the answers 2i (chosen) and 2i + 1 (rejected).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from paddlenlp_ext.config.sections.reward import RewardConfig

NUM_SUMS = 7


def reward_losses(rewards_A: paddle.Tensor, margins_P: paddle.Tensor, options: RewardConfig) -> paddle.Tensor:
    """Return the loss of each pair, float32 [P].

    Args:
        rewards_A: scores of the answers, float32 [A].
        margins_P: margins of the rows, float32 [P].
        options: `config.reward` of a run.
    """
    chosen_P, rejected_P = rewards_A[0::2], rewards_A[1::2]
    losses_P = -F.log_sigmoid(chosen_P - rejected_P - margins_P)
    if options.center_rewards_coefficient:
        losses_P = losses_P + options.center_rewards_coefficient * (chosen_P + rejected_P).square()
    if options.regularization:
        losses_P = losses_P + options.regularization * (chosen_P.square() + rejected_P.square()) / 2
    return losses_P


def reward_sums(rewards_A: Any) -> np.ndarray:
    """Return the metric sums of a micro-batch, float64 [NUM_SUMS], for summation over micro-batches.

    Args:
        rewards_A: scores of the answers, tensor or array, float32 [A].
    """
    rewards = np.asarray(rewards_A, np.float64)
    margins = rewards[0::2] - rewards[1::2]
    sums = [(margins > 0).sum(), margins.sum(), len(margins), rewards.sum(), rewards.min(), rewards.max(), 1]
    return np.array(sums, np.float64)


def reward_metrics(sums: np.ndarray) -> dict[str, float]:
    """Return the metrics, named as in TRL; `sums` is the sum of `reward_sums` over micro-batches.

    | metric | value |
    |---|---|
    | `accuracy` | fraction of the pairs whose chosen answer has the higher reward |
    | `margin` | chosen reward minus rejected reward, averaged over the pairs |
    | `mean_reward` | mean reward of the answers |
    | `min_reward`, `max_reward` | lowest and highest reward of a micro-batch, averaged over the micro-batches |
    """
    correct, margin, num_pairs, total, least, greatest, num_batches = (float(value) for value in sums)
    return {
        "accuracy": correct / num_pairs,
        "margin": margin / num_pairs,
        "mean_reward": total / (2 * num_pairs),
        "min_reward": least / num_batches,
        "max_reward": greatest / num_batches,
    }
