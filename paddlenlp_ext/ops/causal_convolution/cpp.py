"""Causal depthwise convolution in C++ (csrc/causal_convolution.cpp), one pass forward and one backward.

Shapes: T outputs, N input rows, L taps, D channels.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import paddle
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.causal_convolution.taps import Taps
from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.cpp.library import empty, function, pointer
from paddlenlp_ext.ops.tensor_utils import contiguous, needs_grad


def causal_convolution_cpp(
    x_ND: paddle.Tensor, weight_DL: paddle.Tensor, taps: Taps, bias_D: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Compute `causal_convolution` in C++."""
    given = (x_ND, weight_DL.t(), *(() if bias_D is None else (bias_D,)))
    inputs = [contiguous(x) for x in given]
    shapes, (channels, num_taps) = [x.shape for x in inputs], weight_DL.shape
    # Checked here, because C++ loops would read past the end of tensors.
    taps_TL = taps.rows
    assert taps_TL.shape[1] == num_taps and taps_TL.dtype == np.int64 and taps_TL.flags.c_contiguous, taps_TL.shape
    assert taps.num_rows == x_ND.shape[0], f"taps of {taps.num_rows} rows, {x_ND.shape[0]} rows"
    assert shapes == [[x_ND.shape[0], channels], [num_taps, channels], [channels]][: len(shapes)], shapes
    sizes = struct("ConvolutionSizes")(len(taps_TL), x_ND.shape[0], channels, num_taps, taps_TL.ctypes.data)
    sizes.taps_TL = taps_TL  # keeps the table alive; the struct holds only its address
    run = _CausalConvolution.apply if needs_grad(*inputs) else _forward
    return run(sizes, *inputs)


class _CausalConvolution(PyLayer):
    @staticmethod
    def forward(ctx: Any, sizes: ctypes.Structure, *inputs: paddle.Tensor) -> paddle.Tensor:
        ctx.save_for_backward(*inputs)
        ctx.sizes, ctx.needs_grad = sizes, [not x.stop_gradient for x in inputs]
        return _forward(sizes, *inputs)

    @staticmethod
    def backward(ctx: Any, gradient_TD: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        x_ND, weight_LD, *bias = ctx.saved_tensor()
        gradient_TD = contiguous(gradient_TD)
        needed = zip((x_ND, weight_LD, *bias), ctx.needs_grad, strict=True)
        gradients = [empty(x.shape) if is_needed else None for x, is_needed in needed]
        addresses = [None if x is None else pointer(x) for x in gradients] + [None] * (1 - len(bias))
        inputs = pointer(x_ND), pointer(weight_LD), pointer(gradient_TD)
        function("causal_convolution_backward")(ctypes.addressof(ctx.sizes), *inputs, *addresses)
        return tuple(gradients)


def _forward(
    sizes: ctypes.Structure, x_ND: paddle.Tensor, weight_LD: paddle.Tensor, bias_D: paddle.Tensor | None = None
) -> paddle.Tensor:
    y_TD = empty([sizes.positions, sizes.channels])
    bias = None if bias_D is None else pointer(bias_D)
    inputs = pointer(x_ND), pointer(weight_LD), bias
    function("causal_convolution_forward")(ctypes.addressof(sizes), *inputs, pointer(y_TD))
    return y_TD
