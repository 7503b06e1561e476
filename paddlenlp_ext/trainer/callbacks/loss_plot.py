"""Plot the training and evaluation losses of a run in loss.png."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.storage_errors import explained_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FEWEST_SMOOTHED = 20  # the moving average lags by 10 values, so in a shorter run it would lie far from the losses
_EVALUATION_COLORS = ("#d94801", "#238b45", "#6a51a3", "#a50f15", "#525252")


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the exponential moving average of `values`, with Adam's bias correction."""
    average, result = 0.0, []
    for count, value in enumerate(values, start=1):
        average = weight * average + (1.0 - weight) * value
        result.append(average / (1.0 - weight**count))
    return result


def plot_loss(log_history: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the training and evaluation losses of a log history. Without losses, no file is written."""
    figure = loss_figure(log_history)
    if figure is not None:
        with explained_errors(path):
            figure.savefig(path)


def loss_figure(log_history: Sequence[dict[str, Any]]) -> Figure | None:
    """Return a figure of the losses of a log history, or None if it has no losses.

    Each of a few training losses is marked with a point. Many training losses are also drawn smoothed.
    """
    train = [(entry["step"], entry["loss"]) for entry in log_history if "loss" in entry]
    evaluations: dict[str, list[tuple[int, float]]] = {}
    for entry in log_history:
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
        is_long = len(train) >= _FEWEST_SMOOTHED
        color, marker = ("#9ecae1", "") if is_long else ("#08519c", "o")
        axes.plot(steps, losses, color=color, marker=marker, markersize=4, linewidth=1, label="training")
        if is_long:
            axes.plot(steps, smoothed(losses), color="#08519c", linewidth=1.8, label="training, smoothed")
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
    is_per_token = not any("rewards/chosen" in entry for entry in log_history)
    axes.set_ylabel("loss (nats per target token)" if is_per_token else "loss")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


class LossPlot(Callback):
    """Callback that plots loss.png at the end of training, even if an error or a signal ends it."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / "loss.png"

    def on_train_end(self, state: TrainerState) -> None:
        plot_loss(state.log_history, self.path)
