"""Linear layer with a quantized weight.

    y = x W^T,   dL/dx = (dL/dy) W

Forward and backward pass dequantize W a few rows at a time, so the full W is never in memory in full precision. W has
no gradient.

`weight_only` is Paddle's fused matmul with int8 and int4 weights; it requires a GPU with tensor cores. The kernel reads
the codes in its own order, which `paddle.nn.quant.weight_quantize` produces. This function receives the codes as
numbers: if the largest magnitude of every block is 127 (int8) or 7 (int4), it finds a scale of 1 and returns the same
codes, reordered. Newly quantized weights satisfy this condition; shards along the inputs may not. The kernel multiplies
by the original scales.

Shapes: in/out features.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, Literal, cast

import paddle
from paddle.autograd import PyLayer
from paddle.nn import quant

from paddlenlp_ext.ops.cpu import library
from paddlenlp_ext.ops.cpu.bf16 import bf16_matmuls, bf16_matmuls_enabled
from paddlenlp_ext.ops.dispatch import DispatchedOp, compute_capability, on_gpu_in_half_precision
from paddlenlp_ext.ops.linear import in_dtype, product_dtype
from paddlenlp_ext.ops.quantized.cpu import quantized_input_gradient_cpp, quantized_linear_cpp
from paddlenlp_ext.ops.quantized.dequantize import block_scales, dequantize, dequantize_rows, row_blocks
from paddlenlp_ext.ops.quantized.triton_launch import (
    MOST_POSITIONS,
    fits_tiles,
    on_gpu_in_4_bits,
    product_triton,
    supports_product,
    tile_product_triton,
)
from paddlenlp_ext.ops.quantized.weight import QuantizedWeight
from paddlenlp_ext.paddle_compat import is_symbolic

_LARGEST = {"weight_only_int8": 127.0, "weight_only_int4": 7.0}
_KERNEL_GPUS = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (9, 2), (10, 0))
"""Compute capabilities for which `paddle.nn.quant` has kernels."""

KernelGroup = Literal[-1, 64, 128]
KernelAlgo = Literal["weight_only_int8", "weight_only_int4"]


def fits_kernel(weight: QuantizedWeight) -> bool:
    """Return whether Paddle's kernel supports this weight; the result is cached on the weight.

    The kernel supports certain sizes only. Reordering the codes writes past their end if the row length is not a
    multiple of 64, and Paddle does not check this.
    """
    if "fits kernel" not in weight.kernel_cache:
        out, width = weight.shape
        fits = weight.is_plain and width % 64 == 0 and out % 16 == 0 and kernel_group(weight) in (-1, 64, 128)
        weight.kernel_cache["fits kernel"] = fits and _codes_survive_reordering(weight)
    return weight.kernel_cache["fits kernel"]


def _codes_survive_reordering(weight: QuantizedWeight) -> bool:
    """Return whether every block contains the largest possible code or only zeros."""
    largest_B = _unscaled_weight(weight).reshape([-1, weight.block_size]).abs().max(axis=1)
    return bool(((largest_B == _LARGEST[weight.algo]) | (largest_B == 0)).all())


def weight_only_linear(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out] by Paddle's kernel; the weight must satisfy `fits_kernel`.

    The reordered codes are cached on the weight.
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
    """Return the codes in the kernel's order."""
    numbers, group = _unscaled_weight(weight), cast("KernelGroup", kernel_group(weight))
    algo = cast("KernelAlgo", weight.algo)
    return quant.weight_quantize(numbers.T.astype("float16"), algo=algo, group_size=group)[0]


def _unscaled_weight(weight: QuantizedWeight) -> paddle.Tensor:
    """Return the values of the codes before scaling, float32 [out, in]."""
    ones = paddle.ones([-(-weight.num_weights // weight.block_size)])
    return dequantize(QuantizedWeight(weight.algo, weight.shape, weight.block_size, weight.codes, ones))


def kernel_group(weight: QuantizedWeight) -> int:
    """Return the block size in Paddle's notation: inputs that share a scale, or -1 for a full row."""
    return -1 if weight.block_size == weight.shape[1] else weight.block_size


_MAX_FUSED_POSITIONS = 2
"""Positions up to which `product_triton` is the fastest (benchmarks/triton_dequantize.py)."""


def quantized_linear(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Map `x` [..., in] to [..., out], in the dtype of x or of autocast."""
    if x.stop_gradient or not paddle.is_grad_enabled() or is_symbolic(x):
        return linear_op(weight.algo).choose(x)(x, weight)
    return _QuantizedLinear.apply(x, weight)


class _QuantizedLinear(PyLayer):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight, ctx.dtype, ctx.in_bf16 = weight, x.dtype, bf16_matmuls_enabled()
        return linear_op(weight.algo).choose(x)(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        with paddle.no_grad():
            input_gradient = input_gradient_op.choose(gradient)
            with bf16_matmuls() if ctx.in_bf16 else nullcontext():
                return input_gradient(gradient, ctx.weight).astype(ctx.dtype)


def linear_reference(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out] in plain Paddle."""
    parts = [
        paddle.matmul(x, dequantize_rows(weight, first, last, x.dtype), transpose_y=True)
        for first, last in row_blocks(weight)
    ]
    return parts[0] if len(parts) == 1 else paddle.concat(parts, axis=-1)


def input_gradient_reference(gradient: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return (dL/dy) W [..., in] in plain Paddle; parts are summed in float32 to keep precision."""
    total = None
    for first, last in row_blocks(weight):
        part = paddle.matmul(gradient[..., first:last], dequantize_rows(weight, first, last, gradient.dtype))
        if (first, last) == (0, weight.shape[0]):
            return part
        part = part if part.dtype == paddle.float32 else part.astype("float32")
        total = part if total is None else total.add_(part)
    assert total is not None, "a weight has rows"
    return total


def linear_triton(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out]: with one fused kernel for few positions, from dequantized rows for many."""
    x = in_dtype(x, product_dtype(x))  # autocast does not reach the kernels
    (out, width), leading = weight.shape, x.shape[:-1]
    positions = math.prod(leading)
    if positions <= _MAX_FUSED_POSITIONS and supports_product(weight):
        product = product_triton
    elif 0 < positions <= MOST_POSITIONS and fits_tiles(weight):
        product = tile_product_triton
    else:
        return linear_reference(x, weight)
    return product(x.reshape([-1, width]), weight).reshape([*leading, out])


def linear_weight_only(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
    """Return x W^T [..., out] by Paddle's fused kernel, or from dequantized rows if it does not support the weight."""
    return weight_only_linear(x, weight) if fits_kernel(weight) else linear_reference(x, weight)


def takes_weight_only(x: paddle.Tensor, weight: QuantizedWeight) -> bool:
    """Return whether `quantized_linear` multiplies `x` by Paddle's fused kernel."""
    return linear_op(weight.algo).choose(x) is linear_weight_only and fits_kernel(weight)


def _on_gpu_with_kernel(x: paddle.Tensor) -> str | None:
    reason = on_gpu_in_half_precision(x)
    if reason is None and compute_capability(x) not in _KERNEL_GPUS:
        major, minor = compute_capability(x)
        return f"Paddle's kernel does not support GPUs of compute capability {major}.{minor}"
    return reason


_CPP = (quantized_linear_cpp, library.usable)
_FOUR_BIT = DispatchedOp(
    "quantized linear (nf4, fp4)",
    triton=(linear_triton, on_gpu_in_4_bits),
    native=_CPP,
    reference=linear_reference,
)
_INTEGER = DispatchedOp(
    "quantized linear (int8, int4)",
    weight_only=(linear_weight_only, _on_gpu_with_kernel),
    native=_CPP,
    reference=linear_reference,
)
input_gradient_op = DispatchedOp(
    "quantized linear's gradient",
    native=(quantized_input_gradient_cpp, library.usable),
    reference=input_gradient_reference,
)
"""Op of (dL/dy) W; backends take (gradient [..., out], weight)."""


def linear_op(algo: str) -> DispatchedOp:
    """Return the op of x W^T; backends take (x [..., in], weight)."""
    return _INTEGER if algo.startswith("weight_only") else _FOUR_BIT
