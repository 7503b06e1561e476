r"""Grouped linear layer, `x W[g]^T`: one weight per group of rows, such as the experts of an MoE layer.

    x_NI              weight_GOI        starts = [0, 3, 3, 5]
    . . . . \\
    . . . .  > group 0      W[0]
    . . . . /
                group 1      W[1]        no rows: W[1] is not read, and its gradient is 0
    . . . . \\
    . . . . /  group 2      W[2]

The rows of a group are adjacent, and a group may have any number of rows. One C++ call on the CPU, or one Triton launch
on a GPU, computes all groups. The reference computes one matmul per group.

A layer may fuse several projections of equal size, such as gate and up. Each projection has a separate output tensor.

Shapes: N rows, G groups, I inputs, O outputs, P fused projections.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.grouped_linear.cpp import GroupedCpp
from paddlenlp_ext.ops.grouped_linear.reference import GroupedReference
from paddlenlp_ext.ops.grouped_linear.triton import GroupedTriton
from paddlenlp_ext.ops.recompute_functions import recompute_function
from paddlenlp_ext.ops.tensor_utils import in_dtype, requires_grad
from paddlenlp_ext.ops.triton_utils.launch import on_gpu_with_triton


def grouped_linear(
    x_NI: paddle.Tensor, weight_GOI: paddle.Tensor, starts: np.ndarray, parts: int = 1
) -> tuple[paddle.Tensor, ...]:
    """Multiply the rows of each group by the transposed weight of the group.

    A frozen weight gets no gradient. If x has a recompute function (ops/recompute_functions.py), x is not saved.

    Args:
        x_NI: rows, sorted by group.
        weight_GOI: weights of the groups; on the CPU, float32 x may be multiplied with bfloat16 weights.
        starts: int64 [G + 1], the first row of each group, followed by N.
        parts: number of fused projections.

    Returns:
        The output of each projection, [N, O / parts]; float32 on the CPU.
    """
    backend: Any = grouped_linear_op.choose(x_NI)
    if paddle.is_grad_enabled() and (requires_grad(x_NI) or requires_grad(weight_GOI)):
        results = _GroupedLinear.apply(x_NI, weight_GOI, starts, parts, backend)
        return results if isinstance(results, tuple) else (results,)
    return backend.forward(x_NI, weight_GOI, starts, parts)


class _GroupedLinear(PyLayer):
    @staticmethod
    def forward(ctx, x, weight, starts, parts, backend):
        ctx.backend, ctx.starts, ctx.dtype = backend, starts, x.dtype
        ctx.grads_needed = [requires_grad(each) for each in (x, weight)]
        ctx.recompute_x, ctx.precision = recompute_function(x), backend.precision(weight)
        saves_x = requires_grad(weight) and ctx.recompute_x is None
        ctx.save_for_backward(weight, *([backend.saved(x, weight)] if saves_x else []))
        results = backend.forward(x, weight, starts, parts)
        return results if parts > 1 else results[0]

    @staticmethod
    def backward(ctx, *gradients):
        weight, *saved = ctx.saved_tensor()
        found: list[paddle.Tensor | None] = [None, None]
        operands = [ctx.backend.operand(gradient, ctx.precision) for gradient in gradients]
        if ctx.grads_needed[0]:
            found[0] = in_dtype(ctx.backend.input_gradient(operands, weight, ctx.starts), ctx.dtype)
        if ctx.grads_needed[1]:
            x = ctx.backend.operand(saved[0] if saved else ctx.recompute_x(), ctx.precision)
            found[1] = ctx.backend.weight_gradient(operands, x, weight, ctx.starts)
        return tuple(found)


grouped_linear_op = DispatchedOp(
    "grouped_linear",
    cpp=(GroupedCpp, library.with_products(library.usable)),
    triton=(GroupedTriton, on_gpu_with_triton),
    reference=GroupedReference,
)
