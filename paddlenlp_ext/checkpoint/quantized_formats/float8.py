"""Dequantize FP8 weights, which have a scale per block (DeepSeek-V3), row or matrix, while reading them.

    in files                                                as read
    q_a_proj.weight [O, I], float8_e4m3fn                   q_a_proj.weight [O, I]
    q_a_proj.weight_scale_inv [ceil(O / R), ceil(I / C)]

Each value is multiplied by the scale of its block of R rows and C columns (DeepSeek-AI 2024, arXiv:2412.19437, section
3.3). A scale tensor with one element applies to the entire matrix. Stacked experts [E, O, I] have the scales of each
expert, stacked: [E, 1, 1] for one scale per matrix. compressed-tensors (FP8_DYNAMIC) stores a
`weight_scale` per row. The quantization of activations is not simulated. Models are saved with unquantized weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import NUMPY_DTYPE, cast
from paddlenlp_ext.checkpoint.quantized_formats.compressed_tensors import COMPRESSED_TENSORS, weight_options
from paddlenlp_ext.checkpoint.quantized_formats.packed_layout import whole_option
from paddlenlp_ext.checkpoint.quantized_formats.supported_formats import unsupported
from paddlenlp_ext.checkpoint.weight_source import WeightSource
from paddlenlp_ext.sharding_spec import Shard

FLOAT8_METHOD = "fp8"
"""Value of `quant_method` in config.json for FP8 weights."""
_SCALES = ("_scale_inv", "_scale")
_OF_ACTIVATIONS = ("activation_scale", ".input_scale", ".output_scale", ".k_scale", ".v_scale")
_WEIGHTS = "float8_e4m3fn"
_WHOLE = 1 << 62
"""Size of a block that covers all rows or columns."""
_ROWS_AT_ONCE = 128


def is_float8(options: Mapping[str, Any]) -> bool:
    """Return whether a `quantization_config` describes FP8 weights.

    Raises:
        ValueError: see `weight_options`.
    """
    method = options.get("quant_method")
    return method == FLOAT8_METHOD or (method == COMPRESSED_TENSORS and weight_options(options).get("type") == "float")


def open_float8(source: WeightSource, options: Mapping[str, Any]) -> WeightSource:
    """Return the stored tensors with FP8 weights dequantized.

    Args:
        source: the stored tensors.
        options: `quantization_config` of config.json.

    Raises:
        ValueError: block sizes are invalid, scales are missing or have the wrong shape, or the variant of
            compressed-tensors is not supported.
    """
    if options.get("quant_method") == COMPRESSED_TENSORS:
        return _Float8Weights(source, _compressed_block(source, options), None)
    return _Float8Weights(source, _checked(source, "weight_block_size", options.get("weight_block_size")), "bfloat16")


def _compressed_block(source: WeightSource, options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale in a compressed-tensors model; None: the matrix has one scale."""
    weights, form = weight_options(options), options.get("format")
    bits, strategy = whole_option(weights, "num_bits"), weights.get("strategy")
    if bits != 8 or form not in ("float-quantized", "naive-quantized"):
        raise unsupported(COMPRESSED_TENSORS, f"floating-point weights of {bits} bits in the format {form!r}")
    if strategy == "block":
        return _checked(source, "block_structure", weights.get("block_structure"))
    if strategy == "group":
        return _checked(source, "group_size", [1, weights.get("group_size")])
    if strategy not in ("tensor", "channel"):
        raise unsupported(COMPRESSED_TENSORS, f"FP8 weights and the strategy {strategy!r}")
    return (1, _WHOLE) if strategy == "channel" else None


def _checked(source: WeightSource, key: str, block: Any) -> tuple[int, int] | None:
    """Check `block`, the value of `key`; return the rows and columns of a block, or None if `block` is None."""
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(
            f"{source.path}: {key} {block!r} in quantization_config of config.json must be null or two "
            "positive integers (rows and columns of a block)"
        )
    return block[0], block[1]


class _Float8Weights(WeightSource):
    """Stored tensors with FP8 matrices multiplied by their scales.

    Args:
        source: the stored tensors.
        block: rows and columns that share a scale; None: the entire matrix has one scale.
        dtype: dtype of dequantized weights; None: dtype of the scales.
    """

    def __init__(self, source: WeightSource, block: tuple[int, int] | None, dtype: str | None) -> None:
        self.path, self._source, self._dtype = source.path, source, dtype
        self._block = block or (_WHOLE, _WHOLE)
        stored = {name: source.dtype(name) for name in source.names() if not name.endswith(_OF_ACTIVATIONS)}
        self._scales: dict[str, str] = {}
        for name in (name for name, dtype in stored.items() if dtype == _WEIGHTS):
            scale = next((name + ending for ending in _SCALES if name + ending in stored), None)
            if scale is None:
                missing = f"{name}_scale_inv" if self._dtype else f"{name}_scale"
                raise ValueError(
                    f"{self.path}: {name} is stored in FP8, but {missing} is missing; download the model again"
                )
            self._scales[name] = scale
            self._check(name)
        scales = set(self._scales.values())
        self._names = [name for name in stored if name not in scales]

    def _check(self, name: str) -> None:
        shape, scale = self._source.shape(name), self._source.shape(self._scales[name])
        grid, is_matrix = self._grid(shape), len(shape) == 2
        if len(shape) not in (2, 3) or (scale != grid and not (is_matrix and scale in ((), (1,)))):
            rows, columns = ("all" if size == _WHOLE else str(size) for size in self._block)
            is_whole = is_matrix and self._block == (_WHOLE, _WHOLE)
            expected = "1 element" if is_whole else f"{list(grid)} for blocks of {rows} x {columns}"
            raise ValueError(
                f"{self.path}: {self._scales[name]} has the shape {list(scale)} for a weight of {list(shape)}; "
                f"expected: {expected}"
            )

    def _grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight: rows and columns of blocks, for each expert of a stack."""
        blocks = (-(-size // block) for size, block in zip(shape[-2:], self._block, strict=False))
        return (*shape[:-2], *blocks)

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> str:
        if name not in self._scales:
            return self._source.dtype(name)
        return self._dtype or self._source.dtype(self._scales[name])

    def read(self, name: str, dtype: str | None = None, shard: Shard | None = None) -> np.ndarray:
        if name not in self._scales:
            return self._source.read(name, dtype, shard)
        dtype, codes = dtype or self.dtype(name), self._source.read(name, None, shard)
        start = [0] * codes.ndim
        if shard is not None:
            start[shard.axis] = shard.start
        scales = self._source.read(self._scales[name], "float32")
        scales = np.broadcast_to(scales, self._grid(self._source.shape(name)))
        if codes.ndim == 2:
            return self._scaled(codes, scales, start, dtype)
        values = np.empty(codes.shape, NUMPY_DTYPE[dtype])
        for expert, of_expert in enumerate(codes):
            values[expert] = self._scaled(of_expert, scales[start[0] + expert], start[1:], dtype)
        return values

    def _scaled(self, codes: np.ndarray, scales: np.ndarray, start: Sequence[int], dtype: str) -> np.ndarray:
        """Multiply a part of a matrix, from row and column `start`, by the scales of the matrix."""
        rows, columns = (
            (first + np.arange(size)) // block
            for first, size, block in zip(start, codes.shape, self._block, strict=True)
        )
        values = np.empty(codes.shape, NUMPY_DTYPE[dtype])
        for first in range(0, len(codes), _ROWS_AT_ONCE):  # avoids a float32 copy of the entire matrix
            chosen = slice(first, first + _ROWS_AT_ONCE)
            scaled = cast(codes[chosen], _WEIGHTS, "float32") * scales[rows[chosen, None], columns]
            values[chosen] = cast(scaled, "float32", dtype)
        return values
