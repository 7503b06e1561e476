"""Linear layers of groups of rows over quantized weights against the formula, forward and backward."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops import quantized_grouped_linear as module
from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls
from paddlenlp_ext.ops.dequantize import dequantize, dequantize_stack
from paddlenlp_ext.ops.quantized_grouped_linear import quantized_grouped_linear
from paddlenlp_ext.ops.quantized_weight import QuantizedStack, stack_weights
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize
from tests.common.arrays import normal
from tests.common.marks import needs_cpp
from tests.ops.grouped_linear.test_grouped_linear import expected
from tests.ops.quantized_linear.test_quantized_linear import FORMATS

BACKENDS = [pytest.param("cpp", marks=needs_cpp), "reference"]
CASES = [([3, 0, 8, 1], 2), ([0, 0, 0], 2), ([0, 2], 1), ([40, 1, 0, 9], 2)]
by_format = pytest.mark.parametrize("options", FORMATS, ids=lambda o: f"{o.algo}{'-double' * o.double_quant}")


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    for op in (module.quantized_grouped_linear_op, module.quantized_grouped_input_gradient_op):
        monkeypatch.setattr(op, "choose", lambda x, choose=op.choose: choose(x, request.param))
    return request.param


def make_stack(groups: int, parts: int, options: QuantizationConfig) -> QuantizedStack:
    """Quantize a weight [G, P * 7, 33]: every matrix has an odd number of weights, and a short last block."""
    weights = normal(2, groups, parts, 7, 33)
    return stack_weights([[quantize(weight, options) for weight in group] for group in weights])


def run(counts, parts, options, uses_bf16=False):
    """Return outputs and the gradient of x, and those of the formula over the dequantized weights."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    stack = make_stack(len(counts), parts, options)
    x, gradient = normal(1, int(starts[-1]), 33), normal(3, int(starts[-1]), 7 * parts)
    operand = paddle.to_tensor(x, stop_gradient=False)
    if uses_bf16:
        with bf16_matmuls():
            results = quantized_grouped_linear(operand, stack, starts)
    else:
        results = quantized_grouped_linear(operand, stack, starts)
    assert [result.shape[-1] for result in results] == [7] * parts
    y = paddle.concat(results, axis=-1)
    (y * paddle.to_tensor(gradient)).sum().backward()
    correct = expected(x, dequantize_stack(stack).numpy(), gradient, starts)
    return (y.numpy(), operand.grad.numpy()), correct[:2]


@by_format
@pytest.mark.parametrize(("counts", "parts"), CASES, ids=str)
def test_quantized_grouped_linear_matches_the_formula(backend, counts, parts, options):
    for actual, correct in zip(*run(counts, parts, options), strict=True):
        np.testing.assert_allclose(actual, correct, rtol=0, atol=2e-5)


@needs_cpp
def test_quantized_grouped_linear_in_bf16_rounds_its_inputs():
    for actual, correct in zip(*run([40, 0, 1], 2, FORMATS[1], uses_bf16=True), strict=True):
        error = np.abs(actual - correct).max() / np.abs(correct).max()
        assert 1e-4 < error < 2e-2


@by_format
def test_quantized_stack_contains_the_matrices(options):
    stack, weights = make_stack(3, 2, options), normal(2, 3, 2, 7, 33)
    alone = [[dequantize(quantize(weight, options)).numpy() for weight in group] for group in weights]
    assert stack.shape == (3, 14, 33) and stack.num_weights == weights.size
    np.testing.assert_array_equal(dequantize_stack(stack).numpy(), np.reshape(alone, (3, 14, 33)))
    assert stack.num_bytes == 6 * quantize(weights[0, 0], options).num_bytes


def test_quantized_grouped_linear_of_a_frozen_input_has_no_graph(backend):
    stack = make_stack(2, 2, FORMATS[0])
    results = quantized_grouped_linear(paddle.to_tensor(normal(1, 5, 33)), stack, np.array([0, 5, 5]))
    assert all(result.stop_gradient for result in results)


def test_kernel_caches_belong_to_single_matrices():
    stack = make_stack(2, 1, FORMATS[4])
    stack.matrix(0, 0).kernel_cache["fits kernel"] = False
    assert stack.matrix(0, 0).kernel_cache and not stack.matrix(1, 0).kernel_cache
