"""Triton kernel of norm and linear layers in the interpreter, against NumPy in double precision."""

from __future__ import annotations

import dataclasses

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.frozen_linear import FrozenDense, FrozenQuantized
from paddlenlp_ext.ops.norm_linear import norm_linear_op
from paddlenlp_ext.ops.norm_linear import triton as module
from paddlenlp_ext.ops.norm_linear.triton import norm_linear_triton
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize
from tests.common.arrays import assert_all_close, normal
from tests.common.gpu import pretend_autocast
from tests.ops.interpreter import Recorder, bfloat16_products, interpreted, skip_without_triton

skip_without_triton()

EPSILON = 1e-3
FORMATS = {
    "dense": None,
    "nf4": QuantizationConfig(algo="nf4"),
    "fp4 in small blocks, nested": QuantizationConfig(
        algo="fp4", block_size=8, double_quant=True, double_quant_block_size=6
    ),
    "nf4 in large blocks, nested": QuantizationConfig(algo="nf4", block_size=128, double_quant=True),
    "int8": QuantizationConfig(algo="weight_only_int8"),
    "int8, nested": QuantizationConfig(algo="weight_only_int8", double_quant=True, double_quant_block_size=6),
    "int4": QuantizationConfig(algo="weight_only_int4"),
    "int4 in groups": QuantizationConfig(algo="weight_only_int4", group_size=32),
}
CASES = [  # leading axes, inputs, outputs of the layers
    ((1,), 128, (1,)),
    ((2, 1), 384, (20, 7)),
    ((3,), 640, (33, 5, 16)),
    ((8, 1), 128, (16, 17, 31)),
    ((4, 4), 1152, (40, 3)),
]
ROWS_OF_ANY_LENGTH = {
    "dense": None,
    "nf4": QuantizationConfig(algo="nf4", block_size=2),
    "int8": QuantizationConfig(algo="weight_only_int8"),
    "int4": QuantizationConfig(algo="weight_only_int4"),
}


@pytest.fixture(scope="module")
def kernels():
    with interpreted("paddlenlp_ext.ops.norm_linear.kernels") as kernels:
        yield kernels


@pytest.fixture
def launched(kernels, monkeypatch):
    """Run the launches in the interpreter; return them."""
    launches = Recorder()
    monkeypatch.setattr(module, "launch", launches)
    with bfloat16_products():
        yield launches


def linears_of(options: QuantizationConfig | None, inputs: int, outputs: tuple[int, ...], has_bias: bool) -> list:
    """Return linear layers with random weights."""
    found = []
    for seed, out in enumerate(outputs):
        bias = paddle.to_tensor(normal(100 + seed, out)) if has_bias else None
        weight = normal(200 + seed, out, inputs)
        dense = FrozenDense(paddle.to_tensor(weight), bias)
        found.append(dense if options is None else FrozenQuantized(quantize(weight, options), bias))
    return found


def matrix(linear: FrozenDense | FrozenQuantized) -> np.ndarray:
    """Return the weight of a layer in float64."""
    weight = linear.weight if isinstance(linear, FrozenDense) else dequantize(linear.weight)
    return weight.astype("float32").numpy().astype(np.float64)


def formula(total: np.ndarray, linears: list, scale: np.ndarray, offset: float) -> list[np.ndarray]:
    """Return the outputs of each layer for a sum [..., I], in float64."""
    total = total.astype(np.float64)
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + EPSILON) * (scale.astype(np.float64) + offset)
    biases = [0.0 if linear.bias is None else linear.bias.numpy() for linear in linears]
    return [normed @ matrix(linear).T + bias for linear, bias in zip(linears, biases, strict=True)]


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_norm_linear_triton_matches_the_formula(launched, case, options):
    check(launched, options, *case)


@pytest.mark.parametrize("options", ROWS_OF_ANY_LENGTH.values(), ids=ROWS_OF_ANY_LENGTH)
@pytest.mark.parametrize("case", [((5,), 70, (9, 5)), ((1, 2), 538, (6,)), ((2,), 22, (3,))], ids=str)
def test_norm_linear_triton_with_rows_of_any_length_matches_the_formula(launched, case, options):
    check(launched, options, *case)


def check(launched: Recorder, options: QuantizationConfig | None, leading, inputs: int, outputs) -> None:
    """Compare one launch with the formula, with a sum and biases if the number of outputs is even."""
    adds = has_bias = sum(outputs) % 2 == 0
    linears = linears_of(options, inputs, outputs, has_bias)
    x, addend, scale = 3 * normal(1, *leading, inputs), normal(2, *leading, inputs), normal(3, inputs)
    arrays = [paddle.to_tensor(x), linears, paddle.to_tensor(scale), EPSILON, 1.0]
    total, ys = norm_linear_triton(*arrays, paddle.to_tensor(addend) if adds else None)
    expected_total = x + addend if adds else x
    np.testing.assert_array_equal(total.numpy(), expected_total)
    expected = formula(expected_total, linears, scale, 1.0)
    assert_all_close([y.numpy() for y in ys], expected, atol=2e-6 * max(abs(each).max() for each in expected))
    assert launched.names == ["norm_linear_kernel"]


def test_norm_linear_triton_launches_programs_for_the_outputs_of_each_layer(launched):
    x, scale = paddle.ones([9, 100]), paddle.ones([100])
    linears = linears_of(None, 100, (33, 32, 1), has_bias=False)
    norm_linear_triton(x, linears, scale, EPSILON)
    norm_linear_triton(x[:8], linears[:2], scale, EPSILON)
    assert [launch.grid for launch in launched] == [(3 + 2 + 1,), (3 + 2,)]
    many, few = (launch.arguments for launch in launched)
    assert [many[name] for name in ("outputs0", "outputs1", "outputs2", "num_positions")] == [33, 32, 1, 9]
    assert [few[name] for name in ("outputs0", "outputs1", "outputs2", "num_positions")] == [33, 32, None, 8]
    sizes = {"OUTPUTS": 16, "WAYS": 2, "SPAN": 64, "POSITIONS": 16, "num_warps": 2, "num_stages": 1}
    assert {name: many[name] for name in sizes} == sizes
    assert few["y1"].shape == [8, 32]


@pytest.mark.parametrize("algo", [None, "nf4"])
@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2.0**-9), ("bfloat16", 2.0**-6)])
def test_norm_linear_triton_in_half_precision_is_within_rounding(launched, dtype, rounding, algo):
    """Use numbers whose squares and products with the scale float16 cannot store, but the results can."""
    x, scale = (paddle.to_tensor(each).astype(dtype) for each in (4000 * normal(1, 3, 64), 40 + normal(2, 64)))
    options = None if algo is None else QuantizationConfig(algo=algo)
    linears = linears_of(options, 64, (20, 6), has_bias=False)
    if options is None:
        linears = [FrozenDense(linear.weight.astype(dtype), None) for linear in linears]
    _, ys = norm_linear_triton(x, linears, scale, EPSILON)
    full = [FrozenDense(paddle.to_tensor(matrix(each).astype(np.float32)), None) for each in linears]
    expected = formula(x.astype("float32").numpy(), full, scale.astype("float32").numpy(), 0.0)
    for y, correct in zip(ys, expected, strict=True):
        assert y.dtype == x.dtype
        np.testing.assert_allclose(y.astype("float32").numpy(), correct, rtol=0, atol=rounding * abs(correct).max())
    assert len(launched) == 1


def test_norm_linear_triton_in_bfloat16_normalizes_the_rounded_sum(launched):
    x, addend = (paddle.to_tensor(normal(seed, 5, 64)).astype("bfloat16") for seed in (1, 2))
    linears = linears_of(QuantizationConfig(algo="nf4"), 64, (20,), has_bias=False)
    total, ys = norm_linear_triton(x, linears, paddle.ones([64]), EPSILON, 0.0, addend)
    _, again = norm_linear_triton(total, linears, paddle.ones([64]), EPSILON)
    np.testing.assert_array_equal(ys[0].astype("float32").numpy(), again[0].astype("float32").numpy())


def in_reverse(linear: FrozenQuantized) -> FrozenQuantized:
    """Return the layer whose columns are stored in the opposite order."""
    order = paddle.arange(linear.weight.shape[1] - 1, -1, -1, dtype="int32")
    return FrozenQuantized(dataclasses.replace(linear.weight, order=order), linear.bias)


NF4 = QuantizationConfig(algo="nf4")
UNSUPPORTED = {
    "17 positions": lambda: (paddle.ones([17, 64]), linears_of(NF4, 64, (8, 5), False)),
    "two formats": lambda: (
        paddle.ones([1, 64]),
        linears_of(NF4, 64, (8,), False) + linears_of(None, 64, (8,), False),
    ),
    "four layers": lambda: (paddle.ones([1, 64]), linears_of(None, 64, (8, 8, 8, 8), False)),
    "a bias for one of two layers": lambda: (
        paddle.ones([1, 64]),
        linears_of(None, 64, (8,), False) + linears_of(None, 64, (8,), True),
    ),
    "a block in two rows": lambda: (paddle.ones([1, 96]), linears_of(NF4, 96, (8,), False)),
    "blocks of 6": lambda: (
        paddle.ones([1, 24]),
        linears_of(QuantizationConfig(algo="nf4", block_size=6), 24, (8,), False),
    ),
    "columns in another order": lambda: (paddle.ones([1, 64]), [in_reverse(linears_of(NF4, 64, (8,), False)[0])]),
    "a byte in two rows": lambda: (
        paddle.ones([1, 33]),
        linears_of(QuantizationConfig(algo="weight_only_int4"), 33, (8,), False),
    ),
}


@pytest.mark.parametrize("make", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_norm_linear_triton_with_unsupported_arguments_uses_the_reference(launched, make):
    x, linears = make()
    scale = normal(3, x.shape[-1])
    total, ys = norm_linear_triton(x, linears, paddle.to_tensor(scale), EPSILON)
    assert total is x
    expected = formula(x.numpy(), linears, scale, 0.0)
    assert_all_close([y.numpy() for y in ys], expected, atol=1e-5 * max(abs(each).max() for each in expected))
    assert not launched


def test_norm_linear_triton_where_a_gradient_is_needed_uses_the_reference(launched):
    x, scale, linears = paddle.ones([1, 64]), paddle.ones([64]), linears_of(None, 64, (8,), has_bias=True)
    for needed in (x, scale, linears[0].weight, linears[0].bias):
        needed.stop_gradient = False
        norm_linear_triton(x, linears, scale, EPSILON)[1][0].sum().backward()
        assert needed.grad is not None
        assert not launched
        needed.stop_gradient = True
    scale.stop_gradient = False
    with paddle.no_grad():
        norm_linear_triton(x, linears, scale, EPSILON)
    assert len(launched) == 1


def test_norm_linear_triton_under_autocast_uses_the_reference(launched, monkeypatch):
    x, linears = paddle.ones([1, 64]), linears_of(None, 64, (8,), has_bias=False)
    pretend_autocast(monkeypatch)
    norm_linear_triton(x, linears, paddle.ones([64]), EPSILON)
    assert not launched


def test_norm_linear_triton_copies_strided_rows(launched):
    x, addend = normal(1, 3, 90), normal(2, 64, 3)
    linears = linears_of(None, 64, (8,), has_bias=False)
    arguments = paddle.ones([64]), EPSILON, 0.0, paddle.to_tensor(addend).T
    total, ys = norm_linear_triton(paddle.to_tensor(x)[:, 7:71], linears, *arguments)
    np.testing.assert_array_equal(total.numpy(), x[:, 7:71] + addend.T)
    expected = formula(total.numpy(), linears, np.ones(64), 0.0)
    np.testing.assert_allclose(ys[0].numpy(), expected[0], rtol=0, atol=1e-4)
    assert len(launched) == 1


def test_norm_linear_with_triton_on_cpu_raises_value_error():
    with pytest.raises(ValueError, match="'triton' was requested, but the backend needs a GPU"):
        norm_linear_op.choose(paddle.ones([1, 4]), "triton")
