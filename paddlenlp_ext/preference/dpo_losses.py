"""Losses of DPO and its variants, which compare the two answers of a pair (`loss_type`).

`@_pair_loss` registers a loss. The KTO loss of rated answers is in kto_loss.py.

The log-ratio of an answer y is r = log pi(y | x) - log pi_ref(y | x). The indices w and l denote the chosen and the
rejected answer; s is the logistic function:

    sigmoid    -(1 - e) log s(d) - e log s(-d), d = beta (r_w - r_l)                           arXiv:2305.18290
    robust     (-(1 - e) log s(d) + e log s(-d)) / (1 - 2 e), d as in sigmoid                  arXiv:2403.00409
    hinge      max(0, 1 - beta (r_w - r_l))                                                    arXiv:2305.10425
    ipo        (r_w / n_w - r_l / n_l - 1 / (2 beta))^2                                        arXiv:2310.12036
    simpo      sigmoid with d = beta (log pi(y_w) / n_w - log pi(y_l) / n_l) - gamma           arXiv:2405.14734
    orpo       -log s(log odds(y_w) - log odds(y_l))                                           arXiv:2403.07691
    kto_pair   (1 - s(beta (r_w - z_l))) / 2 + (1 - s(beta (z_w - r_l))) / 2                   arXiv:2402.01306
    dpop       -log s(beta (r_w - r_l - lambda max(0, -r_w)))                                  arXiv:2402.13228
    sppo_hard  (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2                                 arXiv:2405.00675
    nca_pair   -log s(beta r_w) - (log s(-beta r_w) + log s(-beta r_l)) / 2                    arXiv:2402.05369
    apo_zero   1 - s(beta r_w) + s(beta r_l)                                                   arXiv:2408.06266

e is `label_smoothing`; if e is above 0, sigmoid is conservative DPO. gamma is `simpo_gamma`, and lambda is
`dpop_lambda`. n is the number of tokens of an answer. odds(y) is p / (1 - p) with p = exp(log pi(y) / n). z_w and z_l
are the mean log-ratios of the chosen and the rejected answers of the micro-batch, clipped at 0 and without gradient.
The reward of an answer is beta r; with SimPO and ORPO, the reward is beta log pi(y) / n.

Shapes: N pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import paddle
import paddle.nn.functional as F

from paddlenlp_ext.config.sections.preference import WITHOUT_REFERENCE, PreferenceConfig

LEAST_DOUBT = 1e-6
"""Minimum of -log p for computing the odds p / (1 - p), which are infinite for p = 1."""


@dataclass(frozen=True)
class Pairs:
    """Inputs of a pair loss, float32 [N].

    Attributes:
        chosen_ratios, rejected_ratios: result of `log_ratios` for each answer.
        chosen_means, rejected_means: mean log-probability per token of each answer.
        chosen_lengths, rejected_lengths: number of tokens of each answer.
    """

    chosen_ratios: paddle.Tensor
    rejected_ratios: paddle.Tensor
    chosen_means: paddle.Tensor
    rejected_means: paddle.Tensor
    chosen_lengths: paddle.Tensor
    rejected_lengths: paddle.Tensor

    @property
    def margins(self) -> paddle.Tensor:
        """Log-ratios of the chosen answers minus log-ratios of the rejected answers, [N]."""
        return self.chosen_ratios - self.rejected_ratios


@dataclass(frozen=True)
class PairLoss:
    """Losses and rewards of pairs, float32 [N]; rewards have no gradient."""

    losses: paddle.Tensor
    chosen_rewards: paddle.Tensor
    rejected_rewards: paddle.Tensor


PairFunction = Callable[[Pairs, PreferenceConfig], paddle.Tensor]
PAIR_LOSSES: dict[str, PairFunction] = {}
"""`loss_type` -> function that maps pairs and options to the loss of each pair, float32 [N]."""


def _pair_loss(function: PairFunction) -> PairFunction:
    PAIR_LOSSES[function.__name__] = function
    return function


def pair_loss(
    chosen_logps_N: paddle.Tensor,
    rejected_logps_N: paddle.Tensor,
    reference_chosen_N: paddle.Tensor | None,
    reference_rejected_N: paddle.Tensor | None,
    options: PreferenceConfig,
    chosen_lengths_N: paddle.Tensor,
    rejected_lengths_N: paddle.Tensor,
) -> PairLoss:
    """Return the loss of each pair: `pref_loss_ratio` times the loss of `loss_type`, plus the SFT loss.

    The SFT loss of a pair is `options.sft_weight` times the chosen answer's mean negative log-probability per token.
    Except with `kto_pair`, the loss of a pair does not depend on other pairs, so the mean over a step does not depend
    on the split into micro-batches.

    Args:
        chosen_logps_N, rejected_logps_N: float32 [N], sums of the log-probabilities of each answer's tokens.
        reference_chosen_N, reference_rejected_N: sums of the reference model's log-probabilities, without gradient;
            unused if `options.has_reference` is false.
        options: `config.preference` of a run.
        chosen_lengths_N, rejected_lengths_N: int64 [N], number of tokens of each answer.

    Raises:
        ValueError: `options.loss_type` is not a pair loss.
    """
    if options.loss_type not in PAIR_LOSSES:
        raise ValueError(f"loss_type {options.loss_type} does not compare pairs; use {', '.join(PAIR_LOSSES)}")
    chosen_lengths_N, rejected_lengths_N = chosen_lengths_N.astype("float32"), rejected_lengths_N.astype("float32")
    pairs = Pairs(
        log_ratios(chosen_logps_N, reference_chosen_N, options),
        log_ratios(rejected_logps_N, reference_rejected_N, options),
        chosen_logps_N / chosen_lengths_N,
        rejected_logps_N / rejected_lengths_N,
        chosen_lengths_N,
        rejected_lengths_N,
    )
    losses_N = options.pref_loss_ratio * PAIR_LOSSES[options.loss_type](pairs, options)
    if options.sft_weight:
        losses_N = losses_N - options.sft_weight * pairs.chosen_means
    is_mean = options.loss_type in WITHOUT_REFERENCE
    scores = (pairs.chosen_means, pairs.rejected_means) if is_mean else (pairs.chosen_ratios, pairs.rejected_ratios)
    return PairLoss(losses_N, *(options.beta * score_N.detach() for score_N in scores))


def log_ratios(logps: paddle.Tensor, reference: paddle.Tensor | None, options: PreferenceConfig) -> paddle.Tensor:
    """Return log pi(y | x) - log pi_ref(y | x); without a reference model, log pi(y | x)."""
    if not options.has_reference:
        return logps
    assert reference is not None, f"loss_type {options.loss_type} needs log-probabilities of the reference model"
    return logps - reference


def _smoothed_log_sigmoid(logits_N: paddle.Tensor, label_smoothing: float) -> paddle.Tensor:
    losses_N = -(1 - label_smoothing) * F.log_sigmoid(logits_N)
    return losses_N - label_smoothing * F.log_sigmoid(-logits_N) if label_smoothing else losses_N


@_pair_loss
def sigmoid(pairs: Pairs, options: PreferenceConfig) -> paddle.Tensor:
    """Return the DPO loss (arXiv:2305.18290); with `label_smoothing`, the conservative DPO loss."""
    return _smoothed_log_sigmoid(options.beta * pairs.margins, options.label_smoothing)


@_pair_loss
def robust(pairs: Pairs, options: PreferenceConfig) -> paddle.Tensor:
    """Return the robust DPO loss (arXiv:2403.00409).

    The loss is an unbiased estimate of the DPO loss with correct labels if `label_smoothing` is the fraction of wrong
    labels.
    """
    logits_N, wrong = options.beta * pairs.margins, options.label_smoothing
    return (wrong * F.log_sigmoid(-logits_N) - (1 - wrong) * F.log_sigmoid(logits_N)) / (1 - 2 * wrong)


@_pair_loss
def hinge(pairs: Pairs, options: PreferenceConfig) -> paddle.Tensor:
    """Return the hinge loss of SLiC (arXiv:2305.10425) on the log-ratios."""
    return F.relu(1 - options.beta * pairs.margins)


@_pair_loss
def ipo(pairs: Pairs, options: PreferenceConfig) -> paddle.Tensor:
    """Return the IPO loss (arXiv:2310.12036, eq. 17) on log-ratios per token, as in the experiments of the paper."""
    margins_N = pairs.chosen_ratios / pairs.chosen_lengths - pairs.rejected_ratios / pairs.rejected_lengths
    return (margins_N - 1 / (2 * options.beta)).square()


@_pair_loss
def simpo(pairs: Pairs, options: PreferenceConfig) -> paddle.Tensor:
    """Return the SimPO loss (arXiv:2405.14734) on log-probabilities per token, with a target margin."""
    logits_N = options.beta * (pairs.chosen_means - pairs.rejected_means) - options.simpo_gamma
    return _smoothed_log_sigmoid(logits_N, options.label_smoothing)


@_pair_loss
def orpo(pairs: Pairs, options: PreferenceConfig) -> paddle.Tensor:
    """Return the odds ratio loss of ORPO (arXiv:2403.07691, eq. 7); `pair_loss` adds the SFT loss."""
    return -F.log_sigmoid(_log_odds(pairs.chosen_means) - _log_odds(pairs.rejected_means))


def _log_odds(logps_N: paddle.Tensor) -> paddle.Tensor:
    """Return log(p / (1 - p)) for p = exp(logps_N); p is clipped to at most exp(-LEAST_DOUBT)."""
    logps_N = logps_N.clip(max=-LEAST_DOUBT)
    return logps_N - paddle.log(-paddle.expm1(logps_N))


@_pair_loss
def kto_pair(pairs: Pairs, options: PreferenceConfig) -> paddle.Tensor:
    """Return the KTO loss on pairs (arXiv:2402.01306).

    The baseline of chosen answers is the mean log-ratio of rejected answers, at least 0, and vice versa.
    """
    chosen_kl = pairs.chosen_ratios.mean().clip(min=0).detach()
    rejected_kl = pairs.rejected_ratios.mean().clip(min=0).detach()
    chosen_N = 1 - F.sigmoid(options.beta * (pairs.chosen_ratios - rejected_kl))
    rejected_N = 1 - F.sigmoid(options.beta * (chosen_kl - pairs.rejected_ratios))
    return (chosen_N + rejected_N) / 2


@_pair_loss
def dpop(pairs: Pairs, options: PreferenceConfig) -> paddle.Tensor:
    """Return the DPO-Positive loss (arXiv:2402.13228), which penalizes chosen answers with a log-ratio below 0."""
    penalties_N = F.relu(-pairs.chosen_ratios)
    return -F.log_sigmoid(options.beta * (pairs.margins - options.dpop_lambda * penalties_N))


@_pair_loss
def sppo_hard(pairs: Pairs, options: PreferenceConfig) -> paddle.Tensor:
    """Return the SPPO loss (arXiv:2405.00675, eq. 4.7) with win probabilities of 1 (chosen) and 0 (rejected)."""
    target = 1 / (2 * options.beta)
    return (pairs.chosen_ratios - target).square() + (pairs.rejected_ratios + target).square()


@_pair_loss
def nca_pair(pairs: Pairs, options: PreferenceConfig) -> paddle.Tensor:
    """Return the NCA loss on pairs (arXiv:2402.05369)."""
    chosen_N, rejected_N = options.beta * pairs.chosen_ratios, options.beta * pairs.rejected_ratios
    return -F.log_sigmoid(chosen_N) - 0.5 * (F.log_sigmoid(-chosen_N) + F.log_sigmoid(-rejected_N))


@_pair_loss
def apo_zero(pairs: Pairs, options: PreferenceConfig) -> paddle.Tensor:
    """Return the APO-zero loss (arXiv:2408.06266, eq. 7), which raises chosen rewards and lowers rejected rewards."""
    return 1 - F.sigmoid(options.beta * pairs.chosen_ratios) + F.sigmoid(options.beta * pairs.rejected_ratios)
