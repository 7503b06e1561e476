"""Compare nf4 and fp4 codes, scales and weights with bitsandbytes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paddlenlp_ext.ops.dequantize import dequantize
from paddlenlp_ext.ops.quantized_weight.codebooks import dynamic_levels, levels
from paddlenlp_ext.quantization.config import QuantizationConfig
from paddlenlp_ext.quantization.quantize_weight import quantize
from tests.golden import DATA
from tests.golden.cases.quant_cases import CASES, weight_of


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(DATA / "quant.npz") as stored:
        return dict(stored)


def test_levels_match_bitsandbytes(golden: dict[str, np.ndarray]):
    assert np.array_equal(dynamic_levels(), golden["dynamic_levels"])
    for algo in ("nf4", "fp4"):
        assert np.array_equal(levels(algo), golden[f"{algo}/levels"])


def test_levels_nf4_symmetric_mirror_the_7_negative_levels_of_nf4(golden: dict[str, np.ndarray]):
    # Both sides are quantiles at linspace(0.9677083, 0.5, 8)[:-1], as the negative side of bitsandbytes' nf4.
    negative = golden["nf4/levels"][:7]
    expected = np.concatenate([negative, [0, 0], -negative[::-1]]).astype(np.float32)
    assert np.array_equal(levels("nf4_symmetric"), expected)
    probabilities = np.linspace(0.9677083, 0.5, 8)[:-1]
    outermost = levels("nf4_symmetric")[9:][::-1] * 1.8481  # the quantile of 0.9677083 in a table of Φ
    below = [(1 + math.erf(value / math.sqrt(2))) / 2 for value in outermost]
    np.testing.assert_allclose(below, probabilities, atol=1e-4)


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("algo", ["nf4", "fp4"])
def test_quantize_matches_bitsandbytes(golden: dict[str, np.ndarray], algo: str, case: str, double: bool):
    options = QuantizationConfig(algo=algo, block_size=CASES[case]["block_size"], double_quant=double)
    stored = quantize(weight_of(case), options)
    prefix = f"{algo}/{case}/{'double' if double else 'single'}"
    assert np.array_equal(stored.codes.numpy(), golden[f"{prefix}/codes"])
    assert stored.scales.numpy().dtype == golden[f"{prefix}/scales"].dtype
    if not double or case != "less_than_a_block":  # a single scale minus the mean is 0 / 0: any code is right
        assert np.array_equal(stored.scales.numpy(), golden[f"{prefix}/scales"])
    if double:
        # the last digit of the mean depends on the order of the float32 sum
        np.testing.assert_allclose(stored.offset.numpy(), golden[f"{prefix}/offset"], rtol=2e-7)
        np.testing.assert_allclose(stored.group_scales.numpy(), golden[f"{prefix}/group_scales"], rtol=1e-6, atol=1e-37)
        expected = golden[f"{prefix}/dequantized"]
        np.testing.assert_allclose(dequantize(stored).numpy(), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    else:
        assert np.array_equal(dequantize(stored).numpy(), golden[f"{prefix}/dequantized"])
