"""AdamW for bfloat16 weights against AdamW in float32 and rounding in NumPy."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.checkpoint.dtypes import bfloat16_to_float32, float32_to_bfloat16
from paddlenlp_ext.ops.adamw import AdamWUpdate
from paddlenlp_ext.ops.adamw.cpp import adamw_bf16_cpp
from paddlenlp_ext.ops.adamw.reference import adamw_bf16_reference, adamw_reference
from paddlenlp_ext.ops.adamw.updates import Bf16Update
from paddlenlp_ext.ops.stochastic_rounding import DrawPosition
from tests.common.arrays import normal
from tests.common.marks import needs_cpp
from tests.ops.test_stochastic_rounding import round_in_numpy

BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-8
SHAPES, RATES, DECAYS = [[1], [17, 3], [8, 576], [131, 257]], [1e-2, 1e-3, 4e-2, 1e-3], [0.0, 0.1, 0.1, 0.0]
BACKENDS = [pytest.param(adamw_bf16_cpp, marks=needs_cpp), adamw_bf16_reference]
NUM_STEPS = 3


def state_of(shape: list[int]) -> list[paddle.Tensor]:
    return [paddle.zeros(shape), paddle.zeros(shape), paddle.full([1], BETA1), paddle.full([1], BETA2)]


def position_of(index: int, shape: list[int], step: int) -> DrawPosition:
    """Return the position of a tensor; the second one is a slice of columns."""
    size = int(np.prod(shape))
    return DrawPosition(3, index, step, 7, 3, 10) if index == 1 else DrawPosition(3, index, step, 0, size, size)


def gradient_of(step: int, index: int, dtype: str) -> np.ndarray:
    """Return a gradient in float32, whose values are representable in `dtype`."""
    value = (10.0**-index * normal(100 * step + index, *SHAPES[index])).astype(np.float32)
    return bfloat16_to_float32(float32_to_bfloat16(value)) if dtype == "bfloat16" else value


def run(backend, with_masters: bool, dtype: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the bits of the weights after some steps, and the master copies."""
    weights = [paddle.to_tensor(normal(index, *shape)).astype("bfloat16") for index, shape in enumerate(SHAPES)]
    masters = [weight.astype("float32") if with_masters else None for weight in weights]
    states = [state_of(shape) for shape in SHAPES]
    for step in range(NUM_STEPS):
        updates = []
        for index, shape in enumerate(SHAPES):
            gradient = paddle.to_tensor(gradient_of(step, index, dtype)).astype(dtype)
            update = AdamWUpdate(weights[index], gradient, *states[index], RATES[index], DECAYS[index])
            position = None if with_masters else position_of(index, shape, step)
            updates.append(Bf16Update(update, masters[index], position))
        backend(updates, BETA1, BETA2, EPSILON)
    assert all(weight.dtype == paddle.bfloat16 for weight in weights)
    return [weight.numpy() for weight in weights], [master.numpy() for master in masters if master is not None]


def expected(with_masters: bool, dtype: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the weights' bits by AdamW in float32 on values that NumPy rounds after each step, or not."""
    bits, values = [], []
    for index, shape in enumerate(SHAPES):
        value = paddle.to_tensor(bfloat16_to_float32(float32_to_bfloat16(normal(index, *shape))))
        state = state_of(shape)
        for step in range(NUM_STEPS):
            gradient = paddle.to_tensor(gradient_of(step, index, dtype))
            update = AdamWUpdate(value, gradient, *state, RATES[index], DECAYS[index])
            adamw_reference([update], BETA1, BETA2, EPSILON)
            if not with_masters:
                value.set_value(bfloat16_to_float32(round_in_numpy(value.numpy(), position_of(index, shape, step))))
        bits.append(float32_to_bfloat16(value.numpy()))
        values.append(value.numpy())
    return bits, values


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_adamw_bf16_updates_master_copies_and_rounds_them_to_nearest(backend, dtype):
    bits, masters = run(backend, True, dtype)
    for got, master, want in zip(bits, masters, expected(True, dtype)[1], strict=True):
        np.testing.assert_allclose(master, want, rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(got, float32_to_bfloat16(master))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_adamw_bf16_without_master_copies_rounds_stochastically(backend, dtype):
    """Check the bits; the backends round the update itself in another order, which may change a rare draw."""
    bits, _ = run(backend, False, dtype)
    different = [np.mean(got != want) for got, want in zip(bits, expected(False, dtype)[0], strict=True)]
    assert max(different) < 2e-3, different


def test_adamw_bf16_keeps_updates_below_half_the_spacing_of_weights():
    """Check updates that rounding to nearest would lose: 100 steps of 1/50 of the spacing move by two spacings."""
    weight = paddle.full([4096], 1.0, "bfloat16")
    state, rate = state_of([4096]), 2.0**-7 / 50
    for step in range(100):
        update = AdamWUpdate(weight, paddle.full([4096], -1.0, "bfloat16"), *state, rate, 0.0)
        adamw_bf16_reference([Bf16Update(update, None, DrawPosition(0, 0, step, 0, 4096, 4096))], BETA1, BETA2, EPSILON)
    moved = weight.astype("float32").numpy() - 1.0
    assert moved.mean() == pytest.approx(2 * 2.0**-7, rel=0.05)
