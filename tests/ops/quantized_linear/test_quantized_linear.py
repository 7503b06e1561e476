"""Quantized linear layer against NumPy, forward and backward, and the arguments of Paddle's kernel."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import dequantize as dequantize_module
from paddlenlp_ext.ops.cpp import library
from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.dequantize.cpp import dequantize_rows_cpp
from paddlenlp_ext.ops.dequantize.plain_cpu import dequantize_rows_plain_cpu
from paddlenlp_ext.ops.dequantize.reference import dequantize_rows_reference
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.quantized_linear import (
    quantized_linear,
    quantized_linear_op,
    reference,
    takes_weight_only,
    weight_only,
)
from paddlenlp_ext.ops.quantized_linear.cpp import quantized_input_gradient_cpp, quantized_linear_cpp
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels, levels
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize
from paddlenlp_ext.quantization.shard_weight import slice_weight
from paddlenlp_ext.sharding_spec import Shard
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

FORMATS = [
    QuantizationConfig(algo="nf4"),
    QuantizationConfig(algo="nf4", double_quant=True, double_quant_block_size=4),
    QuantizationConfig(algo="fp4", block_size=34, double_quant=True),
    QuantizationConfig(algo="nf4_symmetric", block_size=32, double_quant=True),
    QuantizationConfig(algo="weight_only_int8"),
    QuantizationConfig(algo="weight_only_int8", double_quant=True),
    QuantizationConfig(algo="weight_only_int4"),
]
SHAPES = [(12, 33), (7, 64), (1, 5), (130, 20)]
by_format = pytest.mark.parametrize("options", FORMATS, ids=lambda o: f"{o.algo}{'-double' * o.double_quant}")
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def packed(shape: tuple[int, int], options: QuantizationConfig) -> QuantizedWeight:
    return quantize(np.random.default_rng(shape).standard_normal(shape).astype(np.float32), options)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference, "row_blocks", lambda weight: dequantize_module.row_blocks(weight, 100))


@by_format
@by_shape
def test_dequantize_backends_give_same_bits(shape: tuple[int, int], options: QuantizationConfig):
    weight = packed(shape, options)
    parts = list(dequantize_module.row_blocks(weight, 100))
    assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])]
    assert parts[-1][1] == shape[0]
    full = from_formula(weight)
    for backend in (dequantize_rows_plain_cpu, dequantize_rows_reference, dequantize):
        found = backend(weight) if backend is dequantize else paddle.concat([backend(weight, *part) for part in parts])
        assert np.array_equal(found.numpy(), full), backend.__name__


def from_formula(weight: QuantizedWeight) -> np.ndarray:
    """Dequantize to float32 [out, in], one weight at a time."""
    out, width = weight.shape
    number = np.arange(out * width)
    codes, block = weight.codes.numpy(), number // weight.block_size
    if weight.algo == "weight_only_int8":
        values = codes.astype(np.float32)
    else:
        values = levels(weight.algo)[np.where(number % 2, codes[number // 2] & 15, codes[number // 2] >> 4)]
    scales = weight.scales.numpy()
    if weight.group_scales is not None:
        groups = weight.group_scales.numpy()[np.arange(len(scales)) // weight.group_size]
        scales = dynamic_levels()[scales] * groups + weight.offset.numpy()
    return (values * scales[block]).reshape(out, width)


@needs_cpp
@by_format
@by_shape
@pytest.mark.parametrize("threads", [1, 2])
def test_dequantize_rows_cpp_accepts_any_rows(
    shape: tuple[int, int], options: QuantizationConfig, threads: int, cpp_threads
):
    """Dequantize rows that start inside a block or a byte; bfloat16 results are the rounded float32 ones."""
    cpp_threads(threads)
    weight = packed(shape, options)
    full = from_formula(weight)
    for first, last in [(0, shape[0]), (shape[0] // 2, shape[0]), (shape[0] // 3, shape[0] // 3 + 1)]:
        assert np.array_equal(dequantize_rows_cpp(weight, first, last).numpy(), full[first:last])
        rounded = dequantize_rows_cpp(weight, first, last, paddle.bfloat16).astype("float32").numpy()
        assert np.array_equal(rounded, paddle.to_tensor(full[first:last]).astype("bfloat16").astype("float32").numpy())


@needs_cpp
@by_format
@pytest.mark.parametrize("shape", [*SHAPES, (700, 601)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 9, 64, 200])
def test_quantized_linear_cpp_matches_the_formula(shape: tuple[int, int], options: QuantizationConfig, rows: int):
    weight = packed(shape, options)
    plain = from_formula(weight).astype(np.float64)
    x, gradient = normal(1, rows, shape[1]), normal(2, rows, shape[0])
    limit = 3e-6 * np.abs(plain).max() * shape[1] ** 0.5
    y = quantized_linear_cpp(paddle.to_tensor(x), weight).numpy()
    np.testing.assert_allclose(y, x @ plain.T, rtol=0, atol=3 * limit)
    of_x = quantized_input_gradient_cpp(paddle.to_tensor(gradient), weight).numpy()
    np.testing.assert_allclose(of_x, gradient @ plain, rtol=0, atol=3 * limit * (shape[0] / shape[1] + 1) ** 0.5)


@needs_cpp
@pytest.mark.parametrize("rows", [3, 30])
def test_quantized_linear_cpp_with_mismatched_width_raises_value_error(rows: int):
    weight = packed((7, 64), FORMATS[0])
    with pytest.raises(ValueError, match=rf"x \[{rows}, 32\] with a weight of shape \[7, 64\]"):
        quantized_linear_cpp(paddle.to_tensor(normal(1, rows, 32)), weight)


@needs_cpp
@by_format
@pytest.mark.parametrize("in_context", [True, False], ids=["bf16_matmuls", "bfloat16 weight"])
def test_quantized_linear_cpp_in_bf16_rounds_its_inputs(options: QuantizationConfig, in_context: bool):
    weight = packed((130, 65), options)
    if not in_context:
        weight = dataclasses.replace(weight, dtype=paddle.bfloat16)
    x = paddle.to_tensor(normal(1, 3, 12, 65), stop_gradient=False)
    gradient = normal(2, 3, 12, 130)
    with bf16_matmuls() if in_context else nullcontext():
        y = quantized_linear(x, weight)
    y.backward(paddle.to_tensor(gradient))
    assert y.dtype == x.grad.dtype == paddle.float32

    def rounded(values: np.ndarray) -> np.ndarray:
        return paddle.to_tensor(values).astype("bfloat16").astype("float32").numpy().astype(np.float64)

    plain = rounded(from_formula(weight))
    np.testing.assert_allclose(y.numpy(), rounded(x.numpy()) @ plain.T, rtol=0, atol=1e-4)
    np.testing.assert_allclose(x.grad.numpy(), rounded(gradient) @ plain, rtol=0, atol=1e-4)


@pytest.fixture(params=["cpp", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the backend of `quantized_linear`."""
    if request.param == "cpp" and library.unavailable_reason() is not None:
        pytest.skip(f"C++ library unavailable: {library.unavailable_reason()}")
    choose = DispatchedOp.choose
    monkeypatch.setattr(DispatchedOp, "choose", lambda op, x: choose(op, x, request.param))
    return request.param


@by_format
@by_shape
def test_quantized_linear_matches_the_dequantized_weight(
    shape: tuple[int, int], options: QuantizationConfig, small_blocks: None, backend: str
):
    weight = packed(shape, options)
    generator = np.random.default_rng(0)
    x = paddle.to_tensor(generator.standard_normal((2, 3, shape[1])).astype(np.float32), stop_gradient=False)
    gradient = generator.standard_normal((2, 3, shape[0])).astype(np.float32)
    y = quantized_linear(x, weight)
    (y * paddle.to_tensor(gradient)).sum().backward()
    plain = from_formula(weight).astype(np.float64)
    np.testing.assert_allclose(y.numpy(), x.numpy() @ plain.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x.grad.numpy(), gradient @ plain, rtol=1e-5, atol=1e-5)


def test_input_gradient_reference_in_half_precision_sums_in_float32(monkeypatch: pytest.MonkeyPatch):
    """Emulate GPU matmuls, which return the dtype of their inputs."""

    def rounded(values: paddle.Tensor) -> paddle.Tensor:
        return values.astype("bfloat16")

    def product(x: paddle.Tensor, y: paddle.Tensor) -> paddle.Tensor:
        return rounded(multiply(x.astype("float32"), y.astype("float32")))

    multiply, weight = paddle.matmul, packed((600, 32), FORMATS[0])
    gradient = rounded(paddle.to_tensor(normal(2, 9, 600)))
    plain = rounded(dequantize(weight)).astype("float32").numpy().astype(np.float64)
    expected = gradient.astype("float32").numpy() @ plain
    monkeypatch.setattr(paddle, "matmul", product)
    monkeypatch.setattr(reference, "row_blocks", lambda weight: dequantize_module.row_blocks(weight, 300))
    found = reference.quantized_input_gradient_reference(gradient, weight)
    assert found.dtype == paddle.float32
    assert np.linalg.norm(found.numpy() - expected) < 2.0**-8 * np.linalg.norm(expected)


def test_row_blocks_on_gpu_cover_a_layer_at_once():
    def weight(is_gpu: bool) -> SimpleNamespace:
        place = SimpleNamespace(is_cpu_place=lambda: not is_gpu)
        return SimpleNamespace(shape=(14336, 4096), block_size=64, codes=SimpleNamespace(place=place))

    assert list(dequantize_module.row_blocks(weight(True))) == [(0, 14336)]
    assert len(list(dequantize_module.row_blocks(weight(False)))) == 56


def test_quantized_linear_with_frozen_input_returns_no_gradient(backend: str):
    weight = packed((7, 64), FORMATS[0])
    x, scale = paddle.ones([2, 64]), paddle.ones([1])
    scale.stop_gradient = False
    (quantized_linear(x, weight) * scale).sum().backward()
    assert scale.grad is not None and x.grad is None


def test_quantized_linear_reference_never_holds_the_full_weight(monkeypatch: pytest.MonkeyPatch, small_blocks: None):
    largest = []
    rows = dequantize_module.dequantize_rows

    def watched(weight: QuantizedWeight, first: int, last: int, dtype: paddle.dtype) -> paddle.Tensor:
        largest.append((last - first) * weight.shape[1])
        return rows(weight, first, last, dtype)

    monkeypatch.setattr(reference, "dequantize_rows", watched)
    weight = packed((40, 64), FORMATS[0])
    reference.quantized_linear_reference(paddle.ones([3, 64]), weight)
    reference.quantized_input_gradient_reference(paddle.ones([3, 40]), weight)
    assert len(largest) == 2 * 40
    assert max(largest) == 64


def test_linear_op_exists_for_every_algo():
    x = paddle.ones([1])
    for options in FORMATS:
        assert quantized_linear_op(options.algo).choose(x, "reference") is reference.quantized_linear_reference
        if library.unavailable_reason() is None:
            assert quantized_linear_op(options.algo).choose(x) is quantized_linear_cpp
    with pytest.raises(ValueError, match="'weight_only' was requested, but the backend needs a GPU"):
        quantized_linear_op("weight_only_int8").choose(x, "weight_only")


# -- Paddle's kernel, which runs on GPUs only ----------------------------------------------
@pytest.mark.parametrize(
    ("options", "group"),
    [
        (QuantizationConfig(algo="weight_only_int8"), -1),
        (QuantizationConfig(algo="weight_only_int8", double_quant=True), -1),
        (QuantizationConfig(algo="weight_only_int4"), -1),
        (QuantizationConfig(algo="weight_only_int4", group_size=64), 64),
    ],
)
def test_weight_only_linear_passes_our_codes_and_scales(
    monkeypatch: pytest.MonkeyPatch, options: QuantizationConfig, group: int
):
    calls: list[dict[str, Any]] = []
    paddles_quantize = paddle.nn.quant.weight_quantize

    def on_a_gpu(x: paddle.Tensor, algo: str, group_size: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        codes, scales = paddles_quantize(x, algo=algo, arch=80, group_size=group_size)
        np.testing.assert_allclose(scales.astype("float32").numpy(), 1.0, rtol=1e-3)
        return codes, scales

    def kernel(x: paddle.Tensor, **arguments: Any) -> paddle.Tensor:
        calls.append(arguments)
        return paddle.zeros([x.shape[0], 64], x.dtype)

    monkeypatch.setattr(weight_only.quant, "weight_quantize", on_a_gpu)
    monkeypatch.setattr(weight_only.quant, "weight_only_linear", kernel)
    weight = packed((64, 128), options)
    for _ in range(2):
        weight_only.weight_only_linear(paddle.ones([3, 128], "float16"), weight)
    first, second = calls
    assert first["weight"] is second["weight"]
    assert first["weight_dtype"] == options.algo.removeprefix("weight_only_")
    assert first["group_size"] == group
    assert first["weight_scale"].dtype == paddle.float16
    assert first["weight_scale"].shape == ([64] if group < 0 else [2, 64])
    found, expected = first["weight"].numpy().view(np.uint8), weight.codes.numpy().view(np.uint8)
    if options.algo == "weight_only_int8":  # the kernel has its own order of codes, with an offset of 128
        assert np.array_equal(np.sort(found.reshape(-1) ^ 0x80), np.sort(expected))
    else:
        uses_bf16 = [np.sort(np.concatenate([a.reshape(-1) >> 4, a.reshape(-1) & 15])) for a in (found, expected)]
        assert np.array_equal(*uses_bf16)


def test_takes_weight_only_if_it_is_chosen_and_supports_the_weight(monkeypatch: pytest.MonkeyPatch):
    x, full, odd = paddle.ones([1, 64]), *(packed((rows, 64), FORMATS[4]) for rows in (64, 24))
    assert not takes_weight_only(x, full)
    monkeypatch.setattr(
        quantized_linear_op("weight_only_int8"), "choose", lambda x: weight_only.quantized_linear_weight_only
    )
    assert takes_weight_only(x, full) and not takes_weight_only(x, odd)


@pytest.mark.parametrize("algo", ["weight_only_int8", "weight_only_int4"])
def test_weight_only_linear_with_unsupported_weight_uses_reference(monkeypatch: pytest.MonkeyPatch, algo: str):
    """Test unsupported sizes, and shards whose largest code is below the format's maximum."""

    def kernel(x: paddle.Tensor, weight: QuantizedWeight) -> paddle.Tensor:
        raise AssertionError("given to the kernel")

    monkeypatch.setattr(weight_only, "weight_only_linear", kernel)
    full = packed((64, 256), QuantizationConfig(algo=algo))
    assert weight_only.fits_kernel(full)
    part = slice_weight(full, Shard(axis=1, start=128, stop=256, size=256))
    groups_of_32 = [packed((64, 128), QuantizationConfig(algo=algo, group_size=32))] if algo.endswith("4") else []
    for weight in (
        part,
        packed((64, 48), QuantizationConfig(algo=algo)),
        packed((24, 64), QuantizationConfig(algo=algo)),
        *groups_of_32,
    ):
        x = paddle.to_tensor(normal(1, 3, weight.shape[1]))
        expected = x.numpy() @ from_formula(weight).T
        np.testing.assert_allclose(weight_only.quantized_linear_weight_only(x, weight).numpy(), expected, atol=1e-4)
    assert weight_only.fits_kernel(slice_weight(full, Shard(axis=0, start=16, stop=32, size=64)))
    zeros = quantize(np.zeros((64, 128), np.float32), QuantizationConfig(algo=algo))
    assert weight_only.fits_kernel(zeros)
    with pytest.raises(AssertionError, match="given to the kernel"):
        weight_only.quantized_linear_weight_only(paddle.ones([1, 256]), full)
