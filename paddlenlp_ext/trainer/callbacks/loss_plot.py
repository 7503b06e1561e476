"""Plot the training and evaluation losses of a run in loss.png."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.storage_errors import explained_errors

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
    train = [(entry["step"], entry["loss"]) for entry in log_history if "loss" in entry]
    evaluations: dict[str, list[tuple[int, float]]] = {}
    for entry in log_history:
        for name, value in entry.items():
            if name.startswith("eval_") and name.endswith("_loss"):
                evaluations.setdefault(name.removeprefix("eval").removesuffix("_loss"), []).append(
                    (entry["step"], value)
                )
    if not train and not evaluations:
        return
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # matplotlib takes a second to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="training")
        if len(train) > 2:
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
    with explained_errors(path):
        figure.savefig(path)


class LossPlot(Callback):
    """Callback that plots loss.png at the end of training, even if an error or a signal ends it."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / "loss.png"

    def on_train_end(self, state: TrainerState) -> None:
        plot_loss(state.log_history, self.path)
