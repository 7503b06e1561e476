"""Stochastic rounding of float32 to bfloat16.

A float32 value is rounded at random to one of the two nearest bfloat16 values. The expected result is the exact value:

    rounded = upper half of (bits + draw),  draw uniform in 0 .. 2^16 - 1

The random draws are counter-based: draw i of a tensor is 16 of the 128 bits that Philox4x32-10 (Salmon et al. 2011,
doi:10.1145/2063384.2063405) computes from the counter [i // 8, step] under the key [seed, tensor]. The draws therefore
depend neither on interruptions of a run nor on the sharding of the tensor. All backends return the same bits.
"""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import paddle

from paddlenlp_ext.ops.cpp.api_header import struct
from paddlenlp_ext.ops.cpp.library import empty, function, pointer, usable
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.tensor_utils import bits_of

_ROUNDS = 10
_LOW = 0xFFFFFFFF
_CHUNK = 1 << 20
"""Values per slice in the reference backend, which allocates several int64 tensors of this size."""


class DrawPosition(NamedTuple):
    """Position of a tensor or shard in the random draws of a training run.

    Attributes:
        seed, tensor, step: seed of the run, index of the tensor, and optimizer step, as 32-bit integers.
        first: index of the shard's first value in the full tensor.
        width: values per row of the shard; a contiguous shard counts as a single row.
        stride: distance between consecutive rows of the shard, counted in values of the full tensor.
    """

    seed: int
    tensor: int
    step: int
    first: int
    width: int
    stride: int

    def as_struct(self) -> ctypes.Structure:
        return struct("DrawPosition")(*self)


def stochastic_round_cpp(values: paddle.Tensor, position: DrawPosition) -> paddle.Tensor:
    """Round float32 to bfloat16 in C++ (csrc/stochastic_rounding.cpp)."""
    values = values.contiguous()
    rounded = empty(values.shape, "bfloat16")
    draws = ctypes.byref(position.as_struct())
    function("round_stochastically")(pointer(values), pointer(rounded), math.prod(values.shape), draws)
    return rounded


def stochastic_round_reference(values: paddle.Tensor, position: DrawPosition) -> paddle.Tensor:
    """Round float32 to bfloat16 in plain Paddle, on any device."""
    flat, parts = values.reshape([-1]), []
    for start in range(0, flat.shape[0], _CHUNK):
        part = flat[start : start + _CHUNK]
        local = paddle.arange(start, start + part.shape[0], dtype="int64")
        index = position.first + local // position.width * position.stride + local % position.width
        bits = _masked(bits_of(part, "int32").astype("int64"), _LOW)
        rounded = _masked(bits + _draws(index, position), 0xFFFF0000)
        quiet = _masked(bits, 0xFFFF0000) | part.isnan().astype("int64") * 0x400000
        is_finite = _masked(bits, 0x7F800000) != 0x7F800000
        # The lower 16 bits are zero, so the cast is exact.
        parts.append(bits_of(paddle.where(is_finite, rounded, quiet).astype("int32"), "float32").astype("bfloat16"))
    return paddle.concat(parts).reshape(values.shape) if parts else values.astype("bfloat16")


def _draws(index: paddle.Tensor, position: DrawPosition) -> paddle.Tensor:
    """Return the random draw for the value at each index in `index` [N]: int64 [N], from 0 to 2^16 - 1."""
    counter, half = index // 8, index % 8
    x = [_masked(counter, _LOW), counter // 2**32, paddle.full_like(counter, position.step), paddle.zeros_like(counter)]
    key0, key1 = position.seed, position.tensor
    for _ in range(_ROUNDS):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57  # int64 multiplication keeps the lower 64 bits
        x0, x2 = _high(b) ^ x[1] ^ paddle.full([], key0, "int64"), _high(a) ^ x[3] ^ paddle.full([], key1, "int64")
        x = [x0, _masked(b, _LOW), x2, _masked(a, _LOW)]
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    words = paddle.stack(x, axis=1)
    word = paddle.take_along_axis(words, (half // 2).unsqueeze(1), axis=1).squeeze(1)
    return paddle.where(half % 2 == 1, word // 2**16, _masked(word, 0xFFFF))


def _masked(bits: paddle.Tensor, mask: int) -> paddle.Tensor:
    return paddle.bitwise_and(bits, paddle.full([], mask, "int64"))


def _high(product: paddle.Tensor) -> paddle.Tensor:
    return _masked(paddle.bitwise_right_shift(product, paddle.full([], 32, "int64")), _LOW)


stochastic_round_op = DispatchedOp(
    "stochastic rounding", cpp=(stochastic_round_cpp, usable), reference=stochastic_round_reference
)


def stochastic_round(values: paddle.Tensor, position: DrawPosition) -> paddle.Tensor:
    """Round float32 values stochastically to bfloat16; infinities are unchanged, and NaN stays NaN.

    `position` selects the random draws.
    """
    return stochastic_round_op.choose(values)(values, position)
