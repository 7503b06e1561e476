"""Integer weights with zero points and columns in another order, against the formula in NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls
from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.dispatch import DispatchedOp
from paddlenlp_ext.ops.quantized_grouped_linear import quantized_grouped_linear
from paddlenlp_ext.ops.quantized_linear import quantized_linear
from paddlenlp_ext.ops.quantized_linear.triton import supports_product
from paddlenlp_ext.ops.quantized_linear.weight_only import fits_kernel
from paddlenlp_ext.ops.quantized_weight import QuantizedWeight, stack_weights
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize
from paddlenlp_ext.quantization.shard_weight import slice_weight
from paddlenlp_ext.sharding_spec import Shard
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

OUT, IN, GROUP = 7, 24, 6
FORMATS = [
    QuantizationConfig(algo="weight_only_int8"),
    QuantizationConfig(algo="weight_only_int4", group_size=GROUP),
]
BACKENDS = [pytest.param("cpp", marks=needs_cpp), "reference"]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    choose = DispatchedOp.choose
    monkeypatch.setattr(DispatchedOp, "choose", lambda op, x: choose(op, x, request.param))


def make(seed: int, options: QuantizationConfig, zeros: bool, order: bool) -> tuple[QuantizedWeight, np.ndarray]:
    """Return a quantized weight [OUT, IN], and the weight by the formula."""
    rng, plain = np.random.default_rng(seed), quantize(normal(seed, OUT, IN), options)
    scales = plain.scales.numpy().reshape(OUT, -1)
    zeros_OG = rng.integers(-8, 9, scales.shape).astype(np.int16) * zeros
    order_I = rng.permutation(IN).astype(np.int32) if order else np.arange(IN)
    block = plain.block_size
    expected = np.empty((OUT, IN), np.float32)
    expected[:, order_I] = dequantize(plain).numpy() - (zeros_OG * scales).repeat(block, axis=1)
    weight = dataclasses.replace(
        plain,
        zeros=paddle.to_tensor(zeros_OG.reshape(-1)) if zeros else None,
        order=paddle.to_tensor(order_I) if order else None,
        kernel_cache={},
    )
    return weight, expected


@pytest.mark.parametrize("options", FORMATS, ids=lambda options: options.algo)
@pytest.mark.parametrize(("zeros", "order"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("rows", [1, 40])
def test_quantized_linear_with_zero_points_matches_the_formula(backend, options, zeros, order, rows):
    weight, expected = make(0, options, zeros, order)
    np.testing.assert_allclose(dequantize(weight).numpy(), expected, atol=1e-5)
    assert not fits_kernel(weight)
    assert not supports_product(weight)
    x, gradient = normal(1, rows, IN), normal(2, rows, OUT)
    operand = paddle.to_tensor(x, stop_gradient=False)
    y = quantized_linear(operand, weight)
    (y * paddle.to_tensor(gradient)).sum().backward()
    np.testing.assert_allclose(y.numpy(), x @ expected.T, atol=2e-5)
    np.testing.assert_allclose(operand.grad.numpy(), gradient @ expected, atol=2e-5)


@needs_cpp
def test_quantized_linear_with_zero_points_under_bf16_matmuls_is_close():
    weight, expected = make(0, FORMATS[1], zeros=True, order=True)
    x, gradient = normal(1, 40, IN), normal(2, 40, OUT)
    operand = paddle.to_tensor(x, stop_gradient=False)
    with bf16_matmuls():
        y = quantized_linear(operand, weight)
        (y * paddle.to_tensor(gradient)).sum().backward()
    for found, wanted in ((y, x @ expected.T), (operand.grad, gradient @ expected)):
        np.testing.assert_allclose(found.numpy(), wanted, atol=0.02 * np.abs(wanted).max())


def test_quantized_grouped_linear_with_zero_points_matches_the_formula(backend):
    made = [[make(2 * group + part, FORMATS[1], part == 0, order=True) for part in range(2)] for group in range(3)]
    stack = stack_weights([[weight for weight, _ in parts] for parts in made])
    starts = np.array([0, 3, 3, 8])
    x, gradients = normal(1, 8, IN), normal(2, 2, 8, OUT)
    operand = paddle.to_tensor(x, stop_gradient=False)
    results = quantized_grouped_linear(operand, stack, starts)
    sum((y * paddle.to_tensor(gradient)).sum() for y, gradient in zip(results, gradients, strict=True)).backward()
    group_of_row = np.repeat(np.arange(3), np.diff(starts))
    for part, y in enumerate(results):
        wanted = np.stack([made[group][part][1] @ row for group, row in zip(group_of_row, x, strict=True)])
        np.testing.assert_allclose(y.numpy(), wanted, atol=2e-5)
    x_gradient = np.stack(
        [
            sum(gradients[part, row] @ made[group][part][1] for part in range(2))
            for row, group in enumerate(group_of_row)
        ]
    )
    np.testing.assert_allclose(operand.grad.numpy(), x_gradient, atol=2e-5)


def test_slice_weight_with_zero_points_is_the_slice_of_the_weight():
    weight, expected = make(0, FORMATS[1], zeros=True, order=False)
    for axis, size, start, stop in ((0, OUT, 2, 4), (1, IN, 12, 24)):
        shard = Shard(axis, start, stop, size)
        np.testing.assert_allclose(dequantize(slice_weight(weight, shard)).numpy(), expected[shard.index], atol=1e-5)


def test_slice_weight_along_reordered_inputs_raises():
    weight, expected = make(0, FORMATS[1], zeros=False, order=True)
    rows = Shard(0, 2, 4, OUT)
    np.testing.assert_allclose(dequantize(slice_weight(weight, rows)).numpy(), expected[rows.index], atol=1e-5)
    with pytest.raises(ValueError, match="cannot be sharded along its inputs; set tensor_parallel_degree: 1"):
        slice_weight(weight, Shard(1, 12, 24, IN))
