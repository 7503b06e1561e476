"""A dense layer with a low-rank update, `x W^T + bias + s (x A^T) B^T` (Hu et al. 2021, arXiv 2106.09685).

The native twin of `lora_linear`: one node, keeping x A^T, and x as the products read it or its maker.

The base's values and its input's gradient come from the base; the update adds itself to them in place.
"""

from __future__ import annotations

import math

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpu import library
from paddlenlp_ext.ops.cpu.bf16 import as_half, cached_bf16
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.frozen_linear import FrozenLinear
from paddlenlp_ext.ops.linear import SMALL_BATCH_ROWS, in_one_piece, linear_native, wants_gradient
from paddlenlp_ext.ops.saved_tensors import maker


def lora_linear_native(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> paddle.Tensor:
    """As `lora_linear`."""
    x, a, b = in_one_piece(x), _in_float(a), _in_float(b)
    if (a.shape[1], b.shape[1]) != (x.shape[-1], a.shape[0]):
        raise ValueError(f"a LoRA linear of x {list(x.shape)} with A {list(a.shape)} and B {list(b.shape)}")
    if paddle.is_grad_enabled() and any(wants_gradient(each) for each in (x, a, b)):
        return _LoRALinear.apply(x, a, b, base, scaling)
    if math.prod(x.shape[:-1]) <= SMALL_BATCH_ROWS:
        return base.native_forward(x).add_(linear_native(linear_native(x, a).scale_(scaling), b))
    return _forward(x, base, a, b, scaling)[0]


def _in_float(factor: paddle.Tensor) -> paddle.Tensor:
    """A or B as the native update reads it."""
    return in_one_piece(factor if factor.dtype == paddle.float32 else factor.astype("float32"))


class _LoRALinear(PyLayer):
    @staticmethod
    def forward(ctx, x, a, b, base, scaling):
        y, read, inner = _forward(x, base, a, b, scaling)
        ctx.base, ctx.scaling, ctx.x_shape = base, scaling, x.shape
        ctx.make_x, ctx.half = maker(x), read.dtype == paddle.bfloat16
        ctx.wanted = [wants_gradient(each) for each in (x, a, b)]
        ctx.save_for_backward(a, b, inner, *([] if ctx.make_x else [read]))
        return y

    @staticmethod
    def backward(ctx, y_gradient):
        a, b, inner, *kept = ctx.saved_tensor()
        read = kept[0] if kept else ctx.make_x()
        gradient = in_one_piece(y_gradient)
        if ctx.half:
            read, gradient = as_half(read), as_half(gradient)
        of_x, of_a, of_b = ctx.wanted
        gradients = (
            ctx.base.native_input_gradient(gradient) if of_x else None,
            library.empty(a.shape) if of_a else None,
            library.empty(b.shape) if of_b else None,
        )
        _call("lora_update_backward", (read, gradient, a, b, inner, *gradients), ctx.scaling)
        return gradients


def _forward(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """y, x as the products read it, and A x^T [r, rows] in the same format."""
    y = base.native_forward(x)
    assert y.shape[-1] == b.shape[0], f"B {list(b.shape)} beside a base with {y.shape[-1]} outputs"
    read = cached_bf16(x) if base.halves else x
    inner = library.empty([a.shape[0], math.prod(x.shape[:-1])], "bfloat16" if base.halves else "float32")
    _call("lora_update_forward", (read, y, a, b, inner), scaling)
    return y, read, inner


def _call(name: str, tensors: tuple[paddle.Tensor | None, ...], scaling: float) -> None:
    """A function over these tensors (x, y or its gradient, A, B, ...), rows, in, out, rank, scaling, half."""
    x, _, a, b, *_ = tensors
    assert x is not None and a is not None and b is not None
    rows, (rank, in_), out = math.prod(x.shape[:-1]), a.shape, b.shape[0]
    addresses = [None if each is None else library.pointer(each) for each in tensors]
    library.function(name)(*addresses, rows, in_, out, rank, scaling, x.dtype == paddle.bfloat16)


def lora_linear_reference(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> paddle.Tensor:
    """The formula, product by product."""
    inner = paddle.matmul(x, a, transpose_y=True) * scaling
    return base(x) + paddle.matmul(inner, b, transpose_y=True)


lora_linear_op = DispatchedOp(
    "LoRA linear", native=(lora_linear_native, library.usable), reference=lora_linear_reference
)


def lora_linear(
    x: paddle.Tensor, base: FrozenLinear, a: paddle.Tensor, b: paddle.Tensor, scaling: float
) -> paddle.Tensor:
    """Map [..., in] to [..., out].

    Args:
        x: [..., in].
        base: x W^T + bias.
        a, b: A [r, in] and B [out, r].
        scaling: s.
    """
    return lora_linear_op.choose(x)(x, base, a, b, scaling)
