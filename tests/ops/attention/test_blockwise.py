"""Plans of blockwise attention: visible keys of each tile, work and memory."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.ops.attention.blockwise import QUERY_BLOCK, TILE_SCORES, plan_blocks
from paddlenlp_ext.ops.attention.document_layout import AttentionLayout

PACKS = {
    "short": [[60] * 30],
    "long": [[2048]],
    "mixed": [[500, 37, 1, 12, 300, 299, 5, 150, 100]],
    "batch": [[512, 512], [1000, 24]],
}


@pytest.mark.parametrize("documents", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("window", [None, 100])
def test_plan_blocks_puts_every_query_in_one_tile_with_all_visible_keys(documents, window):
    layout = AttentionLayout.from_documents(documents, window)
    plan = plan_blocks(layout, 1, 1)
    starts, lengths = layout.documents()
    start_of = np.repeat(starts, lengths)
    seen = np.zeros(layout.num_positions, int)
    for tile in plan.tiles:
        queries_MQ, keys_MT = (
            tile.query_rows.numpy().reshape(tile.shape[:2]),
            tile.key_rows.numpy().reshape(tile.shape[::2]),
        )
        may_look_QT = np.isfinite(tile.mask.numpy())
        for queries, keys in zip(queries_MQ, keys_MT, strict=True):
            for query, row in zip(queries, may_look_QT, strict=True):
                if query < layout.num_positions:
                    first = start_of[query] if window is None else max(start_of[query], query - window + 1)
                    assert keys[row].tolist() == list(range(first, query + 1))
                    seen[query] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("documents", PACKS.values(), ids=PACKS)
def test_plan_blocks_work_and_memory_follow_the_documents(documents):
    layout = AttentionLayout.from_documents(documents)
    num_heads = 9
    tiles = plan_blocks(layout, num_heads, 3).tiles
    sizes = [int(np.prod(tile.shape)) for tile in tiles]
    assert max(sizes) <= max(TILE_SCORES, num_heads * QUERY_BLOCK * max(max(row) for row in documents))
    needed = sum(num_heads * length * (length + 1) / 2 for row in documents for length in row)
    assert sum(sizes) <= 2.2 * needed + num_heads * 32 * 32 * len(documents[0])
    assert len(tiles) <= 30


def test_plan_blocks_with_window_shortens_the_keys():
    full, windowed = (plan_blocks(AttentionLayout.from_documents([[2048]], window), 2, 1) for window in (None, 128))
    assert max(tile.shape[2] for tile in full.tiles) == 2048
    assert max(tile.shape[2] for tile in windowed.tiles) <= 256


def test_plan_blocks_of_equal_documents_needs_no_padding():
    assert not plan_blocks(AttentionLayout.from_documents([[64, 64, 64]]), 2, 1).is_padded
    assert plan_blocks(AttentionLayout.from_documents([[64, 63, 64]]), 2, 1).is_padded
