"""Layer normalization without bias (arXiv:1607.06450).

    y = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight

The C++ backend (csrc/layer_norm.cpp) saves the input, and the mean and inverse standard deviation of each row.

Shapes: R rows, D row length.
"""

from __future__ import annotations

import math

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.cpp.library import empty, function, pointer, usable
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.tensor_utils import needs_grad


def layer_norm_reference(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """Normalize the last axis in float32, for any input dtype."""
    # On the CPU, Paddle's kernel ignores a frozen scale in the gradient of x, so the scale is applied separately.
    normed = F.layer_norm(x.astype("float32"), weight_D.shape, epsilon=epsilon)
    return (normed * weight_D.astype("float32")).astype(x.dtype)


def layer_norm_cpp(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """Normalize the last axis of x [..., D] in C++."""
    x, weight_D = x.contiguous(), weight_D.astype(x.dtype)
    if needs_grad(x, weight_D):
        return _LayerNormCpp.apply(x, weight_D, epsilon)
    return _forward(x, weight_D, epsilon)[0]


class _LayerNormCpp(PyLayer):
    @staticmethod
    def forward(ctx, x, weight_D, epsilon):
        out, *statistics = _forward(x, weight_D, epsilon)
        ctx.save_for_backward(x, weight_D, *statistics)
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, weight_D, means_R, inverses_R = ctx.saved_tensor()
        gradient = gradient.contiguous()
        inputs, statistics = (pointer(gradient), pointer(x)), (pointer(means_R), pointer(inverses_R))
        x_gradient = weight_gradient = None  # Paddle rejects gradients for frozen inputs
        if not x.stop_gradient:
            x_gradient = empty(x.shape)
            run = function("layer_norm_backward")
            run(*inputs, pointer(weight_D), *statistics, *_rows(x), pointer(x_gradient))
        if not weight_D.stop_gradient:
            weight_gradient = empty(weight_D.shape)
            run = function("layer_norm_weight_backward")
            run(*inputs, *statistics, *_rows(x), pointer(weight_gradient))
        return x_gradient, weight_gradient


def _forward(
    x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Return the normalized rows, and each row's mean [R] and inverse standard deviation [R]."""
    num_rows, size = _rows(x)
    assert weight_D.shape == [size], f"weight of shape {weight_D.shape} does not match rows of {size}"
    out, means_R, inverses_R = empty(x.shape), empty([num_rows]), empty([num_rows])
    results = pointer(out), pointer(means_R), pointer(inverses_R)
    function("layer_norm_forward")(pointer(x), pointer(weight_D), epsilon, num_rows, size, *results)
    return out, means_R, inverses_R


def _rows(x: paddle.Tensor) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), x.shape[-1]


layer_norm_op = DispatchedOp("layer_norm", cpp=(layer_norm_cpp, usable), reference=layer_norm_reference)


def layer_norm(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """Normalize the last axis of `x` [..., D] to mean 0 and variance 1, and scale it by `weight_D`."""
    return layer_norm_op.choose(x)(x, weight_D, epsilon)
