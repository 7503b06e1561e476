"""Export a language model as a static graph, in a folder with all files for prediction.

    model.json, model.pdiparams     program and weights (trace.py)
    config.json                     config.json of the model, with the key `static_graph`
    generation_config.json, tokenizer, chat template, run_config.json

The folder is renamed to its final name only if the logits of program and model agree (`LIMITS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.generation.logits_processors import on_host
from paddlenlp_ext.generation.prefill_and_decode import GenerationModel, prefill, step
from paddlenlp_ext.models.model_source import ModelSource
from paddlenlp_ext.peft.merge.write_merged import write_companions
from paddlenlp_ext.static_graph.static_model import STATIC_GRAPH, StaticModel, program_files
from paddlenlp_ext.static_graph.trace import cache_dtype, cache_shapes, save_program, state_shapes
from paddlenlp_ext.utils.files import atomic_folder, read_json_object, write_json

LIMITS = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}
"""Largest allowed relative difference of the logits (see `compare`), by dtype of the activations."""
_BATCHES, _STEPS = ((4, 1), (8,)), 8
"""Prompt lengths of each compared batch, and number of decoding steps after the prompts.

A forward pass has at most eight positions. With more positions, the model may round the inputs of matrix products to
bfloat16 (ops/linear.py), but the program does not. A router may then choose other experts.
"""


def export_model(
    model: Any, folder: Path, source: ModelSource, adapter: Path | None = None, prefix: str = "model"
) -> float:
    """Export a model as a static graph with its config, tokenizer and chat template.

    Args:
        model: `CausalLM` without adapter layers, in floating point or quantized.
        folder: folder to create or replace.
        source: source of the model, with its config and tokenizer.
        adapter: folder of the adapter that was merged into the model; a tokenizer in this folder is exported.
        prefix: file name of program and weights, without suffix.

    Returns:
        The relative difference between the logits of program and model (see `compare`).

    Raises:
        ValueError: a tokenizer or config file has the same name as a program file, or the logits of program and
            model differ by more than `LIMITS`.
    """
    with atomic_folder(folder) as draft:
        write_companions(draft, source.path, adapter or source.path, model.dtype_name, source.config_overrides or {})
        for name in program_files(prefix):
            if (draft / name).exists():
                raise ValueError(f"--model_prefix {prefix}: the model already has a file {name}; choose another prefix")
        save_program(model, draft, prefix)
        describe_program(draft, model)
        difference = compare(StaticModel(draft, prefix), model)
        limit = LIMITS[cache_dtype(model)]
        if not difference <= limit:
            raise ValueError(
                f"{folder}: not written: the relative difference of the logits between program and model is "
                f"{difference:.2g}, above the limit {limit:g}; export with --dtype float32 or without --quant_type to "
                "find the format that causes the difference"
            )
    return difference


def describe_program(folder: Path, model: Any) -> None:
    """Write the description of the program to the key `static_graph` of config.json, where `StaticModel` reads it."""
    config = read_json_object(folder / "config.json")
    config[STATIC_GRAPH] = {
        "cache_dtype": cache_dtype(model),
        "cache_shapes": cache_shapes(model),
        "dtype": model.dtype_name,
        "quant_type": None if model.quantization is None else model.quantization.describe(),
        "state_shapes": state_shapes(model),
    }
    write_json(folder / "config.json", config)


@paddle.no_grad()
def compare(exported: GenerationModel, model: GenerationModel, batches: Sequence[Sequence[int]] = _BATCHES) -> float:
    """Return the largest difference between the logits of two models, relative to the largest magnitude of the logits.

    The comparison covers the last positions of random prompts and greedy decoding steps. Both models decode the tokens
    that `model` chooses. The result is NaN if any logit is NaN.

    Args:
        exported: model to check.
        model: reference model.
        batches: prompt lengths of each batch of random prompts.
    """
    rng, size = np.random.default_rng(0), model.config.vocab_size
    prompts = [[rng.integers(0, size, length).tolist() for length in lengths] for lengths in batches]
    return float(np.max([_compare_batch(exported, model, batch) for batch in prompts]))  # unlike max(), keeps NaN


def _compare_batch(exported: GenerationModel, model: GenerationModel, prompts: list[list[int]]) -> float:
    found = [prefill(each, prompts) for each in (exported, model)]
    caches, logits = [cache for cache, _ in found], [on_host(logits_BV) for _, logits_BV in found]
    differences = [_relative_difference(*logits)]
    for _ in range(_STEPS):
        tokens = np.argmax(logits[1], axis=-1)[:, None].tolist()
        pairs = zip((exported, model), caches, strict=True)
        logits = [on_host(step(each, tokens, cache))[:, -1] for each, cache in pairs]
        differences.append(_relative_difference(*logits))
    return float(np.max(differences))


def _relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())
