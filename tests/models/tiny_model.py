"""Tiny random model of the decoder tests."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.decoder import CausalLM
from tests.common.models import TINY_SIZES

TINY: dict[str, Any] = {"model_type": "llama", **TINY_SIZES, "vocab_size": 96}


def make_model(seed: int = 0, **changes: Any) -> CausalLM:
    return AutoModelForCausalLM.from_config({**TINY, **changes}, seed=seed)
