"""Grouped linear layer with quantized weights in C++ (csrc/quantized_linear.cpp).

Shapes: N rows, I inputs, O outputs, P fused projections.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import paddle

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.bf16 import as_bf16, cached_bf16, uses_bf16
from paddlenlp_ext.ops.grouped_linear.reference import groups_with_rows
from paddlenlp_ext.ops.quantized_weight import QuantizedStack
from paddlenlp_ext.ops.quantized_weight.cpp import packed
from paddlenlp_ext.ops.tensor_utils import contiguous


def quantized_grouped_linear_cpp(
    x_NI: paddle.Tensor, stack: QuantizedStack, starts: np.ndarray
) -> tuple[paddle.Tensor, ...]:
    """Compute `quantized_grouped_linear` for float32 rows without autograd."""
    x = contiguous(x_NI)
    is_small = int(np.diff(starts).max(initial=0)) <= library.small_batch_rows(uses_bf16(stack.matrices))
    operand = cached_bf16(x) if uses_bf16(stack.matrices) and not is_small else x
    results = tuple(library.empty([len(x), stack.matrices.shape[0]]) for _ in range(stack.parts))
    run = library.function("quantized_linear_small_batch" if is_small else "quantized_linear_forward")
    precision = () if is_small else (operand.dtype == paddle.bfloat16,)
    for group, first, end in groups_with_rows(starts):
        for part, y in enumerate(results):
            weight = packed(stack.matrices, group * stack.parts + part)
            run(_row(operand, first), weight, _row(y, first), end - first, *precision)
    return results


def quantized_grouped_input_gradient_cpp(
    gradients: Sequence[paddle.Tensor], stack: QuantizedStack, starts: np.ndarray
) -> paddle.Tensor:
    """Return the input gradient, float32 [N, I], from the gradients of the fused projections, each [N, O / P]."""
    in_bf16 = uses_bf16(stack.matrices)
    operands = [as_bf16(contiguous(each)) if in_bf16 else contiguous(each) for each in gradients]
    x_gradient = library.empty([len(operands[0]), stack.matrices.shape[1]])
    run = library.function("quantized_linear_input_gradient")
    for group, first, end in groups_with_rows(starts):
        for part, gradient in enumerate(operands):
            weight = packed(stack.matrices, group * stack.parts + part)
            is_bf16 = gradient.dtype == paddle.bfloat16
            run(_row(gradient, first), weight, _row(x_gradient, first), end - first, part > 0, is_bf16)
    return x_gradient


def _row(x: paddle.Tensor, row: int) -> int:
    return library.pointer(x) + row * x.shape[1] * x.element_size()
