"""Files of gpt-oss: experts in one tensor per layer, with gate and up interleaved, as numbers or in MXFP4.

    in memory                              in files
    gate_up_proj.weight [E, 2F, D]         gate_up_proj [E, D, 2F], columns gate 0, up 0, gate 1, up 1, ...
    gate_up_proj_bias [E, 2F]              gate_up_proj_bias [E, 2F], likewise
    down_proj.weight [E, D, F]             down_proj [E, F, D]

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
from paddlenlp_ext.checkpoint.file_layout import FileLayout, split_layer
from paddlenlp_ext.checkpoint.safetensors import LazyTensor, as_lazy
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

_NAMES = {
    "mlp.experts.gate_up_proj.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up_proj_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down_proj.weight": "mlp.experts.down_proj",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.bias": "mlp.router.bias",
}
"""Name in memory -> name in files of the tensors that differ."""
_BLOCKS, _SCALES = "_blocks", "_scales"
_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of the 4-bit codes: a sign, two bits of exponent and one of mantissa."""


class InterleavedExperts(FileLayout):
    """Layout of gpt-oss's files."""

    has_experts_of_transformers = False

    def open(self, source: WeightSource) -> WeightSource:
        """Return the tensors of a file under the names and in the shapes of memory."""
        return _InterleavedWeights(source)

    def to_files(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's tensors as they are written."""
        written: dict[str, Any] = {}
        for name, tensor in tensors.items():
            prefix, own = split_layer(name)
            if ".experts." in own and own in _NAMES:
                tensor = _to_file(own, as_lazy(tensor))
            written[prefix + _NAMES.get(own, own)] = tensor
        return written


def _to_file(own: str, tensor: LazyTensor) -> LazyTensor:
    experts, *rest = tensor.shape
    return LazyTensor((experts, *reversed(rest)), tensor.dtype, lambda: _interleaved(own, tensor.read()))


def _interleaved(own: str, values: np.ndarray) -> np.ndarray:
    """Return a tensor in memory as the file has it."""
    if "gate_up" in own:
        experts, rows, *rest = values.shape
        values = np.swapaxes(values.reshape(experts, 2, rows // 2, *rest), 1, 2).reshape(values.shape)
    return np.ascontiguousarray(np.swapaxes(values, 1, 2) if values.ndim == 3 else values)


def _separated(own: str, values: np.ndarray) -> np.ndarray:
    """Return a tensor whose rows are outputs, those of gate and up interleaved, with the rows of gate before up."""
    if "gate_up" not in own:
        return np.ascontiguousarray(values)
    experts, rows, *rest = values.shape
    return np.swapaxes(values.reshape(experts, rows // 2, 2, *rest), 1, 2).reshape(values.shape)


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
        values = self._source.read(file, dtype, shard)
        return _separated(own, np.swapaxes(values, 1, 2) if values.ndim == 3 else values)

    def _dequantized(self, file: str, own: str, dtype: str, shard: Shard | None) -> np.ndarray:
        """Return the values of experts in MXFP4, one expert at a time."""
        read = partial(self._source.read, dtype=None, shard=shard)
        blocks, scales = read(file + _BLOCKS), read(file + _SCALES)
        experts = [cast(_mxfp4(*one), "float32", dtype) for one in zip(blocks, scales, strict=True)]
        return _separated(own, np.stack(experts))


def _is_expert(name: str) -> bool:
    return split_layer(name)[1] in _NAMES and ".experts." in name


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values [rows, columns] of blocks [rows, columns / 32, 16] and scales [rows, columns / 32]."""
    codes = np.stack([blocks & 0x0F, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], -1)
    return np.ldexp(_LEVELS[codes], scales.astype(np.int32)[..., None] - 127).reshape(len(blocks), -1)
