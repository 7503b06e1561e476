"""Which evaluation was the best."""

from __future__ import annotations

import math
from typing import Any

from paddlenlp_ext.config.sections import GENERATION_METRICS, METRIC_SPELLINGS

_LOWER_IS_BETTER = ("loss", "perplexity")


class BestMetric:
    """`metric_for_best_model` of `config.train`, and in which direction it improves.

    Raises:
        ValueError: the metric needs generated answers and `eval_with_do_generation` is off.
    """

    def __init__(self, train: Any, with_generation: bool) -> None:
        name = (train.metric_for_best_model or "loss").removeprefix("eval_")
        self.name = METRIC_SPELLINGS.get(name, name)
        if self.name in GENERATION_METRICS and not with_generation:
            raise ValueError(f"metric_for_best_model {name!r} needs eval_with_do_generation: true")
        greater = train.greater_is_better
        self.greater_is_better = self.name not in _LOWER_IS_BETTER if greater is None else greater

    def value(self, metrics: dict[str, float]) -> float:
        """The metric among an evaluation's.

        Raises:
            ValueError: the evaluation has no such metric.
        """
        key = f"eval_{self.name}"
        if key not in metrics:
            raise ValueError(f"metric_for_best_model {self.name!r} is not among {', '.join(sorted(metrics))}")
        return metrics[key]

    def improves(self, value: float, best: float | None) -> bool:
        """Whether `value` beats the best so far; NaN never does."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value > best if self.greater_is_better else value < best
