"""Choose a LoRA configuration that fits the rows and a memory limit, for `pnx init`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.config import RunConfig
from paddlenlp_ext.config.parser import run_config_from
from paddlenlp_ext.config.processor import has_bf16_arithmetic
from paddlenlp_ext.config.run_config import PREFERENCE_SECTIONS, SECTIONS
from paddlenlp_ext.data.readers.splits import MissingSplitError
from paddlenlp_ext.devices import has_gpu
from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.load_data import RunData, load_data
from paddlenlp_ext.trainer.memory.run_estimate import estimate_run, outline_model
from paddlenlp_ext.utils.logging import get_logger

_LENGTHS = (128, 256, 512, 1024, 2048, 4096)
_MIN_ROWS_PER_STEP, _MAX_ROWS_PER_STEP = 8, 32
_SMALL_MODEL = 500_000_000
"""Number of parameters below which a model needs a higher learning rate."""
_SAVINGS: tuple[dict[str, Any], ...] = (
    {},
    {"recompute": True},
    {"weight_quantize_algo": "nf4"},
    {"weight_quantize_algo": "nf4", "recompute": True},
)
"""Keys that save memory, in the order in which they are tried."""


def suggest_config(model: str, data: str, goal: str, memory: float, output_dir: str) -> dict[str, Any]:
    """Return the configuration keys of a LoRA run.

    Args:
        model: name or path of the model.
        data: training rows: a file, a folder or the name of a dataset.
        goal: "chat", "instructions" or "preferences".
        memory: limit of the estimated memory in GB.
        output_dir: folder of the run.

    Raises:
        ValueError: the model or data cannot be used, or the run does not fit in memory.
    """
    keys: dict[str, Any] = {
        "model_name_or_path": model,
        "dataset_name_or_path": data,
        "output_dir": output_dir,
        "do_train": True,
        "lora": True,
        "lora_rank": 16,
        **({"bf16": True} if _has_bf16() else {}),
        "max_length": _LENGTHS[-1],
        "src_length": _LENGTHS[-1] // 2,
        "zero_padding": True,
        "greedy_zero_padding": True,
        "per_device_train_batch_size": 1,
    }
    keys, config, rows = _load(keys, goal)
    lengths = np.asarray(rows.train_rows.lengths)  # type: ignore[union-attr]
    needed = max(lengths.max(), _MIN_ROWS_PER_STEP * lengths.mean())
    keys["max_length"] = next((length for length in _LENGTHS if length >= needed), _LENGTHS[-1])
    keys["src_length"] = keys["max_length"] // 2
    keys |= _steps(len(lengths), float(lengths.mean()), keys["max_length"], has_dev=bool(keys.get("do_eval")))
    keys["learning_rate"] = _learning_rate(rows, config, goal)
    keys |= {"lr_scheduler_type": "cosine", "seed": 42}
    if keys["max_steps"] >= 100:
        keys["warmup_ratio"] = 0.05
    return _fitting(keys, rows, goal, memory)


def _has_bf16() -> bool:
    """Return whether the GPU, or the processor with the C++ library, computes in bfloat16."""
    return has_gpu() or (has_bf16_arithmetic() and bf16.unavailable_reason() is None)


def _load(keys: dict[str, Any], goal: str) -> tuple[dict[str, Any], RunConfig, RunData]:
    """Load training and eval rows; return the keys, the configuration and the rows.

    Without a dev split, a tenth of the rows is held out. If no rows can be held out, there are no eval rows.
    """
    with_dev = {**keys, "do_eval": True, "per_device_eval_batch_size": 8}
    for tried in (with_dev, {**with_dev, "dev_ratio": 0.1}):
        config = config_of(tried, goal)
        try:
            return tried, config, load_data(config)
        except MissingSplitError:
            continue
    config = config_of(keys, goal)
    data = load_data(config)
    message = "the run has no eval rows: %s has no dev split, and dev_ratio 0.1 would leave a split without rows"
    get_logger().warning(message, keys["dataset_name_or_path"])
    return keys, config, data


def config_of(keys: Mapping[str, Any], goal: str) -> RunConfig:
    """Return the configuration of a run with the given keys; `goal` selects the sections.

    Raises:
        ConfigError: a key is invalid.
    """
    sections = PREFERENCE_SECTIONS if goal == "preferences" else SECTIONS
    return run_config_from(dict(keys), {}, peft_methods(), sections)


def _steps(num_rows: int, mean_length: float, max_length: int, has_dev: bool) -> dict[str, Any]:
    """Return the configuration keys for steps and intervals.

    A step uses about a hundredth of the rows, but at least 8 and at most 32, and at least one pack. A run has three
    epochs, or up to ten epochs to reach 20 steps. The limit is 200 steps on a CPU, and 2,000 steps on a GPU.
    """
    rows_per_step = min(_MAX_ROWS_PER_STEP, max(_MIN_ROWS_PER_STEP, num_rows // 100))
    rows_per_pack = max(1.0, max_length / mean_length)
    packs_per_step = max(1, round(rows_per_step / rows_per_pack))
    steps_per_epoch = max(1, math.ceil(num_rows / (packs_per_step * rows_per_pack)))
    max_steps = max(3 * steps_per_epoch, min(20, 10 * steps_per_epoch))
    max_steps = min(max_steps, 2000 if has_gpu() else 200)
    interval = max(1, max_steps // 4)
    keys: dict[str, Any] = {"gradient_accumulation_steps": packs_per_step, "max_steps": max_steps}
    keys |= {"logging_steps": max(1, max_steps // 20), "save_strategy": "steps", "save_steps": interval}
    keys["save_total_limit"] = 1
    return keys | (
        {"evaluation_strategy": "steps", "eval_steps": interval, "max_evaluate_steps": 20} if has_dev else {}
    )


def _learning_rate(data: RunData, config: RunConfig, goal: str) -> float:
    is_small = outline_model(data.source, config).num_base_parameters < _SMALL_MODEL
    if goal == "preferences":
        return 1e-4 if is_small else 5e-5
    return 1e-3 if is_small else 2e-4


def _fitting(keys: dict[str, Any], data: RunData, goal: str, memory: float) -> dict[str, Any]:
    """Add the first of `_SAVINGS` with which the run fits in memory.

    Raises:
        ValueError: the run does not fit in memory with any of these keys.
    """
    needed = []
    for savings in _SAVINGS:
        config = config_of({**keys, **savings}, goal)
        estimate = estimate_run(config, outline_model(data.source, config), keys["max_length"], keys["max_length"])
        needed.append(estimate.total / 1e9)
        if needed[-1] <= memory:
            return {**keys, **savings}
    raise ValueError(
        f"{Path(keys['model_name_or_path']).name}: a LoRA run needs at least {min(needed):.1f} GB, more than the "
        f"{memory:g} GB of --memory; use a smaller model or more memory"
    )
