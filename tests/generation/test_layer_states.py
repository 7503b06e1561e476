"""States of layers in both caches, with a layer that sums and counts the tokens of each row."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.continuous_kv_cache import RowsOfCache, SlotCache
from paddlenlp_ext.generation.padded_kv_cache import KVCache

LAYER = 3
SHAPES = [((1, 2), paddle.float32), ((), paddle.int64)]


def run(cache: KVCache | RowsOfCache, tokens_BS: list[list[int]]) -> None:
    """Add the tokens of each row to the sums [B, 1, 2] and the counts [B] of its state, in place where it may."""
    cache.begin_pass(len(tokens_BS[0]))
    cache.note_frequency_sets(())
    sums, counts = cache.state(LAYER, SHAPES)
    assert (sums.dtype, counts.dtype) == (paddle.float32, paddle.int64)
    documents = cache.new_documents().document_lengths
    own = [row[-lengths[-1] :] for row, lengths in zip(tokens_BS, documents, strict=True)]
    added = paddle.to_tensor([[[sum(row), -sum(row)]] for row in own], "float32")
    if cache.owns_state(LAYER):
        sums.add_(added)
    else:
        sums = sums + added
    cache.keep_state(LAYER, (sums, counts + paddle.to_tensor([len(row) for row in own])))


def found(cache: KVCache | RowsOfCache) -> list[tuple[float, int]]:
    """Return the sum and the count of each row."""
    cache.begin_pass(1)
    sums, counts = cache.state(LAYER, SHAPES)
    assert (sums[:, 0, 1] == -sums[:, 0, 0]).all()
    return list(zip(sums[:, 0, 0].tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("chunks", [(6,), (1,) * 6, (3, 3), (4, 2)])
def test_kv_cache_state_of_a_padded_row_excludes_the_padding(chunks):
    """Test rows that start before, in and after the first chunk."""
    tokens, cache, column = [[1, 2, 3, 4, 5, 6], [100, 100, 100, 4, 5, 6], [100] * 5 + [6]], KVCache([0, 3, 5]), 0
    for size in chunks:
        run(cache, [row[column : column + size] for row in tokens])
        column += size
        assert cache.length == column
    assert found(cache) == [(21, 6), (15, 3), (6, 1)]


def test_kv_cache_new_documents_separate_the_padding():
    cache = KVCache([0, 2, 5])
    cache.begin_pass(3)
    assert cache.new_documents().document_lengths == ((3,), (2, 1), (3,))
    cache.begin_pass(4)
    assert cache.new_documents().document_lengths == ((4,), (4,), (2, 2))


def test_kv_cache_state_follows_the_prefix():
    first = KVCache([0])
    run(first, [[7, 8]])
    cache = KVCache([0, 1, 3])
    cache.set_prefix(*first.as_prefix())
    assert not cache.is_new and cache.length == 0
    run(cache, [[1, 2], [100, 2], [100, 100]])
    run(cache, [[3, 4], [3, 4], [100, 4]])
    assert found(cache) == [(25, 6), (24, 5), (19, 3)]


def test_kv_cache_select_rows_selects_states():
    cache = KVCache([0, 1])
    run(cache, [[1, 2], [100, 3]])
    cache.select_rows([1, 0, 1])
    run(cache, [[10], [20], [30]])
    assert found(cache) == [(13, 2), (23, 3), (33, 2)]


def test_kv_cache_truncate_returns_to_the_saved_states():
    cache = KVCache([0])
    run(cache, [[1, 2]])
    cache.save_states()
    run(cache, [[3, 4, 5]])
    assert cache.truncate(9) == 5 and cache.truncate(4) == 2 and cache.length == 2
    run(cache, [[30]])
    assert cache.truncate(2) == 2 and found(cache) == [(3, 2)]


def test_kv_cache_truncate_before_the_saved_states_empties_the_cache():
    first, cache = KVCache([0]), KVCache([0])
    run(first, [[7]])
    cache.set_prefix(*first.as_prefix())
    run(cache, [[1, 2]])
    assert cache.truncate(1) == cache.length == 0
    run(cache, [[1, 2]])
    cache.save_states()
    assert cache.truncate(1) == 0 and found(cache) == [(7, 1)]


def test_kv_cache_truncate_before_the_saved_states_discards_them():
    """Test that the states saved for the removed tokens do not return after other tokens."""
    cache = KVCache([0])
    run(cache, [[1, 2]])
    cache.save_states()
    run(cache, [[3]])
    assert cache.truncate(1) == 0
    run(cache, [[10, 20, 30]])
    assert cache.truncate(2) == 0 and found(cache) == [(0, 0)]


def test_kv_cache_select_rows_discards_the_saved_states():
    cache = KVCache([0, 0])
    run(cache, [[1, 2], [3, 4]])
    cache.save_states()
    run(cache, [[5], [6]])
    cache.select_rows([1, 0])
    assert cache.truncate(2) == 0 and found(cache) == [(0, 0), (0, 0)]


def test_kv_cache_truncate_without_states_keeps_all_positions_before_the_end():
    cache, x = KVCache([0]), paddle.ones([1, 4, 2, 8])
    cache.begin_pass(4)
    cache.append(LAYER, x, x, None)
    assert cache.truncate(3) == cache.length == 3


def test_kv_cache_owns_the_states_of_a_pass_until_something_else_refers_to_them():
    cache, owns = KVCache([0, 1]), []
    for refer in (lambda: None, lambda: None, cache.save_states, lambda: None, lambda: cache.select_rows([1, 0])):
        refer()
        cache.begin_pass(1)
        owns.append(cache.owns_state(LAYER))
        sums, counts = cache.state(LAYER, SHAPES)
        cache.keep_state(LAYER, (sums + 1, counts + 1))
    assert owns == [False, False, False, True, False]  # row 1 starts in the second pass
    one_row = KVCache([0])
    run(one_row, [[1, 2]])
    assert found(one_row) == [(3, 2)] and one_row.owns_state(LAYER)
    one_row.as_prefix()
    assert not one_row.owns_state(LAYER)


def test_kv_cache_state_keeps_no_gradients():
    cache = KVCache([0])
    cache.begin_pass(1)
    cache.keep_state(LAYER, (paddle.ones([1, 2]) * paddle.to_tensor(1.0, stop_gradient=False),))
    cache.begin_pass(1)
    assert all(x.stop_gradient for x in cache.state(LAYER, [((2,), paddle.float32)]))


def one_row(tokens: list[int], prefix: KVCache | None = None) -> SlotCache:
    """Return a cache with one row."""
    cache = SlotCache()
    cache.add_row()
    view = cache.rows(0, 1, [len(tokens)])
    if prefix is not None:
        view.set_prefix(*prefix.as_prefix())
    run(view, [tokens])
    view.advance()
    return cache


def states(cache: SlotCache) -> list[tuple[float, int]]:
    return found(cache.rows(0, len(cache.lengths), cache.lengths))


def step(cache: SlotCache, first: int, tokens: list[int]) -> None:
    """Append one token to consecutive rows."""
    view = cache.rows(first, len(tokens), [1] * len(tokens))
    run(view, [[token] for token in tokens])
    view.advance()


def test_slot_cache_states_follow_rows_that_join_move_and_leave():
    cache = SlotCache()
    for tokens in ([1, 2], [3], [4, 5, 6], [7]):
        cache.take_row(one_row(tokens))
    assert states(cache) == [(3, 2), (3, 1), (15, 3), (7, 1)]
    step(cache, 1, [10, 20])
    assert states(cache) == [(3, 2), (13, 2), (35, 4), (7, 1)]
    cache.move_row(3, 0)
    cache.remove_last_row()
    assert states(cache) == [(7, 1), (13, 2), (35, 4)]
    step(cache, 0, [1, 1, 1])
    cache.take_row(one_row([8]))
    step(cache, 3, [2])
    assert states(cache) == [(8, 2), (14, 3), (36, 5), (10, 2)]


def test_slot_cache_clear_row_returns_to_the_state_after_the_prefix():
    prefix = KVCache([0])
    run(prefix, [[100]])
    cache = one_row([1], prefix)
    cache.take_row(one_row([2], prefix))
    assert not cache.rows(0, 2, [1, 1]).is_new
    cache.clear_row(1)
    assert states(cache) == [(101, 2), (100, 1)]
    step(cache, 1, [5])
    assert states(cache) == [(101, 2), (105, 2)]
    cache.remove_last_row()
    cache.remove_last_row()
    cache.add_row()
    assert states(cache) == [(100, 1)]


def test_slot_cache_rows_added_together_have_their_own_states():
    """Test that the last row runs first, before the other rows have a state."""
    cache = SlotCache()
    for _ in range(3):
        cache.add_row()
    step(cache, 2, [5])
    step(cache, 0, [1, 2])
    assert states(cache) == [(1, 1), (2, 1), (5, 1)]


def test_slot_cache_copies_states_only_when_rows_join_or_move():
    cache = SlotCache()
    for tokens in ([1], [2], [3]):
        cache.take_row(one_row(tokens))
    view = cache.rows(0, 3, [1] * 3)
    assert view.state(LAYER, SHAPES)[0] is not view.state(LAYER, SHAPES)[0]
    step(cache, 0, [1, 1, 1])
    view = cache.rows(0, 3, [1] * 3)
    assert view.state(LAYER, SHAPES)[0] is view.state(LAYER, SHAPES)[0]
    assert cache.rows(0, 2, [1] * 2).state(LAYER, SHAPES)[0].shape == [2, 1, 2]


def test_states_are_replaced_and_not_written():
    cache = KVCache([0])
    run(cache, [[1]])
    cache.begin_pass(1)
    before = cache.state(LAYER, SHAPES)
    values = [x.numpy().copy() for x in before]
    cache.keep_state(LAYER, tuple(x + 1 for x in before))
    for x, value in zip(before, values, strict=True):
        np.testing.assert_array_equal(x.numpy(), value)
