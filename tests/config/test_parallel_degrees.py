"""Parallel degrees: completed from the world size, or refused with the nearest degrees that fit."""

from __future__ import annotations

import itertools

import pytest

from paddlenlp_ext.config.parallel_degrees import Degrees, complete_degrees
from paddlenlp_ext.config.sections.parallel import ParallelConfig


@pytest.mark.parametrize(
    ("processes", "keys", "expected"),
    [
        (1, {}, Degrees()),
        (4, {}, Degrees(data=4)),
        (4, {"tensor_parallel_degree": 2}, Degrees(data=2, tensor=2)),
        (8, {"tensor_parallel_degree": 2, "sharding": "stage1"}, Degrees(sharding=4, tensor=2)),
        (8, {"sharding": "stage2", "sharding_parallel_degree": 2}, Degrees(data=4, sharding=2)),
        (8, {"pipeline_parallel_degree": 2, "sharding_parallel_degree": 4}, Degrees(data=4, pipeline=2)),
        (2, {"tensor_parallel_degree": 0, "pipeline_parallel_degree": 2}, Degrees(pipeline=2)),
        (8, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}, Degrees(data=4, tensor=2, expert=2)),
        (4, {"expert_parallel_degree": 4, "sharding": "stage1"}, Degrees(sharding=4, expert=4)),
    ],
)
def test_complete_degrees_fills_what_is_left_open(processes, keys, expected):
    assert complete_degrees(ParallelConfig(**keys), processes) == expected


def test_complete_degrees_completes_or_refuses_every_combination():
    for processes, tensor, pipeline in itertools.product(range(1, 9), range(1, 5), range(1, 5)):
        options = ParallelConfig(tensor_parallel_degree=tensor, pipeline_parallel_degree=pipeline)
        if processes % (tensor * pipeline):
            with pytest.raises(ValueError, match="nearest valid degrees"):
                complete_degrees(options, processes)
        else:
            degrees = complete_degrees(options, processes)
            assert degrees.data * tensor * pipeline == processes


def test_complete_degrees_with_experts_that_the_replicas_cannot_divide_names_the_largest_degree_that_works():
    options = ParallelConfig(expert_parallel_degree=5, pipeline_parallel_degree=2)
    with pytest.raises(ValueError, match=r"expert_parallel_degree 5 does not divide the 6 .* is 3"):
        complete_degrees(options, 12)


def test_complete_degrees_names_the_nearest():
    with pytest.raises(ValueError, match="tensor_parallel_degree 4, pipeline_parallel_degree 2, sharding"):
        complete_degrees(ParallelConfig(tensor_parallel_degree=4, pipeline_parallel_degree=3), 8)
