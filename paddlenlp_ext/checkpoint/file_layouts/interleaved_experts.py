"""Files of gpt-oss: experts in one tensor per layer, with gate and up interleaved, as numbers or in MXFP4.

    in memory                              in files
    gate_up_proj.weight [E, 2F, D]         gate_up_proj [E, D, 2F], columns gate 0, up 0, gate 1, up 1, ...
    gate_up_proj_bias [E, 2F]              gate_up_proj_bias [E, 2F], likewise
    down_proj.weight [E, D, F]             down_proj [E, F, D]
    gate_up_proj.lora_B.weight [E, 2F, r]  in adapters: rows gate 0, up 0, gate 1, up 1, ...

MXFP4 stores a weight [E, rows, columns] in blocks of 32 columns: `..._blocks` [E, rows, columns / 32, 16] has two 4-bit
codes per byte, the first in the low half, and `..._scales` [E, rows, columns / 32] the exponents of a power of 2, plus
127 (Open Compute Project, Microscaling Formats 1.0). Rows are the outputs, those of gate and up interleaved. It is
dequantized while it is read; saved models have numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import FileLayout, Tensor, split_layer
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

_NAMES = {
    "mlp.experts.gate_up_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up_proj_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down_proj.weight": "mlp.experts.down_proj",
}
"""Name in memory -> name in files of the tensors that differ."""
_WEIGHTS = frozenset(name for name in _NAMES if name.endswith(".weight"))
_INTERLEAVED = frozenset(f"mlp.experts.gate_up_proj{end}" for end in (".weight", "_bias", ".lora_B.weight"))
"""Names in memory of tensors with rows of gate and up."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of the 4-bit codes: a sign, two bits of exponent and one of mantissa."""


class InterleavedExperts(FileLayout):
    """Layout of gpt-oss's files."""

    def open(self, source: WeightSource) -> WeightSource:
        """Return the tensors of a file under the names and in the shapes of memory."""
        return _InterleavedWeights(source)

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's tensors as they are written."""
        written: dict[str, Any] = {}
        for name, tensor in tensors.items():
            prefix, own = split_layer(name)
            written[prefix + _NAMES.get(own, own)] = self._to_file(name, as_lazy(tensor)) if own in _NAMES else tensor
        return written

    def to_transformers(self, name: str, values: Tensor) -> Tensor:
        """Return a tensor with the rows of gate and up interleaved, and weights transposed."""
        own = split_layer(name)[1]
        if own in _INTERLEAVED:
            values = _regrouped(values, [2, values.shape[1] // 2])
        return values.transpose([0, 2, 1]) if own in _WEIGHTS else values

    def from_transformers(self, name: str, values: Tensor) -> Tensor:
        """Return a tensor with the rows of gate before those of up, and weights [E, outputs, inputs]."""
        own = split_layer(name)[1]
        return _separated(own, values.transpose([0, 2, 1]) if own in _WEIGHTS else values)

    def _to_file(self, name: str, tensor: LazyTensor) -> LazyTensor:
        experts, *rest = tensor.shape
        shape = (experts, *reversed(rest))
        return LazyTensor(shape, tensor.dtype, lambda: np.ascontiguousarray(self.to_transformers(name, tensor.read())))


def _separated(own: str, values: Tensor) -> Tensor:
    """Return a tensor [E, outputs, ...] with the rows of gate, if it has any, before those of up."""
    return _regrouped(values, [values.shape[1] // 2, 2]) if own in _INTERLEAVED else values


def _regrouped(values: Tensor, shape: list[int]) -> Tensor:
    """Return a tensor [E, rows, ...] with its rows, seen as a matrix of this shape, transposed."""
    experts, _, *rest = values.shape
    axes = [0, 2, 1, *range(3, 3 + len(rest))]
    return values.reshape([experts, *shape, *rest]).transpose(axes).reshape(values.shape)


class _InterleavedWeights(WeightSource):
    """Tensors of a file of gpt-oss under the names and in the shapes of memory."""

    def __init__(self, source: WeightSource) -> None:
        self.path, self._source = source.path, source
        in_memory = {file: memory for memory, file in _NAMES.items()}
        self._files: dict[str, str] = {}  # name in memory -> name in the file, of MXFP4 without its ending
        self._packed: set[str] = set()
        for name in source.names():
            prefix, own = split_layer(name)
            if own.endswith((_BLOCKS, _SCALES)):
                own = own.removesuffix(_BLOCKS).removesuffix(_SCALES)
                self._packed.add(prefix + own)
            self._files[prefix + in_memory.get(own, own)] = prefix + own

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        file = self._files[name]
        if file in self._packed:
            experts, rows, blocks, width = self._source.shape(file + _BLOCKS)
            return experts, rows, 2 * blocks * width
        shape = self._source.shape(file)
        return (shape[0], *reversed(shape[1:])) if _is_expert(name) else shape

    def dtype(self, name: str) -> str:
        file = self._files[name]
        return "bfloat16" if file in self._packed else self._source.dtype(file)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        file, own = self._files[name], split_layer(name)[1]
        if not _is_expert(name):
            return self._source.read(file, dtype, shard)
        assert shard is None or shard.axis == 0, "stacked experts are sharded by experts"
        if file in self._packed:
            return self._dequantized(file, own, dtype or "bfloat16", shard)
        values = InterleavedExperts().from_transformers(name, self._source.read(file, dtype, shard))
        return np.ascontiguousarray(values)

    def _dequantized(self, file: str, own: str, dtype: str, shard: Shard | None) -> np.ndarray:
        """Return the values of experts in MXFP4, one expert at a time."""
        read = partial(self._source.read, dtype=None, shard=shard)
        blocks, scales = read(file + _BLOCKS), read(file + _SCALES)
        experts = [cast(_mxfp4(*one), "float32", dtype) for one in zip(blocks, scales, strict=True)]
        return np.ascontiguousarray(_separated(own, np.stack(experts)))


def _is_expert(name: str) -> bool:
    return split_layer(name)[1] in _NAMES


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values [rows, columns] of blocks [rows, columns / 32, 16] and scales [rows, columns / 32]."""
    codes = np.stack([blocks & 0x0F, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], -1)
    return np.ldexp(_LEVELS[codes], scales.astype(np.int32)[..., None] - 127).reshape(len(blocks), -1)
