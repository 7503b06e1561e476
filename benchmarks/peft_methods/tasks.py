"""Tasks on which each method is trained, and the short run that measures speed and memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OF_ALL_RUNS: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "per_device_eval_batch_size": 25,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "zero_padding": True,
    "greedy_zero_padding": True,
    "do_train": True,
    "disable_tqdm": True,
    "seed": 42,
}


@dataclass(frozen=True)
class Task:
    """Task of the comparison: rows and training options.

    Attributes:
        name: name of the task in the table, and of the folder of its runs.
        keys: configuration of a run, except the keys and the learning rate of its method.
    """

    name: str
    keys: dict[str, Any]

    @classmethod
    def of(
        cls, name: str, dataset: str, *, steps: int, pack_tokens: int, eval_batches: int, new_tokens: int = 0
    ) -> Task:
        """Return a task of `steps` optimizer steps of one pack each.

        Args:
            name: name of the task.
            dataset: built-in name, or a folder of train.json and dev.json.
            steps: optimizer steps.
            pack_tokens: capacity of a pack.
            eval_batches: number of batches of 25 eval rows; 0: no evaluation.
            new_tokens: maximum tokens of a generated answer; 0: no answers and no score.
        """
        keys = {
            **_OF_ALL_RUNS,
            "dataset_name_or_path": dataset,
            "max_steps": steps,
            "logging_steps": max(1, steps // 20),
            "max_length": pack_tokens,
            "src_length": pack_tokens // 2,
            "do_eval": eval_batches > 0,
            "max_evaluate_steps": eval_batches,
            "eval_with_do_generation": new_tokens > 0,
            "max_new_tokens": new_tokens or 1,
        }
        return cls(name, keys)

    def on(self, model: str, settings: Sequence[Sequence[str]]) -> Task:
        """Return the task for a model; `settings` (key, JSON value) override keys of the task."""
        more = {key: json.loads(value) for key, value in settings}
        return Task(self.name, {**self.keys, "model_name_or_path": model, **more})


INFLECTION = Task.of("inflection", "inflection", steps=100, pack_tokens=128, eval_batches=4, new_tokens=16)
COST = Task.of("cost", "inflection", steps=6, pack_tokens=512, eval_batches=0)
"""Task that measures time and memory on an otherwise idle machine."""


def gsm8k(folder: Path) -> Task:
    """Return GSM8K (school mathematics with worked answers, arXiv:2110.14168), evaluated by the loss on 50 rows."""
    return Task.of("gsm8k", str(folder), steps=30, pack_tokens=256, eval_batches=2)


def tiny(folder: Path) -> list[Task]:
    """Return small tasks of each kind on a tiny random model, whose figures are meaningless."""
    from tests.common.models import write_tiny_data, write_tiny_model

    model, data = folder / "tiny_model", folder / "tiny_data"
    if not (model / "model.safetensors").is_file():
        write_tiny_model(model)
    write_tiny_data(data)
    keys = {"chat_template": "none", "device": "cpu", "data_cache_dir": str(folder / "cache")}
    settings = [(key, json.dumps(value)) for key, value in keys.items()]
    scored = Task.of("inflection", str(data), steps=2, pack_tokens=32, eval_batches=1, new_tokens=4)
    unscored = Task.of("gsm8k", str(data), steps=2, pack_tokens=32, eval_batches=1)
    cost = Task.of("cost", str(data), steps=2, pack_tokens=32, eval_batches=0)
    return [task.on(str(model), settings) for task in (scored, unscored, cost)]
