"""Paddle's fused product with int8 and int4 weights. Needs a GPU with tensor cores.

The kernel wants the codes in an order of its own, which `paddle.nn.quant.weight_quantize` makes. It is given the codes
themselves as numbers: their largest is 127 (or 7) in every block, so that it finds a scale of 1 and the same codes
again. The kernel multiplies by our scales.
"""

from __future__ import annotations

import paddle
from paddle.nn import quant

from paddlenlp_ext.ops.dequantize import QuantizedWeight, block_scales, dequantize


def weight_only_linear(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """x W^T [..., out], as `linear_reference`. The codes in the kernel's order stay beside the weight."""
    if "weight_only" not in weight.kept:
        weight.kept["weight_only"] = kernel_weight(weight)
    blocks = -(-weight.num_weights // weight.block_size)
    scales = block_scales(weight, 0, blocks)
    if kernel_group(weight) > 0:
        scales = scales.reshape([weight.shape[0], -1]).T
    out, width = weight.shape
    y_TO = quant.weight_only_linear(
        x.reshape([-1, width]),
        weight=weight.kept["weight_only"],
        weight_scale=scales.astype(x.dtype),
        weight_dtype=weight.algo.removeprefix("weight_only_"),
        group_size=kernel_group(weight),
    )
    return y_TO.reshape([*x.shape[:-1], out])


def kernel_weight(weight: QuantizedWeight) -> paddle.Tensor:
    """The codes in the order that the kernel reads."""
    ones = paddle.ones([-(-weight.num_weights // weight.block_size)])
    numbers = QuantizedWeight(weight.algo, weight.shape, weight.block_size, weight.codes, ones)
    group = kernel_group(weight)
    return quant.weight_quantize(dequantize(numbers).T.astype("float16"), algo=weight.algo, group_size=group)[0]


def kernel_group(weight: QuantizedWeight) -> int:
    """Paddle's word for the block: inputs that share a scale, -1 for a whole row."""
    return -1 if weight.block_size == weight.shape[1] else weight.block_size
