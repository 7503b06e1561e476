"""Options of the methods as they reach a matrix, and the reported errors."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.quantization.ptq.awq import search_clipping
from paddlenlp_ext.quantization.ptq.gptq import InverseFactor, gptq
from paddlenlp_ext.quantization.ptq.input_statistics import InputStatistics
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.quantize_matrix import ErrorTotals, PostTrainingOptions, quantize_matrix
from paddlenlp_ext.quantization.ptq.rtn import round_to_nearest
from tests.quantization.ptq.test_gptq import IN, WEIGHT, X

INTEGERS = IntegerFormat(bits=4, group_size=30, symmetric=False)
NEAREST = round_to_nearest(WEIGHT, INTEGERS).dequantized()


def quantized(rows: np.ndarray, **options) -> tuple[np.ndarray, ErrorTotals]:
    inputs, errors = InputStatistics(IN), ErrorTotals()
    inputs.add(paddle.to_tensor(rows))
    options = PostTrainingOptions(integers=INTEGERS, **options)
    return dequantize(quantize_matrix("a", WEIGHT, inputs, options, errors)).numpy(), errors


@pytest.mark.parametrize(("act_order", "damping"), [(True, 0.01), (False, 0.5)])
def test_quantize_matrix_by_gptq_follows_its_options(act_order: bool, damping: float):
    found, _ = quantized(X, method="gptq", act_order=act_order, damping=damping)
    inputs = InputStatistics(IN)
    inputs.add(paddle.to_tensor(X))
    expected = gptq(WEIGHT, InverseFactor.from_hessian(inputs.hessian, act_order, damping), INTEGERS).dequantized()
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("clips", [True, False])
def test_quantize_matrix_by_awq_follows_its_options(clips: bool):
    found, _ = quantized(X, method="awq", clips=clips)
    shrink = search_clipping(WEIGHT, X.T @ X / len(X), INTEGERS) if clips else 1.0
    expected = round_to_nearest(WEIGHT, INTEGERS, shrink).dequantized()
    assert (np.abs(found - expected) > 1e-5).mean() < 0.01  # ties between factors


@pytest.mark.parametrize(("method", "rows"), [("gptq", X[:0]), ("awq", X[:0]), ("rtn", X)])
def test_quantize_matrix_without_rows_rounds_to_the_nearest(method: str, rows: np.ndarray):
    found, errors = quantized(rows, method=method)
    np.testing.assert_allclose(found, NEAREST, atol=2e-6)
    assert not errors.errors


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_quantize_matrix_of_inputs_that_are_all_0_rounds_to_the_nearest(method: str):
    found, errors = quantized(np.zeros_like(X), method=method, clips=False)
    np.testing.assert_allclose(found, NEAREST, atol=2e-6)
    assert not errors.errors


def test_error_totals_are_relative_to_the_outputs():
    found, errors = quantized(X, method="gptq")
    expected = [np.square(X @ (each - WEIGHT).T).sum() / np.square(X @ WEIGHT.T).sum() for each in (found, NEAREST)]
    np.testing.assert_allclose(errors.errors, [expected], rtol=1e-3)
    assert errors.describe().endswith(f"outputs: {expected[0]:.3g}; rounding to nearest: {expected[1]:.3g}")
