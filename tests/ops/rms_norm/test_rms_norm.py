"""RMS norm against the formula in double precision, forward and backward, also fused with an addition."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext._runtime import threads_per_process
from paddlenlp_ext.ops.cpp.library import set_threads
from paddlenlp_ext.ops.rms_norm import add_rms_norm_reference, rms_norm
from paddlenlp_ext.ops.rms_norm.cpp import add_rms_norm_cpp, rms_norm_cpp
from paddlenlp_ext.ops.rms_norm.plain_cpu import rms_norm_plain_cpu
from paddlenlp_ext.ops.rms_norm.reference import rms_norm_reference
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.marks import needs_cpp

EPSILON = 1e-3
CPP = pytest.param(rms_norm_cpp, marks=needs_cpp)
ADD_CPP = pytest.param(add_rms_norm_cpp, marks=needs_cpp)


@pytest.mark.parametrize("implementation", [rms_norm, CPP, rms_norm_plain_cpu, rms_norm_reference])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 7), (5, 33), (2, 3, 4, 6), (211, 97)])
def test_rms_norm_matches_the_formula(implementation, shape):
    x, weight, gradient = normal(1, *shape), normal(2, shape[-1]), normal(3, *shape)
    actual = run_both_ways(lambda x, w: implementation(x, w, EPSILON), [x, weight], gradient)

    x = x.astype(np.float64)
    rms = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    scaled = gradient * weight
    x_gradient = scaled / rms - x * (scaled * x).mean(-1, keepdims=True) / rms**3
    weight_gradient = (gradient * x / rms).reshape(-1, shape[-1]).sum(0)
    assert_all_close(actual, [x / rms * weight, x_gradient, weight_gradient], atol=2e-5)


@pytest.mark.parametrize("implementation", [CPP, rms_norm_plain_cpu, rms_norm_reference])
def test_rms_norm_with_frozen_weight_returns_no_gradient(implementation):
    x, weight, gradient = normal(1, 4, 8), normal(2, 8), normal(3, 4, 8)
    _, x_gradient, weight_gradient = run_both_ways(
        lambda x, w: implementation(x, w, EPSILON), [x, weight], gradient, frozen=[1]
    )
    assert weight_gradient is None and np.abs(x_gradient).max() > 0


@needs_cpp
def test_rms_norm_with_frozen_input_returns_no_gradient():
    x, weight, gradient = normal(1, 4, 8), normal(2, 8), normal(3, 4, 8)
    _, x_gradient, weight_gradient = run_both_ways(
        lambda x, w: rms_norm_cpp(x, w, EPSILON), [x, weight], gradient, frozen=[0]
    )
    assert x_gradient is None and np.abs(weight_gradient).max() > 0


@needs_cpp
def test_rms_norm_cpp_with_other_thread_counts_gives_same_bits():
    x, weight, gradient = normal(1, 301, 97), normal(2, 97), normal(3, 301, 97)
    runs = []
    for num_threads in (1, 2):
        set_threads(num_threads)
        runs.append(run_both_ways(lambda x, w: rms_norm_cpp(x, w, EPSILON), [x, weight], gradient))
    set_threads(threads_per_process())
    assert_all_close(*runs, atol=0.0)


@needs_cpp
def test_rms_norm_cpp_reads_strided_input():
    x, weight = normal(1, 8, 6), paddle.to_tensor(normal(2, 6))
    strided = paddle.to_tensor(np.ascontiguousarray(x.T)).transpose([1, 0])
    np.testing.assert_array_equal(
        rms_norm_cpp(strided, weight, EPSILON).numpy(), rms_norm_cpp(paddle.to_tensor(x), weight, EPSILON).numpy()
    )


@pytest.mark.parametrize("implementation", [ADD_CPP, add_rms_norm_reference])
@pytest.mark.parametrize("shape", [(1, 1, 8), (211, 97)])
@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_add_rms_norm_matches_the_formula(implementation, shape, frozen):
    x, addend, weight = normal(1, *shape), normal(2, *shape), normal(3, shape[-1])
    total_gradient, gradient = normal(4, *shape), normal(5, *shape)
    tensors = [
        paddle.to_tensor(array, stop_gradient=index == frozen) for index, array in enumerate((x, addend, weight))
    ]
    total, normed = implementation(*tensors, EPSILON)
    # The sum is used twice, so Paddle accumulates its gradient in place.
    loss = (normed * paddle.to_tensor(gradient)).sum() + (total * paddle.to_tensor(total_gradient)).sum()
    (loss + (tensors[0] * 2.0).sum()).backward()

    expected_sum = (x + addend).astype(np.float64)
    rms = np.sqrt((expected_sum**2).mean(-1, keepdims=True) + EPSILON)
    scaled = gradient * weight
    into_sum = scaled / rms - expected_sum * (scaled * expected_sum).mean(-1, keepdims=True) / rms**3 + total_gradient
    weight_gradient = (gradient * expected_sum / rms).reshape(-1, shape[-1]).sum(0)
    expected = [None if index == frozen else array for index, array in enumerate((into_sum + 2.0, into_sum))]
    actual = [total.numpy(), normed.numpy(), *(None if x.grad is None else x.grad.numpy() for x in tensors)]
    assert_all_close(actual, [expected_sum, expected_sum / rms * weight, *expected, weight_gradient], atol=2e-5)


def test_rms_norm_returns_the_dtype_of_its_input():
    x, weight = paddle.to_tensor(normal(1, 4, 8)).astype("bfloat16"), paddle.to_tensor(normal(2, 8))
    assert rms_norm(x, weight, EPSILON).dtype == paddle.bfloat16
