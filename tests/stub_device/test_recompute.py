"""Recomputation on a device without a kernel for dropout, whose masks Paddle draws on the CPU."""

from __future__ import annotations

import pytest

from tests.stub_device.plugin import run_with_stub

CODE = """
import numpy as np
import paddle
from paddlenlp_ext.nn.recompute import RecomputePlan, recompute_region

def layer(x):
    dropped = paddle.nn.functional.dropout(x, 0.5)
    saved = recompute_region("attention_row", lambda x: paddle.nn.functional.dropout(x, 0.5), dropped)
    return paddle.nn.functional.dropout(saved, 0.5)

assert paddle.get_device() == "stub:0"
x = paddle.ones([4000])
x.stop_gradient = False
y = RecomputePlan(saved_regions={saved_regions}).run_layer(layer, 0, x)
y.sum().backward()
np.testing.assert_array_equal(x.grad.numpy(), y.numpy())
assert 0 < np.count_nonzero(y.numpy()) < 1000
"""


@pytest.mark.parametrize("saved_regions", [{}, {"attention_row": -1}])
def test_recomputed_layer_drops_the_same_values(stub_folder, saved_regions):
    done = run_with_stub(stub_folder, "-c", CODE.replace("{saved_regions}", repr(saved_regions)))
    assert done.returncode == 0, done.stderr[-3000:]
