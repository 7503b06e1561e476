"""Linear layer against NumPy in float64, forward and backward, for every backend and both dtypes."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.cpp import bf16, library
from paddlenlp_ext.ops.linear import linear
from paddlenlp_ext.ops.linear.cpp import linear_cpp
from paddlenlp_ext.ops.linear.reference import linear_reference
from paddlenlp_ext.ops.tensor_utils import product_dtype
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.marks import needs_cpp

CPP = pytest.param(linear_cpp, marks=needs_cpp)
# (leading axes of x, in, out): zero, one and few rows, the switch from few rows to many, primes, full vectors.
SHAPES = [
    ((0,), 17, 5),
    ((1,), 1, 1),
    ((3,), 17, 5),
    ((2, 4), 33, 31),
    ((17,), 64, 16),
    ((7, 13), 101, 67),
    ((1, 1, 15), 130, 9),
]
HALF = 2.0**-8  # largest relative change by rounding to bfloat16


def reference(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, gradient: np.ndarray) -> list[np.ndarray]:
    """Return y and the gradients of x, weight and bias, in float64."""
    x, weight, gradient = (array.astype(np.float64) for array in (x, weight, gradient))
    rows, row_gradients = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    return [x @ weight.T + bias, gradient @ weight, row_gradients.T @ rows, row_gradients.sum(0)]


def numbers(leading: tuple[int, ...], in_: int, out: int) -> list[np.ndarray]:
    return [normal(1, *leading, in_), normal(2, out, in_), normal(3, out), normal(4, *leading, out)]


@pytest.mark.parametrize("implementation", [linear, CPP, linear_reference])
@pytest.mark.parametrize(("leading", "in_", "out"), SHAPES)
def test_linear_matches_the_formula(implementation, leading, in_, out):
    x, weight, bias, gradient = numbers(leading, in_, out)
    expected = reference(x, weight, bias, gradient)
    assert_all_close(run_both_ways(implementation, [x, weight, bias], gradient), expected, atol=2e-5)
    expected[0] = expected[0] - bias
    assert_all_close(run_both_ways(implementation, [x, weight], gradient), expected[:3], atol=2e-5)


@needs_cpp
@pytest.mark.parametrize(("leading", "in_", "out"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_linear_cpp_with_frozen_bf16_weight_is_exact_on_whole_numbers(leading, in_, out, threads, cpp_threads):
    """Check that sums are in float32: integers that bfloat16 represents give exact results."""
    cpp_threads(threads)
    x, weight, bias, gradient = (np.round(3 * array) for array in numbers(leading, in_, out))
    expected = reference(x, weight, bias, gradient)

    def in_half(x, weight, bias):
        return linear(x, weight.astype("bfloat16"), bias)

    actual = run_both_ways(in_half, [x, weight, bias], gradient, frozen=[1])
    expected[2] = None
    assert_all_close(actual, expected, atol=0)
    assert paddle.to_tensor(actual[0]).dtype == paddle.float32


@needs_cpp
@pytest.mark.parametrize(("leading", "in_", "out"), SHAPES)
def test_linear_cpp_in_bf16_is_within_rounding(leading, in_, out):
    """Test full fine-tuning in bf16: the weight is float32, and the inputs of all three matmuls are rounded."""
    x, weight, bias, gradient = numbers(leading, in_, out)

    def rounded(*tensors):
        with bf16.bf16_matmuls():
            return linear(*tensors)

    actual = run_both_ways(rounded, [x, weight, bias], gradient)
    expected = reference(x, weight, bias, gradient)
    # |sum of a_i b_i (1 + d_i) - sum of a_i b_i| <= max |d_i| * sum of |a_i b_i|, with d_i of two roundings.
    largest = reference(abs(x), abs(weight), 0 * bias, abs(gradient))
    for one, other, bound in zip(actual[:3], expected[:3], largest[:3], strict=True):
        assert (abs(one - other) <= 2.02 * HALF * bound + 1e-5).all()
    np.testing.assert_allclose(actual[3], expected[3], atol=2e-5)
    if np.prod(leading) > library.small_batch_rows(in_bf16=True):
        assert abs(actual[0] - expected[0]).max() > 1e-4, "nothing was rounded"
    assert not bf16.uses_bf16(paddle.to_tensor(weight)), "bf16_matmuls is still active"


@needs_cpp
@pytest.mark.parametrize("threads", [1, 2])
def test_linear_cpp_in_bf16_with_large_matrices_is_exact_on_whole_numbers(threads, cpp_threads):
    """Test matrices of several blocks in every dimension: without AVX-512, blocks are converted to float32."""
    cpp_threads(threads)
    x, weight, bias, gradient = (np.round(3 * array) for array in numbers((1100,), 1090, 500))

    def rounded(*tensors):
        with bf16.bf16_matmuls():
            return linear(*tensors)

    actual = run_both_ways(rounded, [x, weight, bias], gradient)
    assert_all_close(actual, reference(x, weight, bias, gradient), atol=0)


@pytest.mark.parametrize("implementation", [CPP, linear_reference])
@pytest.mark.parametrize("frozen", [[0], [1], [2], [1, 2], [0, 2]])
def test_linear_with_frozen_inputs_returns_no_gradient_for_them(implementation, frozen):
    x, weight, bias, gradient = numbers((3,), 17, 5)
    actual = run_both_ways(implementation, [x, weight, bias], gradient, frozen)
    expected = [
        None if place - 1 in frozen else each for place, each in enumerate(reference(x, weight, bias, gradient))
    ]
    assert_all_close(actual, expected, atol=2e-5)


@needs_cpp
def test_linear_cpp_is_independent_of_default_dtype():
    """Check that outputs are allocated as float32, which the library writes, whatever the default dtype."""
    x, weight, bias, gradient = numbers((9,), 17, 5)
    paddle.set_default_dtype("bfloat16")
    try:
        actual = run_both_ways(linear_cpp, [x, weight, bias], gradient)
    finally:
        paddle.set_default_dtype("float32")
    assert_all_close(actual, reference(x, weight, bias, gradient), atol=2e-5)


@needs_cpp
def test_linear_cpp_reads_strided_input():
    x, weight, bias, gradient = numbers((6, 10), 12, 5)

    def of_transposed(x, weight, bias):
        return linear_cpp(x.transpose([1, 0, 2]), weight, bias)

    actual = run_both_ways(of_transposed, [x.transpose(1, 0, 2).copy(), weight, bias], gradient)
    expected = reference(x, weight, bias, gradient)
    expected[1] = expected[1].transpose(1, 0, 2)
    assert_all_close(actual, expected, atol=2e-5)


@needs_cpp
def test_linear_cpp_reads_strided_weight():
    x, weight, bias, gradient = numbers((10,), 12, 5)

    def with_transposed(x, weight, bias):
        return linear_cpp(x, weight.transpose([1, 0]), bias)

    actual = run_both_ways(with_transposed, [x, np.ascontiguousarray(weight.T), bias], gradient)
    expected = reference(x, weight, bias, gradient)
    expected[2] = expected[2].T
    assert_all_close(actual, expected, atol=2e-5)


@needs_cpp
@pytest.mark.parametrize("rows", [3, 30])
@pytest.mark.parametrize("shapes", [(11, (5, 12), (5,)), (12, (5, 12), (4,))])
def test_linear_cpp_with_mismatched_shapes_raises_value_error(rows, shapes):
    in_, weight, bias = shapes
    with pytest.raises(ValueError, match=rf"x \[{rows}, {in_}\] with a weight of shape \[5, 12\] and a bias"):
        linear_cpp(*(paddle.to_tensor(normal(1, *shape)) for shape in ((rows, in_), weight, bias)))


@needs_cpp
def test_cached_bf16_of_parameter_is_not_cached():
    """Check parameters, whose `inplace_version` is not increased by set_value or AdamW."""
    x = paddle.create_parameter([20, 12], "float32")
    weight = paddle.to_tensor(normal(2, 5, 12)).astype("bfloat16")
    before = linear_cpp(x, weight)
    x.set_value(x.detach() * 2)
    np.testing.assert_array_equal(linear_cpp(x, weight).numpy(), 2 * before.numpy())


@needs_cpp
def test_cached_bf16_is_shared_until_x_changes():
    x = paddle.to_tensor(normal(1, 16, 8))
    first = bf16.cached_bf16(x)
    assert bf16.cached_bf16(x) is first
    x.scale_(2.0)
    np.testing.assert_array_equal(bf16.cached_bf16(x).astype("float32").numpy(), 2 * first.astype("float32").numpy())


@needs_cpp
def test_linear_cpp_with_other_thread_counts_differs_by_rounding_only(cpp_threads):
    inputs, results = numbers((40,), 200, 300), []
    for threads in (1, 2, 2):
        cpp_threads(threads)
        results.append(run_both_ways(linear_cpp, inputs[:3], inputs[3]))
    assert_all_close(results[0], results[1], atol=1e-4)
    assert_all_close(results[1], results[2], atol=0)


def test_linear_reference_casts_bf16_weight_to_float32():
    x, weight = paddle.to_tensor(normal(1, 3, 7)), paddle.to_tensor(normal(2, 5, 7)).astype("bfloat16")
    y = linear_reference(x, weight)
    np.testing.assert_allclose(y.numpy(), x.numpy() @ weight.astype("float32").numpy().T, atol=1e-5)


@needs_cpp
def test_linear_cpp_reuses_memory_of_large_results():
    x, weight = paddle.to_tensor(normal(1, 700, 8)), paddle.to_tensor(normal(2, 300, 8))
    address = library.pointer(linear_cpp(x, weight))
    assert library.pointer(linear_cpp(x, weight)) == address


@needs_cpp
@pytest.mark.parametrize(("leading", "in_", "out"), [((5,), 12, 7), ((3, 17), 40, 24)])
def test_linear_cpp_with_trained_bf16_weight_returns_bf16_gradient(leading, in_, out):
    """Check that the weight is read as stored, and its gradient is the float32 one, rounded once."""
    x, weight, bias, gradient = numbers(leading, in_, out)
    stored = paddle.to_tensor(weight).astype("bfloat16")
    stored.stop_gradient = False
    x_t, bias_t = paddle.to_tensor(x, stop_gradient=False), paddle.to_tensor(bias, stop_gradient=False)
    y = linear_cpp(x_t, stored, bias_t)
    y.backward(paddle.to_tensor(gradient))
    rounded_weight = stored.astype("float32").numpy()
    expected = reference(x, rounded_weight, bias, gradient)
    assert stored.grad.dtype == paddle.bfloat16
    actual = [y, x_t.grad, stored.grad.astype("float32"), bias_t.grad]
    for got, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_product_dtype_is_that_of_paddles_matmul(level, dtype):
    """Compare within a static program, in which Paddle casts for autocast without a GPU too."""
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            x, weight = paddle.static.data("x", [3, 4], dtype), paddle.static.data("weight", [5, 4], dtype)
            assert product_dtype(x) == linear_reference(x, weight).dtype == getattr(paddle, dtype)
            with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
                assert product_dtype(x) == paddle.matmul(x, weight, transpose_y=True).dtype == paddle.bfloat16
    finally:
        paddle.disable_static()
