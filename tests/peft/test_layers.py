"""Test new_parameter: values, shapes without values, speed."""

from __future__ import annotations

import time

import numpy as np
import paddle
import pytest
from paddle import nn

from paddlenlp_ext.peft.layers import new_parameter
from tests.common.arrays import normal


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_new_parameter_rounds_as_paddle(dtype):
    value = normal(1, 5, 3)
    parameter = new_parameter(nn.Layer(), value.T, dtype)
    assert parameter.shape == [3, 5] and str(parameter.dtype) == f"paddle.{dtype}" and not parameter.stop_gradient
    np.testing.assert_array_equal(parameter.numpy(), paddle.to_tensor(value).astype(dtype).numpy().T)


def test_new_parameter_under_lazy_guard_has_only_a_shape():
    with paddle.LazyGuard():
        parameter = new_parameter(nn.Layer(), normal(2, 5, 3), "float32")
    assert parameter.shape == [5, 3] and not parameter._is_initialized()


def test_new_parameter_creates_no_python_numbers():
    """Measure processor time, of which Paddle's `Assign` takes 0.5 s for the same array."""
    value, start = np.zeros((2048, 2048), np.float32), time.process_time()
    new_parameter(nn.Layer(), value, "float32")
    assert time.process_time() - start < 0.25
