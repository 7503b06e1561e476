"""The native twin of `lora_linear`: one node, keeping x A^T, and x as the products read it or its maker."""

from __future__ import annotations

import math

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops import native
from paddlenlp_ext.ops.half import as_half, halves, shared_half
from paddlenlp_ext.ops.linear_native import FEW_ROWS, in_one_piece, linear_native, readable, wants_gradient
from paddlenlp_ext.ops.remake import maker


def lora_linear_native(
    x: paddle.Tensor,
    weight: paddle.Tensor,
    bias: paddle.Tensor | None,
    a: paddle.Tensor,
    b: paddle.Tensor,
    scaling: float,
) -> paddle.Tensor:
    """As `lora_linear`."""
    assert not (wants_gradient(weight) or wants_gradient(bias)), "the base of a LoRA linear is frozen"
    x, weight, bias, a, b = in_one_piece(x), readable(weight), readable(bias), readable(a), readable(b)
    if paddle.is_grad_enabled() and any(wants_gradient(each) for each in (x, a, b)):
        return _LoRALinear.apply(x, a, b, (weight, bias), scaling)
    if math.prod(x.shape[:-1]) <= FEW_ROWS:
        return linear_native(x, weight, bias).add_(linear_native(linear_native(x, a).scale_(scaling), b))
    return _forward(x, weight, bias, a, b, scaling)[0]


class _LoRALinear(PyLayer):
    @staticmethod
    def forward(ctx, x, a, b, base, scaling):
        weight, bias = base
        y, read, inner = _forward(x, weight, bias, a, b, scaling)
        ctx.scaling, ctx.x_shape = scaling, x.shape
        ctx.make_x, ctx.half = maker(x), read.dtype == paddle.bfloat16
        ctx.wanted = [wants_gradient(each) for each in (x, a, b)]
        ctx.save_for_backward(weight, a, b, inner, *([] if ctx.make_x else [read]))
        return y

    @staticmethod
    def backward(ctx, y_gradient):
        weight, a, b, inner, *kept = ctx.saved_tensor()
        read = kept[0] if kept else ctx.make_x()
        read = as_half(read) if ctx.half else read
        shapes = (ctx.x_shape, a.shape, b.shape)
        gradients = [native.empty(shape) if wanted else None for shape, wanted in zip(shapes, ctx.wanted, strict=True)]
        tensors = (in_one_piece(y_gradient), a, b, inner, *gradients)
        _call("lora_linear_backward", tensors, read, weight, a.shape[0], ctx.scaling)
        return tuple(gradients)


def _forward(
    x: paddle.Tensor,
    weight: paddle.Tensor,
    bias: paddle.Tensor | None,
    a: paddle.Tensor,
    b: paddle.Tensor,
    scaling: float,
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """y, x as the products read it, and A x^T [r, rows] in the same format."""
    read = shared_half(x) if halves(weight) else x
    y = native.empty([*x.shape[:-1], weight.shape[0]])
    inner = native.empty([a.shape[0], math.prod(x.shape[:-1])], "bfloat16" if halves(weight) else "float32")
    _call("lora_linear_forward", (bias, a, b, y, inner), read, weight, a.shape[0], scaling)
    return y, read, inner


def _call(
    name: str,
    tensors: tuple[paddle.Tensor | None, ...],
    x: paddle.Tensor,
    weight: paddle.Tensor,
    rank: int,
    scaling: float,
) -> None:
    """A function over x and the weight in one format, these tensors, rows, in, out, rank, scaling, half."""
    half = x.dtype == paddle.bfloat16
    weight = as_half(weight) if half else weight
    addresses = [None if each is None else native.pointer(each) for each in (x, weight, *tensors)]
    call = native.function(name, "p" * len(addresses) + "iiiifi")
    call(*addresses, math.prod(x.shape[:-1]), weight.shape[1], weight.shape[0], rank, scaling, half)
