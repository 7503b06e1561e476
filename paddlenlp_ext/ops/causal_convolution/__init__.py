"""Causal depthwise convolution whose input rows are gathered by index (`taps`).

    y[t] = sum over k of weight[:, k] * x[taps[t, k]]

A tap is the index of an input row. A tap before the start of a document has the index N, and its input counts as 0.
Rows that no tap selects therefore cannot change the result, even if they contain NaN.

Shapes: T outputs, N input rows, L taps, D channels.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.causal_convolution.cpp import causal_convolution_cpp
from paddlenlp_ext.ops.causal_convolution.reference import causal_convolution_reference
from paddlenlp_ext.ops.causal_convolution.taps import Taps
from paddlenlp_ext.ops.causal_convolution.taps import document_taps as document_taps
from paddlenlp_ext.ops.causal_convolution.triton import causal_convolution_triton
from paddlenlp_ext.ops.cpp.library import usable
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.triton_utils.launch import floats_on_gpu_with_triton

causal_convolution_op = DispatchedOp(
    "causal convolution",
    cpp=(causal_convolution_cpp, usable),
    triton=(causal_convolution_triton, floats_on_gpu_with_triton),
    reference=causal_convolution_reference,
)


def causal_convolution(
    x_ND: paddle.Tensor, weight_DL: paddle.Tensor, taps: Taps, bias_D: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Return the convolution of the rows that the taps select, [T, D].

    Args:
        x_ND: input rows.
        weight_DL: weight of each channel and tap, in the dtype of `x_ND`.
        taps: rows that each output reads.
        bias_D: bias of each channel; None: no bias.
    """
    return causal_convolution_op.choose(x_ND)(x_ND, weight_DL, taps, bias_D)
