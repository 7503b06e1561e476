"""Find the token prefixes that rows of a dataset share.

1. Rows are grouped by the hash of their first 32 tokens. Each group of two or more rows is then split by the hash of
   the first 64 tokens, of the first 96 tokens, and so on. The groups form a tree. For example, the root is the system
   prompt of all rows, and its children are the few-shot examples of each task.
2. From the deepest groups upward: if one prefix for an entire group saves more positions than the prefixes of the
   subgroups, the rows of the subgroups move to the group. A row has only one prefix, because a document that continues
   a prefix cannot be continued (ops/attention/document_layout.py).
3. The prefix of a group is the longest common prefix of the tokens of its rows; hashes only propose the groups. The
   prefix ends before the first position with a label.

All steps are vectorized over the rows, and read only the shared tokens and at most 32 tokens after them. The result
depends only on the tokens, the loss masks and the capacity of a pack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from paddlenlp_ext.data.shared_prefixes import SharedPrefixes, saved_positions
from paddlenlp_ext.data.tokenization.memory_mapped_arrays import TokenArrays

BLOCK = 32
"""Number of tokens that each level of the tree of groups adds to the prefix; also the minimum length of a prefix."""
_ROWS_AT_ONCE = 1 << 15
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def find_prefixes(parts: Sequence[TokenArrays], capacity: int) -> SharedPrefixes:
    """Return the shared prefix of each row of one or more datasets; rows of different datasets never share a prefix.

    Args:
        parts: rows of each dataset.
        capacity: number of positions of a pack.
    """
    return SharedPrefixes.concatenate([_find(part, capacity) for part in parts])


def _find(arrays: TokenArrays, capacity: int) -> SharedPrefixes:
    limits = prefix_limits(arrays)
    labels = _choose_groups(_tree(arrays, limits), arrays.lengths, capacity)
    rows = np.flatnonzero(labels >= 0)
    rows = rows[np.argsort(labels[rows], kind="stable")]
    groups = np.full(len(labels), -1, np.int64)
    if not len(rows):
        return SharedPrefixes(groups, np.zeros(0, np.int64))
    starts = np.flatnonzero(np.diff(labels[rows], prepend=-1))
    sizes = np.diff(np.append(starts, len(rows)))
    common = _common_lengths(arrays, rows, np.repeat(rows[starts], sizes), limits)
    lengths = np.minimum.reduceat(common, starts)
    is_long = lengths >= BLOCK  # False if rows with different tokens have the same hash
    numbers = np.where(is_long, np.cumsum(is_long) - 1, -1)
    groups[rows] = np.repeat(numbers, sizes)
    return SharedPrefixes(groups, lengths[is_long])


def prefix_limits(arrays: TokenArrays) -> np.ndarray:
    """Return the number of positions of each row before the first position with a label, int64 [rows].

    The result is 0 for a row without target tokens.
    """
    limits = np.zeros(len(arrays), np.int64)
    for rows in _slices(len(arrays)):
        begins, ends = arrays.offsets[rows], arrays.offsets[rows.start + 1 : rows.stop + 1]
        targets = begins[0] + np.flatnonzero(arrays.loss_mask[begins[0] : ends[-1]])
        first = np.append(targets, ends[-1])[np.searchsorted(targets, begins)]
        limits[rows] = np.where(first < ends, first - begins - 1, 0)
    return limits


def _tree(arrays: TokenArrays, limits: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Return (depth, rows, groups) for each depth 32, 64, ...; rows with equal hashes of `depth` tokens form a group.

    `rows` has the indices of the rows in groups of at least two rows, int64. `groups` has the index of the group of
    each of these rows, int64.
    """
    hashes, rows, depth = np.zeros(len(arrays), np.uint64), np.arange(len(arrays)), 0
    levels = []
    while True:
        rows = rows[limits[rows] >= depth + BLOCK]
        for part in _slices(len(rows)):
            blocks = _block(arrays, rows[part], depth)
            hashes[rows[part]] = _hash(hashes[rows[part]], blocks)
        depth += BLOCK
        _, groups, counts = np.unique(hashes[rows], return_inverse=True, return_counts=True)
        rows, groups = rows[counts[groups] > 1], groups[counts[groups] > 1]
        if not len(rows):
            return levels
        levels.append((depth, rows, np.unique(groups, return_inverse=True)[1]))


def _choose_groups(
    levels: Sequence[tuple[int, np.ndarray, np.ndarray]], lengths: np.ndarray, capacity: int
) -> np.ndarray:
    """Choose at most one group of the tree for each row; return the label of each row's group, or -1 without a group.

    Args:
        levels: result of `_tree`.
        lengths: number of positions of each row.
        capacity: number of positions of a pack.
    """
    labels, saved = np.full(len(lengths), -1, np.int64), np.zeros(len(lengths))  # saved: positions saved per row
    num_labels = 0
    for depth, rows, groups in reversed(levels):
        num_groups = int(groups.max()) + 1
        depths = np.full(num_groups, depth, np.int64)
        is_free = labels[rows] < 0
        of_all = saved_positions(groups, lengths[rows], depths, capacity)
        of_free = saved_positions(groups[is_free], lengths[rows[is_free]], depths, capacity)
        below = np.bincount(groups, weights=saved[rows], minlength=num_groups)
        takes_all = of_all > below + of_free
        joins = takes_all[groups] | (is_free & (of_free[groups] > 0))
        joined = groups[joins]
        share = np.where(takes_all, of_all, of_free) / np.maximum(np.bincount(joined, minlength=num_groups), 1)
        labels[rows[joins]] = num_labels + joined
        saved[rows[joins]] = share[joined]
        num_labels += num_groups
    return labels


def _common_lengths(arrays: TokenArrays, rows: np.ndarray, others: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return the length of the common prefix of rows[i] and others[i], at most the smaller of their limits, int64."""
    ends = np.minimum(limits[rows], limits[others])
    lengths = ends.copy()
    for part in _slices(len(rows)):
        active, depth = np.arange(part.start, part.stop), 0
        while len(active):
            differs = _block(arrays, rows[active], depth) != _block(arrays, others[active], depth)
            found = np.where(differs.any(axis=1), depth + differs.argmax(axis=1), depth + BLOCK)
            lengths[active] = np.minimum(found, ends[active])
            depth += BLOCK
            active = active[(found == depth) & (ends[active] > depth)]
    return lengths


def _slices(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _ROWS_AT_ONCE, count)) for start in range(0, count, _ROWS_AT_ONCE))


def _block(arrays: TokenArrays, rows: np.ndarray, depth: int) -> np.ndarray:
    """Return tokens `depth` to `depth` + 31 of each row, int32 [rows, 32]; entries after a row's end are arbitrary."""
    starts, last = arrays.offsets[rows] + depth, len(arrays.tokens) - BLOCK
    if len(starts) and starts.max() <= last:
        return np.lib.stride_tricks.sliding_window_view(arrays.tokens, BLOCK)[starts]  # 4 x as fast as take
    return np.take(arrays.tokens, starts[:, None] + np.arange(BLOCK), mode="clip")


def _hash(hashes: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Extend the hash of each row with a block of tokens, two tokens at a time; return the hashes, uint64 [rows]."""
    for column in np.ascontiguousarray(blocks.view(np.uint64).T):
        hashes = (hashes ^ column) * _MULTIPLIER
        hashes ^= hashes >> _SHIFT
    return hashes
