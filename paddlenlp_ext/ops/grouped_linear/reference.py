"""Grouped linear layer in plain Paddle, on any device, with one matmul per non-empty group.

Shapes: N rows, G groups, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import paddle


def groups_with_rows(starts: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the index, the first row and the end row of each non-empty group.

    Args:
        starts: int64 [G + 1], the first row of each group, followed by N.
    """
    bounds = enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False))
    return [(group, first, end) for group, (first, end) in bounds if first < end]


class GroupedReference:
    """Reference backend of `grouped_linear`."""

    @staticmethod
    def precision(weight: paddle.Tensor) -> Any:
        """Return the precision of the matmuls, in the form that `operand` expects.

        The reference multiplies in the dtype of the weight, but in float32 for bfloat16 weights on the CPU.
        """
        is_half = weight.dtype == paddle.bfloat16 and weight.place.is_cpu_place()
        return paddle.float32 if is_half else weight.dtype

    @staticmethod
    def operand(x: paddle.Tensor, precision: Any) -> paddle.Tensor:
        """Return `x` as an operand of the matmuls, cast to `precision`."""
        return x.astype(precision)

    @staticmethod
    def saved(x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """Return `x` in the form in which it is saved for the backward pass."""
        return x

    @classmethod
    def forward(cls, x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray, parts: int) -> tuple:
        """Return the output of each fused projection."""
        x = cls.operand(x, cls.precision(weight))
        products = [paddle.matmul(x[a:b], w, transpose_y=True) for a, b, w in cls._groups(weight, starts)]
        y = paddle.concat(products) if products else paddle.zeros([0, weight.shape[1]], x.dtype)
        return tuple(paddle.chunk(y, parts, axis=-1)) if parts > 1 else (y,)

    @classmethod
    def input_gradient(cls, gradients: list, weight: paddle.Tensor, starts: np.ndarray) -> paddle.Tensor:
        """Return the input gradient [N, I]."""
        gradient = paddle.concat(gradients, axis=-1)
        products = [paddle.matmul(gradient[a:b], w) for a, b, w in cls._groups(weight, starts)]
        return paddle.concat(products) if products else paddle.zeros([0, weight.shape[2]], gradient.dtype)

    @classmethod
    def weight_gradient(
        cls, gradients: list, x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray
    ) -> paddle.Tensor:
        """Return the weight gradient [G, O, I]; groups without rows get zeros."""
        gradient = paddle.concat(gradients, axis=-1)
        products = [
            paddle.matmul(gradient[a:b], x[a:b], transpose_x=True) if a < b else paddle.zeros(weight.shape[1:], x.dtype)
            for a, b in itertools.pairwise(starts)
        ]
        return paddle.stack(products).astype(weight.dtype)

    @classmethod
    def _groups(cls, weight: paddle.Tensor, starts: np.ndarray) -> list[tuple[int, int, paddle.Tensor]]:
        """Return the first row, the end row and the weight of each non-empty group."""
        return [(a, b, weight[group].astype(cls.precision(weight))) for group, a, b in groups_with_rows(starts)]
