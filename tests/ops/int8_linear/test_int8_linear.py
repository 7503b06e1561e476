"""Linear layer in 8-bit integers against a NumPy formula with the same rounding, forward and backward."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.int8_linear import int8_input_gradient_op, int8_linear, int8_linear_op
from paddlenlp_ext.ops.int8_linear.cpp import int8_linear_cpp
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

CPP = pytest.param("cpp", marks=needs_cpp)
# Panels have 64 or 16 columns, blocks 6 rows, and instructions add 4 products: below, at and above each. Tiles of AMX
# have 32 rows, 32 columns and a depth of 64.
# Blocks of x and of the gradient have 128 values.
SHAPES = [
    ((1,), 1, 1),
    ((3,), 3, 5),
    ((2, 6), 64, 64),
    ((13,), 67, 130),
    ((7, 9), 259, 128),
    ((1030,), 20, 70),
    ((170,), 192, 104),
]
INT8 = QuantizationConfig(algo="weight_only_int8")


def rounded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers and the scales of rows. A fused multiply-add also rounds the exact product once."""
    x = x.astype(np.float32)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), 0).astype(np.float32)
    return np.rint(x.astype(np.float64) * inverse), largest / np.float32(127)


def rounded_blocks(x: np.ndarray) -> np.ndarray:
    """Return x with each block of 128 values rounded."""
    blocks = [rounded(x[..., first : first + 128]) for first in range(0, x.shape[-1], 128)]
    return np.concatenate([values * scales for values, scales in blocks], axis=-1)


def integers(weight: QuantizedWeight) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers [out, in] and the scales [out, 1] of a weight, rounded to int8 unless it is int8."""
    if weight.algo != "weight_only_int8":
        return rounded(dequantize(weight).numpy())
    return weight.codes.numpy().astype(np.float64).reshape(weight.shape), weight.scales.numpy().reshape(-1, 1)


def formula(x, weight: QuantizedWeight, bias, gradient) -> tuple[np.ndarray, np.ndarray]:
    """Return y and dL/dx in float64."""
    codes, channels = integers(weight)
    return rounded_blocks(x) @ codes.T * channels[:, 0] + bias, rounded_blocks(gradient * channels[:, 0]) @ codes


def numbers(leading: tuple[int, ...], in_: int, out: int):
    return normal(0, *leading, in_), normal(1, out, in_), normal(2, out), normal(3, *leading, out)


def run(backend: str, x: paddle.Tensor, weight: QuantizedWeight, bias, gradient: paddle.Tensor):
    y = int8_linear_op.choose(x, backend)(x, weight, bias)
    return y, int8_input_gradient_op.choose(gradient, backend)(gradient, weight)


@pytest.mark.parametrize("backend", [CPP, "reference"])
@pytest.mark.parametrize(("leading", "in_", "out"), SHAPES)
@pytest.mark.parametrize("algo", ["weight_only_int8", "nf4", "weight_only_int4"])
def test_int8_linear_equals_the_formula_up_to_the_last_bits(backend, leading, in_, out, algo):
    x, weight, bias, gradient = numbers(leading, in_, out)
    packed = quantize(weight, QuantizationConfig(algo=algo))
    expected = formula(x, packed, bias, gradient)
    actual = run(backend, *map(paddle.to_tensor, (x,)), packed, paddle.to_tensor(bias), paddle.to_tensor(gradient))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=5e-7, atol=5e-7 * np.abs(other).max())


@needs_cpp
def test_int8_linear_cpp_gives_the_same_bits_on_any_number_of_threads(cpp_threads):
    x, weight, bias, gradient = map(paddle.to_tensor, numbers((1543,), 96, 200))
    packed, results = quantize(weight, INT8), []
    for threads in (1, 2, 3):
        cpp_threads(threads)
        results.append([each.numpy() for each in run("cpp", x.clone(), packed, bias, gradient)])
    for other in results[1:]:
        assert all(np.array_equal(one, two) for one, two in zip(results[0], other, strict=True))


@needs_cpp
def test_int8_linear_cpp_reads_bfloat16():
    x, weight, bias, gradient = numbers((11,), 48, 40)
    halves = [bf16.as_bf16(paddle.to_tensor(each)) for each in (x, gradient)]
    packed = quantize(weight, INT8)
    actual = run("cpp", halves[0], packed, paddle.to_tensor(bias), halves[1])
    expected = formula(halves[0].astype("float32").numpy(), packed, bias, halves[1].astype("float32").numpy())
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == paddle.float32
        np.testing.assert_allclose(one.numpy(), other, rtol=5e-7, atol=5e-7 * np.abs(other).max())


@pytest.mark.parametrize("backend", [CPP, "reference"])
def test_int8_linear_error_of_a_product_is_about_one_percent(backend):
    x, weight, _, gradient = numbers((64,), 256, 128)
    packed = quantize(weight, INT8)
    actual = run(backend, paddle.to_tensor(x), packed, None, paddle.to_tensor(gradient))
    for one, exact in zip(actual, (x @ weight.T, gradient @ weight), strict=True):
        error = np.linalg.norm(one.numpy() - exact) / np.linalg.norm(exact)
        assert 0.003 < error < 0.02


@pytest.mark.parametrize("backend", [CPP, "reference"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 37])
def test_int8_linear_row_with_nan_or_infinity_gives_only_nan(backend, bad, column):
    x, weight, _, gradient = numbers((8,), 38, 38)
    x[2, column] = gradient[5, column] = bad
    y, x_gradient = run(backend, paddle.to_tensor(x), quantize(weight, INT8), None, paddle.to_tensor(gradient))
    assert np.isnan(y.numpy()).all(axis=1).tolist() == [row == 2 for row in range(8)]
    assert np.isnan(x_gradient.numpy()).all(axis=1).tolist() == [row == 5 for row in range(8)]
    assert np.isfinite(np.delete(y.numpy(), 2, 0)).all() and np.isfinite(np.delete(x_gradient.numpy(), 5, 0)).all()


@pytest.mark.parametrize("backend", [CPP, "reference"])
def test_int8_linear_zero_rows_and_tiny_rows_give_the_bias(backend):
    x, weight, bias, _ = numbers((4,), 24, 9)
    x[1], x[2] = 0, x[2] * 1e-39
    weight[3] = 0
    y = int8_linear_op.choose(paddle.to_tensor(x), backend)(
        paddle.to_tensor(x), quantize(weight, INT8), paddle.to_tensor(bias)
    ).numpy()
    assert np.array_equal(y[1], bias) and np.array_equal(y[2], bias)
    assert (y[:, 3] == bias[3]).all()


@pytest.mark.parametrize("backend", [CPP, "reference"])
def test_int8_linear_outlier_affects_only_its_block(backend):
    x, weight, _, gradient = numbers((6,), 300, 200)
    x[:, 130], weight[:, 130] = 1e4, 0
    y, _ = run(backend, paddle.to_tensor(x), quantize(weight, INT8), None, paddle.to_tensor(gradient))
    exact, beside_outlier = x @ weight.T, x[:, 128:256] @ weight[:, 128:256].T
    np.testing.assert_allclose(y.numpy(), exact - beside_outlier, atol=0.03 * np.abs(exact).max())


def test_int8_linear_without_rows_returns_no_rows():
    weight = quantize(normal(0, 5, 8), INT8)
    assert int8_linear(paddle.zeros([0, 8]), weight).shape == [0, 5]


@needs_cpp
def test_int8_linear_cpp_wrong_width_is_an_error():
    with pytest.raises(ValueError, match=r"x \[2, 7\] with a weight of shape \[5, 8\]"):
        int8_linear_cpp(paddle.zeros([2, 7]), quantize(normal(0, 5, 8), INT8))


@needs_cpp
def test_int8_linear_after_a_change_of_x_rounds_x_again():
    x, weight = paddle.to_tensor(normal(0, 3, 8)), quantize(normal(1, 5, 8), INT8)
    before = int8_linear(x, weight).numpy()
    x.scale_(2.0)
    np.testing.assert_allclose(int8_linear(x, weight).numpy(), 2 * before, rtol=1e-6)


def test_int8_linear_autograd_gives_only_the_input_gradient():
    x, weight, bias, gradient = numbers((2, 5), 12, 7)
    x, packed, bias = paddle.to_tensor(x, stop_gradient=False), quantize(weight, INT8), paddle.to_tensor(bias)
    y = int8_linear(x, packed, bias)
    y.backward(paddle.to_tensor(gradient))
    expected = formula(x.numpy(), packed, bias.numpy(), gradient)
    np.testing.assert_allclose(y.numpy(), expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(x.grad.numpy(), expected[1], rtol=1e-5, atol=1e-6 * np.abs(expected[1]).max())
    assert bias.grad is None
