"""Convert the tensors of a model from Hugging Face names and shapes to GGUF names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.gguf.architecture import Architecture
from paddlenlp_ext.checkpoint.gguf.read_weights import TOP_LEVEL, permute_rows
from paddlenlp_ext.checkpoint.gguf.write_file import StoredTensor
from paddlenlp_ext.checkpoint.safetensors import LazyTensor

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NO_EXPERT = -1
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def stored_tensors(
    tensors: Mapping[str, LazyTensor], architecture: Architecture, config: Any
) -> dict[str, StoredTensor]:
    """Return the tensors of a GGUF file; each is computed when it is written.

    Args:
        tensors: tensors under their Hugging Face names and in their Hugging Face shapes.
        architecture: layout of the family's files.
        config: config of the model (`DecoderConfig`).

    Raises:
        ValueError: the family's GGUF files have no name for a tensor.
    """
    groups: dict[str, dict[int, tuple[str, LazyTensor]]] = {}
    unknown = []
    for name, tensor in architecture.divide(tensors, config).items():
        stored, expert = stored_name(name, architecture), _EXPERT.search(name)
        if stored is None:
            unknown.append(name)
        else:
            groups.setdefault(stored, {})[int(expert[0]) if expert else _NO_EXPERT] = (name, tensor)
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        raise ValueError(f"GGUF files of {architecture.name} have no name for {', '.join(unknown[:8])}{more}")
    return {stored: _stored(group, architecture, config) for stored, group in groups.items()}


def _stored(group: Mapping[int, tuple[str, LazyTensor]], architecture: Architecture, config: Any) -> StoredTensor:
    """Return a tensor, or the tensor that stacks all experts."""
    parts = [partial(stored_values, name, tensor, architecture, config) for _, (name, tensor) in sorted(group.items())]
    name, tensor = next(iter(group.values()))
    shape = tensor.shape[1:] if name.endswith(architecture.vectors) and len(tensor.shape) == 2 else tensor.shape
    return StoredTensor(shape if _NO_EXPERT in group else (len(parts), *shape), parts)


def stored_values(name: str, tensor: LazyTensor, architecture: Architecture, config: Any) -> np.ndarray:
    """Return the float32 values to store for the tensor `name` of the Hugging Face checkpoint."""
    values = cast(tensor.read(), tensor.dtype, "float32")
    if architecture.permutes and (".q_proj." in name or ".k_proj." in name):
        values = permute_rows(values, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
    if architecture.norm_offset and "norm" in name:
        values = values + np.float32(architecture.norm_offset)
    return values


def stored_name(name: str, architecture: Architecture) -> str | None:
    """Return the GGUF name of the tensor `name` of the Hugging Face checkpoint; None if it has no GGUF name."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        base, _, kind = name.rpartition(".")
        top = {own: stored for stored, own in TOP_LEVEL.items()}
        return f"{top[base]}.{kind}" if base in top else None
    own = _EXPERT.sub("{}", layer[2])
    stored_of = {own: stored for stored, own in architecture.in_block.items()}
    if own in stored_of:
        return f"blk.{layer[1]}.{stored_of[own]}"
    base, _, kind = own.rpartition(".")
    return f"blk.{layer[1]}.{stored_of[base]}.{kind}" if base in stored_of else None
