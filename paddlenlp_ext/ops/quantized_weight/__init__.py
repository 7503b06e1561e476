"""Containers of a quantized weight, and of a stack of them: codes and scales."""

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
        algo: nf4, fp4, weight_only_int8 or weight_only_int4.
        shape: (out, in).
        block_size: number of neighbours in the flattened weight that share a scale; `in` for one scale per row.
        codes: uint8 [ceil(N / 2)], two per byte, the first in the high half; weight_only_int8: int8 [N].
        scales: float32 [B], or uint8 codes if `group_scales` is set.
        group_scales: float32 [G].
        offset: float32 [1], mean of the scales, subtracted before they were quantized.
        group_size: number of neighbouring scales that share a group scale; 0 if scales are not quantized.
        is_residual: whether part of the original weight was subtracted before quantizing; an adapter adds it back.
        zeros: int16 [B], integer formats: value of the codes that stands for 0, relative to the middle of their range;
            None if all are 0. A block then lies within a row.
        order: int32 [in], input of each column of the codes; None if the columns are in the order of the inputs.
        dtype: dtype of the weight that the codes stand for. C++ matmuls of more than a few rows round their inputs to
            bfloat16 if it is bfloat16, as they do with a weight that is not quantized.
        kernel_cache: tensors that a kernel derives from the codes once and reuses.
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
        """True if the weight is codes times scales, in the order of the inputs, which all kernels support."""
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


@dataclass(frozen=True)
class QuantizedStack:
    """Weight [G, O, I] of G groups, each of P matrices [O / P, I] that are quantized on their own.

    Attributes:
        matrices: format and shape of one matrix; the tensors of all of them, with the leading axes [G, P].
    """

    matrices: QuantizedWeight

    @property
    def shape(self) -> tuple[int, int, int]:
        """(G, O, I)."""
        groups, parts, _ = self.matrices.codes.shape
        outputs, inputs = self.matrices.shape
        return groups, parts * outputs, inputs

    @property
    def parts(self) -> int:
        """P, the number of matrices of a group."""
        return self.matrices.codes.shape[1]

    @property
    def num_weights(self) -> int:
        """Number of weights of all matrices."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return self.matrices.num_bytes

    def matrix(self, group: int, part: int) -> QuantizedWeight:
        """Return a matrix, with a kernel cache that all its copies share."""
        own: dict[str, Any] = {}
        for name in TENSORS:
            stacked = getattr(self.matrices, name)
            own[name] = None if stacked is None else stacked[group, part]
        cache = self.matrices.kernel_cache.setdefault((group, part), {})
        return dataclasses.replace(self.matrices, **own, kernel_cache=cache)


def stack_weights(groups: Sequence[Sequence[QuantizedWeight]]) -> QuantizedStack:
    """Return the stack of the matrices of each group, which have one format and shape; their tensors are copied."""
    first = groups[0][0]
    stacked: dict[str, Any] = dict.fromkeys(TENSORS)
    for name in TENSORS:
        tensors = [getattr(matrix, name) for parts in groups for matrix in parts]
        if any(tensor is not None for tensor in tensors):
            tensors = [_neutral(name, first) if tensor is None else tensor for tensor in tensors]
            stacked[name] = paddle.stack(tensors).reshape([len(groups), len(groups[0]), -1])
    return QuantizedStack(dataclasses.replace(first, **stacked, kernel_cache={}))


def _neutral(name: str, weight: QuantizedWeight) -> paddle.Tensor:
    """Return the tensor that changes nothing, for a matrix without one beside matrices that have one."""
    assert name in ("zeros", "order"), f"all matrices of a stack have {name}, or none"
    return (
        paddle.arange(weight.shape[1], dtype="int32") if name == "order" else paddle.zeros(weight.scales.shape, "int16")
    )
