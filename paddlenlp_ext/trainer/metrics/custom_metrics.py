"""Custom metrics from a user-defined function, given as `compute_metrics` by dotted path or as `file.py:function`.

    def length(rows):                                  # my_metrics.py
        return {"words": sum(len(row["output"].split()) for row in rows) / len(rows)}

    "compute_metrics": "my_metrics.length"        ->   eval_words in the log, metrics.jsonl and eval_results.json

A row is a dict with the texts `src`, `tgt` and `output`, as in generated_output.json.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from numbers import Real

from paddlenlp_ext.config.metric_names import METRICS
from paddlenlp_ext.utils.import_by_path import import_by_path

ComputeMetrics = Callable[[list[dict[str, str]]], Mapping[str, float]]
_NAME = re.compile(r"[\w.-]+")
_COUNTS = ("num_rows", "num_target_tokens", "runtime", "samples_per_second", "tokens_per_second", "generation_runtime")
_TAKEN = {*METRICS, *_COUNTS}


def load_compute_metrics(path: str | None) -> ComputeMetrics | None:
    """Import the function at a dotted path, or in a file; return None if `path` is None (see `import_by_path`).

    Raises:
        ValueError: the module cannot be imported, or does not define the function.
    """
    if path is None:
        return None
    function = import_by_path(path, "compute_metrics")
    if not callable(function):
        raise ValueError(f"compute_metrics: {path} is not a function; name a function")
    return function


def custom_metrics(function: ComputeMetrics, rows: list[dict[str, str]]) -> dict[str, float]:
    """Return the metrics that a user-defined function computes from generated answers.

    Args:
        function: user-defined function; exceptions of the function are not caught.
        rows: dicts with the texts src, tgt and output.

    Raises:
        ValueError: the result is not a mapping from names to numbers, or a name is invalid or belongs to another
            metric.
    """
    result = function(rows)
    if not isinstance(result, Mapping):
        raise ValueError(f"compute_metrics returned {_kind(result)}; return a dict of names and numbers")
    for name, value in result.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"compute_metrics returned the name {name!r}; use strings of letters, digits, '_', '-' and '.'"
            )
        if name in _TAKEN:
            raise ValueError(
                f"compute_metrics returned {name!r}, which is the name of another metric; choose another name"
            )
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError(f"compute_metrics returned {_kind(value)} for {name!r}; return a number")
    return {name: float(value) for name, value in result.items()}


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
