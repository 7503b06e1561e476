"""Grouped linear layer with quantized weights: one quantized matmul per matrix, except for groups without rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle

from paddlenlp_ext.ops.grouped_linear.reference import groups_with_rows
from paddlenlp_ext.ops.quantized_linear import quantized_input_gradient_op, quantized_linear_op
from paddlenlp_ext.ops.quantized_weight import QuantizedStack


def quantized_grouped_linear_reference(
    x_NI: paddle.Tensor, stack: QuantizedStack, starts: np.ndarray
) -> tuple[paddle.Tensor, ...]:
    """Compute `quantized_grouped_linear` without autograd."""
    product, groups = quantized_linear_op(stack.matrices.algo).choose(x_NI), groups_with_rows(starts)
    if not groups:
        return tuple(paddle.zeros([0, stack.matrices.shape[0]], x_NI.dtype) for _ in range(stack.parts))
    return tuple(
        paddle.concat([product(x_NI[first:end], stack.matrix(group, part)) for group, first, end in groups])
        for part in range(stack.parts)
    )


def quantized_grouped_input_gradient_reference(
    gradients: Sequence[paddle.Tensor], stack: QuantizedStack, starts: np.ndarray
) -> paddle.Tensor:
    """Return the input gradient [N, I] from the gradients of the fused projections, each [N, O / P]."""
    product, groups = quantized_input_gradient_op.choose(gradients[0]), groups_with_rows(starts)
    if not groups:
        return paddle.zeros([0, stack.matrices.shape[1]], gradients[0].dtype)
    parts = [
        paddle.concat([product(gradient[first:end], stack.matrix(group, part)) for group, first, end in groups])
        for part, gradient in enumerate(gradients)
    ]
    return sum(parts[1:], start=parts[0])
