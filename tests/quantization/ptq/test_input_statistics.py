"""Statistics of the inputs of linear layers against the inputs themselves."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.nn.grouped_linear import GroupedLinear
from paddlenlp_ext.nn.linear import Linear
from paddlenlp_ext.quantization.ptq.input_statistics import InputStatistics, record_expert_inputs, record_inputs
from tests.common.arrays import normal

BATCHES = [normal(seed, 1, 5 + seed, 4) for seed in range(3)]
X = np.concatenate(BATCHES, axis=1)[0]


def check(found: InputStatistics, x: np.ndarray) -> None:
    assert found.rows == len(x)
    np.testing.assert_allclose(found.hessian, x.T @ x / len(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.magnitudes, np.abs(x).mean(0), rtol=1e-5)


def test_record_inputs_of_all_batches_and_shares_those_of_one_tensor():
    layers = {"first": Linear(4, 3), "second": Linear(4, 2), "third": Linear(3, 2)}
    outputs = []
    with paddle.no_grad(), record_inputs(layers) as statistics:
        for batch in BATCHES:
            x = paddle.to_tensor(batch)
            outputs.append(layers["first"](x))
            layers["second"](x)
            layers["third"](outputs[-1])
    assert statistics["first"] is statistics["second"]
    check(statistics["first"], X)
    check(statistics["third"], paddle.concat(outputs, axis=1).numpy()[0])
    layers["first"](x)  # after the block, nothing is recorded
    assert statistics["first"].rows == len(X)


def test_record_expert_inputs_of_some_experts():
    layer, starts = GroupedLinear(4, 4, 3), np.array([0, 2, 2, 5, 9])
    x = X[:9]
    with paddle.no_grad(), record_expert_inputs(layer, 1, 4) as statistics:
        layer(paddle.to_tensor(x), starts)
    assert [each.rows for each in statistics] == [0, 3, 4]
    check(statistics[1], x[2:5])
    check(statistics[2], x[5:9])


def test_input_statistics_divided_are_those_of_the_divided_inputs():
    statistics, scales = InputStatistics(4), np.array([0.5, 1, 2, 4], np.float32)
    statistics.add(paddle.to_tensor(X))
    check(statistics.divided(scales), X / scales)


def test_input_statistics_of_inputs_that_are_not_finite_raise():
    statistics = InputStatistics(4)
    statistics.add(paddle.to_tensor(np.where(X[0, 0] == X, np.inf, X).astype(np.float32)))
    with pytest.raises(ValueError, match="inputs from the calibration rows are not finite"):
        _ = statistics.hessian
