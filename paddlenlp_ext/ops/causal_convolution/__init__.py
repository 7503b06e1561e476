"""Causal depthwise convolution whose input rows are gathered by index (`taps`).

    y[t] = sum over k of weight[:, k] * x[taps[t, k]]

A tap is the index of an input row. A tap before the start of a document has the index N, and its input counts as 0.
Rows that no tap selects therefore cannot change the result, even if they contain NaN.

Shapes: T outputs, N input rows, B rows of the batch, L taps, D channels.
"""

from __future__ import annotations

import numpy as np
import paddle

from paddlenlp_ext.ops.attention import AttentionLayout
from paddlenlp_ext.ops.causal_convolution.cpp import causal_convolution_cpp
from paddlenlp_ext.ops.causal_convolution.reference import causal_convolution_reference
from paddlenlp_ext.ops.cpp.library import usable
from paddlenlp_ext.ops.dispatch import DispatchedOp

causal_convolution_op = DispatchedOp(
    "causal convolution", cpp=(causal_convolution_cpp, usable), reference=causal_convolution_reference
)


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
    return causal_convolution_op.choose(x_ND)(x_ND, weight_DL, taps_TL, bias_D)
