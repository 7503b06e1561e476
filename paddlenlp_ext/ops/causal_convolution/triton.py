"""Causal depthwise convolution with the Triton kernels in kernels.py.

Weight gradients are bitwise reproducible. Tested in Triton's interpreter on the CPU
(tests/ops/causal_convolution/test_triton.py), except for the launch itself. Not yet run on a GPU with Paddle.

Shapes: T outputs, N input rows, L taps, D channels.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.causal_convolution.taps import Taps
from paddlenlp_ext.ops.tensor_utils import contiguous, needs_grad
from paddlenlp_ext.ops.triton_utils.launch import empty_beside, launch


def causal_convolution_triton(
    x_ND: paddle.Tensor, weight_DL: paddle.Tensor, taps: Taps, bias_D: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Compute `causal_convolution` in one launch forward, and in up to three backward."""
    given = (x_ND, weight_DL.t(), *(() if bias_D is None else (bias_D,)))
    inputs = [contiguous(x) for x in given]
    expected = [taps.num_rows, weight_DL.shape[0]], [taps.rows.shape[1], weight_DL.shape[0]], [weight_DL.shape[0]]
    shapes = [x.shape for x in inputs]
    assert shapes == [*expected][: len(shapes)], f"{shapes}, expected {expected}"
    run = _CausalConvolution.apply if needs_grad(*inputs) else _forward
    return run(taps, *inputs)


class _CausalConvolution(PyLayer):
    @staticmethod
    def forward(ctx: Any, taps: Taps, *inputs: paddle.Tensor) -> paddle.Tensor:
        ctx.save_for_backward(*inputs)
        ctx.taps, ctx.needs_grad = taps, [not x.stop_gradient for x in inputs]
        return _forward(taps, *inputs)

    @staticmethod
    def backward(ctx: Any, gradient_TD: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        from paddlenlp_ext.ops.causal_convolution.kernels import launch_input_gradient

        x_ND, weight_LD, *_ = ctx.saved_tensor()
        gradient_TD = contiguous(gradient_TD)
        of_x, of_weight, *of_bias = ctx.needs_grad  # Paddle rejects gradients for frozen inputs
        x_gradient = weight_gradient = None
        bias_gradient: list[paddle.Tensor | None] = [None] * len(of_bias)
        if of_x:
            _, starts, entries = ctx.taps.on_device(x_ND.place)
            x_gradient = empty_beside(x_ND)
            launch_input_gradient(launch, gradient_TD, weight_LD, starts, entries, x_gradient)
        if of_weight or any(of_bias):
            sums = _parameter_gradients(gradient_TD, x_ND, ctx.taps, any(of_bias))
            weight_gradient = sums[: len(weight_LD)] if of_weight else None
            bias_gradient = [sums[-1] if is_needed else None for is_needed in of_bias]
        return x_gradient, weight_gradient, *bias_gradient


def _forward(
    taps: Taps, x_ND: paddle.Tensor, weight_LD: paddle.Tensor, bias_D: paddle.Tensor | None = None
) -> paddle.Tensor:
    from paddlenlp_ext.ops.causal_convolution.kernels import launch_forward

    y_TD = empty_beside(x_ND, [len(taps.rows), x_ND.shape[1]])
    launch_forward(launch, x_ND, weight_LD, bias_D, taps.on_device(x_ND.place)[0], y_TD)
    return y_TD


def _parameter_gradients(gradient_TD: paddle.Tensor, x_ND: paddle.Tensor, taps: Taps, of_bias: bool) -> paddle.Tensor:
    """Return the gradient of the weight, with the gradient of the bias as a last row if `of_bias`."""
    from paddlenlp_ext.ops.causal_convolution.kernels import launch_weight_gradient, num_parts
    from paddlenlp_ext.ops.triton_utils.column_sums import launch_column_sums

    rows, channels = taps.rows.shape[1] + of_bias, x_ND.shape[1]
    partials = empty_beside(x_ND, [num_parts(gradient_TD), rows, channels], paddle.float32)
    launch_weight_gradient(launch, gradient_TD, x_ND, taps.on_device(x_ND.place)[0], partials)
    sums = empty_beside(x_ND, [rows, channels])
    launch_column_sums(launch, partials.flatten(1), sums)
    return sums
