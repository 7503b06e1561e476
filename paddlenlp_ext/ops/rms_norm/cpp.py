"""RMS norm in C++ (csrc/rms_norm.cpp).

The forward pass saves the input and each row's inverse RMS.

Shapes: R rows, D row length.
"""

from __future__ import annotations

import math

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp.library import empty, function, pointer
from paddlenlp_ext.ops.rms_norm.reference import scale_of
from paddlenlp_ext.ops.tensor_utils import contiguous, in_dtype, needs_grad


def rms_norm_cpp(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float, offset: float = 0.0) -> paddle.Tensor:
    """Normalize the last axis of x [..., D] in C++."""
    x, weight_D = contiguous(x), in_dtype(scale_of(weight_D, offset), x.dtype)
    if needs_grad(x, weight_D):
        return _RmsNormCpp.apply(x, weight_D, epsilon)
    return _forward(x, None, weight_D, epsilon)[1]


def add_rms_norm_cpp(
    x: paddle.Tensor, addend: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float, offset: float = 0.0
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Return `x + addend` and the normalized sum, both [..., D], computed in C++."""
    assert x.shape == addend.shape and x.dtype == addend.dtype, f"{x.shape} {x.dtype}, {addend.shape} {addend.dtype}"
    x, addend, weight_D = x.contiguous(), addend.contiguous(), scale_of(weight_D, offset).astype(x.dtype)
    if needs_grad(x, addend, weight_D):
        return _AddRmsNorm.apply(x, addend, weight_D, epsilon)
    return _forward(x, addend, weight_D, epsilon)[:2]


class _RmsNormCpp(PyLayer):
    @staticmethod
    def forward(ctx, x, weight_D, epsilon):
        _, out, inverse_R = _forward(x, None, weight_D, epsilon)
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
        total, out, inverse_R = _forward(x, addend, weight_D, epsilon)
        ctx.save_for_backward(total, weight_D, inverse_R)
        ctx.grads_needed = not x.stop_gradient, not addend.stop_gradient
        return total, out

    @staticmethod
    def backward(ctx, total_gradient, gradient):
        total, weight_D, inverse_R = ctx.saved_tensor()
        gradient = gradient.contiguous()
        weight_gradient = _weight_gradient(gradient, total, weight_D, inverse_R)
        if not any(ctx.grads_needed):
            return None, None, weight_gradient
        shared = _backward(gradient, total, weight_D, inverse_R, total_gradient.contiguous())
        # x and addend get separate gradients, because Paddle may add other gradients to a gradient in place.
        other = shared.clone() if all(ctx.grads_needed) else shared
        return shared if ctx.grads_needed[0] else None, other if ctx.grads_needed[1] else None, weight_gradient


def _forward(
    x: paddle.Tensor, addend: paddle.Tensor | None, weight_D: paddle.Tensor, epsilon: float
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Return the input of the norm (x, or x + addend), the output, and each row's inverse RMS."""
    num_rows, size = _rows(x)
    assert weight_D.shape == [size], f"weight of shape {weight_D.shape} does not match rows of {size}"
    out, inverse_R = empty(x.shape), empty([num_rows])
    if addend is None:
        run = function("rms_norm_forward")
        run(pointer(x), pointer(weight_D), epsilon, num_rows, size, pointer(out), pointer(inverse_R))
        return x, out, inverse_R
    total, inputs = empty(x.shape), (pointer(x), pointer(addend), pointer(weight_D))
    run = function("add_rms_norm_forward")
    run(*inputs, epsilon, num_rows, size, pointer(total), pointer(out), pointer(inverse_R))
    return total, out, inverse_R


def _backward(
    gradient: paddle.Tensor,
    x: paddle.Tensor,
    weight_D: paddle.Tensor,
    inverse_R: paddle.Tensor,
    residual: paddle.Tensor | None,
) -> paddle.Tensor:
    """Return the gradient of x, plus `residual` if `residual` is given."""
    x_gradient = empty(x.shape)
    inputs = pointer(gradient), pointer(x), pointer(weight_D), pointer(inverse_R)
    residual_pointer = None if residual is None else pointer(residual)
    function("rms_norm_backward")(*inputs, residual_pointer, *_rows(x), pointer(x_gradient))
    return x_gradient


def _weight_gradient(
    gradient: paddle.Tensor, x: paddle.Tensor, weight_D: paddle.Tensor, inverse_R: paddle.Tensor
) -> paddle.Tensor | None:
    if weight_D.stop_gradient:  # Paddle rejects gradients for frozen inputs
        return None
    weight_gradient = empty(weight_D.shape)
    run = function("rms_norm_weight_backward")
    run(pointer(gradient), pointer(x), pointer(inverse_R), *_rows(x), pointer(weight_gradient))
    return weight_gradient


def _rows(x: paddle.Tensor) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), x.shape[-1]
