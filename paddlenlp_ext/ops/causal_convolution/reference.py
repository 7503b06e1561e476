"""Causal depthwise convolution in plain Paddle, on any device, with a hand-written backward pass.

Shapes: T outputs, N input rows, L taps, D channels.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.causal_convolution.taps import Taps
from paddlenlp_ext.paddle_compat import is_symbolic


def causal_convolution_reference(
    x_ND: paddle.Tensor, weight_DL: paddle.Tensor, taps: Taps, bias_D: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Compute `causal_convolution`, one tap after another."""
    if is_symbolic(x_ND):
        y_TD = _convolved(x_ND, weight_DL, taps.rows)
    else:
        y_TD = _CausalConvolution.apply(x_ND, weight_DL, paddle.to_tensor(taps.rows))
    return y_TD if bias_D is None else y_TD + bias_D


def _tap(padded_MD: paddle.Tensor, taps_TL: paddle.Tensor, index: int) -> paddle.Tensor:
    return paddle.gather(padded_MD, taps_TL[:, index])


def _padded(x_ND: paddle.Tensor) -> paddle.Tensor:
    """Return the rows with a row of zeros at the end."""
    return paddle.concat([x_ND, paddle.zeros([1, x_ND.shape[1]], x_ND.dtype)])


def _convolved(x_ND: paddle.Tensor, weight_DL: paddle.Tensor, taps_TL: paddle.Tensor) -> paddle.Tensor:
    padded_MD = _padded(x_ND)
    y_TD = _tap(padded_MD, taps_TL, 0) * weight_DL[:, 0]
    for index in range(1, weight_DL.shape[1]):
        y_TD = y_TD + _tap(padded_MD, taps_TL, index) * weight_DL[:, index]
    return y_TD


class _CausalConvolution(PyLayer):
    @staticmethod
    def forward(ctx: Any, x_ND: paddle.Tensor, weight_DL: paddle.Tensor, taps_TL: paddle.Tensor) -> paddle.Tensor:
        ctx.save_for_backward(x_ND, weight_DL, taps_TL)
        ctx.needs_grad = [not each.stop_gradient for each in (x_ND, weight_DL)]
        return _convolved(x_ND, weight_DL, taps_TL)

    @staticmethod
    def backward(ctx: Any, gradient_TD: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        x_ND, weight_DL, taps_TL = ctx.saved_tensor()
        x_gradient = weight_gradient = None
        if ctx.needs_grad[0]:
            # Taps are added one at a time, from last to first, so the layout of documents does not change the rounding.
            sum_MD = paddle.zeros([x_ND.shape[0] + 1, x_ND.shape[1]], x_ND.dtype)
            for index in reversed(range(weight_DL.shape[1])):
                scaled_TD = gradient_TD * weight_DL[:, index]
                sum_MD = sum_MD + paddle.scatter_nd(taps_TL[:, index : index + 1], scaled_TD, sum_MD.shape)
            x_gradient = sum_MD[:-1]
        if ctx.needs_grad[1]:
            padded_MD = _padded(x_ND)
            columns = [(gradient_TD * _tap(padded_MD, taps_TL, i)).sum(0) for i in range(weight_DL.shape[1])]
            weight_gradient = paddle.stack(columns, axis=1)
        return x_gradient, weight_gradient
