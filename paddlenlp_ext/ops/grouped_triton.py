"""Products of groups of rows by Triton kernels on a GPU, all groups in one launch.

tests/ops/test_grouped_triton.py runs all of it but the launch in Triton's interpreter, on the CPU. It has not
run on a GPU with Paddle.

Shapes: N rows, G groups, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.ops.linear import contiguous
from paddlenlp_ext.ops.triton_launch import launch

# Sizes of a program; not measured yet (benchmarks/triton_grouped.py).
_SMALLEST, _LARGEST = 16, 128
"""Sides of a tile of the result; tensor cores need 16."""
_TERMS = {4: 32, 2: 64}
"""Bytes of an element -> largest number of terms of a sum that a program reads at a time."""
_BAND = 8
"""Tiles of rows whose programs are neighbours."""


def row_tiles(starts: np.ndarray, rows: int) -> np.ndarray:
    """Return group, first row and end of each tile of at most `rows` rows, int32 [tiles, 3]; no tile spans two groups.

    Args:
        starts: int64 [G + 1], the first row of each group, and N at the end.
        rows: rows of a tile.
    """
    tiles_G = -(-np.diff(starts) // rows)
    group = np.repeat(np.arange(len(tiles_G)), tiles_G)
    within = np.arange(len(group)) - np.repeat(np.cumsum(tiles_G) - tiles_G, tiles_G)
    first = starts[group] + within * rows
    return np.stack([group, first, np.minimum(first + rows, starts[group + 1])], axis=1).astype(np.int32)


class GroupedTriton:
    """Backend of `ops.grouped_linear`."""

    @staticmethod
    def precision(weight: paddle.Tensor) -> Any:
        """Return the dtype of the products' operands and results: that of the weight."""
        return weight.dtype

    @staticmethod
    def operand(x: paddle.Tensor, precision: Any) -> paddle.Tensor:
        """Return an operand of a product."""
        return contiguous(x.astype(precision))

    @staticmethod
    def saved(x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """Return the x to save."""
        return x

    @classmethod
    def forward(cls, x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray, parts: int) -> tuple:
        """Return the parts of the outputs."""
        _, outputs, inputs = weight.shape
        y = _product(cls.operand(x, weight.dtype), contiguous(weight), starts, outputs, (inputs, 1))
        return tuple(paddle.chunk(y, parts, axis=-1)) if parts > 1 else (y,)

    @classmethod
    def input_gradient(cls, gradients: list, weight: paddle.Tensor, starts: np.ndarray) -> paddle.Tensor:
        """Return the gradient of x, [N, I]."""
        _, _, inputs = weight.shape
        return _product(_joined(gradients), contiguous(weight), starts, inputs, (1, inputs))

    @classmethod
    def weight_gradient(
        cls, gradients: list, x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray
    ) -> paddle.Tensor:
        """Return the gradient of the weight, [G, O, I]; groups without rows get zeros."""
        from paddlenlp_ext.ops.grouped_triton_kernels import grouped_weight_gradient_kernel

        if not x.shape[0]:
            return paddle.zeros_like(weight)
        groups, outputs, inputs = weight.shape
        gradient, place = _joined(gradients), x.place
        result = paddle.empty(weight.shape, weight.dtype, device=place)
        bounds = paddle.to_tensor(starts.astype(np.int32), place=place)
        height, width = _side(outputs), _side(inputs)
        sizes = {"OUTPUTS": height, "INPUTS": width, "ROWS": _TERMS[x.element_size()]}
        grid, tensors = (groups * -(-outputs // height) * -(-inputs // width),), (gradient, x, result, bounds)
        launch(grouped_weight_gradient_kernel, grid, *tensors, outputs, inputs, **sizes, **_warps(height, width))
        return result


def _product(
    x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray, columns: int, strides: tuple[int, int]
) -> paddle.Tensor:
    """Return y [N, columns] of `grouped_product_kernel`; `strides` are those of columns and terms of W."""
    from paddlenlp_ext.ops.grouped_triton_kernels import grouped_product_kernel

    y = paddle.empty([x.shape[0], columns], x.dtype, device=x.place)
    if not x.shape[0]:
        return y
    rows, width, terms = _side(_mean_rows(starts)), _side(columns), x.shape[1]
    tiles = row_tiles(starts, rows)
    sizes = {"ROWS": rows, "COLUMNS": width, "TERMS": _side(terms, _TERMS[x.element_size()]), "BAND": _BAND}
    tensors = x, weight, y, paddle.to_tensor(tiles, place=x.place)
    numbers = len(tiles), columns, terms, weight.shape[1] * weight.shape[2], *strides
    grid = (len(tiles) * -(-columns // width),)
    launch(grouped_product_kernel, grid, *tensors, *numbers, **sizes, **_warps(rows, width))
    return y


def _mean_rows(starts: np.ndarray) -> int:
    """Return the mean number of rows of the groups that have any, rounded up."""
    return -(-int(starts[-1]) // int(np.count_nonzero(np.diff(starts))))


def _side(count: int, largest: int | None = None) -> int:
    """Return the side of a tile for `count` rows, columns or terms: a power of two within the bounds."""
    return min(largest or _LARGEST, max(_SMALLEST, 1 << (count - 1).bit_length()))


def _warps(height: int, width: int) -> dict[str, int]:
    return {"num_warps": 8 if height * width > 64 * 128 else 4}


def _joined(gradients: list) -> paddle.Tensor:
    """Return the gradient of all outputs, [N, O]."""
    return gradients[0] if len(gradients) == 1 else paddle.concat(gradients, axis=-1)
