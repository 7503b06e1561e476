"""LoRA linear against NumPy in float64, forward and backward, for every backend and both dtypes."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.cpp import bf16
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.frozen_linear import FrozenDense, FrozenQuantized
from paddlenlp_ext.ops.lora_linear import lora_linear
from paddlenlp_ext.ops.lora_linear.cpp import lora_linear_cpp
from paddlenlp_ext.ops.lora_linear.reference import lora_linear_reference
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.marks import needs_cpp

CPP = pytest.param(lora_linear_cpp, marks=needs_cpp)
SHAPES = [((1,), 3, 2, 1), ((3,), 17, 5, 4), ((9,), 64, 16, 8), ((7, 13), 101, 67, 5), ((2, 40), 24, 300, 33)]
SCALING = 0.75


def numbers(leading: tuple[int, ...], in_: int, out: int, rank: int) -> list[np.ndarray]:
    """Return x, W, bias, A, B and the gradient of y."""
    shapes = [(*leading, in_), (out, in_), (out,), (rank, in_), (out, rank), (*leading, out)]
    return [normal(seed, *shape) for seed, shape in enumerate(shapes)]


def reference(x, weight, bias, a, b, gradient) -> list[np.ndarray]:
    """Return y and the gradients of x, A and B, in float64."""
    x, weight, a, b, gradient = (array.astype(np.float64) for array in (x, weight, a, b, gradient))
    merged = weight + SCALING * b @ a
    rows, row_gradients = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    of_merged = row_gradients.T @ rows
    return [x @ merged.T + bias, gradient @ merged, SCALING * b.T @ of_merged, SCALING * of_merged @ a.T]


def on_frozen_base(implementation, weight: np.ndarray, bias: np.ndarray | None, dtype: str = "float32"):
    weight = paddle.to_tensor(weight).astype(dtype)
    base = FrozenDense(weight, None if bias is None else paddle.to_tensor(bias))
    return lambda x, a, b: implementation(x, base, a, b, SCALING)


@pytest.mark.parametrize("implementation", [lora_linear, CPP, lora_linear_reference])
@pytest.mark.parametrize(("leading", "in_", "out", "rank"), SHAPES)
def test_lora_linear_matches_the_formula(implementation, leading, in_, out, rank):
    x, weight, bias, a, b, gradient = numbers(leading, in_, out, rank)
    expected = reference(x, weight, bias, a, b, gradient)
    limit = 3e-6 * max(abs(each).max() for each in expected)
    actual = run_both_ways(on_frozen_base(implementation, weight, bias), [x, a, b], gradient)
    assert_all_close(actual, expected, atol=limit)
    expected[0] = expected[0] - bias
    assert_all_close(
        run_both_ways(on_frozen_base(implementation, weight, None), [x, a, b], gradient), expected, atol=limit
    )


@needs_cpp
@pytest.mark.parametrize(("leading", "in_", "out", "rank"), SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_lora_linear_cpp_in_bf16_is_within_rounding(leading, in_, out, rank, threads, stored, cpp_threads):
    """Test a base stored in bfloat16, and one in float32 under `bf16_matmuls`."""
    cpp_threads(threads)
    x, weight, bias, a, b, gradient = numbers(leading, in_, out, rank)
    run = on_frozen_base(lora_linear, weight, bias, stored)

    def rounded(*tensors):
        if stored == "bfloat16":
            return run(*tensors)
        with bf16.bf16_matmuls():
            return run(*tensors)

    actual = run_both_ways(rounded, [x, a, b], gradient)
    expected = reference(x, weight, bias, a, b, gradient)
    largest = reference(abs(x), abs(weight), 0 * bias, abs(a), abs(b), abs(gradient))
    for one, other, bound in zip(actual, expected, largest, strict=True):
        # At most four roundings by 2^-8 each in one chain: x, A, x A^T, B.
        assert (abs(one - other) <= 4.1 * 2.0**-8 * bound + 1e-5).all()
    assert all(each.dtype == np.float32 for each in actual)
    assert abs(actual[1] - expected[1]).max() > 1e-4 * abs(expected[1]).max(), "nothing was rounded"


@pytest.mark.parametrize("implementation", [CPP, lora_linear_reference])
@pytest.mark.parametrize("frozen", [[0], [1], [2], [1, 2], [0, 1], [0, 2]])
def test_lora_linear_with_frozen_inputs_returns_no_gradient_for_them(implementation, frozen):
    x, weight, bias, a, b, gradient = numbers((3, 5), 17, 6, 4)
    actual = run_both_ways(on_frozen_base(implementation, weight, bias), [x, a, b], gradient, frozen)
    expected = reference(x, weight, bias, a, b, gradient)
    expected = [None if place - 1 in frozen else each for place, each in enumerate(expected)]
    assert_all_close(actual, expected, atol=1e-4)


@needs_cpp
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 8, 17])
def test_lora_linear_cpp_returns_the_same_bits_with_and_without_gradients(stored, rows):
    """Otherwise, a layer that is recomputed in the backward pass would not give its first outputs."""
    x, weight, bias, a, b, _ = numbers((rows,), 65, 40, 4)
    run, tensors = (
        on_frozen_base(lora_linear_cpp, weight, bias, stored),
        [paddle.to_tensor(each) for each in (x, a, b)],
    )
    with paddle.no_grad():
        y = run(*tensors)
    tensors[1].stop_gradient = False
    np.testing.assert_array_equal(run(*tensors).numpy(), y.numpy())
    limit = 2.0**-6 if stored == "bfloat16" else 1e-6
    expected = reference(x, weight, bias, a, b, np.zeros([rows, 40]))[0]
    np.testing.assert_allclose(y.numpy(), expected, atol=limit * abs(expected).max())


@needs_cpp
def test_lora_linear_cpp_layers_with_same_x_share_its_bf16_copy():
    x, weight, bias, a, b, _ = numbers((12,), 64, 16, 4)
    x = paddle.to_tensor(x, stop_gradient=False)
    run = on_frozen_base(lora_linear_cpp, weight, bias, "bfloat16")
    run(x, paddle.to_tensor(a), paddle.to_tensor(b))
    copy = x._bf16_copy[1]
    run(x, paddle.to_tensor(a), paddle.to_tensor(b))
    assert x._bf16_copy[1] is copy


@pytest.mark.parametrize("implementation", [lora_linear, CPP, lora_linear_reference])
@pytest.mark.parametrize(("leading", "in_", "out", "rank"), SHAPES)
@pytest.mark.parametrize("algo", ["nf4", "weight_only_int8"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_lora_linear_over_quantized_base_matches_the_formula(implementation, leading, in_, out, rank, algo, with_bias):
    x, weight, bias, a, b, gradient = numbers(leading, in_, out, rank)
    bias = bias if with_bias else 0 * bias
    packed = quantize(weight, QuantizationConfig(algo=algo))
    base = FrozenQuantized(packed, paddle.to_tensor(bias) if with_bias else None)
    expected = reference(x, dequantize(packed).numpy(), bias, a, b, gradient)
    actual = run_both_ways(lambda x, a, b: implementation(x, base, a, b, SCALING), [x, a, b], gradient)
    assert_all_close(actual, expected, atol=3e-6 * max(abs(each).max() for each in expected))


@needs_cpp
@pytest.mark.parametrize(("leading", "in_", "out", "rank"), SHAPES)
def test_lora_linear_over_quantized_base_in_bf16_matches_dense_base(leading, in_, out, rank):
    x, weight, bias, a, b, gradient = numbers(leading, in_, out, rank)
    packed = quantize(weight, QuantizationConfig(algo="nf4"))
    bases = [FrozenQuantized(packed, paddle.to_tensor(bias)), FrozenDense(dequantize(packed), paddle.to_tensor(bias))]

    def rounded(base):
        def run(x, a, b):
            with bf16.bf16_matmuls():
                return lora_linear_cpp(x, base, a, b, SCALING)

        return run_both_ways(run, [x, a, b], gradient)

    actual, expected = (rounded(base) for base in bases)
    assert_all_close(actual, expected, atol=1e-5 * max(abs(each).max() for each in expected))


@needs_cpp
def test_lora_linear_cpp_with_mismatched_shapes_raises_value_error():
    x, weight, _, a, b, _ = map(paddle.to_tensor, numbers((20,), 17, 5, 4))
    base = FrozenDense(weight, None)
    with pytest.raises(ValueError, match=r"x \[20, 17\] with A \[4, 16\] and B \[5, 4\]"):
        lora_linear_cpp(x, base, a[:, 1:], b, SCALING)
    with pytest.raises(ValueError, match=r"A \[3, 17\] and B \[5, 4\]"):
        lora_linear_cpp(x, base, a[:3], b, SCALING)


@needs_cpp
@pytest.mark.parametrize("rows", [3, 20])
def test_lora_linear_cpp_casts_bf16_factors_to_float32(rows):
    x, weight, _, a, b, _ = map(paddle.to_tensor, numbers((rows,), 17, 5, 4))
    base, (a, b) = FrozenDense(weight, None), (each.astype("bfloat16") for each in (a, b))
    with paddle.no_grad():
        actual = lora_linear_cpp(x, base, a, b, SCALING)
    expected = lora_linear_reference(x, base, a.astype("float32"), b.astype("float32"), SCALING)
    np.testing.assert_allclose(actual.numpy(), expected.numpy(), atol=2e-5)


@needs_cpp
@pytest.mark.parametrize("in_bf16", [False, True])
def test_lora_linear_cpp_without_rows_returns_zero_gradients(in_bf16):
    x, weight, _, a, b, gradient = numbers((0,), 17, 5, 4)
    run = on_frozen_base(lora_linear_cpp, weight, None, "bfloat16" if in_bf16 else "float32")
    y, *gradients = run_both_ways(run, [x, a, b], gradient)
    assert y.shape == (0, 5)
    assert_all_close(gradients, [x, 0 * a, 0 * b], atol=0)
