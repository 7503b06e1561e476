"""Linear layer with int8 or int4 weights, using Paddle's weight-only kernel (`paddle.nn.quant`) for tensor-core GPUs.

The kernel needs the codes in an undocumented order, which only `paddle.nn.quant.weight_quantize` produces.
`weight_quantize` therefore gets the codes as float values. If the largest magnitude of every block is 127 (int8) or 7
(int4), `weight_quantize` computes a scale of 1 and returns the same codes, reordered. Newly quantized weights satisfy
this condition. A shard along the inputs can violate the condition. The kernel call passes the original scales.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import paddle
from paddle.nn import quant

from paddlenlp_ext.devices import compute_capability
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.dequantize.reference import block_scales
from paddlenlp_ext.ops.dispatch import in_half_precision, not_capable
from paddlenlp_ext.ops.quantized_linear.reference import quantized_linear_reference
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight

_LARGEST = {"weight_only_int8": 127.0, "weight_only_int4": 7.0}

_KERNEL_GPUS = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (9, 2), (10, 0))
"""Compute capabilities that the kernels of `paddle.nn.quant` support."""

KernelGroup = Literal[-1, 64, 128]

KernelAlgo = Literal["weight_only_int8", "weight_only_int4"]


def on_gpu_with_weight_only_kernel(x: paddle.Tensor) -> str | None:
    """Return None for half precision on a supported GPU, otherwise the reason why the kernel cannot run."""
    reason = not_capable(x, "weight_only") or in_half_precision(x)
    if reason is None and compute_capability(x.place) not in _KERNEL_GPUS:
        major, minor = compute_capability(x.place)
        return f"Paddle's kernel does not support GPUs of compute capability {major}.{minor}"
    return reason


def quantized_linear_weight_only(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out] with Paddle's kernel; use the reference for weights that the kernel does not support."""
    return weight_only_linear(x, weight) if fits_kernel(weight) else quantized_linear_reference(x, weight)


def fits_kernel(weight: QuantizedWeight) -> bool:
    """Return whether Paddle's kernel supports a weight; the result is cached on the weight.

    The kernel supports only certain sizes. Paddle does not check that the row length is a multiple of 64. With other
    row lengths, Paddle would write out of bounds while reordering the codes.
    """
    if "fits kernel" not in weight.kernel_cache:
        out, width = weight.shape
        fits = weight.is_plain and width % 64 == 0 and out % 16 == 0 and kernel_group(weight) in (-1, 64, 128)
        weight.kernel_cache["fits kernel"] = fits and _codes_survive_reordering(weight)
    return weight.kernel_cache["fits kernel"]


def _codes_survive_reordering(weight: QuantizedWeight) -> bool:
    """Return whether every block contains a code of the largest possible magnitude, or only zeros."""
    largest_B = _unscaled_weight(weight).reshape([-1, weight.block_size]).abs().max(axis=1)
    return bool(((largest_B == _LARGEST[weight.algo]) | (largest_B == 0)).all())


def weight_only_linear(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out] with Paddle's kernel, and cache the reordered codes on the weight.

    The weight must satisfy `fits_kernel`.
    """
    assert fits_kernel(weight), f"Paddle's kernel does not support this weight of {list(weight.shape)}"
    if "weight_only" not in weight.kernel_cache:
        weight.kernel_cache["weight_only"] = kernel_weight(weight)
    blocks = -(-weight.num_weights // weight.block_size)
    scales = block_scales(weight, 0, blocks)
    if kernel_group(weight) > 0:
        scales = scales.reshape([weight.shape[0], -1]).T
    out, width = weight.shape
    y_TO = quant.weight_only_linear(
        x.reshape([-1, width]),
        weight=weight.kernel_cache["weight_only"],
        weight_scale=scales.astype(x.dtype),
        weight_dtype=cast("Any", weight.algo.removeprefix("weight_only_")),  # Paddle's annotation lacks int4
        group_size=cast("KernelGroup", kernel_group(weight)),
    )
    return y_TO.reshape([*x.shape[:-1], out])


def kernel_weight(weight: QuantizedWeight) -> paddle.Tensor:
    """Return the codes in the order that the kernel reads."""
    numbers, group = _unscaled_weight(weight), cast("KernelGroup", kernel_group(weight))
    algo = cast("KernelAlgo", weight.algo)
    return quant.weight_quantize(numbers.T.astype("float16"), algo=algo, group_size=group)[0]


def _unscaled_weight(weight: QuantizedWeight) -> paddle.Tensor:
    """Return the unscaled values of the codes, float32 [out, in]."""
    ones = paddle.ones([-(-weight.num_weights // weight.block_size)])
    return dequantize(QuantizedWeight(weight.algo, weight.shape, weight.block_size, weight.codes, ones))


def kernel_group(weight: QuantizedWeight) -> int:
    """Return Paddle's `group_size`: the number of inputs that share a scale, or -1 for a full row."""
    return -1 if weight.block_size == weight.shape[1] else weight.block_size
