"""Cache of rows that join and leave."""

from __future__ import annotations

import paddle
import pytest

from paddlenlp_ext.generation.continuous_kv_cache import SlotCache


def test_first_chunk_of_a_prompt_reserves_the_slots_of_all_chunks():
    """Append a prompt in chunks, and check that no later chunk allocates keys and values anew."""
    cache, prompt_length = SlotCache(), 700
    cache.add_row()
    stored = []
    for _ in range(7):
        view = cache.rows(0, 1, [prompt_length])
        view.begin_pass(100)
        view.note_frequency_sets(())
        view.append(0, paddle.ones([1, 100, 2, 4]), paddle.ones([1, 100, 2, 4]), None)
        view.advance()
        stored.append(cache.layers[0].stored)
    assert cache.lengths == [prompt_length]
    assert all(each is stored[0] for each in stored)


def _cache_of_one_row(value: float, length: int) -> SlotCache:
    cache = SlotCache()
    cache.add_row()
    view = cache.rows(0, 1, [length])
    view.begin_pass(length)
    view.note_frequency_sets((True,))
    view.append(0, paddle.full([1, length, 2, 4], value), paddle.full([1, length, 2, 3], -value), None)
    view.advance()
    return cache


def test_take_row_keeps_the_stored_rows_and_appends_the_longer_row():
    cache, longer = _cache_of_one_row(1.0, 3), _cache_of_one_row(2.0, 300)
    cache.take_row(longer)
    assert cache.lengths == [3, 300] and cache.frequency_sets == [(True,), (True,)]
    for store, sign, size in zip(cache.layers[0].stored or (), (1.0, -1.0), (4, 3), strict=True):
        assert store[0, :, :3].sum().item() == sign * 3 * 2 * size
        assert store[1, :, :300].sum().item() == 2.0 * sign * 300 * 2 * size
        assert store.sum().item() == sign * (3 + 600) * 2 * size


@pytest.mark.parametrize("first_rows", [0, 1])
def test_take_row_appends_copies_with_their_own_positions(first_rows):
    cache, other = SlotCache(), _cache_of_one_row(2.0, 3)
    for _ in range(first_rows):
        cache.take_row(_cache_of_one_row(1.0, 1))
    cache.take_row(other, copies=6)
    assert cache.lengths == [1] * first_rows + [3] * 6
    view = cache.rows(first_rows, 6, [3] * 6)
    view.begin_pass(1)
    values = paddle.arange(6, dtype="float32").reshape([6, 1, 1, 1])
    view.append(0, values.expand([6, 1, 2, 4]), values.expand([6, 1, 2, 3]), None)
    keys = (cache.layers[0].stored or ())[0][first_rows : first_rows + 6, 0, :4, 0]
    assert keys.tolist() == [[2.0, 2.0, 2.0, float(row)] for row in range(6)]


def test_take_row_into_an_empty_cache_copies_nothing():
    cache, other = SlotCache(), _cache_of_one_row(1.0, 3)
    stored = other.layers[0].stored
    cache.take_row(other)
    assert cache.lengths == [3] and cache.layers[0].stored is stored
