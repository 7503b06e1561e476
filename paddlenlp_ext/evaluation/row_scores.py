"""Scores of one model on the rows of a task, with confidence intervals and comparisons.

| kind | value of a row | weight of a row | score |
|---|---|---|---|
| share | 0 or 1 | 1 | mean value |
| mean | any number | 1 | mean value |
| bits | negative log-likelihood in bits | number of bytes | sum of values / sum of weights |
| perplexity | negative log-likelihood in nats | number of tokens | exp(sum of values / sum of weights) |
| corpus | one value for all rows | 1 | the value, without a confidence interval |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.evaluation.statistics import (
    Array,
    Comparison,
    Interval,
    bootstrap_interval,
    compare_ratios,
    compare_shares,
    wilson_interval,
)

SHARE, MEAN, BITS, RATIO_EXP, CORPUS = "share", "mean", "bits", "perplexity", "corpus"
LOWER_IS_BETTER = (BITS, RATIO_EXP)


@dataclass(frozen=True)
class Scores:
    """Values and weights of a metric on N rows.

    Attributes:
        kind: kind of the metric: share, mean, bits, perplexity or corpus.
        values: value of each row, float64 [N].
        weights: weight of each row, float64 [N].
        window_sizes: number of bytes of each window if the task is a single text, else empty. Different tokenizers may
            yield different windows.
    """

    kind: str
    values: Array
    weights: Array
    window_sizes: tuple[float, ...] = ()

    @classmethod
    def of_rows(cls, kind: str, values: Sequence[float], weights: Sequence[float] | None = None) -> Scores:
        """Return the scores of rows. Every row has the weight 1 unless `weights` are given."""
        return cls(kind, np.array(values, float), np.ones(len(values)) if weights is None else np.array(weights, float))

    @property
    def _transform(self) -> Callable[[Array], Array]:
        return np.exp if self.kind == RATIO_EXP else np.asarray

    @property
    def value(self) -> float:
        """Score over all rows."""
        return float(self._transform(np.array(self.values.sum() / self.weights.sum())))

    def interval(self, seed: int) -> Interval | None:
        """Return the confidence interval, or None for a corpus score."""
        if self.kind == CORPUS:
            return None
        if self.kind == SHARE:
            return wilson_interval(float(self.values.sum()), len(self.values))
        return bootstrap_interval(self.values, self.weights, seed, self._transform)

    def compare(self, base: Scores, seed: int) -> Comparison | None:
        """Compare these scores with the scores of a base model on the same rows.

        Return None for corpus scores, or if the windows of the two models differ.
        """
        if self.kind == CORPUS or self.window_sizes != base.window_sizes:
            return None
        if self.kind == SHARE:
            return compare_shares(base.values, self.values, seed)
        pairs = ((base.values, base.weights), (self.values, self.weights))
        return compare_ratios(*pairs, seed, self._transform)

    def format(self, value: float, signed: bool = False) -> str:
        """Return a value of the metric as text.

        If `signed`, the value is a difference and has a sign. The unit is %, or percentage points (pp) for a
        difference; perplexity and bits have no unit.
        """
        sign = "+" if signed else ""
        if self.kind in LOWER_IS_BETTER:
            return f"{value:{sign}.3f}" if abs(value) < 100 else f"{value:{sign}.1f}"
        return f"{100 * value:{sign}.1f} {'pp' if signed else '%'}"
