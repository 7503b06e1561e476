"""Clamped gate against the formula in double precision, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.ops.gates import clamped_swiglu
from tests.common.arrays import assert_all_close, normal, run_both_ways

ALPHA, LIMIT = 1.702, 1.5


def reference(gate: np.ndarray, up: np.ndarray, gradient: np.ndarray) -> list[np.ndarray]:
    """Return the output and both gradients, in float64; clipped values have none."""
    g, u = np.minimum(gate.astype(np.float64), LIMIT), np.clip(up.astype(np.float64), -LIMIT, LIMIT)
    sigmoid = 1 / (1 + np.exp(-ALPHA * g))
    slope = sigmoid + ALPHA * g * sigmoid * (1 - sigmoid)
    gate_gradient, up_gradient = gradient * (u + 1) * slope, gradient * g * sigmoid
    return [(u + 1) * g * sigmoid, np.where(gate > LIMIT, 0, gate_gradient), np.where(abs(up) > LIMIT, 0, up_gradient)]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (97, 101)])
def test_clamped_swiglu_matches_the_formula(shape):
    gate, up, gradient = 3 * normal(1, *shape), 3 * normal(2, *shape), normal(3, *shape)
    actual = run_both_ways(lambda *inputs: clamped_swiglu(*inputs, ALPHA, LIMIT), [gate, up], gradient)
    assert_all_close(actual, reference(gate, up, gradient), atol=1e-5)


@pytest.mark.parametrize("frozen", [0, 1])
def test_clamped_swiglu_with_frozen_inputs_returns_no_gradient_for_them(frozen):
    inputs = [normal(1, 3, 7), normal(2, 3, 7)]
    actual = run_both_ways(lambda *x: clamped_swiglu(*x, ALPHA, LIMIT), inputs, normal(3, 3, 7), frozen=[frozen])
    assert actual[1 + frozen] is None and np.abs(actual[2 - frozen]).max() > 0
