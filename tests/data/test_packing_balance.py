"""Load balancing: packs of similar cost are in one step, and the ranks get about equal work."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.data.packing import PackingPlan, attention_cost, sort_into_even_steps
from tests.data.test_assign_to_ranks import imbalance


def long_tailed_lengths(count: int, capacity: int) -> np.ndarray:
    drawn = np.random.default_rng(3).lognormal(np.log(capacity / 10), 1.0, count)
    return np.clip(drawn.astype(int), 8, capacity)


def test_attention_cost_sums_squared_lengths():
    assert attention_cost([3, 4]) == 25
    assert attention_cost([]) == 0


def test_sort_into_even_steps_keeps_packs_and_blocks():
    costs = list(np.random.default_rng(0).integers(1, 1000, 203))
    permutation = np.random.default_rng(1).permutation
    order = sort_into_even_steps(costs, 4, permutation)
    assert sorted(order) == list(range(203))
    assert sorted(order[:64]) == list(range(64))  # 16 steps of 4 packs
    assert order[-3:] == [200, 201, 202]  # less than one step
    assert sort_into_even_steps(costs, 1, permutation) == list(range(203))


def test_sort_into_even_steps_permutes_the_steps_of_a_block():
    """Check that steps do not stay sorted by cost, the cheapest first."""
    costs = [7, 1, 8, 2, 6, 3, 9]
    order = sort_into_even_steps(costs, 2, lambda count: np.arange(count)[::-1])
    assert order == [0, 2, 5, 4, 1, 3, 6]  # costs 7 8, 3 6, 1 2, and 9, which fills no step
    lengths = long_tailed_lengths(4000, 2048)
    plan = PackingPlan(lengths, batch_size=4, packing="greedy", capacity=2048, packs_per_step=4)
    steps = np.array([sum(attention_cost(lengths[pack]) for pack in step) for step in plan.epoch(0)[:16]])
    assert not np.all(np.diff(steps) >= 0)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_packing_plan_with_packs_per_step_balances_ranks_at_equal_fill(num_ranks: int):
    lengths = long_tailed_lengths(4000, 2048)
    settings = {"batch_size": 1, "packing": "greedy", "capacity": 2048}
    plain, even = PackingPlan(lengths, **settings), PackingPlan(lengths, **settings, packs_per_step=num_ranks)
    assert even.fill(0) == plain.fill(0)
    assert sorted(map(tuple, even.packs(0))) == sorted(map(tuple, plain.packs(0)))

    def mean_imbalance(plan: PackingPlan) -> float:
        costs = [attention_cost(lengths[pack]) for pack in plan.packs(0)]
        steps = [costs[start : start + num_ranks] for start in range(0, len(costs) - num_ranks, num_ranks)]
        return float(np.mean([imbalance(step, num_ranks) for step in steps]))

    assert mean_imbalance(even) <= 1.10 < mean_imbalance(plain)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_packing_plan_with_several_packs_per_rank_balances_every_step(num_ranks: int):
    """Check the figures of the table in docs/benchmarks/parallel.md."""
    lengths, per_step = long_tailed_lengths(4000, 2048), 4 * num_ranks
    packs = PackingPlan(lengths, batch_size=1, packing="greedy", capacity=2048, packs_per_step=per_step).packs(0)
    costs = [attention_cost(lengths[pack]) for pack in packs]
    steps = [costs[start : start + per_step] for start in range(0, len(costs) - per_step + 1, per_step)]
    assert max(imbalance(step, num_ranks) for step in steps) <= 1.10


def test_packing_plan_with_another_batch_size_keeps_the_packs():
    lengths = long_tailed_lengths(500, 512)
    settings = {"packing": "greedy", "capacity": 512, "packs_per_step": 8}
    one_by_one, in_fours = (PackingPlan(lengths, batch_size=size, **settings) for size in (1, 4))
    assert one_by_one.packs(1) == in_fours.packs(1)
    assert one_by_one.packs(0) != one_by_one.packs(1)


def test_packing_plan_without_greedy_keeps_the_order():
    lengths = long_tailed_lengths(100, 512)
    for packing in ("none", "in_order"):
        settings = {"batch_size": 1, "packing": packing, "capacity": 512}
        assert PackingPlan(lengths, **settings, packs_per_step=4).packs(0) == PackingPlan(lengths, **settings).packs(0)


def test_packing_plan_with_leading_packs_makes_the_steps_after_them_even():
    lengths = np.random.default_rng(5).integers(10, 900, 3000)
    options = {"batch_size": 1, "packing": "greedy", "capacity": 1000, "seed": 2}
    in_order = PackingPlan(lengths, **options).packs(0)
    packs = PackingPlan(lengths, **options, packs_per_step=8, lead=5).packs(0)
    assert packs[:5] == in_order[:5] and sorted(packs) == sorted(in_order)

    def spread(packs, first):
        costs = [attention_cost(lengths[pack]) for pack in packs]
        return np.mean([np.ptp(costs[start : start + 8]) for start in range(first, len(costs) - 8, 8)])

    assert spread(packs, 5) < 0.5 * min(spread(packs, 0), spread(in_order, 5))
