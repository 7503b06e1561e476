"""Order of GRPO's steps: parts of sampled batches, passes over them, the end of an epoch, and a resumed run."""

from __future__ import annotations

import itertools

import pytest

from paddlenlp_ext.data.packing import PackingPlan
from paddlenlp_ext.data.rollouts.policy_order import PolicyOrder, PolicyStepBatch


def make_order(num_rows: int, micro_batches_per_step: int, num_parts: int, num_iterations: int, **more) -> PolicyOrder:
    plan = PackingPlan([3] * num_rows, batch_size=1, seed=7)
    parts = {"num_parts": num_parts, "num_iterations": num_iterations}
    return PolicyOrder(plan, micro_batches_per_step, **parts, **more)


def first_steps(order: PolicyOrder, count: int, *start: int) -> list[PolicyStepBatch]:
    return list(itertools.islice(order.step_batches(*start), count))


def test_policy_order_divides_each_sampled_batch_into_parts_and_passes_over_it_again():
    order = make_order(num_rows=8, micro_batches_per_step=2, num_parts=2, num_iterations=2)
    steps = first_steps(order, 8)
    assert order.num_steps(0) == order.total_steps == 8
    assert [step.generation for step in steps] == [0] * 4 + [1] * 4
    assert [step.is_first for step in steps] == [True, False, False, False] * 2
    for first in (0, 4):
        sampled = steps[first].sampled_rows
        assert all(step.sampled_rows == sampled for step in steps[first : first + 4])
        parts = [tuple(step.row_indices) for step in steps[first : first + 4]]
        assert parts[:2] == parts[2:] == [sampled[:2], sampled[2:]], "the second pass repeats the parts of the first"
    assert sorted(steps[0].sampled_rows + steps[4].sampled_rows) == list(range(8)), "every row once in an epoch"


def test_policy_order_at_the_end_of_an_epoch_has_a_smaller_sampled_batch():
    order = make_order(num_rows=7, micro_batches_per_step=2, num_parts=3, num_iterations=2)
    steps = first_steps(order, order.num_steps(0) + 1)
    assert [step.generation for step in steps] == [0] * 6 + [1] * 2 + [0]
    assert [len(step.row_indices) for step in steps[:8]] == [2, 2, 2, 2, 2, 2, 1, 1]
    assert [step.is_last for step in steps] == [False] * 7 + [True, False]
    assert [step.end_fraction for step in steps[:8]] == pytest.approx([number / 8 for number in range(1, 9)])
    assert (steps[8].epoch, steps[8].index, steps[8].is_first) == (1, 0, True)
    assert steps[8].sampled_rows != steps[0].sampled_rows, "each epoch is shuffled anew"


@pytest.mark.parametrize("start", [1, 3, 6, 7])
def test_policy_order_continues_at_any_step_of_an_epoch(start: int):
    order = make_order(num_rows=7, micro_batches_per_step=2, num_parts=2, num_iterations=2)
    assert first_steps(order, 6, 0, start) == first_steps(order, 6 + start)[start:]


@pytest.mark.parametrize(("limits", "total"), [({"num_train_epochs": 2.5}, 20), ({"max_steps": 3}, 3)])
def test_policy_order_counts_the_passes_of_epochs_as_steps(limits: dict, total: int):
    order = make_order(num_rows=8, micro_batches_per_step=2, num_parts=1, num_iterations=2, **limits)
    assert order.total_steps == total
