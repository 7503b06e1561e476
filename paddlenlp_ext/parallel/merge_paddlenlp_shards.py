"""Merge the files of a model that PaddleNLP saved as one file per rank.

The folder contains files such as `model_state.tp00_pp00.pdparams`, with the index of the tensor rank after `tp` and the
index of the pipeline stage after `pp`. The content of these files differs from Hugging Face's format:

    names            start with the model family (`llama.layers.0...`)
    linear weights   are stored as [in, out]
    shards           each tensor rank stores its slice of the sharded parameters; if the tensor degree does not divide
                     the vocabulary size, each tensor rank stores the full embedding and lm_head

This toolkit saves unsharded models, which need no merge.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.checkpoint.config_json import read_generation_config
from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.output_folder import check_output
from paddlenlp_ext.checkpoint.safetensors import LazyTensor
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.parallel.shard_parameters import AXES
from paddlenlp_ext.parallel.tensor_parallel import styles_by_name
from paddlenlp_ext.peft.formats.pdparams import read_pickled_arrays
from paddlenlp_ext.peft.merge.write_merged import copy_tokenizer
from paddlenlp_ext.utils.files import atomic_folder, check_writable, read_json_object
from paddlenlp_ext.utils.locks import check_no_active_run

_FORMATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class MergeReport:
    """Result of a merge.

    Attributes:
        output: folder of the merged model.
        num_tensors: number of tensors of the model.
        num_joined: number of tensors that were concatenated from shards.
    """

    output: Path
    num_tensors: int
    num_joined: int


def merge_saved_shards(
    folder: Path, tensor_degree: int, pipeline_degree: int, output: Path | None = None, overwrite: bool = False
) -> MergeReport:
    """Write the merged model atomically in Hugging Face's format, with generation config and tokenizer.

    Args:
        folder: folder that PaddleNLP wrote, including config.json.
        tensor_degree, pipeline_degree: parallel degrees of the run that wrote the folder; 0 or 1 for a degree that the
            run did not use.
        output: folder for the merged model; None to write into `folder` and keep its other files.
        overwrite: whether to replace a model at `output`.

    Raises:
        ValueError: files are missing or do not match config.json; no degree exceeds 1; or `output` exists
            without `overwrite`, is not writable, or is used by an active run.
    """
    in_place = output is None or output.resolve() == folder.resolve()
    output = folder.resolve() if output is None or in_place else output
    if in_place:
        check_no_active_run(output)
        check_writable(output.parent, str(output))
    else:
        check_output(output, overwrite, (folder,))
    files = shard_files(folder, tensor_degree, pipeline_degree)
    content = _hf_config(folder)
    dtype = str(content.get("torch_dtype") or "float32")
    with paddle.LazyGuard():
        model = AutoModelForCausalLM.from_config(content)
    model.generation_config = read_generation_config(folder)
    ranks = [_without_family(_read_stages(stages), content["model_type"]) for stages in files]
    expected = dict(model.named_parameters())
    _check_names(set(expected), ranks, folder)
    axes = _axes_of_parameters(model)
    tensors, num_joined = {}, 0
    for name, parameter in expected.items():
        parts = [_to_out_in(rank[name], name) for rank in ranks]
        value, joined = _join(name, parts, tuple(parameter.shape), axes.get(name))
        num_joined += joined
        tensors[name] = LazyTensor(value.shape, dtype, functools.partial(cast, value, "float32", dtype))
    with atomic_folder(output) as draft:
        if in_place:
            shutil.copytree(folder, draft, symlinks=True, copy_function=_link_or_copy, dirs_exist_ok=True)
        else:
            copy_tokenizer(folder, draft)
        model.save_pretrained(str(draft), tensors=tensors)
    return MergeReport(output, len(tensors), num_joined)


def shard_files(folder: Path, tensor_degree: int, pipeline_degree: int) -> list[list[Path]]:
    """Return a list of files for each tensor rank, with one file per pipeline stage.

    Raises:
        ValueError: neither degree exceeds 1, or files are missing.
    """
    if tensor_degree <= 1 and pipeline_degree <= 1:
        raise ValueError("nothing to merge: --tp and --pp are both at most 1; pass the degrees of the original run")
    tensor = [f"tp{rank:02d}" for rank in range(tensor_degree)] if tensor_degree > 1 else [""]
    stages = [f"pp{stage:02d}" for stage in range(pipeline_degree)] if pipeline_degree > 1 else [""]
    files = [[folder / f"model_state.{'_'.join(filter(None, (t, p)))}.pdparams" for p in stages] for t in tensor]
    missing = [file.name for rank in files for file in rank if not file.is_file()]
    if missing:
        found = sorted(file.name for file in folder.glob("model_state.*.pdparams")) or ["none"]
        raise ValueError(
            f"{folder}: {', '.join(missing[:4])} missing; shards found: {', '.join(found[:8])}; check --tp and --pp"
        )
    return files


def _link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, or copy it on file systems without hard links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target)


def _hf_config(folder: Path) -> dict[str, Any]:
    """Return config.json converted to Hugging Face's format.

    The suffix "Pipe" of the architectures is removed, `dtype` is renamed to `torch_dtype`, and the keys of PaddleNLP's
    parallelism are dropped.

    Raises:
        ValueError: the dtype is not supported.
    """
    content = read_json_object(folder / "config.json")
    content["architectures"] = [name.removesuffix("Pipe") for name in content.get("architectures") or []]
    stored = content.pop("dtype", None) or content.get("torch_dtype") or "float32"
    if stored not in _FORMATS:
        raise ValueError(
            f"{folder / 'config.json'}: dtype {json.dumps(stored)} is not supported; use one of {', '.join(_FORMATS)}"
        )
    content["torch_dtype"] = stored
    for key in ("tensor_parallel_degree", "tensor_parallel_rank", "pipeline_parallel_degree", "paddlenlp_version"):
        content.pop(key, None)
    return content


def _read_stages(files: list[Path]) -> dict[str, np.ndarray]:
    """Read the files of all pipeline stages of one tensor rank, and return the tensors by name."""
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        tensors |= read_pickled_arrays(file)  # a tied embedding is stored in the first and the last stage
    return tensors


def _without_family(tensors: dict[str, np.ndarray], model_type: str) -> dict[str, np.ndarray]:
    """Replace the model family at the start of names with "model": `llama.layers.0...` becomes `model.layers.0...`."""
    prefix = f"{model_type}."
    return {f"model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name: t for name, t in tensors.items()}


def _check_names(expected: set[str], ranks: list[dict[str, np.ndarray]], folder: Path) -> None:
    """Check that every tensor rank stores all parameters of the model, and no other tensor except lm_head.weight.

    Raises:
        ValueError: names are missing or unexpected.
    """
    for number, rank in enumerate(ranks):
        missing = sorted(expected - set(rank))
        unexpected = sorted(set(rank) - expected - {"lm_head.weight"})
        if missing or unexpected:
            raise ValueError(
                f"{folder}: the shards of tensor rank {number} do not match the model that config.json describes: "
                f"{len(missing)} missing ({', '.join(missing[:3])}), {len(unexpected)} unexpected "
                f"({', '.join(unexpected[:3])}); models saved with fused projections are not supported"
            )


def _axes_of_parameters(model: CausalLM) -> dict[str, int]:
    """Return the sharded axis of each sharded parameter, by parameter name."""
    axes = {}
    for layer, style in styles_by_name(model, model.config.tensor_plan).items():
        if style in AXES:
            axes[f"{layer}.weight"] = AXES[style]
        if style in ("colwise", "inner_colwise"):
            axes[f"{layer}.bias"] = 0
    return axes


def _to_out_in(value: np.ndarray, name: str) -> np.ndarray:
    """Transpose a linear weight from [in, out] to [out, in]; return other tensors unchanged."""
    is_linear = value.ndim == 2 and not name.endswith("embed_tokens.weight")
    return value.T if is_linear else value


def _join(name: str, parts: list[np.ndarray], shape: tuple[int, ...], axis: int | None) -> tuple[np.ndarray, bool]:
    """Return the full tensor, and whether it was concatenated from several shards.

    Raises:
        ValueError: the concatenated shards do not have the shape of the parameter.
    """
    if parts[0].shape == shape:
        return parts[0], False
    if axis is not None and len(parts) > 1:
        full = np.concatenate(parts, axis)
        if full.shape == shape:
            return full, True
    raise ValueError(
        f"{name}: {len(parts)} shards of shape {list(parts[0].shape)} do not form a tensor of shape {list(shape)}, "
        "which config.json describes; check --tp"
    )
