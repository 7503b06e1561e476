"""Tiny decoders with random weights, and greedy decoding by definition: the whole sequence again for every token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import paddle

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.decoder import CausalLM
from tests.common.models import TINY_SIZES

SIZES = {**TINY_SIZES, "vocab_size": 97, "max_position_embeddings": 512, "initializer_range": 0.3}
FAMILIES = {
    "llama_grouped_heads": {"model_type": "llama"},
    "mistral_window": {"model_type": "mistral", "sliding_window": 8},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3_qk_norm": {"model_type": "qwen3", "head_dim": 16},
}


@cache
def tiny_model(family: str) -> CausalLM:
    """A decoder of that family, the same on every call."""
    return AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]})


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Token ids of those lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, SIZES["vocab_size"], length).tolist() for length in lengths]


def greedy_without_cache(
    model: CausalLM, prompt: Sequence[int], max_new_tokens: int, end_tokens: Sequence[int] = ()
) -> list[int]:
    """The definition that `generate` is held to."""
    sequence = list(prompt)
    for _ in range(max_new_tokens):
        with paddle.no_grad():
            token = int(model(paddle.to_tensor([sequence]))[0, -1].argmax())
        if token in end_tokens:
            break
        sequence.append(token)
    return sequence[len(prompt) :]
