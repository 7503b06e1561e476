"""Update the tables of start/which_model_fits.md, English and Chinese: predicted peak memory by model and method.

python docs/make_model_memory.py

The prediction is the one that `pnx plan` prints. The predicting functions read the shapes of a model from its
config.json, and neither weights nor a tokenizer. MODELS has the keys of config.json that determine the shapes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paddlenlp_ext.config.parser import run_config_from
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trainer.memory.run_estimate import estimate_run, outline_model

PAGES = [Path(__file__).parent / folder / "which_model_fits.md" for folder in ("start", "zh/start")]
MARKERS = ("<!-- memory: made by docs/make_model_memory.py -->\n", "<!-- end of memory -->\n")
NUM_TOKENS = 1024
MACHINES = {"cpu": (0.75, (8, 16, 32, 64, 128)), "gpu": (0.9, (8, 12, 16, 24, 48, 80))}
"""Device -> fraction of the memory that training may use, and sizes of the memory in GB."""

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "tie_word_embeddings": True}
_LARGE_QWEN3 = {**_QWEN3, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    name: {**family, **dict(zip(_SIZES, sizes, strict=True))}
    for name, family, *sizes in (
        ("SmolLM2-135M", _SMOLLM2, 576, 30, 9, 3, 1536),
        ("SmolLM2-360M", _SMOLLM2, 960, 32, 15, 5, 2560),
        ("Qwen3-0.6B", _QWEN3, 1024, 28, 16, 8, 3072),
        ("Qwen3-1.7B", _QWEN3, 2048, 28, 16, 8, 6144),
        ("Qwen3-4B", _QWEN3, 2560, 36, 32, 8, 9728),
        ("Qwen3-8B", _LARGE_QWEN3, 4096, 36, 32, 8, 12288),
        ("Qwen3-14B", _LARGE_QWEN3, 5120, 40, 40, 8, 17408),
        ("Qwen3-32B", _LARGE_QWEN3, 5120, 64, 64, 8, 25600),
    )
}
_HALF = {"bf16": True, "fp16_opt_level": "O2"}
_LORA = {**_HALF, "lora": True, "lora_rank": 16}
_QLORA = {**_LORA, "weight_quantize_algo": "nf4", "weight_double_quant": True}
METHODS: dict[str, dict[str, Any]] = {
    "all weights": _HALF,
    "LoRA": _LORA,
    "LoRA, recompute": {**_LORA, "recompute": True},
    "QLoRA": _QLORA,
    "QLoRA, recompute": {**_QLORA, "recompute": True},
}


def predict_gb(model: Mapping[str, Any], keys: Mapping[str, Any], device: str) -> float:
    """Return the predicted peak memory of a training step with one sequence of NUM_TOKENS target tokens, in GB."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        paths = {"model_name_or_path": folder, "dataset_name_or_path": "unused", "output_dir": "unused"}
        settings = {**paths, "do_train": True, "device": "cpu", "max_length": NUM_TOKENS, **keys}
        config = run_config_from(settings, {}, peft_methods())
        # not in the settings, because `device: gpu` is an error on a machine without a GPU
        config = replace(config, precision=replace(config.precision, device=device))
        outline = outline_model(ModelSource.from_config(config.model), config)
        return estimate_run(config, outline, NUM_TOKENS, NUM_TOKENS).total / 1e9


def predictions(device: str) -> dict[str, list[float]]:
    """Return the prediction of each model for each method, in GB."""
    return {name: [predict_gb(model, keys, device) for keys in METHODS.values()] for name, model in MODELS.items()}


def show(gigabytes: float) -> str:
    """Return a prediction as the page shows it."""
    return f"{gigabytes:.1f}" if gigabytes < 10 else f"{gigabytes:.0f}"


def page_tables() -> str:
    """Return the tables, which are the same in both languages."""
    by_device = {device: predictions(device) for device in MACHINES}
    lines = ["| peak in GB | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(map(show, row))} |" for name, row in by_device["cpu"].items()]
    lines += ["", "The largest model of the first table that fits:", ""]
    lines += ["| memory | " + " | ".join(METHODS) + " |", "|---" * (len(METHODS) + 1) + "|"]
    for device, (fraction, sizes) in MACHINES.items():
        for size in sizes:
            largest = [_largest(by_device[device], column, fraction * size) for column in range(len(METHODS))]
            lines.append(f"| {size} GB, {device.upper()} | {' | '.join(largest)} |")
    return "\n".join([*lines, ""])


def _largest(rows: Mapping[str, list[float]], column: int, limit: float) -> str:
    return max((name for name, row in rows.items() if row[column] <= limit), key=list(rows).index, default="none")


if __name__ == "__main__":
    tables = page_tables()
    for page in PAGES:
        before, rest = page.read_text(encoding="utf-8").split(MARKERS[0])
        _, after = rest.split(MARKERS[1])
        page.write_text(f"{before}{MARKERS[0]}\n{tables}\n{MARKERS[1]}{after}", encoding="utf-8")
