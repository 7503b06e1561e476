"""A tiny random model for the tests of this room."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.decoder import CausalLM

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def make_model(seed: int = 0, **changes: Any) -> CausalLM:
    return AutoModelForCausalLM.from_config({**TINY, **changes}, seed=seed)
