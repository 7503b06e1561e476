"""Dev sets of a run, and the metric that selects the best checkpoint.

| `eval_dataset_path` | metrics |
|---|---|
| `{"math": "a.jsonl", "code": "b.jsonl"}` | eval_math_loss, eval_code_loss, ... |
| `"math.jsonl,code.jsonl"`, or a list | eval_math_loss, eval_code_loss, ... (dev sets are named after their files) |
| `"math.jsonl"` | eval_loss, ... |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddlenlp_ext.config.metric_names import METRICS, is_greater_better, is_known
from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.utils.suggest import did_you_mean

SPELLINGS = {"ppl": "perplexity", "rougeL": "rougel", "rouge_l": "rougel", "bleu": "bleu4", "no": "loss"}
"""Alias of a metric -> its name."""
_NAME = re.compile(r"[\w.-]+")


def dev_sets(data: DataConfig) -> dict[str, str | list[str] | None]:
    """Return a dict from the names of the dev sets of a run to their paths. The name of a single unnamed dev set is "".

    Raises:
        ValueError: two dev sets have the same name, or a name or path is missing or invalid.
    """
    written = data.eval_dataset_path
    if written is None:
        return {"": data.dataset_name_or_path}
    if isinstance(written, Mapping):
        sets = list(written.items())
    else:
        paths = [path.strip() for part in written for path in part.split(",")]
        sets = [("" if len(paths) == 1 else Path(path).stem, path) for path in paths]
    for name, path in sets:
        if not path:
            raise ValueError(f"eval_dataset_path: {name or 'a dev set'} has no path; set the path of a file or folder")
        if len(sets) > 1 and [other for other, _ in sets].count(name) > 1:
            raise ValueError(f"eval_dataset_path: two dev sets are named {name!r}; write an object {{name: path}}")
        if name and not _NAME.fullmatch(name):
            raise ValueError(
                f"eval_dataset_path: {name!r} is not a valid name of a dev set; write an object {{name: path}} "
                "with names of letters, digits, '_', '-' and '.'"
            )
    if not sets:
        raise ValueError("eval_dataset_path is empty; set the path of a file or folder, or leave the key out")
    return dict(sets)


def dev_set_names(data: DataConfig) -> tuple[str, ...]:
    """Return the names of the dev sets; ("",) if `dev_sets` raises an error."""
    try:
        return tuple(dev_sets(data))
    except ValueError:
        return ("",)


@dataclass(frozen=True)
class BestMetric:
    """Metric that selects the best evaluation.

    Attributes:
        dev_set: name of the dev set; "" for a single unnamed dev set.
        metric: name of the metric.
        greater_is_better: whether greater values are better.
    """

    dev_set: str
    metric: str
    greater_is_better: bool

    @property
    def name(self) -> str:
        """Name of the metric with its dev set, such as "math_loss"."""
        return f"{self.dev_set}_{self.metric}" if self.dev_set else self.metric

    def require_known(self, has_custom_metrics: bool) -> None:
        """Check that the metric is known, unless the run has custom metrics.

        Raises:
            ValueError: the metric is unknown.
        """
        if not is_known(self.metric) and not has_custom_metrics:
            known = (*METRICS, *SPELLINGS)
            raise ValueError(
                f"metric_for_best_model: {self.metric!r} is not a metric{did_you_mean(self.metric, known)} Use one of "
                f"{', '.join(METRICS)}, or set compute_metrics and "
                "eval_with_do_generation"
            )


def best_metric(train: TrainConfig, names: Sequence[str] = ("",)) -> BestMetric:
    """Return the metric that `metric_for_best_model` names; without the name of a dev set, the first dev set is used.

    Args:
        train: `config.train`.
        names: names of the dev sets, in order.
    """
    written = (train.metric_for_best_model or "no").removeprefix("eval_")
    dev_set, metric = names[0], written
    if written not in (*METRICS, *SPELLINGS):
        dev_set = max((name for name in names if name and written.startswith(f"{name}_")), key=len, default=names[0])
        metric = written.removeprefix(f"{dev_set}_") if dev_set else written
    metric = SPELLINGS.get(metric, metric)
    greater = train.greater_is_better
    return BestMetric(dev_set, metric, is_greater_better(metric) if greater is None else greater)
