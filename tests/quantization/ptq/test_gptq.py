"""GPTQ and rounding to nearest against the formulas of their papers in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.ptq.awq import output_error
from paddlenlp_ext.quantization.ptq.gptq import InverseFactor, gptq
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.rtn import round_to_nearest
from paddlenlp_ext.quantization.quantize_weight import quantize

OUT, IN, ROWS = 7, 150, 400
FORMATS = [
    IntegerFormat(bits=4, group_size=30),
    IntegerFormat(bits=4, group_size=75, symmetric=False),
    IntegerFormat(bits=4),
    IntegerFormat(bits=8, symmetric=False),
]
by_format = pytest.mark.parametrize("integers", FORMATS, ids=str)


def inputs() -> np.ndarray:
    """Return correlated inputs [ROWS, IN] of very different sizes, of which one is always 0."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, 40)) @ rng.standard_normal((40, IN)) + 0.5 * rng.standard_normal((ROWS, IN))
    x *= np.exp(rng.standard_normal(IN))
    x[:, 3] = 0
    return x.astype(np.float32)


X = inputs()
HESSIAN = X.T @ X / ROWS
WEIGHT = np.random.default_rng(1).standard_normal((OUT, IN)).astype(np.float32)


def by_elimination(integers: IntegerFormat, act_order: bool) -> np.ndarray:
    """Quantize a column at a time with the full inverse, from which each finished column is eliminated."""
    group, steps = integers.group_size or IN, 2**integers.bits - 1
    hessian, weight = HESSIAN.astype(np.float64), WEIGHT.astype(np.float64)
    diagonal = hessian.diagonal().copy()
    hessian[np.diag_indices(IN)] += np.where(diagonal > 0, 0.01 * diagonal.mean(), 1.0)
    inverse, codes = np.linalg.inv(hessian), np.empty((OUT, IN))
    grids: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for column in np.argsort(-diagonal, kind="stable") if act_order else range(IN):
        index = column // group
        if index not in grids:
            of_group = (WEIGHT if act_order else weight)[:, index * group : (index + 1) * group]
            if integers.symmetric:
                scale, zero = np.abs(of_group).max(1) / (steps // 2), np.zeros(OUT)
            else:
                low, high = np.minimum(of_group.min(1), 0), np.maximum(of_group.max(1), 0)
                scale = (high - low) / steps
                zero = np.round(-low / scale) - (steps + 1) // 2
            grids[index] = scale, zero
        scale, zero = grids[index]
        codes[:, column] = np.clip(np.round(weight[:, column] / scale) + zero, -(steps + 1) // 2, steps // 2)
        error = (weight[:, column] - (codes[:, column] - zero) * scale) / inverse[column, column]
        weight -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return codes


@by_format
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_matches_elimination_from_the_full_inverse(integers: IntegerFormat, act_order: bool):
    found = gptq(WEIGHT, InverseFactor.from_hessian(HESSIAN, act_order), integers)
    expected = by_elimination(integers, act_order)
    is_close = np.abs(found.codes - expected) <= (1 if integers.bits == 8 else 0)
    assert is_close.mean() > 0.99  # ties round differently in float32


@by_format
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_leaves_a_smaller_error_of_the_outputs_than_rounding(integers: IntegerFormat, act_order: bool):
    found = gptq(WEIGHT, InverseFactor.from_hessian(HESSIAN, act_order), integers)
    nearest = round_to_nearest(WEIGHT, integers)
    errors = [output_error(each.dequantized() - WEIGHT, HESSIAN) for each in (found, nearest)]
    assert errors[0] < 0.6 * errors[1]
    measured = np.square(X @ (found.dequantized() - WEIGHT).T).sum() / ROWS
    assert np.isclose(errors[0], measured, rtol=1e-3)


def test_round_to_nearest_is_the_quantization_of_training():
    for integers, options in (
        (IntegerFormat(bits=4, group_size=30), QuantizationConfig(algo="weight_only_int4", group_size=30)),
        (IntegerFormat(bits=8), QuantizationConfig(algo="weight_only_int8")),
    ):
        found, expected = round_to_nearest(WEIGHT, integers).packed(integers), quantize(WEIGHT, options)
        assert np.array_equal(found.codes.numpy(), expected.codes.numpy())
        assert np.array_equal(found.scales.numpy(), expected.scales.numpy())


@by_format
def test_integer_weight_packed_has_the_values_of_its_codes(integers: IntegerFormat):
    rounded = round_to_nearest(WEIGHT, integers)
    np.testing.assert_allclose(dequantize(rounded.packed(integers)).numpy(), rounded.dequantized(), atol=2e-6)
    step = rounded.scales.repeat(IN // rounded.scales.shape[1], axis=1)
    assert (np.abs(rounded.dequantized() - WEIGHT) <= 1.001 * step).all()


def test_integer_format_rounds_scales_to_their_format():
    scales, _ = IntegerFormat(bits=4, group_size=30, scale_dtype="float16").fit(WEIGHT.reshape(OUT, -1, 30))
    assert np.array_equal(scales, scales.astype(np.float16).astype(np.float32))
    assert (IntegerFormat(bits=4).fit(np.zeros((1, 1, 4), np.float32))[0] == 1).all()


@pytest.mark.parametrize(
    ("integers", "weight", "message"),
    [
        (IntegerFormat(bits=4, group_size=40), WEIGHT, "group_size=40 does not divide the 150 inputs"),
        (IntegerFormat(bits=4, scale_dtype="float16"), WEIGHT * 1e6, "too large for scales in float16"),
        (IntegerFormat(bits=4), WEIGHT * np.nan, "not finite"),
    ],
)
def test_round_to_nearest_of_an_unsuitable_weight_raises(integers: IntegerFormat, weight: np.ndarray, message: str):
    with pytest.raises(ValueError, match=message):
        round_to_nearest(weight, integers)
