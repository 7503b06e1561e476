"""Test bfloat16 in NumPy: exact widening, rounding to nearest even, agreement with Paddle."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.dtypes import bfloat16_to_float32, cast, float32_to_bfloat16


def test_bfloat16_round_trip_is_exact_for_all_values():
    bits = np.arange(1 << 16, dtype=np.uint16)
    back = float32_to_bfloat16(bfloat16_to_float32(bits))
    is_nan = ((bits & 0x7F80) == 0x7F80) & ((bits & 0x7F) != 0)
    assert np.array_equal(back[~is_nan], bits[~is_nan])
    assert np.isnan(bfloat16_to_float32(back[is_nan])).all()


def test_float32_to_bfloat16_rounds_to_nearest_even():
    # 1 and 1 + 2^-7 are neighbours: their midpoint rounds to the even mantissa (1), the next value rounds up.
    values = np.array([1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 3 * 2**-8, 3.4e38, -0.0], np.float32)
    assert float32_to_bfloat16(values).tolist() == [0x3F80, 0x3F81, 0x3F82, 0x7F80, 0x8000]


def test_float32_to_bfloat16_matches_paddle_across_chunks():
    values = np.random.default_rng(0).standard_normal((3, 100_003)).astype(np.float32)
    expected = paddle.to_tensor(values).astype("bfloat16").numpy()
    assert np.array_equal(float32_to_bfloat16(values), expected)
    assert float32_to_bfloat16(np.float32(1.5)).shape == ()


def test_cast_between_integer_and_float_raises():
    with pytest.raises(ValueError, match="tensor of dtype int8 cannot be read as float32"):
        cast(np.zeros(2, np.int8), "int8", "float32")
    assert cast(np.ones(2, np.float16), "float16", "bfloat16").tolist() == [0x3F80, 0x3F80]
