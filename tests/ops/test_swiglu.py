from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.ops.swiglu import swiglu, swiglu_cpu, swiglu_reference
from tests.ops.elementwise import assert_all_close, normal, run_both_ways


@pytest.mark.parametrize("implementation", [swiglu, swiglu_cpu, swiglu_reference])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7)])
def test_values_and_gradients_are_those_of_the_formula(implementation, shape):
    gate, up, gradient = 4 * normal(1, *shape), normal(2, *shape), normal(3, *shape)
    gate.flat[0] = -80.0  # far out, silu is 0 and not NaN
    actual = run_both_ways(implementation, [gate, up], gradient)

    sigmoid = 1 / (1 + np.exp(-gate.astype(np.float64)))
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    expected = [gate * sigmoid * up, gradient * up * slope, gradient * gate * sigmoid]
    assert_all_close(actual, expected, atol=1e-5)
