"""Sum of squares and scaling of gradients, as used by clipping."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext._runtime import threads_per_process
from paddlenlp_ext.ops.cpp.library import set_threads
from paddlenlp_ext.ops.gradient_clipping import (
    scale_,
    scale_cpp,
    scale_reference,
    sum_of_squares,
    sum_of_squares_cpp,
    sum_of_squares_reference,
)
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

SHAPES = [[1], [3, 5], [16384], [129, 301]]
SUM_CPP = pytest.param(sum_of_squares_cpp, marks=needs_cpp)
SCALE_CPP = pytest.param(scale_cpp, marks=needs_cpp)


def draw() -> list[np.ndarray]:
    return [normal(index, *shape) for index, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("backend", [sum_of_squares, SUM_CPP, sum_of_squares_reference])
def test_sum_of_squares_covers_all_tensors(backend):
    arrays = draw()
    expected = sum(np.square(array.astype(np.float64)).sum() for array in arrays)
    assert backend([paddle.to_tensor(array) for array in arrays]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("backend", [scale_, SCALE_CPP, scale_reference])
def test_scale_multiplies_all_tensors_in_place(backend):
    arrays = draw()
    tensors = [paddle.to_tensor(array) for array in arrays]
    tensors.append(paddle.to_tensor(arrays[1]).transpose([1, 0]))
    for tensor in tensors:
        tensor.stop_gradient = False  # as in gradients of parameters
    backend(tensors, 0.3)
    for tensor, array in zip(tensors, [*arrays, arrays[1].T], strict=True):
        np.testing.assert_allclose(tensor.numpy(), array * np.float32(0.3), rtol=1e-6)


def test_sum_of_squares_accepts_mixed_dtypes():
    tensors = [paddle.full([3], 2.0, "float32"), paddle.full([5], 3.0).astype("bfloat16")]
    assert sum_of_squares(tensors) == pytest.approx(57.0)
    assert sum_of_squares([]) == 0.0


@needs_cpp
def test_sum_of_squares_cpp_with_other_thread_counts_gives_same_bits():
    tensors = [paddle.to_tensor(array) for array in draw()]
    sums = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        sums.append(sum_of_squares_cpp(tensors))
    set_threads(threads_per_process())
    assert sums[0] == sums[1]


@pytest.mark.parametrize("backend", [SUM_CPP, sum_of_squares_reference])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sum_of_squares_with_non_finite_value_is_not_finite(backend, bad):
    array = normal(1, 37)
    array[35] = bad
    assert not np.isfinite(backend([paddle.to_tensor(array)]))
