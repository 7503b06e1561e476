"""Read the tensors of a GGUF file, dequantized and with their Hugging Face names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.gguf.architecture import Architecture, count, kv_heads_by_layer
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile, GgufTensor, open_gguf
from paddlenlp_ext.checkpoint.gguf.registry import architecture_of, num_layers
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTIZED = (
    "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors with the LongRoPE values `short_factor` and `long_factor`."""
_NOT_WEIGHTS = ("rope_freqs.weight", *ROPE_FACTORS)  # only for RoPE scaling (rope_scaling.py)


class _Place(NamedTuple):
    """Name of a stored tensor, and the index of an expert along its first axis (None: the full tensor)."""

    stored: str
    expert: int | None


class GgufWeights(WeightSource):
    """Weights of one .gguf file, or of all files of a split model.

    Raises:
        ValueError: the file is damaged, its architecture is unknown, or the architecture does not define one of the
            tensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.file = open_gguf(path)
        self._architecture = architecture_of(self.file)
        self._places = _places(self.file, self._architecture)

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        shape, axis = self._tensor(name).shape, self._architecture.squeezed_axis(name)
        if self._places[name].expert is not None:
            return shape[1:]
        is_squeezed = axis is not None and shape[axis : axis + 1] != (1,)
        return (*shape[:axis], 1, *shape[axis:]) if is_squeezed else shape

    def dtype(self, name: str) -> str:
        return _PLAIN.get(self._tensor(name).type, "float32")

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        if shard is not None and len(self._tensor(name).shape) == 3:
            assert shard.axis == 0, "stacked experts must be sharded by experts"
            experts = [
                read_gguf_tensor(self.file, self._places[name].stored, e) for e in range(shard.start, shard.stop)
            ]
            return cast(np.stack(experts), self.dtype(name), dtype or self.dtype(name))
        values = read_gguf_tensor(self.file, *self._places[name]).reshape(self.shape(name))
        num_heads = self._permuted_heads(name)
        if num_heads:
            if len(values) % (2 * num_heads):
                raise ValueError(
                    f"{self.path}: {name} has {len(values)} rows for {num_heads} heads; the file is damaged"
                )
            values = unpermute_rows(values, num_heads)
        stored = self.dtype(name)
        if self._architecture.converts_values(name):
            values, stored = self._converted(name, cast(values, stored, "float32")), "float32"
        if shard is not None:  # quantization blocks may cross shard boundaries, so the full tensor is read first
            values = values[shard.index]
        return cast(values, stored, dtype or self.dtype(name))

    def _converted(self, name: str, values: np.ndarray) -> np.ndarray:
        try:
            return self._architecture.from_stored(name, values)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}; the file is damaged") from error

    def _tensor(self, name: str) -> GgufTensor:
        return self.file.tensors[self._places[name].stored]

    def _permuted_heads(self, name: str) -> int:
        """Return the number of heads of a tensor with permuted rows; 0 if the rows are not permuted."""
        is_query = ".q_proj." in name
        if not self._architecture.permutes or not (is_query or ".k_proj." in name):
            return 0
        if self._architecture.has_layers_without_attention and not is_query:
            return max(kv_heads_by_layer(self.file))
        queries, keys = (self.file.architecture_key(f"attention.head_count{end}") for end in ("", "_kv"))
        num_heads = self.file.require(queries, int)
        return num_heads if is_query else self.file.get(keys, int, num_heads)


def open_gguf_weights(path: str | os.PathLike[str]) -> WeightSource:
    """Open the weights of a GGUF model with the names and shapes of the Hugging Face checkpoint.

    Raises:
        ValueError: the file is damaged, its architecture is unknown, a tensor is unknown, or a tensor that is joined
            with others is missing.
    """
    source = GgufWeights(path)
    return architecture_of(source.file).restore(source)


def read_gguf_tensor(file: GgufFile, stored_name: str, expert: int | None = None) -> np.ndarray:
    """Read a stored tensor; quantized values become float32, and bfloat16 is returned as bits (uint16).

    Args:
        file: the model.
        stored_name: GGUF name of the tensor.
        expert: index of the expert to read, along the first axis; None: the full tensor.

    Raises:
        ValueError: the quantization type is not supported, or the file is truncated.
    """
    import gguf

    tensor = file.tensors[stored_name]
    if tensor.type not in _PLAIN and tensor.type not in _QUANTIZED:
        known = ", ".join([*_PLAIN, *_QUANTIZED])
        raise ValueError(
            f"{tensor.path}: tensor {stored_name} is stored as {tensor.type}, which is not supported; known: {known}"
        )
    shape, start, num_bytes = tensor.shape, tensor.start, tensor.num_bytes
    if expert is not None:  # a quantization block lies within one row, so the bytes of an expert are contiguous
        num_bytes //= shape[0]
        shape, start = shape[1:], start + expert * num_bytes
    raw = np.fromfile(tensor.path, np.uint8, count=num_bytes, offset=start)
    if raw.size != num_bytes:
        raise ValueError(f"{tensor.path}: the file ends inside tensor {stored_name}; download the file again")
    if tensor.type in _PLAIN:
        return raw.view({"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.type]).reshape(shape)
    blocks = raw.reshape(*shape[:-1], -1)
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[tensor.type]).reshape(shape)


def unpermute_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from adjacent rotary pairs (llama.cpp) to rotary halves (Hugging Face).

    Args:
        values: weight or bias of a projection, [num_heads * head_dim, ...].
        num_heads: number of query heads or key heads.

    Returns:
        The reordered rows: row (head, half, i) of the result is row (head, i, half) of `values`.
    """
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def permute_rows(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of each head from rotary halves to adjacent rotary pairs; the inverse of `unpermute_rows`."""
    half = values.shape[0] // num_heads // 2
    return values.reshape(num_heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _places(file: GgufFile, architecture: Architecture) -> dict[str, _Place]:
    """Return a map from the Hugging Face name of each tensor to its location in the file."""
    found: dict[str, _Place] = {}
    unknown = []
    unread = count(file, "nextn_predict_layers", 0, minimum=0)
    for stored in file.tensors:
        if stored in _NOT_WEIGHTS:
            continue
        base, _, kind = stored.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(.+)", stored)
        if unread and block and int(block[1]) >= num_layers(file):
            continue
        local_name = _name_in_block(architecture, block[2]) if block else None
        if block and local_name:
            name = f"model.layers.{block[1]}.{local_name}"
            experts = range(file.tensors[stored].shape[0]) if "{}" in name else (None,)
            found |= {name.format(expert): _Place(stored, expert) for expert in experts}
        elif base in architecture.top_level:
            found[f"{architecture.top_level[base]}.{kind}"] = _Place(stored, None)
        else:
            unknown.append(stored)
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        raise ValueError(
            f"{file.path}: unknown tensors for a {file.architecture} model: {', '.join(unknown[:8])}{more}"
        )
    return found


def _name_in_block(architecture: Architecture, stored: str) -> str | None:
    """Convert a GGUF name within a block to the Hugging Face name within a layer; None for an unknown tensor."""
    if stored in architecture.in_block:
        return architecture.in_block[stored]
    base, _, kind = stored.rpartition(".")
    return f"{architecture.in_block[base]}.{kind}" if base in architecture.in_block else None
