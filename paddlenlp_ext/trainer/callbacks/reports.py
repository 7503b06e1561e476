"""Reports of a run: metrics.jsonl, results files, loss.png and VisualDL."""

from __future__ import annotations

import importlib
import json
import logging
import math
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paddlenlp_ext.config.sections.train import TrainConfig
from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.sharding_spec import full_shape
from paddlenlp_ext.trainer.callbacks import Callback
from paddlenlp_ext.trainer.callbacks.progress import build_progress
from paddlenlp_ext.trainer.output_dir import STATE_FILE
from paddlenlp_ext.trainer.state import TrainerState
from paddlenlp_ext.utils.files import read_json_object, write_json, write_text
from paddlenlp_ext.utils.storage_errors import explained_errors


class MetricsFile(Callback):
    """Callback that appends log entries to metrics.jsonl and updates trainer_state.json in the output_dir.

    At the start of a run, metrics.jsonl is rewritten from the history, so a resumed run has no duplicate lines.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.path = output_dir / "metrics.jsonl"

    def on_train_begin(self, state: TrainerState) -> None:
        write_text(self.path, "".join(_line(entry) for entry in state.log_history))

    def on_rollback(self, state: TrainerState) -> None:
        self.on_train_begin(state)

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        with explained_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line(entry))

    def on_save(self, state: TrainerState, folder: Path) -> None:
        write_json(self.output_dir / STATE_FILE, state.to_dict())

    def on_train_end(self, state: TrainerState) -> None:
        write_json(self.output_dir / STATE_FILE, state.to_dict())


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


def train_results(state: TrainerState, model: TrainableModel) -> dict[str, float]:
    """Return the contents of train_results.json: means over all steps, including those before a resume."""
    seconds = max(state.train_seconds, 1e-9)
    return {
        "epoch": state.epoch,
        "step": state.step,
        "train_loss": state.train_loss_sum / max(1, state.num_trained_steps),
        "train_runtime": state.train_seconds,
        "train_steps_per_second": state.step / seconds,
        "train_samples_per_second": state.num_rows / seconds,
        "train_tokens_per_second": state.num_tokens / seconds,
        "train_learned_tokens_per_second": state.num_target_tokens / seconds,
        "num_tokens": state.num_tokens,
        "num_learned_tokens": state.num_target_tokens,
        **state.scaling_metrics(),
        "trainable_parameters": num_trainable(model),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def num_trainable(model: TrainableModel) -> int:
    """Return the number of trained parameters of the unsharded model."""
    return sum(math.prod(full_shape(parameter)) for parameter in model.parameters() if not parameter.stop_gradient)


def peak_memory_bytes() -> int:
    """Return the peak resident set size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def save_results(output_dir: Path, split: str, results: dict[str, float]) -> None:
    """Write `<split>_results.json` and merge the numbers into all_results.json."""
    write_json(output_dir / f"{split}_results.json", results)
    all_results = output_dir / "all_results.json"
    previous = read_json_object(all_results) if all_results.is_file() else {}
    write_json(all_results, {**previous, **results})


def smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the exponential moving average, bias-corrected at the start as Adam's moments are."""
    average, result = 0.0, []
    for count, value in enumerate(values, start=1):
        average = weight * average + (1.0 - weight) * value
        result.append(average / (1.0 - weight**count))
    return result


_EVALUATION_COLORS = ("#d94801", "#238b45", "#6a51a3", "#a50f15", "#525252")


def plot_loss(log_history: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the losses of a log history; an empty history writes no file."""
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here because it takes a second
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
    """Callback that plots loss.png at the end of training, including its end by an error or a signal."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / "loss.png"

    def on_train_end(self, state: TrainerState) -> None:
        plot_loss(state.log_history, self.path)


class VisualDLLog(Callback):
    """Callback that writes every number of a log entry as a VisualDL scalar under `output_dir/runs`.

    Raises:
        ValueError: VisualDL is not installed.
    """

    def __init__(self, output_dir: Path) -> None:
        try:
            visualdl = importlib.import_module("visualdl")
        except ModuleNotFoundError as error:
            raise ValueError(
                "report_to: visualdl needs the package visualdl; run: pip install -e '.[visualdl]'"
            ) from error
        self._writer = visualdl.LogWriter(logdir=str(output_dir / "runs"))

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        for name, value in entry.items():
            if name != "step":
                group = "eval" if name.startswith("eval_") else "train"
                self._writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, entry["step"])

    def on_train_end(self, state: TrainerState) -> None:
        self._writer.close()


_REPORTERS: dict[str, Callable[[Path], Callback]] = {"visualdl": VisualDLLog}


def build_reports(train: TrainConfig, output_dir: Path) -> list[Callback]:
    """Build the callbacks of a run: metrics file, progress, loss plot, and the reporters that `report_to` names.

    Args:
        train: `config.train`.
        output_dir: folder of the run, which must exist.

    Raises:
        ValueError: the package of a reporter is not installed.
    """
    names = [name for name in train.report_to if name != "none"]
    return [
        MetricsFile(output_dir),
        build_progress(train.disable_tqdm),
        LossPlot(output_dir),
        *(_REPORTERS[name](output_dir) for name in names),
    ]
