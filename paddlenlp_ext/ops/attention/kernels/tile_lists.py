"""Classify the tiles of an attention mask given by start rows as skipped, full or partial.

Key j is visible to the queries j, ..., start_row[j] - 1 of its row. A tile of queries by keys is

    skipped     if all its queries precede its first key, or none precedes the largest start row of its keys
    full        if its first query does not precede its last key, and its last query precedes the smallest start row
    partial     otherwise

Shapes: B rows of a batch, S positions, M tiles of queries, N tiles of keys, W length of the longest list.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TileLists(NamedTuple):
    """Tiles of keys to compute for each tile of queries, or tiles of queries for each tile of keys.

    Attributes:
        indices: int32 [B, M, W] tiles of keys, or [B, N, W] tiles of queries; full tiles come first.
        counts: int32 [B, M, 2] or [B, N, 2]: number of full tiles, and of full and partial tiles together.
    """

    indices: np.ndarray
    counts: np.ndarray


def tile_lists(start_rows_BS: np.ndarray, queries: int, keys: int, of_keys: bool = False) -> TileLists:
    """Return the tiles of keys to compute for each tile of queries.

    Args:
        start_rows_BS: int32, for each key the first later query that does not attend to the key.
        queries: number of queries in a tile.
        keys: number of keys in a tile.
        of_keys: whether to list the tiles of queries for each tile of keys instead.
    """
    length = start_rows_BS.shape[1]
    padding = -length % keys
    largest_BN = _tiled(start_rows_BS, padding, keys).max(axis=-1)
    smallest_BN = _tiled(start_rows_BS, padding, keys).min(axis=-1)  # 0 in a tile with padding, which is never full
    first_queries_M1 = np.arange(0, length, queries)[:, None]
    first_keys_N = np.arange(0, length, keys)
    is_computed = (first_keys_N < first_queries_M1 + queries) & (largest_BN[:, None] > first_queries_M1)
    is_full = (first_keys_N + keys - 1 <= first_queries_M1) & (smallest_BN[:, None] >= first_queries_M1 + queries)
    ranks = np.where(is_full, 0, np.where(is_computed, 1, 2)).astype(np.uint8)
    if of_keys:
        ranks = ranks.transpose(0, 2, 1)
    counts = np.stack([(ranks == 0).sum(axis=-1), (ranks < 2).sum(axis=-1)], axis=-1, dtype=np.int32)
    indices = np.argsort(ranks, axis=-1, kind="stable")[..., : counts.max()]
    return TileLists(np.ascontiguousarray(indices, np.int32), counts)


def _tiled(start_rows_BS: np.ndarray, padding: int, keys: int) -> np.ndarray:
    """Return the start rows split into tiles [B, N, keys], padded with zeros."""
    return np.pad(start_rows_BS, ((0, 0), (0, padding))).reshape(len(start_rows_BS), -1, keys)
