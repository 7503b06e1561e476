"""A run's numbers in files: metrics.jsonl as they come, results and history at the end."""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path
from typing import Any

from paddlenlp_ext.sharding_spec import full_shape
from paddlenlp_ext.trainer.callbacks.base import Callback
from paddlenlp_ext.trainer.checkpoint import write_json
from paddlenlp_ext.trainer.output_dir import STATE_FILE
from paddlenlp_ext.trainer.state import TrainerState
from paddlenlp_ext.utils.files import read_json_object, write_text


class LogFiles(Callback):
    """Appends every log entry to metrics.jsonl and keeps trainer_state.json of the output_dir.

    The file is written anew from the history when a run starts, so that a resumed run has no line twice.
    """

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.path = output_dir / "metrics.jsonl"

    def on_train_begin(self, state: TrainerState) -> None:
        write_text(self.path, "".join(_line(entry) for entry in state.log_history))

    def on_log(self, state: TrainerState, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(entry))

    def on_save(self, state: TrainerState, folder: Path) -> None:
        write_json(self.output_dir / STATE_FILE, state.to_dict())

    def on_train_end(self, state: TrainerState) -> None:
        write_json(self.output_dir / STATE_FILE, state.to_dict())


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


def train_results(state: TrainerState, model: Any) -> dict[str, float]:
    """What train_results.json holds: means over all steps, resumed ones included; how much of the model trained."""
    seconds = max(state.train_seconds, 1e-9)
    return {
        "epoch": state.epoch,
        "step": state.step,
        "train_loss": state.train_loss_sum / max(1, state.step),
        "train_runtime": state.train_seconds,
        "train_steps_per_second": state.step / seconds,
        "train_samples_per_second": state.num_rows / seconds,
        "train_tokens_per_second": state.num_tokens / seconds,
        "train_learned_tokens_per_second": state.num_target_tokens / seconds,
        "num_tokens": state.num_tokens,
        "num_learned_tokens": state.num_target_tokens,
        "trainable_parameters": num_trainable(model),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def num_trainable(model: Any) -> int:
    """How many numbers of the whole model train, whatever part of it this process has."""
    return sum(math.prod(full_shape(parameter)) for parameter in model.parameters() if not parameter.stop_gradient)


def peak_memory_bytes() -> int:
    """The most memory this process has held so far (resident set)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def save_results(output_dir: Path, split: str, results: dict[str, float]) -> None:
    """Write `<split>_results.json` and join the numbers to all_results.json."""
    write_json(output_dir / f"{split}_results.json", results)
    everything = output_dir / "all_results.json"
    before = read_json_object(everything) if everything.is_file() else {}
    write_json(everything, {**before, **results})
