"""Paddle's fused product with int8 and int4 weights. Needs a GPU with tensor cores.

The kernel wants the codes in an order of its own, which `paddle.nn.quant.weight_quantize` makes. It is given the codes
themselves as numbers: where their largest is 127 (or 7) in every block, it finds a scale of 1 and the same codes again.
So it is after quantizing, and not in every part of a weight that is cut along its inputs. The kernel multiplies by our
scales.
"""

from __future__ import annotations

import paddle
from paddle.nn import quant

from paddlenlp_ext.ops.dequantize import QuantizedWeight, block_scales, dequantize

_LARGEST = {"weight_only_int8": 127.0, "weight_only_int4": 7.0}


def is_for_kernel(weight: QuantizedWeight) -> bool:
    """Whether the kernel can be given this weight: found out once.

    Of other sizes it takes none; ordering the codes of rows that are no multiple of 64 writes past their end, and
    Paddle does not look.
    """
    if "is for kernel" not in weight.kept:
        out, width = weight.shape
        fits = width % 64 == 0 and out % 16 == 0 and kernel_group(weight) in (-1, 64, 128)
        weight.kept["is for kernel"] = fits and _keeps_its_codes(weight)
    return weight.kept["is for kernel"]


def _keeps_its_codes(weight: QuantizedWeight) -> bool:
    """Whether every block has the largest code that there is, or nothing but zeros."""
    largest_B = _code_numbers(weight).reshape([-1, weight.block_size]).abs().max(axis=1)
    return bool(((largest_B == _LARGEST[weight.algo]) | (largest_B == 0)).all())


def weight_only_linear(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """x W^T [..., out], as `linear_reference`, of a weight that the kernel can be given.

    The codes in the kernel's order stay beside the weight.
    """
    assert is_for_kernel(weight), f"Paddle's kernel cannot be given this weight of {list(weight.shape)}"
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
    numbers, group = _code_numbers(weight), kernel_group(weight)
    return quant.weight_quantize(numbers.T.astype("float16"), algo=weight.algo, group_size=group)[0]


def _code_numbers(weight: QuantizedWeight) -> paddle.Tensor:
    """What the codes stand for before a scale, float32 [out, in]."""
    ones = paddle.ones([-(-weight.num_weights // weight.block_size)])
    return dequantize(QuantizedWeight(weight.algo, weight.shape, weight.block_size, weight.codes, ones))


def kernel_group(weight: QuantizedWeight) -> int:
    """Paddle's word for the block: inputs that share a scale, -1 for a whole row."""
    return -1 if weight.block_size == weight.shape[1] else weight.block_size
