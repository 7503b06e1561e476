"""Tables of the classification: mean and standard deviation over the seeds, and F1 per label."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
REFERENCE = "lora_r16"
"""Method that the others are compared with, seed by seed."""
_RATIOS = {
    "Precision, macro": "precision_macro",
    "Recall, macro": "recall_macro",
    "F1, macro": "f1_macro",
    "F1, micro": "f1_micro",
    "Answers that are not a label": "unknown_labels",
}


def write_tables(path: Path, results: Sequence[Result], methods: Sequence[str]) -> str:
    """Write the tables of the scored runs in Markdown, in the order of `methods`; return their text."""
    scored = {(result["method"], result["seed"]): result for result in results if result["split"] == "test"}
    groups = {name: [run for (method, _), run in sorted(scored.items()) if method == name] for name in methods}
    groups = {name: runs for name, runs in groups.items() if runs}
    text = f"{averages(groups)}\nF1 by label, mean over the seeds:\n\n{by_label(groups)}"
    path.write_text(text, encoding="utf-8")
    return text


def averages(groups: Mapping[str, Sequence[Result]]) -> str:
    """Return a line per method: scores in percent as mean +- standard deviation, and the cost of the method.

    The difference from the reference is taken between runs with the same seed, and therefore the same order of rows.
    """
    rows = []
    of_reference = {run["seed"]: run["f1_macro"] for run in groups.get(REFERENCE, ())}
    for method, runs in groups.items():
        first = runs[0]
        scores = [spread([100 * run[key] for run in runs]) for key in _RATIOS.values()]
        differences = [
            100 * (run["f1_macro"] - of_reference[run["seed"]]) for run in runs if run["seed"] in of_reference
        ]
        scores.append(spread(differences, sign="+") if differences and method != REFERENCE else "")
        memory = f"{max(run['peak_memory_gb'] for run in runs):.2f} GB"
        costs = [f"{first['learning_rate']:.2g}", f"{first['trainable_parameters']:,}", memory]
        rows.append([method, str(len(runs)), *scores, *costs])
    header = [
        "Method",
        "Seeds",
        *_RATIOS,
        f"F1, macro, minus {REFERENCE}",
        "Learning rate",
        "Trained parameters",
        "Peak memory",
    ]
    return _markdown(header, rows)


def by_label(groups: Mapping[str, Sequence[Result]]) -> str:
    """Return a line per label: mean F1 of each method in percent."""
    labels = sorted({label for runs in groups.values() for run in runs for label in run["per_label"]})
    rows = []
    for label in labels:
        means = [statistics.mean(run["per_label"][label]["f1"] for run in runs) for runs in groups.values()]
        rows.append([label, *(f"{100 * mean:.0f}" for mean in means)])
    return _markdown(["Label", *groups], rows)


def spread(values: Sequence[float], sign: str = "-") -> str:
    """Return mean and sample standard deviation with one decimal; of a single value, the value."""
    mean = f"{statistics.mean(values):{sign}.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else mean


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"
