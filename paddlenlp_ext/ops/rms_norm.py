"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467).

Shapes: R rows, D their length.
"""

from __future__ import annotations

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.dispatch import Op, on_cpu_in_fp32
from paddlenlp_ext.ops.native import usable
from paddlenlp_ext.ops.rms_norm_native import add_rms_norm_native, rms_norm_native


def rms_norm_reference(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """`x / sqrt(mean(x^2) + epsilon) * weight` over the last axis, the statistics in fp32 whatever the input."""
    x_fp32 = x.astype("float32")
    inverse_rms = paddle.rsqrt(x_fp32.square().mean(axis=-1, keepdim=True) + epsilon)
    return (x_fp32 * inverse_rms).astype(x.dtype) * weight_D.astype(x.dtype)


def rms_norm_cpu(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """The same with a gradient written out; row sums are matmuls, Paddle's reductions being slow on the CPU."""
    return _RmsNorm.apply(x.reshape([-1, x.shape[-1]]), weight_D, epsilon).reshape(x.shape)


class _RmsNorm(PyLayer):
    @staticmethod
    def forward(ctx, x_RD, weight_D, epsilon):
        mean_weights_D1 = paddle.full([x_RD.shape[1], 1], 1.0 / x_RD.shape[1])
        inverse_R1 = paddle.matmul(x_RD * x_RD, mean_weights_D1).add_(paddle.full([1], epsilon)).rsqrt_()
        ctx.save_for_backward(x_RD, weight_D, inverse_R1)
        return (x_RD * inverse_R1).multiply_(weight_D)

    @staticmethod
    def backward(ctx, gradient_RD):
        x_RD, weight_D, inverse_R1 = ctx.saved_tensor()
        weight_gradient = None
        if not weight_D.stop_gradient:
            weight_gradient = paddle.matmul(inverse_R1, gradient_RD * x_RD, transpose_x=True).flatten()
        if x_RD.stop_gradient:  # Paddle refuses a gradient that nobody wants
            return None, weight_gradient
        scaled_RD = gradient_RD * weight_D
        mean_weights_D1 = paddle.full([x_RD.shape[1], 1], 1.0 / x_RD.shape[1])
        mean_R1 = paddle.matmul(scaled_RD * x_RD, mean_weights_D1)
        along_x_RD = x_RD * (mean_R1 * inverse_R1 * inverse_R1)
        return scaled_RD.subtract_(along_x_RD).multiply_(inverse_R1), weight_gradient


def add_rms_norm_reference(
    x: paddle.Tensor, addend: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """`x + addend`, and that sum normalised, by whatever norm is best."""
    total = x + addend
    return total, rms_norm(total, weight_D, epsilon)


rms_norm_op = Op(
    "rms_norm",
    native=(rms_norm_native, usable),
    cpu=(rms_norm_cpu, on_cpu_in_fp32),
    reference=rms_norm_reference,
)
add_rms_norm_op = Op("add_rms_norm", native=(add_rms_norm_native, usable), reference=add_rms_norm_reference)


def rms_norm(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float) -> paddle.Tensor:
    """Normalise the last axis of `x` [..., D] and scale it by `weight_D`."""
    return rms_norm_op.choose(x)(x, weight_D, epsilon)


def add_rms_norm(
    x: paddle.Tensor, addend: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The sum of two tensors [..., D] and its norm: where a residual stream takes something in and is read again."""
    return add_rms_norm_op.choose(x)(x, addend, weight_D, epsilon)
