"""Dequantize FP8 weights with block scales (DeepSeek-V3) while reading them.

    in files                                                as read
    q_a_proj.weight [O, I], float8_e4m3fn                   q_a_proj.weight [O, I]
    q_a_proj.weight_scale_inv [ceil(O / R), ceil(I / C)]

Each value is multiplied by the scale of its block of R rows and C columns (DeepSeek-AI 2024, arXiv:2412.19437, section
3.3). A scale tensor with one element applies to the entire matrix. Models are saved with unquantized weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import NUMPY_DTYPE, cast
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

FLOAT8_METHOD = "fp8"
"""Value of `quant_method` in config.json for FP8 weights."""
_SCALES = ("_scale_inv", "_scale")
_OF_ACTIVATIONS = (".activation_scale", ".input_scale")
_WEIGHTS = "float8_e4m3fn"
_ROWS, _COLUMNS = 128, 128


def open_float8(source: WeightSource, options: Mapping[str, Any]) -> WeightSource:
    """Return the stored tensors with FP8 weights dequantized.

    Args:
        source: the stored tensors.
        options: `quantization_config` of config.json.

    Raises:
        ValueError: `weight_block_size` is invalid, or scales are missing or have a wrong shape.
    """
    block = options.get("weight_block_size")
    if block is not None and (
        not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block)
    ):
        raise ValueError(
            f"{source.path}: weight_block_size {block!r} in quantization_config of config.json must be null or two "
            "positive integers (rows and columns of a block)"
        )
    return _Float8Weights(source, None if block is None else (block[0], block[1]))


class _Float8Weights(WeightSource):
    """Stored tensors with FP8 matrices multiplied by their scales."""

    def __init__(self, source: WeightSource, block: tuple[int, int] | None) -> None:
        self.path, self._source = source.path, source
        self._block = block or (_ROWS, _COLUMNS)
        stored = {name: source.dtype(name) for name in source.names() if not name.endswith(_OF_ACTIVATIONS)}
        self._scales: dict[str, str] = {}
        for name in (name for name, dtype in stored.items() if dtype == _WEIGHTS):
            scale = next((name + ending for ending in _SCALES if name + ending in stored), None)
            if scale is None:
                raise ValueError(
                    f"{self.path}: {name} is stored in FP8, but {name}_scale_inv is missing; download the model again"
                )
            self._scales[name] = scale
            self._check(name, block is not None)
        scales = set(self._scales.values())
        self._names = [name for name in stored if name not in scales]

    def _check(self, name: str, has_blocks: bool) -> None:
        shape, scale = self._source.shape(name), self._source.shape(self._scales[name])
        grid = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
        if len(shape) != 2 or (scale not in ((), (1,)) and not (has_blocks and scale == grid)):
            expected = f"{list(grid)} for blocks of {self._block[0]} x {self._block[1]}" if has_blocks else "1 element"
            raise ValueError(
                f"{self.path}: {self._scales[name]} has the shape {list(scale)} for a weight of {list(shape)}; "
                f"expected: {expected}"
            )

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> str:
        return "bfloat16" if name in self._scales else self._source.dtype(name)

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        if name not in self._scales:
            return self._source.read(name, dtype, shard)
        dtype, codes = dtype or self.dtype(name), self._source.read(name, None, shard)
        start = [0, 0]
        if shard is not None:
            start[shard.axis] = shard.start
        rows, columns = (
            (first + np.arange(size)) // block
            for first, size, block in zip(start, codes.shape, self._block, strict=True)
        )
        scales = self._source.read(self._scales[name], "float32")
        if scales.size == 1:
            scales = np.broadcast_to(scales.reshape(1, 1), (rows[-1] + 1, columns[-1] + 1))
        values = np.empty(codes.shape, NUMPY_DTYPE[dtype])
        for row in np.unique(rows):  # one block row at a time, to avoid a float32 copy of the entire matrix
            chosen = slice(*np.searchsorted(rows, (row, row + 1)))
            values[chosen] = cast(cast(codes[chosen], _WEIGHTS, "float32") * scales[row, columns], "float32", dtype)
        return values
