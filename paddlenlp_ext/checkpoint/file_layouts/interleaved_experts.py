"""Checkpoints of gpt-oss: each tensor stacks all experts of a layer, and gate and up channels alternate.

    in memory                              in files
    gate_up_proj.weight [E, 2F, D]         gate_up_proj [E, D, 2F], columns gate 0, up 0, gate 1, up 1, ...
    gate_up_proj_bias [E, 2F]              gate_up_proj_bias [E, 2F], in the same order
    down_proj.weight [E, D, F]             down_proj [E, F, D]
    gate_up_proj.lora_B.weight [E, 2F, r]  in adapters: rows gate 0, up 0, gate 1, up 1, ...

MXFP4 weights (quantized_formats/mxfp4.py) are dequantized while they are read.

Shapes: E experts, F intermediate size, D hidden size, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.file_layouts.base import FileLayout, Tensor, split_layer
from paddlenlp_ext.checkpoint.quantized_formats.mxfp4 import open_mxfp4
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

_NAMES = {
    "mlp.experts.gate_up_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up_proj_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down_proj.weight": "mlp.experts.down_proj",
}
"""Name in memory -> name in files for the tensors whose layout differs."""
_WEIGHTS = frozenset(name for name in _NAMES if name.endswith(".weight"))
_INTERLEAVED = frozenset(f"mlp.experts.gate_up_proj{end}" for end in (".weight", "_bias", ".lora_B.weight"))
"""Names in memory of tensors that combine the rows of gate and up."""


class InterleavedExperts(FileLayout):
    """Layout of gpt-oss checkpoints."""

    def open(self, source: WeightSource) -> WeightSource:
        return _InterleavedWeights(open_mxfp4(source))

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for name, tensor in tensors.items():
            prefix, local_name = split_layer(name)
            written[prefix + _NAMES.get(local_name, local_name)] = (
                self._to_file(name, as_lazy(tensor)) if local_name in _NAMES else tensor
            )
        return written

    def to_transformers(self, name: str, values: Tensor) -> Tensor:
        """Interleave the rows of gate and up, and transpose weights."""
        local_name = split_layer(name)[1]
        if local_name in _INTERLEAVED:
            values = _regrouped(values, [2, values.shape[1] // 2])
        return values.transpose([0, 2, 1]) if local_name in _WEIGHTS else values

    def from_transformers(self, name: str, values: Tensor) -> Tensor:
        """Put the rows of gate before the rows of up, and transpose weights to [E, outputs, inputs]."""
        local_name = split_layer(name)[1]
        values = values.transpose([0, 2, 1]) if local_name in _WEIGHTS else values
        return _regrouped(values, [values.shape[1] // 2, 2]) if local_name in _INTERLEAVED else values

    def _to_file(self, name: str, tensor: LazyTensor) -> LazyTensor:
        experts, *rest = tensor.shape
        shape = (experts, *reversed(rest))
        return LazyTensor(shape, tensor.dtype, lambda: np.ascontiguousarray(self.to_transformers(name, tensor.read())))


def _regrouped(values: Tensor, shape: list[int]) -> Tensor:
    """Reorder the rows of a tensor [E, rows, ...]: reshape the rows to the 2D grid `shape` and transpose the grid."""
    experts, _, *rest = values.shape
    axes = [0, 2, 1, *range(3, 3 + len(rest))]
    return values.reshape([experts, *shape, *rest]).transpose(axes).reshape(values.shape)


class _InterleavedWeights(WeightSource):
    """Tensors of a gpt-oss checkpoint with the names and shapes of the parameters."""

    def __init__(self, source: WeightSource) -> None:
        self.path, self._source = source.path, source
        in_memory = {file: memory for memory, file in _NAMES.items()}
        self._files: dict[str, str] = {}  # name in memory -> name in the file
        for name in source.names():
            prefix, local_name = split_layer(name)
            self._files[prefix + in_memory.get(local_name, local_name)] = name

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._source.shape(self._files[name])
        return (shape[0], *reversed(shape[1:])) if _is_expert(name) else shape

    def dtype(self, name: str) -> str:
        return self._source.dtype(self._files[name])

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        values = self._source.read(self._files[name], dtype, shard)
        if not _is_expert(name):
            return values
        assert shard is None or shard.axis == 0, "stacked experts must be sharded by experts"
        return np.ascontiguousarray(InterleavedExperts().from_transformers(name, values))


def _is_expert(name: str) -> bool:
    return split_layer(name)[1] in _NAMES
