"""LoRA linear layer in C++ (csrc/lora_linear.cpp), as a single autograd node.

The forward pass saves x A^T, and either x in the dtype of the matmul inputs or the recompute function of x. The
low-rank terms are added in place to the outputs and the input gradient of the base layer.
"""

from __future__ import annotations

import math

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.bf16 import as_bf16, cached_bf16
from paddlenlp_ext.ops.frozen_linear import FrozenLinear
from paddlenlp_ext.ops.linear import linear
from paddlenlp_ext.ops.recompute_functions import recompute_function
from paddlenlp_ext.ops.tensor_utils import contiguous, requires_grad


def lora_linear_cpp(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> paddle.Tensor:
    """Compute `lora_linear` in C++."""
    x, a, b = contiguous(x), _in_float(a), _in_float(b)
    if (a.shape[1], b.shape[1]) != (x.shape[-1], a.shape[0]):
        raise ValueError(
            f"lora_linear: shapes do not match: x {list(x.shape)} with A {list(a.shape)} and B {list(b.shape)}"
        )
    if paddle.is_grad_enabled() and any(requires_grad(each) for each in (x, a, b)):
        return _LoRALinear.apply(x, a, b, base, scaling)
    return _forward(x, base, a, b, scaling)[0]


def _in_float(factor: paddle.Tensor) -> paddle.Tensor:
    return contiguous(factor if factor.dtype == paddle.float32 else factor.astype("float32"))


class _LoRALinear(PyLayer):
    @staticmethod
    def forward(ctx, x, a, b, base, scaling):
        y, operand, inner = _forward(x, base, a, b, scaling)
        ctx.base, ctx.scaling, ctx.x_shape = base, scaling, x.shape
        ctx.in_bf16 = operand.dtype == paddle.bfloat16
        ctx.recompute_x = recompute_function(x, ctx.in_bf16)
        ctx.grads_needed = [requires_grad(each) for each in (x, a, b)]
        ctx.save_for_backward(a, b, inner, *([] if ctx.recompute_x else [operand]))
        return y

    @staticmethod
    def backward(ctx, y_gradient):
        a, b, inner, *saved = ctx.saved_tensor()
        operand = saved[0] if saved else ctx.recompute_x()
        gradient = contiguous(y_gradient)
        if ctx.in_bf16:
            operand, gradient = as_bf16(operand), as_bf16(gradient)
        of_x, of_a, of_b = ctx.grads_needed
        gradients = (
            contiguous(ctx.base.input_gradient(gradient)) if of_x else None,
            library.empty(a.shape) if of_a else None,
            library.empty(b.shape) if of_b else None,
        )
        _call("lora_update_backward", (operand, gradient, a, b, inner, *gradients), ctx.scaling)
        return gradients


def _forward(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Return y, and both x and A x^T [r, rows] in the dtype of the matmul inputs.

    y has the same bits with and without gradients, so that a layer that is recomputed gives the same bits.
    """
    y, rows = contiguous(base(x)), math.prod(x.shape[:-1])
    assert y.shape[-1] == b.shape[0], f"B {list(b.shape)} does not match a base with {y.shape[-1]} outputs"
    operand = cached_bf16(x) if base.uses_bf16 else x
    if rows <= library.small_batch_rows(in_bf16=True):
        inner_BSR = linear(x, a)
        inner = contiguous(inner_BSR.reshape([rows, a.shape[0]]).t())
        y.add_(linear(inner_BSR * scaling, b))
        return y, operand, as_bf16(inner) if base.uses_bf16 else inner
    inner = library.empty([a.shape[0], rows], "bfloat16" if base.uses_bf16 else "float32")
    _call("lora_update_forward", (operand, y, a, b, inner), scaling)
    return y, operand, inner


def _call(name: str, tensors: tuple[paddle.Tensor | None, ...], scaling: float) -> None:
    """Call an entry point with tensors (x, y or dy, A, B, ...), their sizes, and whether x is bfloat16."""
    x, _, a, b, *_ = tensors
    assert x is not None and a is not None and b is not None
    rows, (rank, in_), out = math.prod(x.shape[:-1]), a.shape, b.shape[0]
    addresses = [None if each is None else library.pointer(each) for each in tensors]
    library.function(name)(*addresses, rows, in_, out, rank, scaling, x.dtype == paddle.bfloat16)
