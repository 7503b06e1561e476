"""KTO loss on rated answers, and its KL baseline (arXiv:2402.01306).

Shapes: A answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import paddle
import paddle.nn.functional as F

from paddlenlp_ext.config.sections.preference import PreferenceConfig
from paddlenlp_ext.preference.dpo_losses import log_ratios


@dataclass(frozen=True)
class AnswerLoss:
    """Losses and rewards of rated answers, float32 [A]; rewards have no gradient."""

    losses: paddle.Tensor
    rewards: paddle.Tensor


def kto_loss(
    logps_A: paddle.Tensor,
    reference_A: paddle.Tensor | None,
    is_desirable_A: paddle.Tensor,
    baseline: paddle.Tensor | float,
    options: PreferenceConfig,
    lengths_A: paddle.Tensor,
) -> AnswerLoss:
    """Return the KTO loss of each answer (arXiv:2402.01306).

    With the log-ratio r, the baseline z and the logistic function s, the loss is
    pref_loss_ratio desirable_weight (1 - s(beta (r - z))) for a desirable answer, and
    pref_loss_ratio undesirable_weight (1 - s(beta (z - r))) for an undesirable answer. A desirable answer also has an
    SFT loss: `options.sft_weight` times the mean negative log-probability per token.

    Args:
        logps_A: float32 [A], sum of the log-probabilities of each answer's tokens.
        reference_A: float32 [A], sums of the reference model's log-probabilities; None without a reference model.
        is_desirable_A: bool [A], True for a desirable answer.
        baseline: the result of `kto_baseline`.
        options: `config.preference` of a run.
        lengths_A: int64 [A], number of tokens of each answer.
    """
    ratios_A = log_ratios(logps_A, reference_A, options)
    desirable_A = is_desirable_A.astype("float32")
    signs_A = 2 * desirable_A - 1
    weights_A = options.desirable_weight * desirable_A + options.undesirable_weight * (1 - desirable_A)
    losses_A = options.pref_loss_ratio * weights_A * (1 - F.sigmoid(options.beta * signs_A * (ratios_A - baseline)))
    if options.sft_weight:
        losses_A = losses_A - options.sft_weight * desirable_A * logps_A / lengths_A.astype("float32")
    return AnswerLoss(losses_A, options.beta * ratios_A.detach())


def kto_baseline(logps_A: paddle.Tensor, reference_A: paddle.Tensor | None, options: PreferenceConfig) -> paddle.Tensor:
    """Return KTO's estimate of the KL divergence: the mean log-ratio of mismatched answers, or 0 if it is negative.

    Args:
        logps_A: float32 [A], log-probabilities of answers given other prompts (`PreferenceBatch.mismatched`).
        reference_A: log-probabilities under the reference model; None without a reference model.
        options: `config.preference` of a run.
    """
    return log_ratios(logps_A, reference_A, options).mean().clip(min=0).detach()
