"""Write an adapter as a GGUF file, which llama.cpp applies to the GGUF file of the base model.

    y = W x + (alpha / r) B (A x)        NAME.lora_a [r, in], NAME.lora_b [out, r]

NAME is the name of the weight W in the base's file. Only methods with low-rank factors are supported. The scale of each
layer is multiplied into B, and alpha is set to r. If the base's file fuses several projections into one layer,
A concatenates the projections' factors, and B is block-diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.file_layouts.fused_projections import FusedLayers, locate, projection_rows
from paddlenlp_ext.checkpoint.gguf.architecture import Architecture
from paddlenlp_ext.checkpoint.gguf.gguf_file import open_gguf
from paddlenlp_ext.checkpoint.gguf.read_weights import read_gguf_tensor
from paddlenlp_ext.checkpoint.gguf.write_file import StoredTensor, write_gguf
from paddlenlp_ext.checkpoint.gguf.write_weights import in_stored_columns, in_stored_rows, stored_name
from paddlenlp_ext.checkpoint.safetensors import as_lazy
from paddlenlp_ext.peft.low_rank_factors import AdaptedModel, factors_of
from paddlenlp_ext.utils.files import atomic_file, flush


def export_gguf_adapter(path: Path, model: AdaptedModel, architecture: Architecture, name: str) -> int:
    """Write a model's adapter with F32 values; return the number of adapted matrices.

    Args:
        path: file to write; an existing file is replaced.
        model: model with the adapter.
        architecture: GGUF layout of the base's model family.
        name: value of `general.name` in the metadata.

    Raises:
        ValueError: the adapter's updates are not low-rank (`factors_of`), or llama.cpp cannot adapt one of the layers.
        StorageError: the disk is full or read-only, or a permission is missing.
    """
    tensors = adapter_tensors(model, architecture)
    rank = max(len(values) for key, values in tensors.items() if key.endswith(".lora_a"))
    metadata = {
        "general.type": "adapter",
        "general.name": name,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(rank),
    }
    for key, values in tensors.items():
        if key.endswith(".lora_b"):  # llama.cpp divides alpha by the rank of each matrix
            values *= values.shape[1] / rank
    stored = {key: StoredTensor(values.shape, [lambda values=values: values]) for key, values in tensors.items()}
    with atomic_file(path) as draft:
        write_gguf(draft, architecture.name, metadata, stored, "f32")
        _check(draft, tensors)
        flush(draft)
    return len(tensors) // 2


def adapter_tensors(model: AdaptedModel, architecture: Architecture) -> dict[str, np.ndarray]:
    """Return a dict from names in the GGUF file to low-rank factors; raises the errors of `export_gguf_adapter`."""
    config: Any = model.base_model.config
    factors = {layer: (found.a.numpy(), found.b.numpy()) for layer, found in factors_of(model).items()}
    tensors: dict[str, np.ndarray] = {}
    stored_layers = {name.rpartition(".")[2] for name in architecture.in_block.values()}
    fused_layers = {name: parts for name, parts in config.fused_layers.items() if name in stored_layers}
    for layer, (a, b) in _fused(factors, fused_layers).items():
        files = config.file_layout.to_files({f"{layer}.weight": as_lazy(b)})
        files = architecture.equivalent(files, config)[0]
        parts = list((files if architecture.split is None else architecture.split(files, config)).items())
        name, factor = parts[0]
        stored = stored_name(name, architecture) if len(parts) == 1 else None
        if stored is None or stored.split(".")[-2] in architecture.unadapted:
            raise ValueError(
                f"{layer}: llama.cpp cannot apply an adapter to this layer of {architecture.name}; leave out "
                "--adapter_only to merge the adapter"
            )
        tensors[f"{stored}.lora_a"] = np.ascontiguousarray(in_stored_columns(name, a, architecture, config))
        tensors[f"{stored}.lora_b"] = np.ascontiguousarray(in_stored_rows(name, factor, architecture, config))
    return tensors


def _fused(
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]], layers: FusedLayers
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return a dict from layer names in files to (A, B); the factors of a fused layer's projections are joined."""
    joined: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    groups: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for layer, pair in factors.items():
        found = locate(f"{layer}.weight", layers)
        if found is None or found.projection is None:
            joined[layer] = pair
        else:
            groups.setdefault(found.fused, {})[found.projection] = pair
    for fused, parts in groups.items():
        rows = projection_rows(fused, layers)
        a = np.concatenate([parts[part][0] for part in parts])
        b = np.zeros((list(rows.values())[-1].stop, len(a)), np.float32)
        column = 0
        for part, (_, own) in parts.items():
            b[rows[part], column : column + own.shape[1]] = own
            column += own.shape[1]
        joined[fused] = (a, b)
    return joined


def _check(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Check that reading the written file returns the same tensors."""
    file = open_gguf(path)
    for name, values in tensors.items():
        if name not in file.tensors or not np.array_equal(read_gguf_tensor(file, name), values):
            raise ValueError(f"{path}: the values of {name} in the file differ from the written values; check the disk")
