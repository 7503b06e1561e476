"""Triton kernels of the LoRA linear for many positions in the interpreter, against NumPy in double precision."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import lora_linear as op
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.frozen_linear import FrozenDense, FrozenQuantized
from paddlenlp_ext.ops.lora_linear import triton as module
from paddlenlp_ext.ops.lora_linear.triton import lora_linear_triton
from paddlenlp_ext.ops.recompute_functions import with_recompute_function
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.ops.interpreter import Launch, Recorder, interpreted, skip_without_triton
from tests.ops.lora_linear.test_lora_linear import SCALING, numbers, on_frozen_base, reference

skip_without_triton()

SHAPES = [((1,), 3, 2, 1), ((33,), 17, 5, 4), ((7, 13), 101, 67, 20), ((2, 20), 24, 90, 32), ((9,), 40, 50, 33)]
SIZES = {
    "ADD_SIZES": {"ROWS": 32, "COLUMNS": 64, "num_warps": 1},
    "GRADIENT_SIZES": {"ROWS": 16, "COLUMNS": 32, "PROGRAMS": 8, "num_warps": 1, "num_stages": 1},
}


@pytest.fixture(scope="module")
def kernels():
    with interpreted("paddlenlp_ext.ops.lora_linear.kernels") as kernels:
        yield kernels


@pytest.fixture
def launched(kernels, monkeypatch):
    """Use the kernels on the CPU for any number of positions, with small tiles."""
    launches = Recorder()
    for name, sizes in SIZES.items():
        monkeypatch.setattr(getattr(kernels, name), "fixed", sizes)
    monkeypatch.setattr(kernels, "_TERMS", 16)
    monkeypatch.setattr(module, "launch", launches)
    monkeypatch.setattr(module, "SMALLEST_BATCH", 1)
    monkeypatch.setattr(module, "MOST_POSITIONS", 0)
    return launches


@pytest.mark.parametrize(("leading", "in_", "out", "rank"), SHAPES)
def test_lora_linear_triton_matches_the_formula(launched, leading, in_, out, rank):
    x, weight, bias, a, b, gradient = numbers(leading, in_, out, rank)
    expected = reference(x, weight, bias, a, b, gradient)
    limit = 3e-6 * max(abs(each).max() for each in expected)
    actual = run_both_ways(on_frozen_base(lora_linear_triton, weight, bias), [x, a, b], gradient)
    assert_all_close(actual, expected, atol=limit)
    add, shared = "add_low_rank_kernel", ["low_rank_gradients_kernel"]
    assert launched.names == [add, *(shared if rank <= 32 else []), add]


def test_lora_linear_triton_launches_grids_that_cover_the_matrices(launched):
    (rows, in_, out, rank), tile = (91, 101, 67, 20), 32
    x, weight, bias, a, b, gradient = numbers((7, 13), in_, out, rank)
    run_both_ways(on_frozen_base(lora_linear_triton, weight, bias), [x, a, b], gradient)
    forward, gradients, backward = launched
    assert forward.grid == (math.ceil(out / 64), math.ceil(rows / 32))
    sizes = {"scaling": SCALING, "num_rows": rows, "num_columns": out, "rank": rank}
    assert_has(forward, {**sizes, "rank_stride": 1, "column_stride": rank})
    assert backward.grid == (math.ceil(in_ / 64), math.ceil(rows / 32))
    assert_has(backward, {**sizes, "scaling": 1.0, "num_columns": in_, "rank_stride": in_, "column_stride": 1})
    assert gradients.grid == (3, 3)  # 8 programs to aim at, over 3 columns
    del sizes["scaling"]
    assert_has(gradients, {**sizes, "span": 32, "ROWS": 16, "COLUMNS": 32, "RANK": tile})
    parts = [gradients.arguments[name].shape for name in ("row_parts", "column_parts")]
    assert parts == [[3, rows, rank], [3, out, rank]]


def assert_has(launch: Launch, arguments: dict) -> None:
    """Assert that a launch has these arguments, among others."""
    assert {name: launch.arguments[name] for name in arguments} == arguments


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_lora_linear_triton_with_frozen_inputs_returns_no_gradient_for_them(launched, frozen):
    x, weight, _, a, b, gradient = numbers((18,), 17, 5, 4)
    expected = reference(x, weight, np.zeros(5), a, b, gradient)
    actual = run_both_ways(on_frozen_base(lora_linear_triton, weight, None), [x, a, b], gradient, frozen)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert (one is None) == (index - 1 in frozen)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("algo", ["nf4", "weight_only_int8"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_lora_linear_triton_over_quantized_base_matches_the_formula(launched, algo, with_bias):
    x, weight, bias, a, b, gradient = numbers((3, 9), 64, 20, 4)
    packed = quantize(weight, QuantizationConfig(algo=algo))
    base = FrozenQuantized(packed, paddle.to_tensor(bias) if with_bias else None)
    expected = reference(x, dequantize(packed).numpy(), bias if with_bias else 0 * bias, a, b, gradient)
    actual = run_both_ways(lambda *own: lora_linear_triton(own[0], base, *own[1:], SCALING), [x, a, b], gradient)
    assert_all_close(actual, expected, atol=1e-4)


def test_lora_linear_triton_gives_the_same_bits_again(launched):
    x, weight, _, a, b, gradient = numbers((60,), 33, 130, 8)
    run = on_frozen_base(lora_linear_triton, weight, None)
    for one, other in zip(*(run_both_ways(run, [x, a, b], gradient) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_lora_linear_triton_saves_a_recompute_function_instead_of_x(launched):
    x, weight, _, a, b, gradient = numbers((18,), 17, 5, 4)
    calls = []

    def with_function(x, a, b):
        x = with_recompute_function(x, lambda: calls.append(1) or x)
        return on_frozen_base(lora_linear_triton, weight, None)(x, a, b)

    actual = run_both_ways(with_function, [x, a, b], gradient)
    np.testing.assert_allclose(actual[2], reference(x, weight, np.zeros(5), a, b, gradient)[2], atol=1e-4)
    assert calls == [1]


def test_lora_linear_triton_without_gradients_returns_same_values(launched):
    x, weight, bias, a, b, gradient = numbers((18,), 17, 5, 4)
    with paddle.no_grad():
        y = on_frozen_base(lora_linear_triton, weight, bias)(*map(paddle.to_tensor, (x, a, b)))
    np.testing.assert_allclose(y.numpy(), reference(x, weight, bias, a, b, gradient)[0], atol=1e-4)


def test_lora_linear_triton_of_few_positions_launches_nothing(launched, monkeypatch):
    monkeypatch.setattr(module, "SMALLEST_BATCH", 19)
    x, weight, bias, a, b, gradient = numbers((18,), 17, 5, 4)
    actual = run_both_ways(on_frozen_base(lora_linear_triton, weight, bias), [x, a, b], gradient)
    assert_all_close(actual, reference(x, weight, bias, a, b, gradient), atol=1e-4)
    assert not launched


def test_add_low_rank_in_half_precision_rounds_once(launched):
    """Add 16 products of 1/32 to 2048, which float16 would lose one by one."""
    y, ones = paddle.full([3, 5], 2048.0, "float16"), paddle.ones([3, 16], "float16")
    module.add_low_rank_(y, ones, paddle.full([5, 16], 1 / 4, "float16"), 0.5, (1, 16))
    assert (y.numpy() == 2050).all()


def test_frozen_linear_input_gradient_keeps_the_dtype_of_the_gradient():
    weight = paddle.to_tensor(normal(1, 8, 64))
    packed = quantize(weight.numpy(), QuantizationConfig(algo="nf4"))
    gradient = paddle.to_tensor(normal(2, 3, 8))
    for base, full in ((FrozenDense(weight, None), weight), (FrozenQuantized(packed, None), dequantize(packed))):
        found = base.input_gradient(gradient)
        assert found.dtype == paddle.float32
        np.testing.assert_allclose(found.numpy(), (gradient @ full).numpy(), atol=1e-5)


def test_lora_linear_with_triton_on_cpu_raises_value_error():
    with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
        op.lora_linear_op.choose(paddle.ones([1, 4]), "triton")
