"""SwiGLU against the formula in double precision, forward and backward."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls
from paddlenlp_ext.ops.gates import swiglu
from paddlenlp_ext.ops.gates.cpp import swiglu_cpp
from paddlenlp_ext.ops.gates.plain_cpu import swiglu_plain_cpu
from paddlenlp_ext.ops.gates.reference import swiglu_reference
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.marks import needs_cpp

CPP = pytest.param(swiglu_cpp, marks=needs_cpp)


@pytest.mark.parametrize("implementation", [swiglu, CPP, swiglu_plain_cpu, swiglu_reference])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (197, 101)])
def test_swiglu_matches_the_formula(implementation, shape):
    gate, up, gradient = 4 * normal(1, *shape), normal(2, *shape), normal(3, *shape)
    gate.flat[0] = -80.0  # for a large negative gate, silu is 0 and not NaN
    actual = run_both_ways(implementation, [gate, up], gradient)
    assert_all_close(actual, reference(gate, up, gradient), atol=1e-5)


def reference(gate: np.ndarray, up: np.ndarray, gradient: np.ndarray) -> list[np.ndarray]:
    """Return silu(gate) * up and both gradients, in float64."""
    sigmoid = 1 / (1 + np.exp(-gate.astype(np.float64)))
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return [gate * sigmoid * up, gradient * up * slope, gradient * gate * sigmoid]


@needs_cpp
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (197, 101)])
def test_swiglu_cpp_in_bf16_matches_the_formula_of_rounded_inputs(shape):
    gate, up, gradient = 4 * normal(1, *shape), normal(2, *shape), normal(3, *shape)
    with bf16_matmuls():
        actual = run_both_ways(swiglu_cpp, [gate, up], gradient)
    rounded = [paddle.to_tensor(x).astype("bfloat16").astype("float32").numpy() for x in (gate, up)]
    assert_all_close(actual, reference(*rounded, gradient), atol=1e-5)


@pytest.mark.parametrize("implementation", [CPP, swiglu_plain_cpu])
@pytest.mark.parametrize("frozen", [0, 1])
def test_swiglu_with_frozen_inputs_returns_no_gradient_for_them(implementation, frozen):
    actual = run_both_ways(implementation, [normal(1, 3, 7), normal(2, 3, 7)], normal(3, 3, 7), frozen=[frozen])
    assert actual[1 + frozen] is None and np.abs(actual[2 - frozen]).max() > 0


@needs_cpp
@pytest.mark.parametrize("far", [-1e4, -104.0, -88.0, 88.0, 1e4])
def test_swiglu_with_large_gate_is_zero_or_its_input(far):
    """Check values and gradients where e^-x leaves the float range."""
    out, gate_gradient, up_gradient = run_both_ways(
        swiglu_cpp, [np.full([17], far, np.float32), np.ones([17], np.float32)], np.ones([17], np.float32)
    )
    expected = max(far, 0.0)
    for values, correct in ((out, expected), (up_gradient, expected), (gate_gradient, float(far > 0))):
        np.testing.assert_allclose(values, correct, rtol=1e-6, atol=1e-30)
