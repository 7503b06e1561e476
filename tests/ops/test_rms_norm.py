from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.rms_norm import rms_norm, rms_norm_cpu, rms_norm_reference
from tests.ops.elementwise import assert_all_close, normal, run_both_ways

EPSILON = 1e-3


@pytest.mark.parametrize("implementation", [rms_norm, rms_norm_cpu, rms_norm_reference])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 7), (5, 33), (2, 3, 4, 6)])
def test_values_and_gradients_are_those_of_the_formula(implementation, shape):
    x, weight, gradient = normal(1, *shape), normal(2, shape[-1]), normal(3, *shape)
    actual = run_both_ways(lambda x, w: implementation(x, w, EPSILON), [x, weight], gradient)

    rms = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
    scaled = gradient * weight
    x_gradient = scaled / rms - x * (scaled * x).mean(-1, keepdims=True) / rms**3
    weight_gradient = (gradient * x / rms).reshape(-1, shape[-1]).sum(0)
    assert_all_close(actual, [x / rms * weight, x_gradient, weight_gradient], atol=1e-5)


def test_a_frozen_weight_gets_no_gradient():
    x, weight, gradient = normal(1, 4, 8), normal(2, 8), normal(3, 4, 8)
    for implementation in (rms_norm_cpu, rms_norm_reference):
        _, x_gradient, weight_gradient = run_both_ways(
            lambda x, w, run=implementation: run(x, w, EPSILON), [x, weight], gradient, frozen=[1]
        )
        assert weight_gradient is None and np.abs(x_gradient).max() > 0


def test_the_result_has_the_inputs_format_whatever_the_weights():
    x, weight = paddle.to_tensor(normal(1, 4, 8)).astype("bfloat16"), paddle.to_tensor(normal(2, 8))
    assert rms_norm(x, weight, EPSILON).dtype == paddle.bfloat16
