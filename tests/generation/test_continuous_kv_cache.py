"""Cache of rows that join and leave."""

from __future__ import annotations

import paddle

from paddlenlp_ext.generation.continuous_kv_cache import SlotCache


def test_first_chunk_of_a_prompt_reserves_the_slots_of_all_chunks():
    """Append a prompt in chunks, and check that no later chunk allocates keys and values anew."""
    cache, prompt_length = SlotCache(), 700
    cache.add_row()
    stored = []
    for _ in range(7):
        view = cache.rows(0, 1, [prompt_length])
        view.note_frequency_sets(())
        view.append(0, paddle.ones([1, 100, 2, 4]), paddle.ones([1, 100, 2, 4]), None)
        view.advance(100)
        stored.append(cache.layers[0].stored)
    assert cache.lengths == [prompt_length]
    assert all(each is stored[0] for each in stored)
