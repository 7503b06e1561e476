"""AdamW with 8-bit moments: the C++ backend stores the same codes as plain Paddle over several steps.

tests/trainer/optimizers/test_small_state_optimizers.py tests the formula and compares with bitsandbytes.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.adamw import adamw_8bit_op
from paddlenlp_ext.ops.adamw.cpp import adamw_8bit_cpp
from paddlenlp_ext.ops.adamw.quantizer_8bit import dynamic_8bit
from paddlenlp_ext.ops.adamw.reference import adamw_8bit_reference
from paddlenlp_ext.ops.adamw.updates import BLOCK, AdamStep, AdamW8BitUpdate, Moments8Bit
from tests.common.arrays import normal
from tests.common.marks import needs_cpp


def new_moments(size: int) -> Moments8Bit:
    blocks = -(-size // BLOCK)
    codes = [paddle.full([blocks, BLOCK], dynamic_8bit(signed).zero, "uint8") for signed in (True, False)]
    return Moments8Bit(codes[0], paddle.zeros([blocks, 1]), codes[1], paddle.zeros([blocks, 1]))


def steps(implementation, shape: tuple[int, ...], scale: float) -> list[np.ndarray]:
    """Return the parameter and its moments after five steps with gradients of many magnitudes, including zeros."""
    value, moments = paddle.to_tensor(normal(0, *shape)), new_moments(int(np.prod(shape)))
    for number in range(1, 6):
        gradient = normal(number, *shape) * np.float32(scale) * np.exp(3 * normal(10 + number, *shape))
        gradient[0] = 0
        step = AdamStep(0.9, 0.999, 1e-8, number, 1e-3)
        implementation([AdamW8BitUpdate(value, paddle.to_tensor(gradient), moments, step)])
    return [tensor.numpy() for tensor in (value, *moments)]


@needs_cpp
@pytest.mark.parametrize("shape", [(1,), (255,), (256,), (3, 257), (96, 1031)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_adamw_8bit_cpp_stores_the_codes_of_the_reference(shape, threads, scale, cpp_threads):
    cpp_threads(threads)
    value, *moments = steps(adamw_8bit_cpp, shape, scale)
    expected, *expected_moments = steps(adamw_8bit_reference, shape, scale)
    np.testing.assert_allclose(value, expected, rtol=3e-6, atol=3e-6)
    for one, other in zip(moments[1::2], expected_moments[1::2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    for one, other in zip(moments[::2], expected_moments[::2], strict=True):
        # Paddle's quotients may differ in the last bit, which determines the code of a midpoint between two levels.
        differs = np.abs(one.astype(int) - other.astype(int))
        assert differs.max() <= 1 and (differs > 0).mean() < 1e-4


@needs_cpp
def test_adamw_8bit_on_cpu_uses_cpp_backend():
    assert adamw_8bit_op.choose(paddle.ones([1])) is adamw_8bit_cpp
