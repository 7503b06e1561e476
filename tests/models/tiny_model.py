"""Tiny random model of the decoder tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import paddle

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from paddlenlp_ext.models.init_weights import initialize_weights
from tests.common.arrays import normal
from tests.common.models import TINY_SIZES, slow_decays

TINY: dict[str, Any] = {"model_type": "llama", **TINY_SIZES, "vocab_size": 96}


def make_model(seed: int = 0, **changes: Any) -> CausalLM:
    return AutoModelForCausalLM.from_config({**TINY, **changes}, seed=seed)


def make_model_with_slow_decays(**changes: Any) -> CausalLM:
    """Build a decoder whose gated delta nets have the decays of trained models."""
    return slow_decays(make_model(**changes))


def make_model_with_sinks(**changes: Any) -> CausalLM:
    """Build a decoder whose heads have sinks of different sizes."""
    config = dataclasses.replace(DecoderConfig.from_dict({**TINY, **changes}), attention_sinks=True)
    model = CausalLM(config)
    initialize_weights(model, 0, config.initializer_range)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.sinks.set_value(paddle.to_tensor(normal(index, config.num_attention_heads)))
    return model
