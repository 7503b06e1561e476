"""Linear layers of groups of rows with quantized weights: `ops.grouped_linear` over a frozen `QuantizedStack`.

    y_p = x W[g, p]^T,   dL/dx = sum over p of (dL/dy_p) W[g, p]

Each matrix is that of a quantized linear layer, and is read only if its group has rows.

Shapes: N rows, G groups, I inputs, O outputs, P parts of the outputs, each of which is a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpu import library
from paddlenlp_ext.ops.cpu.bf16 import bf16_matmuls, bf16_matmuls_enabled
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.grouped_linear import groups_with_rows
from paddlenlp_ext.ops.linear import requires_grad
from paddlenlp_ext.ops.quantized.cpu import quantized_grouped_input_gradient_cpp, quantized_grouped_linear_cpp
from paddlenlp_ext.ops.quantized.linear import input_gradient_op, linear_op
from paddlenlp_ext.ops.quantized.weight import QuantizedStack


def quantized_grouped_linear(
    x_NI: paddle.Tensor, stack: QuantizedStack, starts: np.ndarray
) -> tuple[paddle.Tensor, ...]:
    """Multiply each group of rows by the matrices of its group; only the input has a gradient.

    Args:
        x_NI: rows, sorted by group.
        stack: the weight [G, O, I].
        starts: int64 [G + 1], the first row of each group, and N at the end.

    Returns:
        The P parts of the outputs, each [N, O / P].
    """
    if not (paddle.is_grad_enabled() and requires_grad(x_NI)):
        return _chosen(x_NI, stack)(x_NI, stack, starts)
    results: Any = _QuantizedGroupedLinear.apply(x_NI, stack, starts)
    return results if isinstance(results, tuple) else (results,)


class _QuantizedGroupedLinear(PyLayer):
    @staticmethod
    def forward(ctx, x, stack, starts):
        ctx.stack, ctx.starts, ctx.dtype, ctx.in_bf16 = stack, starts, x.dtype, bf16_matmuls_enabled()
        results = _chosen(x, stack)(x, stack, starts)
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx, *gradients):
        input_gradient = grouped_input_gradient_op.choose(gradients[0])
        if not ctx.stack.matrices.is_plain:
            input_gradient = grouped_input_gradient_reference
        with paddle.no_grad(), bf16_matmuls() if ctx.in_bf16 else nullcontext():
            return input_gradient(gradients, ctx.stack, ctx.starts).astype(ctx.dtype)


def _chosen(x_NI: paddle.Tensor, stack: QuantizedStack) -> Callable[..., tuple[paddle.Tensor, ...]]:
    """Return the backend of the product; the kernels of all matrices at once support plain ones only."""
    return grouped_op.choose(x_NI) if stack.matrices.is_plain else grouped_linear_reference


def grouped_linear_reference(
    x_NI: paddle.Tensor, stack: QuantizedStack, starts: np.ndarray
) -> tuple[paddle.Tensor, ...]:
    """Return the parts of the outputs by one quantized product for each matrix of a group with rows."""
    product, groups = linear_op(stack.matrices.algo).choose(x_NI), groups_with_rows(starts)
    if not groups:
        return tuple(paddle.zeros([0, stack.matrices.shape[0]], x_NI.dtype) for _ in range(stack.parts))
    return tuple(
        paddle.concat([product(x_NI[first:end], stack.matrix(group, part)) for group, first, end in groups])
        for part in range(stack.parts)
    )


def grouped_input_gradient_reference(
    gradients: Sequence[paddle.Tensor], stack: QuantizedStack, starts: np.ndarray
) -> paddle.Tensor:
    """Return the gradient of x, [N, I], by one quantized product for each matrix of a group with rows."""
    product, groups = input_gradient_op.choose(gradients[0]), groups_with_rows(starts)
    if not groups:
        return paddle.zeros([0, stack.matrices.shape[1]], gradients[0].dtype)
    parts = [
        paddle.concat([product(gradient[first:end], stack.matrix(group, part)) for group, first, end in groups])
        for part, gradient in enumerate(gradients)
    ]
    return sum(parts[1:], start=parts[0])


grouped_op = DispatchedOp(
    "quantized grouped linear",
    native=(quantized_grouped_linear_cpp, library.usable),
    reference=grouped_linear_reference,
)
"""Op of the parts of x W[g]^T; backends take (x [N, I], stack, starts)."""
grouped_input_gradient_op = DispatchedOp(
    "quantized grouped linear's gradient",
    native=(quantized_grouped_input_gradient_cpp, library.usable),
    reference=grouped_input_gradient_reference,
)
"""Op of the gradient of x; backends take (gradients of the parts, stack, starts)."""
