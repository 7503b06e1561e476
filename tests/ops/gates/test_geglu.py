"""GeGLU against the formula in double precision, forward and backward."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls
from paddlenlp_ext.ops.gates import geglu
from paddlenlp_ext.ops.gates.cpp import geglu_cpp
from paddlenlp_ext.ops.gates.reference import geglu_recomputed, geglu_reference
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.marks import needs_cpp

CPP = pytest.param(geglu_cpp, marks=needs_cpp)


@pytest.mark.parametrize("frozen", [[], [0], [1]])
@pytest.mark.parametrize("implementation", [geglu, CPP, geglu_recomputed, geglu_reference])
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


@needs_cpp
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (197, 101)])
def test_geglu_cpp_in_bf16_matches_the_formula_of_rounded_inputs(shape):
    gate, up, gradient = 4 * normal(1, *shape), normal(2, *shape), normal(3, *shape)
    with bf16_matmuls():
        actual = run_both_ways(geglu_cpp, [gate, up], gradient)
    rounded = [paddle.to_tensor(x).astype("bfloat16").astype("float32").numpy() for x in (gate, up)]
    assert_all_close(actual, reference(*rounded, gradient), atol=2e-5)


@needs_cpp
@pytest.mark.parametrize("far", [-1e6, -30.0, 30.0, 1e6])
def test_geglu_cpp_with_large_gate_is_zero_or_its_input(far):
    out, gate_gradient, up_gradient = run_both_ways(
        geglu_cpp, [np.full([17], far, np.float32), np.ones([17], np.float32)], np.ones([17], np.float32)
    )
    expected = max(far, 0.0)
    for values, correct in ((out, expected), (up_gradient, expected), (gate_gradient, float(far > 0))):
        np.testing.assert_allclose(values, correct, rtol=1e-6, atol=1e-12)
