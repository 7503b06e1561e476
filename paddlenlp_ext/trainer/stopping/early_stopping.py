"""Track the best evaluation (`metric_for_best_model`), and stop when evaluations no longer improve."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paddlenlp_ext.config.dev_sets import best_metric
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.logging import get_logger


class BestMetricTracker:
    """Tracker of the best evaluation by `metric_for_best_model`.

    Args:
        train: `config.train`.
        names: names of the dev sets; a single dev set has the name "".
        has_custom_metrics: whether evaluations compute custom metrics (`compute_metrics`).

    Raises:
        ValueError: evaluations do not compute the metric.
    """

    def __init__(self, train: TrainConfig, names: Sequence[str] = ("",), has_custom_metrics: bool = False) -> None:
        best = best_metric(train, names)
        if train.evaluation_strategy != "no":
            best.require_known(has_custom_metrics)
        self.name, self.greater_is_better = best.name, best.greater_is_better
        self._threshold, self._patience = train.early_stopping_threshold, train.patience

    def update(self, state: TrainerState, metrics: dict[str, float]) -> bool:
        """Record the metrics of an evaluation in `state`; return whether the evaluation is the best so far.

        Raises:
            ValueError: the evaluation lacks `metric_for_best_model`; the message lists the available metrics.
        """
        value, best = self._value(metrics), state.best_metric
        is_best = self.improves(value, best)
        is_progress = is_best and (best is None or abs(value - best) > self._threshold)
        state.num_not_improved = 0 if is_progress else state.num_not_improved + 1
        if is_best:
            state.best_name, state.best_metric, state.best_step = self.name, value, state.step
        return is_best

    def _value(self, metrics: dict[str, float]) -> float:
        if f"eval_{self.name}" not in metrics:
            names = ", ".join(name.removeprefix("eval_") for name in metrics)
            raise ValueError(
                f"metric_for_best_model: the evaluation has no metric {self.name!r}; choose one of {names}"
            )
        return metrics[f"eval_{self.name}"]

    def improves(self, value: float, best: float | None) -> bool:
        """Return whether `value` is better than the best so far; NaN is never better."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value > best if self.greater_is_better else value < best

    def stops_early(self, state: TrainerState) -> bool:
        """Return whether none of the last `early_stopping_patience` evaluations improved the metric."""
        if self._patience is None or state.num_not_improved < self._patience:
            return False
        get_logger(__name__).info(
            "early stopping after step %d: %d evaluations without an improvement in %s (best: %s)",
            *(state.step, state.num_not_improved, self.name),
            "none" if state.best_metric is None else f"{state.best_metric:.4f} of step {state.best_step}",
        )
        return True
