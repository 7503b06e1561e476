"""Grouped linear layer with Triton kernels; one launch computes all groups.

Tested in Triton's interpreter on the CPU (tests/ops/grouped_linear/test_triton.py), except for the launch itself.
Not yet run on a GPU with Paddle.

Shapes: N rows, G groups, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.ops.grouped_linear.reference import GroupedReference
from paddlenlp_ext.ops.tensor_utils import contiguous, in_dtype, product_dtype
from paddlenlp_ext.ops.triton_utils.launch import launch


def row_tiles(starts: np.ndarray, rows: int) -> np.ndarray:
    """Split the rows of each group into tiles; return (group, first row, end row) of each tile, int32 [tiles, 3].

    Args:
        starts: int64 [G + 1], the first row of each group, followed by N.
        rows: maximum number of rows per tile.
    """
    tiles_G = -(-np.diff(starts) // rows)
    group = np.repeat(np.arange(len(tiles_G)), tiles_G)
    within = np.arange(len(group)) - np.repeat(np.cumsum(tiles_G) - tiles_G, tiles_G)
    first = starts[group] + within * rows
    return np.stack([group, first, np.minimum(first + rows, starts[group + 1])], axis=1).astype(np.int32)


class GroupedTriton(GroupedReference):
    """Triton backend of `grouped_linear`."""

    @staticmethod
    def precision(weight: paddle.Tensor) -> Any:
        return product_dtype(weight)

    @staticmethod
    def operand(x: paddle.Tensor, precision: Any) -> paddle.Tensor:
        return contiguous(in_dtype(x, precision))

    @classmethod
    def forward(cls, x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray, parts: int) -> tuple:
        _, outputs, inputs = weight.shape
        x, weight = (cls.operand(each, cls.precision(weight)) for each in (x, weight))
        y = _product(x, weight, starts, outputs, (inputs, 1))
        return tuple(paddle.chunk(y, parts, axis=-1)) if parts > 1 else (y,)

    @classmethod
    def input_gradient(cls, gradients: list, weight: paddle.Tensor, starts: np.ndarray) -> paddle.Tensor:
        _, _, inputs = weight.shape
        weight = cls.operand(weight, gradients[0].dtype)
        return _product(_joined(gradients), weight, starts, inputs, (1, inputs))

    @classmethod
    def weight_gradient(
        cls, gradients: list, x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray
    ) -> paddle.Tensor:
        from paddlenlp_ext.ops.grouped_linear.kernels import launch_weight_gradient

        if not x.shape[0]:
            return paddle.zeros_like(weight)
        result = paddle.empty(weight.shape, weight.dtype, device=x.place)
        bounds = paddle.to_tensor(starts.astype(np.int32), place=x.place)
        launch_weight_gradient(launch, _joined(gradients), x, result, bounds)
        return result


def _product(
    x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray, columns: int, strides: tuple[int, int]
) -> paddle.Tensor:
    """Launch `grouped_product_kernel` and return y [N, columns]; `strides` are W's strides along columns and terms."""
    from paddlenlp_ext.ops.grouped_linear.kernels import launch_product, product_sizes

    y = paddle.empty([x.shape[0], columns], x.dtype, device=x.place)
    if not x.shape[0]:
        return y
    sizes = product_sizes(x, _mean_rows(starts), columns)
    tiles = paddle.to_tensor(row_tiles(starts, sizes["ROWS"]), place=x.place)
    launch_product(launch, x, weight, y, tiles, strides, sizes)
    return y


def _mean_rows(starts: np.ndarray) -> int:
    """Return the mean number of rows of non-empty groups, rounded up."""
    return -(-int(starts[-1]) // int(np.count_nonzero(np.diff(starts))))


def _joined(gradients: list) -> paddle.Tensor:
    """Concatenate the gradients of the fused projections to [N, O]."""
    return gradients[0] if len(gradients) == 1 else paddle.concat(gradients, axis=-1)
