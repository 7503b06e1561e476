"""Metrics of preference training, named as in TRL and accumulated over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SUMMED = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "nll_loss",
    "kl",
)


def _zeros() -> np.ndarray:
    return np.zeros(len(SUMMED), dtype=np.float64)


@dataclass(frozen=True)
class PreferenceMetrics:
    """Sums and counts of preference metrics.

    | metric | value |
    |---|---|
    | `rewards/chosen`, `rewards/rejected` | mean reward of the chosen (desirable) or rejected (undesirable) answers |
    | `rewards/margins` | mean reward of the chosen answers minus mean reward of the rejected answers |
    | `rewards/accuracies` | fraction of the pairs whose chosen answer has the higher reward |
    | `logps/chosen`, `logps/rejected` | mean log-probability of an answer, summed over its tokens |
    | `nll_loss` | negative log-probability per token, averaged over the chosen answers |
    | `kl` | KTO's baseline, averaged over the micro-batches |

    Attributes:
        sums: float64 [metrics], in the order of `SUMMED`.
        counts: float64 [metrics], number of values in each sum.
    """

    sums: np.ndarray = field(default_factory=_zeros)
    counts: np.ndarray = field(default_factory=_zeros)

    @classmethod
    def from_answers(
        cls,
        logps_A: Any,
        rewards_A: Any,
        is_desirable_A: np.ndarray,
        lengths_A: np.ndarray,
        *,
        in_pairs: bool = True,
        baseline: Any = None,
    ) -> PreferenceMetrics:
        """Return the metrics of a micro-batch.

        Args:
            logps_A: log-probabilities of the answers, tensor or array, float32 [A].
            rewards_A: rewards of the answers, tensor or array, float32 [A].
            is_desirable_A: bool [A], True for a chosen answer.
            lengths_A: int [A], number of tokens of each answer.
            in_pairs: whether answers 2i and 2i + 1 are the chosen and the rejected answer of pair i.
            baseline: KTO's baseline; None for other losses.
        """
        logps, rewards = np.asarray(logps_A, np.float64), np.asarray(rewards_A, np.float64)
        chosen, rejected = is_desirable_A, ~is_desirable_A
        values = {
            "rewards/chosen": rewards[chosen],
            "rewards/rejected": rewards[rejected],
            "rewards/accuracies": rewards[0::2] > rewards[1::2] if in_pairs else (),
            "logps/chosen": logps[chosen],
            "logps/rejected": logps[rejected],
            "nll_loss": -logps[chosen] / lengths_A[chosen],
            "kl": () if baseline is None else [float(baseline)],
        }
        sums = [np.sum(values[name], dtype=np.float64) for name in SUMMED]
        return cls(np.array(sums), np.array([len(values[name]) for name in SUMMED], dtype=np.float64))

    def __add__(self, other: PreferenceMetrics) -> PreferenceMetrics:
        return PreferenceMetrics(self.sums + other.sums, self.counts + other.counts)

    def to_vector(self) -> np.ndarray:
        """Return sums and counts as one vector, float64 [2 x metrics], for summation over ranks."""
        return np.concatenate([self.sums, self.counts])

    @classmethod
    def from_vector(cls, vector: np.ndarray) -> PreferenceMetrics:
        """Build the metrics from a sum of results of `to_vector`."""
        sums, counts = np.split(np.asarray(vector, np.float64), 2)
        return cls(sums, counts)

    def means(self) -> dict[str, float]:
        """Return a dict from metric names to values; metrics without data are left out."""
        means = {
            name: float(total / count)
            for name, total, count in zip(SUMMED, self.sums, self.counts, strict=True)
            if count
        }
        if "rewards/chosen" in means and "rewards/rejected" in means:
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means
