r"""Linear layers of groups of rows, `x W[g]^T`, each group with a weight of its own: the experts of a layer.

    x_NI              weight_GOI        starts = [0, 3, 3, 5]
    . . . . \\
    . . . .  > group 0      W[0]
    . . . . /
                group 1      W[1]        no rows: not read, and its gradient is 0
    . . . . \\
    . . . . /  group 2      W[2]

Rows of one group are adjacent, and groups may have any number of rows. All groups are computed in one call: of C++ on
the CPU, of Triton kernels on a GPU. The reference computes one matrix product per group.

Shapes: N rows, G groups, I inputs, O outputs, P parts of the outputs.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpu import library
from paddlenlp_ext.ops.cpu.bf16 import as_bf16, cached_bf16, unavailable_reason, uses_bf16
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.grouped_triton import GroupedTriton
from paddlenlp_ext.ops.linear import SMALL_BATCH_ROWS, contiguous, in_dtype, requires_grad
from paddlenlp_ext.ops.saved_tensors import recompute_function
from paddlenlp_ext.ops.triton_launch import on_gpu_with_triton


def grouped_linear(
    x_NI: paddle.Tensor, weight_GOI: paddle.Tensor, starts: np.ndarray, parts: int = 1
) -> tuple[paddle.Tensor, ...]:
    """Multiply each group of rows by its own weight.

    A frozen weight costs nothing in the backward pass. An x with a recompute function (ops/saved_tensors.py) is not
    saved.

    Args:
        x_NI: rows, sorted by group.
        weight_GOI: weights of the groups; on the CPU they may be bfloat16 while x is float32.
        starts: int64 [G + 1], the first row of each group, and N at the end.
        parts: number of equal parts into which the outputs are split.

    Returns:
        The parts of the outputs, each [N, O / parts], on the CPU always float32.
    """
    backend: Any = grouped_linear_op.choose(x_NI)
    if paddle.is_grad_enabled() and (requires_grad(x_NI) or requires_grad(weight_GOI)):
        results = _GroupedLinear.apply(x_NI, weight_GOI, starts, parts, backend)
        return results if isinstance(results, tuple) else (results,)
    return backend.forward(x_NI, weight_GOI, starts, parts)


def groups_with_rows(starts: np.ndarray) -> list[tuple[int, int, int]]:
    """Return index, first row and end of each group that has rows; `starts` is that of `grouped_linear`."""
    bounds = enumerate(zip(starts.tolist(), starts[1:].tolist(), strict=False))
    return [(group, first, end) for group, (first, end) in bounds if first < end]


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


class _Reference:
    """One product of Paddle for each group with rows, on any device."""

    @staticmethod
    def precision(weight: paddle.Tensor) -> Any:
        """Return the dtype of the products: that of the weight, or float32 where the CPU has no kernel for it."""
        is_half = weight.dtype == paddle.bfloat16 and weight.place.is_cpu_place()
        return paddle.float32 if is_half else weight.dtype

    @staticmethod
    def operand(x: paddle.Tensor, precision: Any) -> paddle.Tensor:
        """Return an operand of a product."""
        return x.astype(precision)

    @staticmethod
    def saved(x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """Return the x to save."""
        return x

    @classmethod
    def forward(cls, x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray, parts: int) -> tuple:
        """Return the parts of the outputs."""
        x = cls.operand(x, cls.precision(weight))
        products = [paddle.matmul(x[a:b], w, transpose_y=True) for a, b, w in cls._groups(weight, starts)]
        y = paddle.concat(products) if products else paddle.zeros([0, weight.shape[1]], x.dtype)
        return tuple(paddle.chunk(y, parts, axis=-1)) if parts > 1 else (y,)

    @classmethod
    def input_gradient(cls, gradients: list, weight: paddle.Tensor, starts: np.ndarray) -> paddle.Tensor:
        """Return the gradient of x, [N, I]."""
        gradient = paddle.concat(gradients, axis=-1)
        products = [paddle.matmul(gradient[a:b], w) for a, b, w in cls._groups(weight, starts)]
        return paddle.concat(products) if products else paddle.zeros([0, weight.shape[2]], gradient.dtype)

    @classmethod
    def weight_gradient(
        cls, gradients: list, x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray
    ) -> paddle.Tensor:
        """Return the gradient of the weight, [G, O, I]; groups without rows get zeros."""
        gradient = paddle.concat(gradients, axis=-1)
        products = [
            paddle.matmul(gradient[a:b], x[a:b], transpose_x=True) if a < b else paddle.zeros(weight.shape[1:], x.dtype)
            for a, b in itertools.pairwise(starts)
        ]
        return paddle.stack(products).astype(weight.dtype)

    @classmethod
    def _groups(cls, weight: paddle.Tensor, starts: np.ndarray) -> list[tuple[int, int, paddle.Tensor]]:
        """Return first row, end and weight of each group with rows."""
        return [(a, b, weight[group].astype(cls.precision(weight))) for group, a, b in groups_with_rows(starts)]


class _Cpp:
    """Products of all groups in one call of C++ (csrc/grouped_linear.cpp)."""

    @staticmethod
    def precision(weight: paddle.Tensor) -> bool:
        """Return whether products round their inputs to bfloat16."""
        return uses_bf16(weight)

    @staticmethod
    def operand(x: paddle.Tensor, precision: bool) -> paddle.Tensor:
        """Return an operand of a product."""
        return as_bf16(contiguous(x)) if precision else contiguous(x)

    @staticmethod
    def saved(x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        """Return the x to save, in the dtype in which the product reads it."""
        return cached_bf16(contiguous(x)) if uses_bf16(weight) else contiguous(x)

    @classmethod
    def forward(cls, x: paddle.Tensor, weight: paddle.Tensor, starts: np.ndarray, parts: int) -> tuple:
        """Return the parts of the outputs."""
        weight = _readable(weight)
        is_small = int(np.diff(starts).max(initial=0)) <= SMALL_BATCH_ROWS
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
        """Return the gradient of x, [N, I]."""
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
        """Return the gradient of the weight, [G, O, I]; groups without rows get zeros."""
        result, parts = library.empty(weight.shape), len(gradients)
        for part, gradient in enumerate(gradients):
            tensors = gradient, x, _part(result, part, parts)
            _call("grouped_linear_weight_gradient", tensors, result, starts, parts, in_bf16=x.dtype == paddle.bfloat16)
        return as_bf16(result) if weight.dtype == paddle.bfloat16 else result


def _readable(weight: paddle.Tensor) -> paddle.Tensor:
    """Return the weight in a dtype that the products can read: bfloat16 needs a processor with such products."""
    is_bf16 = weight.dtype == paddle.bfloat16 and unavailable_reason() is None
    return contiguous(weight if weight.dtype == paddle.float32 or is_bf16 else weight.astype("float32"))


def _part(weight_GOI: paddle.Tensor, part: int, parts: int) -> int:
    """Return the address of the first value of a part of the outputs."""
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
    """Call an entry point with tensors or addresses; `weight` gives the sizes of the groups."""
    addresses = [each if isinstance(each, int) else library.pointer(each) for each in tensors]
    groups, out, in_ = weight.shape
    is_bf16 = weight.dtype == paddle.bfloat16 if in_bf16 is None else in_bf16
    sizes = groups, in_, out // parts, out * in_
    library.function(name)(*addresses, starts.ctypes.data, *sizes, *flags, is_bf16)


grouped_linear_op = DispatchedOp(
    "grouped_linear", native=(_Cpp, library.usable), triton=(GroupedTriton, on_gpu_with_triton), reference=_Reference
)
