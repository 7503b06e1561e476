"""Draws of stochastic rounding: equal for shards and full parameters, and different by name, step and seed."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.stochastic_rounding import stochastic_round
from paddlenlp_ext.sharding_spec import Shard, set_placement
from paddlenlp_ext.trainer.optimizers.bf16_rounding import StochasticRounding
from tests.common.arrays import normal

SHAPE = (7, 11, 5)


def rounded(values: np.ndarray, name: str = "weight", seed: int = 3, step: int = 2, shard: Shard | None = None):
    """Return values as the parameter `name` is rounded in a step."""
    parameter = paddle.create_parameter(list(values.shape), "float32")
    set_placement(parameter, shard=shard)
    rounding = StochasticRounding(seed, {name: parameter})
    rounding.step = step
    return stochastic_round(paddle.to_tensor(values), rounding.position(parameter)).numpy()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_stochastic_rounding_of_shards_equals_that_of_the_full_parameter(axis):
    values = normal(1, *SHAPE)
    middle = SHAPE[axis] // 2 + 1
    shards = [Shard(axis, 0, middle, SHAPE[axis]), Shard(axis, middle, SHAPE[axis], SHAPE[axis])]
    parts = [rounded(np.ascontiguousarray(values[shard.index]), shard=shard) for shard in shards]
    np.testing.assert_array_equal(np.concatenate(parts, axis), rounded(values))


@pytest.mark.parametrize("change", [{"name": "other"}, {"seed": 4}, {"step": 3}])
def test_stochastic_rounding_depends_on_name_seed_and_step_only(change):
    values = normal(1, *SHAPE)
    np.testing.assert_array_equal(rounded(values), rounded(values))
    assert (rounded(values) != rounded(values, **change)).any()
