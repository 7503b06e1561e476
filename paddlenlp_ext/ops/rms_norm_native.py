"""RMSNorm in C++ (csrc/rms_norm.cpp), alone and with the addition before it; one pass each way.

For the backward pass it keeps the normed tensor's input and one number a row, not the result.
Shapes: R rows, D their length.
"""

from __future__ import annotations

import math

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.native import empty, function, pointer, wants_gradient


def rms_norm_native(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * weight_D` over the last axis of x [..., D]."""
    x, weight_D = x.contiguous(), weight_D.astype(x.dtype)
    if wants_gradient(x, weight_D):
        return _RmsNorm.apply(x, weight_D, epsilon)
    return _forward(x, weight_D, epsilon)[0]


def add_rms_norm_native(
    x: paddle.Tensor, addend: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """`x + addend`, both [..., D], and that sum normalised."""
    assert x.shape == addend.shape and x.dtype == addend.dtype, f"{x.shape} {x.dtype}, {addend.shape} {addend.dtype}"
    x, addend, weight_D = x.contiguous(), addend.contiguous(), weight_D.astype(x.dtype)
    if wants_gradient(x, addend, weight_D):
        return _AddRmsNorm.apply(x, addend, weight_D, epsilon)
    return _add_forward(x, addend, weight_D, epsilon)[:2]


class _RmsNorm(PyLayer):
    @staticmethod
    def forward(ctx, x, weight_D, epsilon):
        out, inverse_R = _forward(x, weight_D, epsilon)
        ctx.save_for_backward(x, weight_D, inverse_R)
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, weight_D, inverse_R = ctx.saved_tensor()
        gradient = gradient.contiguous()
        x_gradient = None if x.stop_gradient else _backward(gradient, x, weight_D, inverse_R, None)
        return x_gradient, _weight_gradient(gradient, x, weight_D, inverse_R)


class _AddRmsNorm(PyLayer):
    @staticmethod
    def forward(ctx, x, addend, weight_D, epsilon):
        total, out, inverse_R = _add_forward(x, addend, weight_D, epsilon)
        ctx.save_for_backward(total, weight_D, inverse_R)
        ctx.wanted = not x.stop_gradient, not addend.stop_gradient
        return total, out

    @staticmethod
    def backward(ctx, total_gradient, gradient):
        total, weight_D, inverse_R = ctx.saved_tensor()
        gradient = gradient.contiguous()
        weight_gradient = _weight_gradient(gradient, total, weight_D, inverse_R)
        if not any(ctx.wanted):
            return None, None, weight_gradient
        shared = _backward(gradient, total, weight_D, inverse_R, total_gradient.contiguous())
        # A tensor each: Paddle adds further gradients to one of them in place.
        other = shared.clone() if all(ctx.wanted) else shared
        return shared if ctx.wanted[0] else None, other if ctx.wanted[1] else None, weight_gradient


def _forward(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float) -> tuple[paddle.Tensor, paddle.Tensor]:
    num_rows, size = _rows(x)
    assert weight_D.shape == [size], f"a weight of shape {weight_D.shape} for rows of {size}"
    out, inverse_R = empty(x.shape), empty([num_rows])
    run = function("rms_norm_forward", "ppfiipp")
    run(pointer(x), pointer(weight_D), epsilon, num_rows, size, pointer(out), pointer(inverse_R))
    return out, inverse_R


def _add_forward(
    x: paddle.Tensor, addend: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    num_rows, size = _rows(x)
    assert weight_D.shape == [size], f"a weight of shape {weight_D.shape} for rows of {size}"
    total, out, inverse_R = empty(x.shape), empty(x.shape), empty([num_rows])
    inputs = pointer(x), pointer(addend), pointer(weight_D)
    run = function("add_rms_norm_forward", "pppfiippp")
    run(*inputs, epsilon, num_rows, size, pointer(total), pointer(out), pointer(inverse_R))
    return total, out, inverse_R


def _backward(
    gradient: paddle.Tensor,
    x: paddle.Tensor,
    weight_D: paddle.Tensor,
    inverse_R: paddle.Tensor,
    residual: paddle.Tensor | None,
) -> paddle.Tensor:
    """The gradient of x; `residual` is added to it."""
    x_gradient = empty(x.shape)
    inputs = pointer(gradient), pointer(x), pointer(weight_D), pointer(inverse_R)
    beside = None if residual is None else pointer(residual)
    function("rms_norm_backward", "pppppiip")(*inputs, beside, *_rows(x), pointer(x_gradient))
    return x_gradient


def _weight_gradient(
    gradient: paddle.Tensor, x: paddle.Tensor, weight_D: paddle.Tensor, inverse_R: paddle.Tensor
) -> paddle.Tensor | None:
    if weight_D.stop_gradient:  # Paddle refuses a gradient that nobody wants
        return None
    weight_gradient = empty(weight_D.shape)
    run = function("rms_norm_weight_backward", "pppiip")
    run(pointer(gradient), pointer(x), pointer(inverse_R), *_rows(x), pointer(weight_gradient))
    return weight_gradient


def _rows(x: paddle.Tensor) -> tuple[int, int]:
    """R and D."""
    return math.prod(x.shape[:-1]), x.shape[-1]
