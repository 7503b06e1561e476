"""loss.png: the training loss, raw and smoothed, with the evaluations' losses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.trainer.callbacks.base import Callback
from paddlenlp_ext.trainer.state import TrainerState


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start (as Adam's moments are)."""
    average, result = 0.0, []
    for count, value in enumerate(values, start=1):
        average = weight * average + (1.0 - weight) * value
        result.append(average / (1.0 - weight**count))
    return result


def plot_loss(log_history: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the history's losses; an empty history draws nothing."""
    train = [(entry["step"], entry["loss"]) for entry in log_history if "loss" in entry]
    dev = [(entry["step"], entry["eval_loss"]) for entry in log_history if "eval_loss" in entry]
    if not train and not dev:
        return
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second's import, needed once
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color="#9ecae1", linewidth=1, label="training")
        if len(train) > 2:
            axes.plot(steps, smoothed(losses), color="#08519c", linewidth=1.8, label="training, smoothed")
    if dev:
        axes.plot(*zip(*dev, strict=True), color="#d94801", marker="o", markersize=4, linewidth=1, label="evaluation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per learned token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


class LossPlot(Callback):
    """Draws when training ends, however it ends."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / "loss.png"

    def on_train_end(self, state: TrainerState) -> None:
        plot_loss(state.log_history, self.path)
