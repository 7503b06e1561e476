"""Grouped linear layer in C++ (csrc/grouped_linear.cpp); one call computes all groups.

Shapes: N rows, G groups, I inputs, O outputs.
"""

from __future__ import annotations

import numpy as np
import paddle

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.bf16 import as_bf16, cached_bf16, unavailable_reason, uses_bf16
from paddlenlp_ext.ops.tensor_utils import contiguous


class GroupedCpp:
    """C++ backend of `grouped_linear`; the methods are documented in `GroupedReference`."""

    @staticmethod
    def precision(weight: paddle.Tensor) -> bool:
        return uses_bf16(weight)

    @staticmethod
    def operand(x: paddle.Tensor, precision: bool) -> paddle.Tensor:
        return as_bf16(contiguous(x)) if precision else contiguous(x)

    @staticmethod
    def saved(x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        return cached_bf16(contiguous(x)) if uses_bf16(weight) else contiguous(x)

    @classmethod
    def forward(cls, x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray, parts: int) -> tuple:
        weight = _readable(weight)
        is_small = int(np.diff(starts).max(initial=0)) <= library.small_batch_rows(uses_bf16(weight))
        in_bf16 = uses_bf16(weight) and not is_small
        x = cached_bf16(contiguous(x)) if in_bf16 else contiguous(x)
        operand = as_bf16(weight) if in_bf16 else weight
        results = tuple(library.empty([x.shape[0], weight.shape[1] // parts]) for _ in range(parts))
        name = "grouped_linear_small_batch" if is_small else "grouped_linear_forward"
        for part, y in enumerate(results):
            _call(name, (x, _part(operand, part, parts), y), operand, starts, parts)
        return results

    @classmethod
    def input_gradient(cls, gradients: list, weight: paddle.Tensor, starts: np.ndarray) -> paddle.Tensor:
        operand = _readable(weight)
        operand = as_bf16(operand) if gradients[0].dtype == paddle.bfloat16 else operand
        result, parts = library.empty([gradients[0].shape[0], weight.shape[2]]), len(gradients)
        for part, gradient in enumerate(gradients):
            tensors = gradient, _part(operand, part, parts), result
            _call("grouped_linear_input_gradient", tensors, operand, starts, parts, part > 0)
        return result

    @classmethod
    def weight_gradient(
        cls, gradients: list, x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray
    ) -> paddle.Tensor:
        result, parts = library.empty(weight.shape), len(gradients)
        for part, gradient in enumerate(gradients):
            tensors = gradient, x, _part(result, part, parts)
            _call("grouped_linear_weight_gradient", tensors, result, starts, parts, in_bf16=x.dtype == paddle.bfloat16)
        return as_bf16(result) if weight.dtype == paddle.bfloat16 else result


def _readable(weight: paddle.Tensor) -> paddle.Tensor:
    """Return the contiguous weight, cast to float32 if the C++ matmuls cannot read its dtype."""
    is_bf16 = weight.dtype == paddle.bfloat16 and unavailable_reason() is None
    return contiguous(weight if weight.dtype == paddle.float32 or is_bf16 else weight.astype("float32"))


def _part(weight_GOI: paddle.Tensor, part: int, parts: int) -> int:
    """Return the address of fused projection `part` in the first group."""
    _, out, in_ = weight_GOI.shape
    return library.pointer(weight_GOI) + part * (out // parts) * in_ * weight_GOI.element_size()


def _call(
    name: str,
    tensors: tuple[paddle.Tensor | int, ...],
    weight: paddle.Tensor,
    starts: np.ndarray,
    parts: int,
    *flags: bool,
    in_bf16: bool | None = None,
) -> None:
    """Call an entry point with tensors or addresses; the shape of `weight` determines the sizes."""
    addresses = [each if isinstance(each, int) else library.pointer(each) for each in tensors]
    groups, out, in_ = weight.shape
    is_bf16 = weight.dtype == paddle.bfloat16 if in_bf16 is None else in_bf16
    sizes = groups, in_, out // parts, out * in_
    library.function(name)(*addresses, starts.ctypes.data, *sizes, *flags, is_bf16)
