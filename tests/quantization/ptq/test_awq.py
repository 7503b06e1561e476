"""Scales and clipping of AWQ against the errors of the outputs for the inputs themselves."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.quantization.ptq.awq import search_clipping, search_scales
from paddlenlp_ext.quantization.ptq.integer_format import IntegerFormat
from paddlenlp_ext.quantization.ptq.rtn import round_to_nearest
from tests.quantization.ptq.test_gptq import HESSIAN, IN, OUT, WEIGHT, X

FORMATS = [IntegerFormat(bits=4, group_size=30), IntegerFormat(bits=4, group_size=50, symmetric=False)]
MAGNITUDES = np.abs(X).mean(0)


@pytest.mark.parametrize("integers", FORMATS, ids=str)
def test_search_scales_finds_the_exponent_with_the_least_error_of_the_outputs(integers: IntegerFormat):
    found = search_scales(WEIGHT, HESSIAN, MAGNITUDES, integers, np.arange(IN))
    errors = {}
    for step in range(20):
        scales = np.maximum(MAGNITUDES, 1e-4) ** (step / 20)
        scales /= np.sqrt(scales.max() * scales.min())
        rounded = round_to_nearest((WEIGHT * scales).astype(np.float32), integers).dequantized()
        errors[step] = np.square((X / scales) @ rounded.T - X @ WEIGHT.T).sum(), scales
    best, scales = min(errors.values(), key=lambda each: each[0])
    np.testing.assert_allclose(found, scales, rtol=1e-4)
    assert best < 0.9 * errors[0][0]


def test_search_scales_of_shared_channels_are_equal_for_their_inputs():
    channels = np.arange(IN) // 2
    magnitudes = np.bincount(channels, MAGNITUDES) / 2
    found = search_scales(WEIGHT, HESSIAN, magnitudes.astype(np.float32), FORMATS[0], channels)
    assert found.shape == (IN // 2,)
    assert found.std() > 0


@pytest.mark.parametrize("integers", FORMATS, ids=str)
def test_search_clipping_finds_the_range_with_the_least_error_of_each_group(integers: IntegerFormat):
    found = search_clipping(WEIGHT, HESSIAN, integers)
    group = integers.group_size or IN
    assert found.shape == (OUT, IN // group)
    for row, index in ((0, 0), (4, 1), (6, 2)):
        part = slice(index * group, (index + 1) * group)
        errors = {}
        for step in range(11):
            rounded = round_to_nearest(WEIGHT[row : row + 1, part], integers, 1 - step / 20).dequantized()
            errors[1 - step / 20] = np.square(X[:, part] @ (rounded - WEIGHT[row : row + 1, part]).T).sum()
        assert np.isclose(
            errors[min(errors, key=lambda each: errors[each])], errors[round(float(found[row, index]), 2)], rtol=1e-3
        )
    assert (found < 1).any()
