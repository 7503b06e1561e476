"""Test the RMS norm layer."""

from __future__ import annotations

import numpy as np
import paddle

from paddlenlp_ext.nn.rms_norm import RMSNorm
from tests.common.arrays import normal


def test_rms_norm_forward_add_equals_norm_of_sum():
    norm = RMSNorm(6, 1e-5)
    norm.weight.set_value(normal(1, 6))
    x, addend = paddle.to_tensor(normal(2, 2, 3, 6)), paddle.to_tensor(normal(3, 2, 3, 6))
    total, normed = norm.forward_add(x, addend)
    np.testing.assert_array_equal(total.numpy(), (x + addend).numpy())
    np.testing.assert_allclose(normed.numpy(), norm(x + addend).numpy(), rtol=1e-6)
