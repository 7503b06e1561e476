"""Plot scores.png: one panel per task and metric, with the score and confidence interval of each model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.evaluation.report import Line
from paddlenlp_ext.evaluation.row_scores import LOWER_IS_BETTER
from paddlenlp_ext.utils.files import atomic_file

_COLORS = ("#6b7280", "#08519c", "#238b45", "#d94801", "#6a51a3")
_PER_ROW = 3


def plot_scores(lines: Sequence[Line], models: Sequence[str], path: Path) -> None:
    """Write a PNG file with the scores of all models, in percent except for perplexity and bits per byte."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow import
    from matplotlib.figure import Figure

    columns = min(_PER_ROW, len(lines))
    rows = -(-len(lines) // columns)
    height = 0.9 + 0.32 * len(models)
    figure = Figure(figsize=(4.2 * columns, height * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for number, line in enumerate(lines):
        axes = figure.add_subplot(rows, columns, number + 1)
        _plot_line(axes, line, models)
    with atomic_file(path) as draft:
        figure.savefig(draft, format="png")


def _plot_line(axes: Any, line: Line, models: Sequence[str]) -> None:
    is_lower_better = line.scores[models[0]].kind in LOWER_IS_BETTER
    scale = 1 if is_lower_better else 100
    for number, model in enumerate(models):
        value, interval = scale * line.scores[model].value, line.intervals[model]
        low, high = (value, value) if interval is None else (scale * interval.low, scale * interval.high)
        color = _COLORS[number % len(_COLORS)]
        axes.plot([low, high], [number, number], color=color, linewidth=2)
        axes.plot([value], [number], color=color, marker="o", markersize=6)
    axes.set_yticks(range(len(models)), models)
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.set_title(f"{line.task}: {line.metric}, {line.num_rows:,} rows", fontsize=9, loc="left")
    axes.set_xlabel("lower is better" if is_lower_better else "%", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
