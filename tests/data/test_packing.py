"""Packing plans: each row is in one pack, no pack exceeds its capacity, and few positions stay empty."""

from __future__ import annotations

import time

import numpy as np
import pytest

from paddlenlp_ext.data.packing import GROUP_ROWS, PACKINGS, PackingPlan, pack_greedily


def lengths_like(name: str, count: int, seed: int = 0) -> tuple[np.ndarray, int]:
    """Return lengths distributed as in a kind of data, and a capacity."""
    mean_log, deviation, shortest, capacity = {
        "worked_answers": (5.15, 0.35, 60, 2048),
        "instructions": (4.6, 0.7, 20, 2048),
        "chats": (6.2, 1.0, 20, 4096),
        "reasoning": (8.0, 0.7, 200, 8192),
    }[name]
    drawn = np.random.default_rng(seed).lognormal(mean_log, deviation, count)
    return np.clip(drawn, shortest, capacity).astype(np.int64), capacity


def rows_of(batches) -> list[int]:
    return [row for batch in batches for pack in batch for row in pack]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_packing_plan_packs_every_row_once_within_capacity(packing, shuffle, seed):
    draw = np.random.default_rng(seed)
    capacity = int(draw.integers(1, 400))
    lengths = draw.integers(1, capacity + 1, size=int(draw.integers(1, 600)))
    if seed % 4 == 0:
        lengths[:] = lengths[0]
    plan = PackingPlan(lengths, batch_size=3, packing=packing, capacity=capacity, seed=seed, shuffle=shuffle)
    for epoch in range(2):
        batches = plan.epoch(epoch)
        assert sorted(rows_of(batches)) == list(range(len(lengths)))
        assert all(lengths[pack].sum() <= capacity for batch in batches for pack in batch)
        assert all(len(batch) == 3 for batch in batches[:-1]) and 1 <= len(batches[-1]) <= 3


@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_plan_with_several_groups_packs_every_row_once(packing):
    lengths, capacity = lengths_like("instructions", 3 * GROUP_ROWS + 7)
    plan = PackingPlan(lengths, batch_size=8, packing=packing, capacity=capacity, seed=5)
    assert sorted(rows_of(plan.epoch(0))) == list(range(len(lengths)))
    assert max(lengths[pack].sum() for batch in plan.epoch(0) for pack in batch) <= capacity


@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_plan_order_depends_on_seed_and_epoch_only(packing):
    lengths, capacity = lengths_like("instructions", 300)
    settings = {"batch_size": 2, "packing": packing, "capacity": capacity}
    plan, again = PackingPlan(lengths, seed=7, **settings), PackingPlan(lengths, seed=7, **settings)
    # Epochs may be requested in any order.
    assert again.epoch(3) == plan.epoch(3)
    assert again.epoch(0) == plan.epoch(0) == plan.epoch(0)
    plans = [str(plan.epoch(epoch)) for epoch in range(5)]
    assert len(set(plans)) == 5
    assert PackingPlan(lengths, seed=8, **settings).epoch(0) != plan.epoch(0)


def test_packing_plan_order_stays_as_recorded():
    """Check recorded numbers: a run may be resumed with another NumPy version."""
    plan = PackingPlan([1] * 10, batch_size=10, seed=42)
    assert [rows_of(plan.epoch(epoch)) for epoch in range(2)] == [
        [4, 8, 1, 9, 3, 6, 0, 7, 2, 5],
        [1, 2, 8, 5, 3, 9, 6, 0, 4, 7],
    ]


@pytest.mark.parametrize("packing", ["none", "in_order"])
def test_packing_plan_without_shuffle_keeps_the_order(packing):
    lengths, capacity = lengths_like("instructions", 200)
    plan = PackingPlan(lengths, batch_size=4, packing=packing, capacity=capacity, shuffle=False)
    assert rows_of(plan.epoch(0)) == rows_of(plan.epoch(9)) == list(range(200))


def test_packing_plan_greedy_without_shuffle_is_constant():
    lengths, capacity = lengths_like("instructions", 200)
    plan = PackingPlan(lengths, batch_size=4, packing="greedy", capacity=capacity, shuffle=False, seed=1)
    assert plan.epoch(0) == plan.epoch(1)


def test_pack_in_order_is_next_fit():
    plan = PackingPlan([5, 4, 2, 9, 1, 10], batch_size=1, packing="in_order", capacity=10, shuffle=False)
    assert plan.packs(0) == [[0, 1], [2], [3, 4], [5]]
    assert plan.fill(0) == 31 / 40


@pytest.mark.parametrize("name", ["worked_answers", "instructions", "chats", "reasoning"])
def test_pack_greedily_leaves_few_positions_empty(name):
    lengths, capacity = lengths_like(name, 8000)
    plan = PackingPlan(lengths, batch_size=1, packing="greedy", capacity=capacity, seed=1)
    fewest = -(-int(lengths.sum()) // capacity)
    assert len(plan.packs(0)) <= 1.002 * fewest + 1
    assert plan.fill(0) >= PackingPlan(lengths, batch_size=1, packing="in_order", capacity=capacity).fill(0)
    assert plan.fill(0) >= 0.95


@pytest.mark.parametrize("name", ["worked_answers", "instructions", "chats", "reasoning"])
def test_packs_have_fewer_empty_positions_than_padded_batches(name):
    lengths, capacity = lengths_like(name, 800)
    batches = PackingPlan(lengths, batch_size=8, seed=1).epoch(0)
    widths = [max(int(lengths[row]) for pack in batch for row in pack) for batch in batches]
    padded = sum(width * len(batch) for width, batch in zip(widths, batches, strict=True))
    packed = PackingPlan(lengths, batch_size=1, packing="in_order", capacity=capacity, seed=1)
    assert packed.fill(0) > lengths.sum() / padded


def test_pack_greedily_pairs_no_row_with_itself():
    """Check rows of less than half the capacity, which must not be counted as their own partner."""
    (packs,) = pack_greedily(np.arange(2), np.array([6, 4]), 10)
    assert sorted(map(sorted, packs)) == [[0, 1]]
    (packs,) = pack_greedily(np.arange(3), np.array([4, 3, 3]), 10)
    assert sorted(map(sorted, packs)) == [[0, 1, 2]]
    (packs,) = pack_greedily(np.arange(2), np.array([4, 3]), 10)
    assert sorted(row for pack in packs for row in pack) == [0, 1]


def test_pack_greedily_mixes_lengths_over_the_epoch():
    """Check that packs are not sorted by the lengths of their rows."""
    lengths, capacity = lengths_like("instructions", 2 * GROUP_ROWS)
    packs = PackingPlan(lengths, batch_size=1, packing="greedy", capacity=capacity, seed=3).packs(0)
    means = np.array([lengths[pack].mean() for pack in packs])
    thirds = [part.mean() for part in np.array_split(means, 3)]
    assert max(thirds) < 1.15 * min(thirds)


def test_pack_greedily_takes_time_in_proportion_to_the_rows():
    """Compare 16 times as many rows: quadratic planning would take 256 times as long."""

    def seconds(count: int) -> float:
        lengths, capacity = lengths_like("instructions", count)
        plan = PackingPlan(lengths, batch_size=4, packing="greedy", capacity=capacity)
        begin = time.process_time()  # not wall time, which depends on the load of the machine
        plan.epoch(0)
        return time.process_time() - begin

    few = min(seconds(10_000) for _ in range(3))
    assert seconds(160_000) < 48 * few


def test_packing_plan_without_rows_is_empty():
    assert PackingPlan([], batch_size=2, packing="greedy", capacity=8).epoch(0) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 1, "packing": "gredy"}, "'gredy'"),
        ({"batch_size": 1, "packing": "greedy"}, "capacity is None"),
        ({"batch_size": 1, "packing": "in_order", "capacity": 0}, "capacity is 0"),
    ],
)
def test_packing_plan_with_invalid_settings_raises(settings, message):
    with pytest.raises(AssertionError, match=message):
        PackingPlan([1, 2], **settings)


def test_packing_plan_with_a_row_longer_than_a_pack_asserts():
    with pytest.raises(AssertionError, match="row 1 takes 9 positions of 8"):
        PackingPlan([1, 9], batch_size=1, packing="greedy", capacity=8)
