"""Losses of GRPO and its variants on the tokens of sampled completions, as TRL defines them.

With the probability ratio p = exp(log pi - log pi_old) and the advantage A of the completion, the loss of a token is

    -min(p A, clip(p, 1 - epsilon, 1 + epsilon_high) A) c + beta k        arXiv:2402.03300

- With `importance_sampling_level` sequence, p is the geometric mean of the ratios of the completion's tokens (GSPO,
  arXiv:2507.18071).
- `epsilon_high` above `epsilon` gives rare tokens more room to become likely (DAPO, arXiv:2503.14476).
- `delta` is an upper bound of p in the first term; it has an effect only for negative advantages (arXiv:2505.07291).
- c corrects the difference between the probabilities in sampling and in training (`sampling_correction`).
- k estimates the KL divergence from the reference model by exp(q) - q - 1 with q = log pi_ref - log pi. With
  `use_bias_correction_kl`, k is multiplied by p.

The loss of a step is the sum over its tokens, divided by its number of completions. `loss_type` weights the tokens:

| loss_type | weight of a token | |
|---|---|---|
| grpo | 1 / tokens of its completion | arXiv:2402.03300 |
| dapo | completions / tokens of the sampled batch | arXiv:2503.14476 |
| bnpo | completions / tokens of the micro-batch | arXiv:2506.02864 |
| dr_grpo | 1 / `max_completion_length` | arXiv:2503.20783 |

Shapes: T tokens of all completions, C completions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import paddle

from paddlenlp_ext.config.sections.grpo import GRPOConfig


@dataclass(frozen=True)
class PolicyTokens:
    """Tokens of completions, without the tokens that do not count in the loss.

    Attributes:
        logps: float32 [T], log-probabilities under the trained model.
        old_logps: float32 [T], log-probabilities before the first update with these completions, without gradient.
        completions: int64 [T], index of the completion of each token, ascending.
        advantages: float32 [C].
        reference_logps: float32 [T], log-probabilities under the reference model; None if beta is 0.
        correction: float32 [T], result of `sampling_correction`; None: 1 for all tokens.
    """

    logps: paddle.Tensor
    old_logps: paddle.Tensor
    completions: paddle.Tensor
    advantages: paddle.Tensor
    reference_logps: paddle.Tensor | None = None
    correction: paddle.Tensor | None = None

    def sums(self, values_T: paddle.Tensor) -> paddle.Tensor:
        """Return the sum of the values of each completion's tokens, [C]."""
        return paddle.scatter_nd_add(paddle.zeros_like(self.advantages), self.completions.unsqueeze(1), values_T)

    def spread(self, values_C: paddle.Tensor) -> paddle.Tensor:
        """Return the value of each token's completion, [T]."""
        return paddle.gather(values_C, self.completions)

    def means(self, values_T: paddle.Tensor) -> paddle.Tensor:
        """Return the mean of the values of each completion's tokens, [C]; 0 for a completion without tokens."""
        return self.sums(values_T) / self.sums(paddle.ones_like(values_T)).clip(min=1.0)


@dataclass(frozen=True)
class PolicyLoss:
    """Losses of tokens, and values for metrics without gradient.

    Attributes:
        losses: float32 [T].
        kl: float32 [T], estimate of the KL divergence from the reference model; None if beta is 0.
        is_low_clipped, is_high_clipped: float32, 1 where the ratio is clipped: [T], or [C] for ratios of sequences.
    """

    losses: paddle.Tensor
    kl: paddle.Tensor | None
    is_low_clipped: paddle.Tensor
    is_high_clipped: paddle.Tensor


def policy_loss(tokens: PolicyTokens, options: GRPOConfig) -> PolicyLoss:
    """Return the loss of each token, without the weight of `loss_type`.

    Args:
        tokens: tokens of completions.
        options: `config.grpo` of a run.
    """
    log_ratios = tokens.logps - tokens.old_logps
    advantages = tokens.spread(tokens.advantages)
    by_sequence = options.importance_sampling_level == "sequence"
    if by_sequence:
        log_ratios = tokens.means(log_ratios)
    ratios = paddle.exp(log_ratios)
    ratios_T = tokens.spread(ratios) if by_sequence else ratios
    kl_T = None
    if options.has_reference:
        assert tokens.reference_logps is not None, "a KL divergence needs log-probabilities of the reference model"
        differences_T = tokens.reference_logps - tokens.logps
        kl_T = paddle.exp(differences_T) - differences_T - 1
        kl_T = kl_T * ratios_T if options.use_bias_correction_kl else kl_T
    lowest, highest = 1 - options.epsilon, 1 + options.upper_epsilon
    clipped_T = ratios_T.clip(lowest, highest)
    if options.delta is not None:
        ratios, ratios_T = ratios.clip(max=options.delta), ratios_T.clip(max=options.delta)
    losses_T = -paddle.minimum(ratios_T * advantages, clipped_T * advantages)
    if tokens.correction is not None:
        losses_T = losses_T * tokens.correction
    if kl_T is not None:
        losses_T = losses_T + options.beta * kl_T
    signs = tokens.advantages if by_sequence else advantages
    is_low, is_high = (ratios < lowest) & (signs < 0), (ratios > highest) & (signs > 0)
    kl_T = None if kl_T is None else kl_T.detach()
    return PolicyLoss(losses_T, kl_T, is_low.astype("float32"), is_high.astype("float32"))


@paddle.no_grad()
def sampling_correction(tokens: PolicyTokens, sampling_logps_T: paddle.Tensor, options: GRPOConfig) -> paddle.Tensor:
    """Return the ratio of the probabilities in training and in sampling for each token, float32 [T].

    With a mode of sequences, the ratio of a token is the product of the ratios of all tokens of its completion.

    Args:
        tokens: tokens of completions; `old_logps` are the log-probabilities in training.
        sampling_logps_T: log-probabilities that the sampled tokens had in sampling.
        options: `config.grpo` of a run.
    """
    differences_T = tokens.old_logps.detach() - sampling_logps_T
    if options.importance_sampling_mode.startswith("sequence"):
        differences_T = tokens.spread(tokens.sums(differences_T))
    ratios_T = paddle.exp(differences_T)
    lowest, highest = options.importance_sampling_clip_min, options.importance_sampling_clip_max
    clipped_T = ratios_T.clip(lowest, highest)
    if options.importance_sampling_mode.endswith("truncate"):
        return clipped_T
    return paddle.where(ratios_T == clipped_T, ratios_T, paddle.zeros_like(ratios_T))


def completion_weights(lengths: np.ndarray, options: GRPOConfig, max_length: int) -> np.ndarray:
    """Return the weight of the tokens of each completion of a sampled batch or micro-batch, float32 [C].

    Args:
        lengths: number of tokens of each completion that count in the loss: in the micro-batch for bnpo, in the sampled
            batch for dapo.
        options: `config.grpo` of a run.
        max_length: maximum number of tokens of a completion.
    """
    lengths = np.asarray(lengths, np.float64)
    if options.loss_type == "grpo":
        weights = 1 / np.maximum(lengths, 1)
    elif options.loss_type == "dr_grpo":
        weights = np.full(lengths.shape, 1 / max_length)
    else:
        weights = np.full(lengths.shape, lengths.size / max(lengths.sum(), 1))
    return weights.astype(np.float32)
