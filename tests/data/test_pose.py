"""PoSE: properties of the positions, and that a batch keeps every token (arXiv:2309.10400)."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.config.sections.data import DataConfig
from paddlenlp_ext.data.collate import build_collate
from paddlenlp_ext.data.pose import PositionSkips
from tests.common.training import VOCABULARY, Rows


def test_pose_positions_increase_with_at_most_one_skip():
    for seed in range(300):
        draw = np.random.default_rng(seed)
        context, length = int(draw.integers(1, 300)), int(draw.integers(1, 300))
        epoch, row = int(draw.integers(0, 5)), int(draw.integers(0, 10_000))
        positions = PositionSkips(context, seed).positions(epoch, row, length)
        steps = np.diff(positions)
        assert positions.dtype == np.int64 and positions.shape == (length,) and positions[0] == 0
        assert (steps >= 1).all() and (steps > 1).sum() <= 1
        assert positions[-1] < max(context, length)
        if length >= context:
            assert (steps == 1).all()
        np.testing.assert_array_equal(positions, PositionSkips(context, seed).positions(epoch, row, length))


def test_pose_boundaries_and_skips_are_uniform():
    """Check both ends and the means: boundaries in 1 ... 9, skips in 0 ... 20."""
    skips = PositionSkips(30, seed=5)
    drawn = np.stack([skips.positions(epoch, row, 10) for epoch in range(3) for row in range(1500)])
    skip = drawn[:, -1] - 9
    assert (skip.min(), skip.max()) == (0, 20) and abs(skip.mean() - 10) < 0.5
    boundary = np.where(skip > 0, np.argmax(np.diff(drawn) > 1, axis=1) + 1, 0)[skip > 0]
    assert (boundary.min(), boundary.max()) == (1, 9) and abs(boundary.mean() - 5) < 0.25


def test_pose_positions_differ_between_seeds_epochs_and_rows():
    first = PositionSkips(1000, 1).positions(0, 0, 50)
    others = [
        PositionSkips(1000, seed).positions(epoch, row, 50) for seed, epoch, row in ((2, 0, 0), (1, 1, 0), (1, 0, 1))
    ]
    assert all((other != first).any() for other in others)


@pytest.mark.parametrize("keys", [{}, {"pad_to_max_length": True, "max_length": 64}, {"pad_to_multiple_of": 16}])
def test_collate_with_pose_changes_positions_only(keys):
    """Check that no token is lost or doubled, in any packing, and that a row's positions do not depend on its pack."""
    rows, data = Rows(12, seed=2), DataConfig(dataset_name_or_path="x", **keys)
    plain = build_collate(rows, data, 0, VOCABULARY)
    skipping = build_collate(rows, data, 0, VOCABULARY, PositionSkips(500, seed=3))
    micro_batch = [[0, 7, 3], [5, 1], [11]]
    before, after = plain(micro_batch, 2), skipping(micro_batch, 2)
    for name in ("input_ids", "labels"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    assert before.document_lengths == after.document_lengths and before.row_indices == after.row_indices
    assert before.num_tokens == after.num_tokens
    assert (after.position_ids != before.position_ids).any()
    alone = {row: skipping([[row]], 2).position_ids[0, : rows[row].length] for row in after.row_indices}
    documents = iter(after.row_indices)
    for positions, lengths in zip(after.position_ids, after.document_lengths, strict=True):
        for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
            own = positions[start : start + length]
            if (own == np.arange(length)).all() and start + length == len(positions) and keys:
                continue  # padding
            np.testing.assert_array_equal(own, alone[next(documents)])
    assert next(documents, None) is None
    assert (skipping(micro_batch, 3).position_ids != after.position_ids).any()
