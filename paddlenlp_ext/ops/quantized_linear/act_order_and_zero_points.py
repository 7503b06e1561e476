"""Matmuls with integer weights that have zero points (AWQ) or reordered columns (act order, `desc_act` of GPTQ).

    W[:, order] = P - repeat(zeros * scales),   P = codes * scales

    x W^T = x' P^T + sums(x') shifts^T          x' = x[..., order],  shifts = -zeros * scales  [out, in / block]
    g W   = (g P + repeat(g shifts))[..., inverse of order]

`sums(x')` adds the inputs of each block. The kernels without zero points compute the matmuls with P.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import paddle

from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.paddle_compat import axis_sizes

Product = Callable[[paddle.Tensor, QuantizedWeight], paddle.Tensor]


def linear_with_zero_points(product: Product, x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out] for x [..., in], without autograd; `product` computes x' P^T."""
    if weight.order is not None:
        x = paddle.index_select(x, weight.order, axis=-1)
    y = product(x, _plain(weight))
    if weight.zeros is None:
        return y
    # A matmul computes the sums, because Paddle's sum along an axis is inaccurate on the CPU.
    sums = paddle.matmul(x.reshape([-1, weight.block_size]), paddle.ones([weight.block_size, 1], x.dtype))
    sums = sums.reshape([*axis_sizes(x)[:-1], x.shape[-1] // weight.block_size])
    return y + paddle.matmul(sums, weight.block_shifts().astype(x.dtype), transpose_y=True)


def input_gradient_with_zero_points(
    product: Product, gradient: paddle.Tensor, weight: QuantizedWeight
) -> paddle.Tensor:
    """Return the input gradient (dL/dy) W [..., in] for dL/dy [..., out]; `product` computes (dL/dy) P."""
    x_gradient = product(gradient, _plain(weight))
    if weight.zeros is not None:
        sums_gradient = paddle.matmul(gradient.astype(x_gradient.dtype), weight.block_shifts().astype(x_gradient.dtype))
        x_gradient = x_gradient + paddle.repeat_interleave(sums_gradient, weight.block_size, axis=-1)
    if weight.order is None:
        return x_gradient
    return paddle.index_select(x_gradient, weight.order.argsort(), axis=-1)


def _plain(weight: QuantizedWeight) -> QuantizedWeight:
    """Return the weight without its zero points and column order, but with the same kernel cache."""
    return dataclasses.replace(weight, zeros=None, order=None)
