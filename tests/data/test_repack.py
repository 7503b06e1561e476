"""Tests of data/repack.py."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from paddlenlp_ext.data.packing import pack_greedily
from paddlenlp_ext.data.repack import _fill, repack


def next_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    packs: list[list[int]] = [[]]
    for row, length in enumerate(lengths):
        if sum(lengths[other] for other in packs[-1]) + length > capacity:
            packs.append([])
        packs[-1].append(row)
    return packs


@pytest.mark.parametrize("capacity", [1, 64, 100, 1024])
@pytest.mark.parametrize("num_rows", [1, 2, 37, 400])
def test_repack_keeps_every_row_once_within_capacity(capacity, num_rows):
    lengths = np.random.default_rng(num_rows).integers(1, min(capacity, 90) + 1, num_rows).tolist()
    before = next_fit(lengths, capacity)
    packs = repack(before, lengths, capacity)
    assert sorted(itertools.chain.from_iterable(packs)) == list(range(num_rows))
    assert max(sum(lengths[row] for row in pack) for pack in packs) <= capacity
    assert len(packs) <= len(before)
    assert packs == repack(before, lengths, capacity)


def test_repack_of_complete_packs_returns_them():
    assert repack([[0, 1], [2]], [3, 7, 10], 10) == [[0, 1], [2]]


@pytest.mark.parametrize("seed", range(3))
def test_pack_greedily_with_three_rows_per_pack_needs_the_minimum_of_packs(seed):
    """Greedy packing without repacking needs one to three more packs."""
    lengths = np.random.default_rng(seed).gamma(16, 11, 1500).astype(int).clip(60, 400)
    packs = list(itertools.chain.from_iterable(pack_greedily(np.arange(1500), lengths, 512)))
    assert len(packs) == math.ceil(lengths.sum() / 512)


@pytest.mark.parametrize("room", [0, 1, 17, 40, 95])
def test_fill_leaves_as_few_positions_empty_as_any_subset(room):
    lengths = np.random.default_rng(room).integers(3, 30, 10).tolist()
    best = max(
        total
        for count in range(11)
        for subset in itertools.combinations(lengths, count)
        if (total := sum(subset)) <= room
    )
    places = _fill(list(range(10)), lengths, room)
    assert sum(lengths[place] for place in places) == best
    assert places == sorted(set(places), reverse=True)
