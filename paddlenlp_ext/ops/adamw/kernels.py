"""Triton kernels of AdamW over many tensors in one launch; independent of Paddle and PyTorch.

    adamw_kernel         the formula of ops/adamw/__init__.py; the table has bias-corrected rates and epsilons
    adamw_8bit_kernel    the same formula with quantized moments, as in ops/adamw/reference.py

A launch reads a table with a row per tensor, and a map from programs to tensors (launch_tables.py):

    table      int64 [N, 13]: fields of `launch_tables.TableRow`
    numbers    float32 [N, 4]: weight decay factor, learning rate, and two values that each kernel documents
    blocks     int32 [M, 2]: for each program, the index of a tensor and the index of a span of SPAN values in it

ROUNDING: "none" for a float32 weight; "nearest" for a half-precision weight with a float32 master copy; "groups" and
"single" for a bfloat16 weight that is updated in float32 and rounded stochastically (ops/stochastic_rounding.py).
"groups" requires that each group of 8 consecutive values shares one counter of the random generator. "single" supports
any position.

Tested in Triton's interpreter (tests/ops/adamw/test_triton.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from paddlenlp_ext.ops.triton_utils.tile_sizes import TileSizes

SPAN = 16384
"""Number of values that a program updates."""
# A program handles VALUES values, or BLOCKS blocks of quantized moments, at a time: 8 to 16 values per thread. The
# widest load has 16 bytes, which are 8 values in half precision.
SIZES = TileSizes(
    "adamw",
    (),
    lambda entry: 8 <= entry["VALUES"] // (32 * entry["num_warps"]) <= 16,
    VALUES=(512, 1024, 2048, 4096),
    num_warps=(4, 8),
)
SIZES_8BIT = TileSizes(
    "adamw_8bit",
    (),
    lambda entry: 8 <= entry["BLOCKS"] * 256 // (32 * entry["num_warps"]) <= 16,
    BLOCKS=(2, 4, 8, 16),
    num_warps=(4, 8),
)
_WIDTH: tl.constexpr = tl.constexpr(13)  # number of columns of the table
_BLOCK: tl.constexpr = tl.constexpr(256)  # number of moments that share a scale
_DROPPED_BITS: tl.constexpr = tl.constexpr(14)  # low bits that the table of codes ignores (ops/adamw/quantizer_8bit.py)
_SMALLEST: tl.constexpr = tl.constexpr(1e-38)


@triton.jit
def adamw_kernel(
    table,
    numbers,  # decay factor, bias-corrected learning rate, bias-corrected epsilon
    blocks,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    WEIGHT: tl.constexpr,  # dtype of the weights
    GRADIENT: tl.constexpr,  # dtype of the gradients
    ROUNDING: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # 16 or 1; see `TableRow.alignment`
    SIZE: tl.constexpr,  # values per program
    VALUES: tl.constexpr,  # values handled at a time
):
    """Update SIZE values of a tensor."""
    tensor = tl.load(blocks + tl.program_id(0) * 2)
    row, first = table + tensor * _WIDTH, tl.load(blocks + tl.program_id(0) * 2 + 1).to(tl.int64) * SIZE
    decay, rate = tl.load(numbers + tensor * 4), tl.load(numbers + tensor * 4 + 1)
    epsilon = tl.load(numbers + tensor * 4 + 2)
    gradients, moments1 = _address(row, 1, GRADIENT, ALIGNMENT), _address(row, 2, tl.float32, ALIGNMENT)
    moments2, size = _address(row, 3, tl.float32, ALIGNMENT), tl.multiple_of(tl.load(row + 5), ALIGNMENT)
    for begin in range(first, tl.minimum(first + SIZE, size), VALUES):
        at = begin + tl.arange(0, VALUES)
        inside = at < size
        gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
        m = beta1 * tl.load(moments1 + at, mask=inside, other=0.0) + one_minus_beta1 * gradient
        v = beta2 * tl.load(moments2 + at, mask=inside, other=0.0) + one_minus_beta2 * gradient * gradient
        value = _value(row, at, inside, WEIGHT, ROUNDING, ALIGNMENT) * decay
        value -= rate * tl.math.div_rn(m, tl.math.sqrt_rn(v) + epsilon)
        tl.store(moments1 + at, m, mask=inside)
        tl.store(moments2 + at, v, mask=inside)
        _store_value(row, begin, at, inside, value, WEIGHT, ROUNDING, ALIGNMENT, VALUES)


@triton.jit
def adamw_8bit_kernel(
    table,
    numbers,  # decay factor, learning rate, bias corrections of both moments
    blocks,
    levels1,  # float32 [256], levels of the first moment, which is signed
    borders1,  # float32 [256]: midpoint between a level and the next level; infinity for the last level
    codes1,  # uint8 [2^18]: code of the level below, indexed by the upper 18 bits of a float32 value
    levels2,  # the same tables for the second moment
    borders2,
    codes2,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    epsilon,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    ROUNDING: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of moments handled at a time
):
    """Update SIZE values of a tensor with moments that are quantized in blocks of 256."""
    VALUES: tl.constexpr = BLOCKS * _BLOCK
    tensor = tl.load(blocks + tl.program_id(0) * 2)
    row, first = table + tensor * _WIDTH, tl.load(blocks + tl.program_id(0) * 2 + 1).to(tl.int64) * SIZE
    decay, rate = tl.load(numbers + tensor * 4), tl.load(numbers + tensor * 4 + 1)
    correction1, correction2 = tl.load(numbers + tensor * 4 + 2), tl.load(numbers + tensor * 4 + 3)
    gradients, stored1 = _address(row, 1, GRADIENT, ALIGNMENT), _address(row, 2, tl.uint8, ALIGNMENT)
    stored2, size = _address(row, 3, tl.uint8, ALIGNMENT), tl.multiple_of(tl.load(row + 5), ALIGNMENT)
    scales1, scales2 = _address(row, 11, tl.float32, 4), _address(row, 12, tl.float32, 4)
    for begin in range(first, tl.minimum(first + SIZE, size), VALUES):
        block = begin // _BLOCK + tl.arange(0, BLOCKS)
        at = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        is_block, inside = block * _BLOCK < size, at < size
        gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
        m = _dequantized(stored1, scales1, levels1, at, block, is_block) * beta1 + gradient * one_minus_beta1
        v = _dequantized(stored2, scales2, levels2, at, block, is_block) * beta2
        v += gradient * gradient * one_minus_beta2
        value = _value(row, at, inside, WEIGHT, ROUNDING, ALIGNMENT) * decay
        root = tl.math.sqrt_rn(v * correction2) + epsilon
        value -= tl.math.div_rn(m * correction1, root) * rate
        _quantize(stored1, scales1, borders1, codes1, m, at, block, is_block)
        _quantize(stored2, scales2, borders2, codes2, v, at, block, is_block)
        _store_value(row, begin, at, inside, value, WEIGHT, ROUNDING, ALIGNMENT, VALUES)


@triton.jit
def _address(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNMENT: tl.constexpr):
    return tl.multiple_of(tl.load(row + COLUMN).to(tl.pointer_type(DTYPE)), ALIGNMENT)


@triton.jit
def _value(row, at, inside, WEIGHT: tl.constexpr, ROUNDING: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Return the values of a weight, or of its master copy, in float32."""
    if ROUNDING == "nearest":
        return tl.load(_address(row, 4, tl.float32, ALIGNMENT) + at, mask=inside, other=0.0)
    else:  # an explicit else lets the compiler drop the other branch
        return tl.load(_address(row, 0, WEIGHT, ALIGNMENT) + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_value(
    row, begin, at, inside, value,
    WEIGHT: tl.constexpr, ROUNDING: tl.constexpr, ALIGNMENT: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Store VALUES updated values, starting at index `begin`, rounded to the dtype of the weight."""
    if ROUNDING == "nearest":
        tl.store(_address(row, 4, tl.float32, ALIGNMENT) + at, value, mask=inside)
    if ROUNDING == "groups":
        value = _rounded(value, tl.reshape(_draws_of_groups(row, begin, VALUES), value.shape))
    if ROUNDING == "single":
        value = _rounded(value, _draws(row, at))
    tl.store(_address(row, 0, WEIGHT, ALIGNMENT) + at, value.to(WEIGHT), mask=inside)


@triton.jit
def _dequantized(stored, scales, levels, at, block, is_block):
    code = tl.load(stored + at, mask=is_block[:, None], other=0).to(tl.int32)
    return tl.load(levels + code) * tl.load(scales + block, mask=is_block, other=0.0)[:, None]


@triton.jit
def _quantize(stored, scales, borders, codes, numbers, at, block, is_block):
    """Store the largest magnitude of each block as its scale, and for each value the code of the nearest level."""
    scale = tl.max(tl.abs(numbers), axis=1)
    ratio = tl.math.div_rn(numbers, tl.maximum(scale, _SMALLEST)[:, None])
    below = tl.load(codes + (ratio.to(tl.uint32, bitcast=True) >> _DROPPED_BITS).to(tl.int32)).to(tl.int32)
    code = below + (ratio > tl.load(borders + below)).to(tl.int32)
    tl.store(stored + at, code.to(tl.uint8), mask=is_block[:, None])
    tl.store(scales + block, scale, mask=is_block)


@triton.jit
def _rounded(value, draw):
    """Round stochastically to bfloat16 and return float32; infinities are unchanged, and NaN stays NaN."""
    bits = value.to(tl.uint32, bitcast=True)
    kept = (bits & 0xFFFF0000) | tl.where(value != value, 0x400000, 0).to(tl.uint32)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, (bits + draw) & 0xFFFF0000, kept).to(tl.float32, bitcast=True)


@triton.jit
def _draws(row, at):
    """Return the random draws for the values at indices `at`, uint32 in 0 .. 2^16 - 1."""
    index = _index(row, at)
    word0, word1, word2, word3 = _words(row, index // 8)
    half = index % 8
    word = tl.where(half < 4, tl.where(half < 2, word0, word1), tl.where(half < 6, word2, word3))
    return tl.where(half % 2 == 1, word >> 16, word & 0xFFFF)


@triton.jit
def _draws_of_groups(row, begin, VALUES: tl.constexpr):
    """Return the random draws for VALUES values from index `begin`; each group of 8 values shares one counter."""
    word0, word1, word2, word3 = _words(row, _index(row, begin + tl.arange(0, VALUES // 8) * 8) // 8)
    lower = tl.interleave(tl.interleave(word0, word2) & 0xFFFF, tl.interleave(word1, word3) & 0xFFFF)
    upper = tl.interleave(tl.interleave(word0, word2) >> 16, tl.interleave(word1, word3) >> 16)
    return tl.interleave(lower, upper)


@triton.jit
def _index(row, at):
    """Map positions `at` in the shard that `row` describes to indices in the full tensor."""
    width = tl.load(row + 9)
    line = at // width
    return tl.load(row + 8) + line * tl.load(row + 10) + (at - line * width)


@triton.jit
def _words(row, counter):
    """Return the four words of Philox4x32-10 for the counters [counter, step] under the key [seed, tensor]."""
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    step = tl.zeros_like(low) + tl.load(row + 7).to(tl.uint32)
    return tl.philox(tl.load(row + 6), low, high, step, tl.zeros_like(low))


def launch_adamw(
    launch: Callable[..., None], table: Any, numbers: Any, blocks: Any, betas: tuple[float, ...], kinds: dict[str, Any]
) -> None:
    """Update all tensors of a table.

    Args:
        launch: function that runs a kernel.
        table, numbers, blocks: see the module docstring; on the device of the tensors.
        betas: b1, 1 - b1, b2, 1 - b2.
        kinds: the kernel's WEIGHT and GRADIENT, as names of dtypes, ROUNDING and ALIGNMENT.
    """
    sizes = {"SIZE": SPAN, **SIZES(blocks)}
    launch(adamw_kernel, (blocks.shape[0],), table, numbers, blocks, *betas, **_constants(kinds), **sizes)


def launch_adamw_8bit(
    launch: Callable[..., None],
    table: Any,
    numbers: Any,
    blocks: Any,
    quantizers: tuple[Any, ...],
    betas: tuple[float, ...],
    epsilon: float,
    kinds: dict[str, Any],
) -> None:
    """Update all tensors of a table. `quantizers` are the levels, borders and codes of the first and second moment."""
    sizes, tensors = {"SIZE": SPAN, **SIZES_8BIT(blocks)}, (table, numbers, blocks, *quantizers)
    launch(adamw_8bit_kernel, (blocks.shape[0],), *tensors, *betas, epsilon, **_constants(kinds), **sizes)


def _constants(kinds: dict[str, Any]) -> dict[str, Any]:
    dtypes = {name: getattr(tl, kinds[name]) for name in ("WEIGHT", "GRADIENT")}
    # Without fused multiply-adds, all devices and the interpreter compute the same bits.
    return {**kinds, **dtypes, "enable_fp_fusion": False}
