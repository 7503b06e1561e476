"""GeGLU against the formula in double precision, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.ops.geglu import geglu, geglu_recomputed, geglu_reference
from tests.common.arrays import assert_all_close, normal, run_both_ways


@pytest.mark.parametrize("frozen", [[], [0], [1]])
@pytest.mark.parametrize("implementation", [geglu, geglu_recomputed, geglu_reference])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (197, 101)])
def test_geglu_matches_the_formula(implementation, shape, frozen):
    gate, up, gradient = 4 * normal(1, *shape), normal(2, *shape), normal(3, *shape)
    gate.flat[0] = -80.0
    actual = run_both_ways(implementation, [gate, up], gradient, frozen=frozen)
    expected = reference(gate, up, gradient)
    for index in frozen:
        expected[1 + index] = None
    assert_all_close(actual, expected, atol=2e-5)


def reference(gate: np.ndarray, up: np.ndarray, gradient: np.ndarray) -> list[np.ndarray | None]:
    """Return gelu(gate) * up and both gradients, in float64."""
    gate = gate.astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    gelu = 0.5 * gate * (1 + np.tanh(inner))
    inner_slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * gate**2)
    slope = 0.5 * (1 + np.tanh(inner)) + 0.5 * gate / np.cosh(np.minimum(np.abs(inner), 300)) ** 2 * inner_slope
    return [gelu * up, gradient * up * slope, gradient * gelu]
