"""Files with the metrics of a run: metrics.jsonl, trainer_state.json and `<split>_results.json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from paddlenlp_ext.nn.trainable_model import TrainableModel
from paddlenlp_ext.sharding_spec import full_shape
from paddlenlp_ext.trainer.callbacks.callback import Callback
from paddlenlp_ext.trainer.callbacks.report_page import refresh_report
from paddlenlp_ext.trainer.checkpoints.output_dir import STATE_FILE
from paddlenlp_ext.trainer.trainer_state import TrainerState
from paddlenlp_ext.utils.files import read_json_object, write_json, write_text
from paddlenlp_ext.utils.peak_memory import peak_memory_bytes
from paddlenlp_ext.utils.storage_errors import explained_errors


class MetricsFile(Callback):
    """Callback that appends log entries to metrics.jsonl and updates trainer_state.json in output_dir.

    When a run starts, metrics.jsonl is rewritten from the log history, so that a resumed run has no duplicate lines.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.path = output_dir / "metrics.jsonl"

    def on_train_begin(self, state: TrainerState) -> None:
        write_text(self.path, "".join(_line(entry) for entry in state.log_history))

    def on_rollback(self, state: TrainerState) -> None:
        self.on_train_begin(state)

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        with explained_errors(self.path), self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(_line(entry))

    def on_save(self, state: TrainerState, folder: Path) -> None:
        write_json(self.output_dir / STATE_FILE, state.to_dict())

    def on_train_end(self, state: TrainerState) -> None:
        write_json(self.output_dir / STATE_FILE, state.to_dict())


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


def train_results(state: TrainerState, model: TrainableModel) -> dict[str, float]:
    """Return the contents of train_results.json. Means and sums include the steps before a resume."""
    seconds = max(state.train_seconds, 1e-9)
    return {
        "epoch": state.epoch,
        "step": state.step,
        "train_loss": state.train_loss_sum / max(1, state.num_trained_steps),
        "train_runtime": state.train_seconds,
        "train_steps_per_second": state.step / seconds,
        "train_samples_per_second": state.num_rows / seconds,
        "train_tokens_per_second": state.num_tokens / seconds,
        "train_target_tokens_per_second": state.num_target_tokens / seconds,
        "num_tokens": state.num_tokens,
        "num_target_tokens": state.num_target_tokens,
        **state.scaling_metrics(),
        "trainable_parameters": num_trainable(model),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def num_trainable(model: TrainableModel) -> int:
    """Return the number of trainable parameters of the unsharded model."""
    return sum(math.prod(full_shape(parameter)) for parameter in model.parameters() if not parameter.stop_gradient)


def save_results(output_dir: Path, split: str, results: dict[str, float]) -> None:
    """Write `<split>_results.json`, merge the results into all_results.json, and refresh report.html."""
    write_json(output_dir / f"{split}_results.json", results)
    all_results = output_dir / "all_results.json"
    previous = read_json_object(all_results) if all_results.is_file() else {}
    write_json(all_results, {**previous, **results})
    refresh_report(output_dir)
