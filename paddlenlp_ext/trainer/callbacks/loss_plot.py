"""Plot the training and evaluation losses of a run in loss.png."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_ext.report.line_chart import smoothed
from paddlenlp_ext.report.run_folder import read_run
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.storage_errors import explained_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EVALUATION_COLORS = ("#d94801", "#238b45", "#6a51a3", "#a50f15", "#525252")


def plot_loss(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the training and evaluation losses of `entries`. If `entries` has no losses, no file is written."""
    figure = loss_figure(entries)
    if figure is not None:
        with explained_errors(path):
            figure.savefig(path)


def loss_figure(entries: Sequence[dict[str, Any]]) -> Figure | None:
    """Return a figure of the training and evaluation losses of `entries`; None if `entries` has no losses.

    Fewer than 20 training losses are drawn with markers. For 20 or more training losses, a smoothed curve is added.

    Args:
        entries: log entries; training entries have `step` and `loss`, and evaluation entries have `step` and
            `eval_loss`.
    """
    train = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    evaluations: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        for name, value in entry.items():
            if name.startswith("eval_") and name.endswith("_loss"):
                evaluations.setdefault(name.removeprefix("eval").removesuffix("_loss"), []).append(
                    (entry["step"], value)
                )
    if not train and not evaluations:
        return None
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # matplotlib takes a second to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        count, means = smoothed(losses)
        is_long = count > 1
        color, marker = ("#9ecae1", "") if is_long else ("#08519c", "o")
        axes.plot(steps, losses, color=color, marker=marker, markersize=4, linewidth=1, label="training")
        if is_long:
            axes.plot(steps, means, color="#08519c", linewidth=1.8, label=f"training, mean of {count} steps")
    for number, (name, points) in enumerate(evaluations.items()):
        axes.plot(
            *zip(*points, strict=True),
            color=_EVALUATION_COLORS[number % len(_EVALUATION_COLORS)],
            marker="o",
            markersize=4,
            linewidth=1,
            label=f"evaluation{name.replace('_', ' ', 1)}",
        )
    axes.set_xlabel("optimizer step")
    is_per_token = not any({"rewards/chosen", "reward"} & entry.keys() for entry in entries)
    axes.set_ylabel("loss (nats per target token)" if is_per_token else "loss")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


class LossPlot(Callback):
    """Callback that plots loss.png from history.jsonl at the end of training, even after an error or a signal."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir

    def on_train_end(self, state: TrainerState) -> None:
        run = read_run(self._output_dir)
        plot_loss([*run.steps, *run.evaluations], self._output_dir / "loss.png")
