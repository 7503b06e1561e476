"""Causal depthwise convolution over rows that a table selects, with a hand-written backward pass.

    y[t] = sum over k of weight[:, k] * x[taps[t, k]]

A tap is the index of an input row, or the number of rows for a tap before the start of a document, which counts as 0.
Rows that no tap selects therefore cannot change the result, even if they contain NaN.

Shapes: T outputs, N input rows, B rows of the batch, L taps, D channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention import AttentionLayout


def document_taps(layout: AttentionLayout, num_taps: int, has_windows: bool = False) -> np.ndarray:
    """Return the taps [T, L] of the positions of packed documents, int64.

    The last tap of a position is the position itself. A document that continues a parent reads the last positions of
    the parent.

    Args:
        layout: documents of the batch, with T positions.
        num_taps: L.
        has_windows: whether a window of L - 1 rows precedes every document of a row of the batch. The windows
            [B, L - 1] are stored after the T rows.
    """
    starts, lengths = layout.documents()
    parents, firsts = layout.parents(), layout.first_positions()
    document = np.repeat(np.arange(len(starts)), lengths)
    local_T = np.arange(layout.num_positions) - starts[document]
    back_L = np.arange(num_taps)[::-1]
    local_TL = local_T[:, None] - back_L
    in_own_TL = local_TL >= 0
    own_TL = starts[document][:, None] + local_TL
    before_TL = firsts[document][:, None] + local_TL  # position within the sequence of the parent
    in_parent_TL = ~in_own_TL & (before_TL >= 0)
    parent_TL = starts[parents[document]][:, None] + before_TL
    if has_windows:
        row = np.repeat(np.arange(len(layout.document_lengths)), [len(each) for each in layout.document_lengths])
        window_ends = layout.num_positions + (row + 1) * (num_taps - 1)
        outside_TL = window_ends[document][:, None] + before_TL  # the last row of a window has position -1
    else:
        outside_TL = np.full_like(own_TL, layout.num_positions)
    return np.where(in_own_TL, own_TL, np.where(in_parent_TL, parent_TL, outside_TL))


def causal_convolution(
    x_ND: paddle.Tensor, weight_DL: paddle.Tensor, taps_TL: np.ndarray, bias_D: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Return the convolution of the rows that the taps select, [T, D].

    Args:
        x_ND: input rows.
        weight_DL: weight of each channel and tap, in the dtype of `x_ND`.
        taps_TL: indices of rows, int64; N for a tap that counts as 0.
        bias_D: bias of each channel; None: no bias.
    """
    y_TD = _CausalConvolution.apply(x_ND, weight_DL, paddle.to_tensor(taps_TL))
    return y_TD if bias_D is None else y_TD + bias_D


def _tap(padded_MD: paddle.Tensor, taps_TL: paddle.Tensor, index: int) -> paddle.Tensor:
    return paddle.gather(padded_MD, taps_TL[:, index])


def _padded(x_ND: paddle.Tensor) -> paddle.Tensor:
    """Return the rows with a row of zeros at the end."""
    return paddle.concat([x_ND, paddle.zeros([1, x_ND.shape[1]], x_ND.dtype)])


class _CausalConvolution(PyLayer):
    @staticmethod
    def forward(ctx: Any, x_ND: paddle.Tensor, weight_DL: paddle.Tensor, taps_TL: paddle.Tensor) -> paddle.Tensor:
        ctx.save_for_backward(x_ND, weight_DL, taps_TL)
        ctx.needs_grad = [not each.stop_gradient for each in (x_ND, weight_DL)]
        padded_MD = _padded(x_ND)
        y_TD = _tap(padded_MD, taps_TL, 0) * weight_DL[:, 0]
        for index in range(1, weight_DL.shape[1]):
            y_TD = y_TD + _tap(padded_MD, taps_TL, index) * weight_DL[:, index]
        return y_TD

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
