"""Metrics of GRPO, named as in TRL: sums over micro-batches and ranks, and metrics of a sampled batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.policy_optimization.advantages import lack_gradient

SUMMED = (
    "kl",
    "entropy",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/mean",
    "sampling/importance_sampling_ratio/mean",
)
"""Metrics that are means over tokens, or over completions for ratios of sequences."""
EXTREMES = {
    "clip_ratio/low_min": -1,
    "clip_ratio/high_max": 1,
    "sampling/sampling_logp_difference/max": 1,
    "sampling/importance_sampling_ratio/min": -1,
    "sampling/importance_sampling_ratio/max": 1,
}
"""Metrics that are the least (-1) or greatest (1) value of the completions or tokens of a step."""


@dataclass(frozen=True)
class MeanSums:
    """Sums and counts of values of metrics.

    Attributes:
        names: names of the metrics.
        sums: float64 [metrics].
        counts: float64 [metrics], number of values in each sum.
    """

    names: Sequence[str]
    sums: np.ndarray
    counts: np.ndarray

    @classmethod
    def of_values(cls, values: Mapping[str, np.ndarray], names: Sequence[str]) -> MeanSums:
        """Return the sums of given values of some of the metrics `names`; NaN does not count."""
        assert values.keys() <= set(names), f"not in {names}: {values.keys()}"
        arrays = [np.asarray(values.get(name, ()), np.float64) for name in names]
        counts = [float(np.isfinite(array).sum()) for array in arrays]
        return cls(names, np.array([np.nansum(array) for array in arrays]), np.array(counts))

    @classmethod
    def from_vector(cls, vector: np.ndarray, names: Sequence[str]) -> MeanSums:
        """Return the metrics of the result of `to_vector`, or of a sum of such results."""
        return cls(names, *np.split(np.asarray(vector, np.float64), 2))

    def to_vector(self) -> np.ndarray:
        """Return sums and counts as one vector, float64 [2 * metrics]."""
        return np.concatenate([self.sums, self.counts])

    def means(self) -> dict[str, float]:
        """Return the mean of each metric that has values."""
        parts = zip(self.names, self.sums, self.counts, strict=True)
        return {name: float(total / count) for name, total, count in parts if count}


def completion_metrics(lengths: np.ndarray, is_truncated: np.ndarray) -> dict[str, float]:
    """Return metrics of the lengths of completions; without completions that have an end token, their lengths are 0.

    Args:
        lengths: number of tokens of each completion.
        is_truncated: True for completions without an end token.
    """
    ended = lengths[~is_truncated] if not is_truncated.all() else np.zeros(1)
    metrics = {
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(is_truncated.mean()),
        "completions/mean_terminated_length": float(ended.mean()),
        "completions/min_terminated_length": float(ended.min()),
        "completions/max_terminated_length": float(ended.max()),
    }
    return metrics


def reward_metrics(
    rewards_PG: np.ndarray, deviations_P: np.ndarray, by_function: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Return metrics of the rewards of a sampled batch; completions without a reward (NaN) do not count.

    Args:
        rewards_PG: total reward of each completion.
        deviations_P: standard deviation of the rewards of each group; see `lack_gradient`.
        by_function: name of a reward function -> its rewards.
    """
    metrics = {
        "reward": _mean(rewards_PG),
        "reward_std": _deviation(rewards_PG),
        "frac_reward_zero_std": float(lack_gradient(deviations_P).mean()),
    }
    for name, values in by_function.items():
        metrics[f"rewards/{name}/mean"] = _mean(values)
        metrics[f"rewards/{name}/std"] = _deviation(values)
    return {name: value for name, value in metrics.items() if np.isfinite(value)}


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _deviation(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.std(ddof=1)) if known.size > 1 else float("nan")
