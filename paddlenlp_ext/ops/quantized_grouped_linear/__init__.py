"""Grouped linear layer with quantized weights, such as the experts of an MoE layer in QLoRA.

    y_p = x W[g, p]^T,   dL/dx = sum over p of (dL/dy_p) W[g, p]

The op computes `grouped_linear` with a frozen `QuantizedStack`. The matrices of groups without rows are not read.

Shapes: N rows, G groups, I inputs, O outputs, P fused projections, each quantized as a separate matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls, bf16_matmuls_enabled
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.quantized_grouped_linear.cpp import (
    quantized_grouped_input_gradient_cpp,
    quantized_grouped_linear_cpp,
)
from paddlenlp_ext.ops.quantized_grouped_linear.reference import (
    quantized_grouped_input_gradient_reference,
    quantized_grouped_linear_reference,
)
from paddlenlp_ext.ops.quantized_weight import QuantizedStack
from paddlenlp_ext.ops.tensor_utils import requires_grad


def quantized_grouped_linear(
    x_NI: paddle.Tensor, stack: QuantizedStack, starts: np.ndarray
) -> tuple[paddle.Tensor, ...]:
    """Multiply the rows of each group by the matrices of the group; only the input has a gradient.

    Args:
        x_NI: rows, sorted by group.
        stack: the weight [G, O, I].
        starts: int64 [G + 1], the first row of each group, followed by N.

    Returns:
        The output of each fused projection, [N, O / P].
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
        input_gradient = quantized_grouped_input_gradient_op.choose(gradients[0])
        if not ctx.stack.matrices.is_plain:
            input_gradient = quantized_grouped_input_gradient_reference
        with paddle.no_grad(), bf16_matmuls() if ctx.in_bf16 else nullcontext():
            return input_gradient(gradients, ctx.stack, ctx.starts).astype(ctx.dtype)


def _chosen(x_NI: paddle.Tensor, stack: QuantizedStack) -> Callable[..., tuple[paddle.Tensor, ...]]:
    """Return the backend for a stack; only the reference supports zero points and reordered columns."""
    return quantized_grouped_linear_op.choose(x_NI) if stack.matrices.is_plain else quantized_grouped_linear_reference


quantized_grouped_linear_op = DispatchedOp(
    "quantized grouped linear",
    cpp=(quantized_grouped_linear_cpp, library.with_products(library.usable)),
    reference=quantized_grouped_linear_reference,
)
"""Op that computes x W[g]^T. Arguments of a backend: (x [N, I], stack, starts). A backend returns one output per fused
projection."""

quantized_grouped_input_gradient_op = DispatchedOp(
    "quantized grouped linear's gradient",
    cpp=(quantized_grouped_input_gradient_cpp, library.with_products(library.usable)),
    reference=quantized_grouped_input_gradient_reference,
)
"""Op that computes the input gradient. Arguments of a backend: (gradients of the fused projections, stack, starts)."""
