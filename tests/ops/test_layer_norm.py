"""Layer normalization against the formula in double precision, forward and backward."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.layer_norm import layer_norm, layer_norm_cpp, layer_norm_reference
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.marks import needs_cpp

CPP = pytest.param(layer_norm_cpp, marks=needs_cpp)
EPSILON = 1e-3


def reference(x: np.ndarray, weight: np.ndarray, gradient: np.ndarray) -> list[np.ndarray | None]:
    """Return the result and the gradients of x and weight, in float64."""
    x, gradient = x.astype(np.float64), gradient.astype(np.float64)
    inverse = 1 / np.sqrt(x.var(-1, keepdims=True) + EPSILON)
    normed = (x - x.mean(-1, keepdims=True)) * inverse
    scaled = gradient * weight
    along = normed * (scaled * normed).mean(-1, keepdims=True)
    x_gradient = (scaled - scaled.mean(-1, keepdims=True) - along) * inverse
    return [normed * weight, x_gradient, (gradient * normed).reshape(-1, x.shape[-1]).sum(0)]


@pytest.mark.parametrize("frozen", [[], [0], [1]])
@pytest.mark.parametrize("implementation", [layer_norm, CPP, layer_norm_reference])
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 7), (2, 16), (97, 101)])
def test_layer_norm_matches_the_formula(implementation, shape, frozen):
    x, weight, gradient = normal(1, *shape) + 3.0, 1 + normal(2, shape[-1]), normal(3, *shape)
    actual = run_both_ways(lambda x, weight: implementation(x, weight, EPSILON), [x, weight], gradient, frozen=frozen)
    expected = reference(x, weight, gradient)
    for index in frozen:
        expected[1 + index] = None
    assert_all_close(actual, expected, atol=2e-5)


@pytest.mark.parametrize("implementation", [CPP, layer_norm_reference])
def test_layer_norm_of_a_constant_row_is_zero(implementation):
    out = implementation(paddle.full([2, 21], 5.0), paddle.ones([21]), EPSILON)
    np.testing.assert_allclose(out.numpy(), 0.0, atol=1e-5)


@needs_cpp
def test_layer_norm_cpp_with_other_thread_counts_gives_same_bits(cpp_threads):
    x, weight, gradient, runs = normal(1, 301, 101), normal(2, 101), normal(3, 301, 101), []
    for threads in (1, 2):
        cpp_threads(threads)
        runs.append(run_both_ways(lambda x, weight: layer_norm_cpp(x, weight, EPSILON), [x, weight], gradient))
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)
