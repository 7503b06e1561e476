"""Quantized weights: codes and scales of one matrix, or of a stack of matrices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import paddle

TENSORS = ("codes", "scales", "group_scales", "offset", "zeros", "order")
"""Fields of `QuantizedWeight` that are tensors."""


@dataclass(frozen=True)
class QuantizedWeight:
    """Weight [out, in] quantized to 4 or 8 bits; N weights, B scales, G group scales.

    Attributes:
        algo: nf4, nf4_symmetric, fp4, weight_only_int8 or weight_only_int4.
        shape: (out, in).
        block_size: number of consecutive weights that share a scale, in row-major order; `in` for one scale per row.
        codes: uint8 [ceil(N / 2)], two codes per byte, the first in the high half; weight_only_int8: int8 [N].
        scales: float32 [B]; uint8 codes [B] with double quantization.
        group_scales: float32 [G], scales of the quantized scales (double quantization).
        offset: float32 [1], mean of the scales, which is subtracted from the scales before quantization.
        group_size: number of consecutive scales that share a group scale; 0 without double quantization.
        is_residual: whether the low-rank part of an adapter was subtracted from the weight before quantization (PiSSA).
        zeros: int16 [B], zero points of integer formats, relative to the middle of the range of codes; None if all zero
            points are 0. With zero points, a block must not span rows.
        order: int32 [in], input index of each column of the codes; None if the columns are not reordered.
        dtype: dtype of the weight before quantization. With bfloat16, C++ matmuls of more than a few rows round their
            inputs to bfloat16, as with an unquantized weight.
        kernel_cache: tensors that kernels compute once from the codes and reuse.
    """

    algo: str
    shape: tuple[int, int]
    block_size: int
    codes: paddle.Tensor
    scales: paddle.Tensor
    group_scales: paddle.Tensor | None = None
    offset: paddle.Tensor | None = None
    group_size: int = 0
    is_residual: bool = False
    zeros: paddle.Tensor | None = None
    order: paddle.Tensor | None = None
    dtype: paddle.dtype = paddle.float32
    kernel_cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_plain(self) -> bool:
        """True if the weight has no zero points and no reordered columns; some kernels support only such weights."""
        return self.zeros is None and self.order is None

    @property
    def num_weights(self) -> int:
        """N, the number of weights."""
        return self.shape[0] * self.shape[1]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        tensors = (getattr(self, name) for name in TENSORS)
        return sum(tensor.size * tensor.element_size() for tensor in tensors if tensor is not None)

    def block_shifts(self) -> paddle.Tensor:
        """Return the offset of the weights of each block, -zeros * scales, float32 [out, in / block]."""
        assert self.zeros is not None, "the weight must have zero points"
        return (self.zeros.astype("float32") * self.scales).reshape([self.shape[0], -1]).scale(-1.0)


@dataclass(frozen=True)
class QuantizedStack:
    """Weight [G, O, I] of G groups of P fused projections; each projection is quantized as a matrix [O / P, I].

    Attributes:
        matrices: format and shape of a single matrix, with the stacked tensors of all matrices [G, P, ...].
    """

    matrices: QuantizedWeight

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (G, O, I)."""
        groups, parts, _ = self.matrices.codes.shape
        outputs, inputs = self.matrices.shape
        return groups, parts * outputs, inputs

    @property
    def parts(self) -> int:
        """P, the number of fused projections."""
        return self.matrices.codes.shape[1]

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return self.matrices.num_bytes

    def matrix(self, group: int, part: int) -> QuantizedWeight:
        """Return one matrix; all calls for the same matrix share a kernel cache."""
        own: dict[str, Any] = {}
        for name in TENSORS:
            stacked = getattr(self.matrices, name)
            own[name] = None if stacked is None else stacked[group, part]
        cache = self.matrices.kernel_cache.setdefault((group, part), {})
        return dataclasses.replace(self.matrices, **own, kernel_cache=cache)


def stack_weights(groups: Sequence[Sequence[QuantizedWeight]]) -> QuantizedStack:
    """Stack copies of the matrices of all groups; all matrices must have the same format and shape."""
    first = groups[0][0]
    stacked: dict[str, Any] = dict.fromkeys(TENSORS)
    for name in TENSORS:
        tensors = [getattr(matrix, name) for parts in groups for matrix in parts]
        if any(tensor is not None for tensor in tensors):
            tensors = [_neutral(name, first) if tensor is None else tensor for tensor in tensors]
            stacked[name] = paddle.stack(tensors).reshape([len(groups), len(groups[0]), -1])
    return QuantizedStack(dataclasses.replace(first, **stacked, kernel_cache={}))


def _neutral(name: str, weight: QuantizedWeight) -> paddle.Tensor:
    """Return neutral zero points or column indices for a stacked matrix that has none."""
    assert name in ("zeros", "order"), f"either all matrices of a stack must have {name}, or none of the matrices"
    return (
        paddle.arange(weight.shape[1], dtype="int32") if name == "order" else paddle.zeros(weight.scales.shape, "int16")
    )
