from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext._runtime import threads_per_process
from paddlenlp_ext.ops.cpu.library import set_threads
from paddlenlp_ext.ops.gradients import (
    scale_,
    scale_native,
    scale_reference,
    sum_of_squares,
    sum_of_squares_native,
    sum_of_squares_reference,
)
from tests.common.arrays import normal
from tests.common.marks import needs_native

SHAPES = [[1], [3, 5], [16384], [129, 301]]
SUM_NATIVE = pytest.param(sum_of_squares_native, marks=needs_native)
SCALE_NATIVE = pytest.param(scale_native, marks=needs_native)


def draw() -> list[np.ndarray]:
    return [normal(index, *shape) for index, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("twin", [sum_of_squares, SUM_NATIVE, sum_of_squares_reference])
def test_the_sum_runs_over_all_values(twin):
    arrays = draw()
    expected = sum(np.square(array.astype(np.float64)).sum() for array in arrays)
    assert twin([paddle.to_tensor(array) for array in arrays]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("twin", [scale_, SCALE_NATIVE, scale_reference])
def test_every_value_is_scaled_in_place(twin):
    arrays = draw()
    tensors = [paddle.to_tensor(array) for array in arrays]
    tensors.append(paddle.to_tensor(arrays[1]).transpose([1, 0]))
    twin(tensors, 0.3)
    for tensor, array in zip(tensors, [*arrays, arrays[1].T], strict=True):
        np.testing.assert_allclose(tensor.numpy(), array * np.float32(0.3), rtol=1e-6)


def test_formats_may_be_mixed():
    tensors = [paddle.full([3], 2.0, "float32"), paddle.full([5], 3.0).astype("bfloat16")]
    assert sum_of_squares(tensors) == pytest.approx(57.0)
    assert sum_of_squares([]) == 0.0


@needs_native
def test_the_number_of_threads_changes_no_bit():
    tensors = [paddle.to_tensor(array) for array in draw()]
    sums = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        sums.append(sum_of_squares_native(tensors))
    set_threads(threads_per_process())
    assert sums[0] == sums[1]


@pytest.mark.parametrize("twin", [SUM_NATIVE, sum_of_squares_reference])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows(twin, bad):
    array = normal(1, 37)
    array[35] = bad
    assert not np.isfinite(twin([paddle.to_tensor(array)]))
