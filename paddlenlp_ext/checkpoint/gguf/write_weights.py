"""Convert the tensors of a model from Hugging Face names and shapes to GGUF names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.gguf.architecture import Architecture
from paddlenlp_ext.checkpoint.gguf.read_weights import permute_rows
from paddlenlp_ext.checkpoint.gguf.write_file import StoredTensor
from paddlenlp_ext.checkpoint.safetensors import LazyTensor

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NO_EXPERT = -1
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def stored_tensors(
    tensors: Mapping[str, LazyTensor], architecture: Architecture, config: Any
) -> dict[str, StoredTensor]:
    """Return a dict from GGUF names to tensors; the values of a tensor are computed when it is written.

    Args:
        tensors: Hugging Face name -> tensor with its Hugging Face shape.
        architecture: GGUF layout of the model family.
        config: config of the model (`DecoderConfig`).

    Raises:
        ValueError: a tensor has no GGUF name in this family.
    """
    groups: dict[str, dict[int, tuple[str, LazyTensor]]] = {}
    unknown = []
    if architecture.split is not None:
        tensors = architecture.split(tensors, config)
    for name, tensor in tensors.items():
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
    """Return the tensor to write for one Hugging Face tensor, or for the stacked tensors of all experts."""
    parts = [partial(stored_values, name, tensor, architecture, config) for _, (name, tensor) in sorted(group.items())]
    name, tensor = next(iter(group.values()))
    shape, axis = tensor.shape, architecture.squeezed_axis(name)
    if axis is not None and shape[axis] == 1:
        shape = (*shape[:axis], *shape[axis + 1 :])
    return StoredTensor(shape if _NO_EXPERT in group else (len(parts), *shape), parts)


def stored_values(name: str, tensor: LazyTensor, architecture: Architecture, config: Any) -> np.ndarray:
    """Return the float32 values that a GGUF file stores for the Hugging Face tensor `name`."""
    return in_stored_columns(name, in_stored_rows(name, tensor, architecture, config), architecture, config)


def in_stored_rows(name: str, tensor: LazyTensor, architecture: Architecture, config: Any) -> np.ndarray:
    """Return the float32 values of a tensor, with its rows in the order that GGUF files use for `name`."""
    values = cast(tensor.read(), tensor.dtype, "float32")
    if architecture.permutes and (".q_proj." in name or ".k_proj." in name):
        values = permute_rows(values, config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads)
    order = architecture.row_order(name, config)
    return architecture.to_stored(name, values if order is None else values[order])


def in_stored_columns(name: str, values: np.ndarray, architecture: Architecture, config: Any) -> np.ndarray:
    """Return values with their columns in the order that GGUF files use for `name`."""
    order = architecture.column_order(name, config)
    return values if order is None else values[:, order]


def stored_name(name: str, architecture: Architecture) -> str | None:
    """Return the GGUF name of the Hugging Face tensor `name`; None if the family has no GGUF name for the tensor."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        base, _, kind = name.rpartition(".")
        top = {local_name: stored for stored, local_name in architecture.top_level.items()}
        return f"{top[base]}.{kind}" if base in top else None
    local_name = _EXPERT.sub("{}", layer[2])
    stored_of = {local_name: stored for stored, local_name in architecture.in_block.items()}
    if local_name in stored_of:
        return f"blk.{layer[1]}.{stored_of[local_name]}"
    base, _, kind = local_name.rpartition(".")
    return f"blk.{layer[1]}.{stored_of[base]}.{kind}" if base in stored_of else None
