"""RMS norm in plain Paddle, optimized for the CPU.

Shapes: R rows, D row length; a trailing 1 marks an axis of length 1.
"""

from __future__ import annotations

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.rms_norm.reference import scale_of
from paddlenlp_ext.ops.tensor_utils import contiguous


def rms_norm_plain_cpu(x: paddle.Tensor, weight_D: paddle.Tensor, epsilon: float, offset: float = 0.0) -> paddle.Tensor:
    """Compute `rms_norm` with a custom gradient; row sums are matmuls, because Paddle's reductions are slower."""
    # x is saved for the backward pass. A saved slice would keep the entire sliced tensor in memory.
    x_RD = contiguous(x).reshape([-1, x.shape[-1]])
    return _RmsNorm.apply(x_RD, scale_of(weight_D, offset), epsilon).reshape(x.shape)


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
        if x_RD.stop_gradient:  # Paddle rejects gradients for frozen inputs
            return None, weight_gradient
        scaled_RD = gradient_RD * weight_D
        mean_weights_D1 = paddle.full([x_RD.shape[1], 1], 1.0 / x_RD.shape[1])
        mean_R1 = paddle.matmul(scaled_RD * x_RD, mean_weights_D1)
        along_x_RD = x_RD * (mean_R1 * inverse_R1 * inverse_R1)
        return scaled_RD.subtract_(along_x_RD).multiply_(inverse_R1), weight_gradient
