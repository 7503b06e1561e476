"""Estimated size of the cache in sampling, compared with the tensors that the engine stores."""

from __future__ import annotations

from types import SimpleNamespace

import paddle
import pytest

from paddlenlp_ext.generation.continuous_kv_cache import SlotCache
from paddlenlp_ext.trainer.memory.recurrent_states import decoding_state_bytes
from paddlenlp_ext.trainer.memory.sampling_cache import sampling_bytes
from paddlenlp_ext.trainer.policy.sample_completions import sample_completions
from tests.generation.tiny_models import tiny_model

NUM_ROWS, NEW_TOKENS, PROMPT = 8, 6, [1, 2, 3, 4]


@pytest.mark.parametrize("family", ["llama_grouped_heads", "deepseek_v3_latents", "qwen3_5_gated_delta"])
def test_sampling_bytes_are_those_of_the_stored_keys_values_and_states(family, monkeypatch):
    model, found = tiny_model(family), []
    remove = SlotCache.remove_last_row

    def measure(cache: SlotCache) -> None:
        stored = [store for layer in cache.layers.values() for store in layer.stored or ()]
        sizes = [store.size * store.element_size() for store in stored]
        found.append(sum(sizes) + max(sizes))  # a layer is copied when it grows
        remove(cache)

    monkeypatch.setattr(SlotCache, "remove_last_row", measure)
    options = SimpleNamespace(max_completion_length=NEW_TOKENS, top_k=0, temperature=1.0, top_p=1.0)
    sample_completions(model, [(0, PROMPT)], NUM_ROWS, options, end_tokens=frozenset(), max_rows=NUM_ROWS, seed=0)
    estimated = sampling_bytes(model, NUM_ROWS, len(PROMPT) + NEW_TOKENS, paddle.float32)
    others = decoding_state_bytes(model, paddle.float32) + 4 * model.config.vocab_size
    assert estimated == max(found) + NUM_ROWS * others
