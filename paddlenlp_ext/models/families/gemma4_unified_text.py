"""Gemma 4 12B, text only: a dense Gemma 4 model with longer windows and contexts. Google 2026."""

from __future__ import annotations

from dataclasses import replace

from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.gemma4_text import (
    GEMMA4_DEFAULTS,
    GEMMA4_GGUF,
    complete_gemma4,
    gemma4_differences,
)
from paddlenlp_ext.models.families.qwen3 import QWEN3_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, Family

FAMILIES.register("gemma4_unified_text")(
    Family(
        "Gemma4UnifiedForCausalLM",
        gemma4_differences,
        QWEN3_TENSOR_PLAN,
        {**GEMMA4_DEFAULTS, "max_position_embeddings": 262_144, "sliding_window": 1024},
        activation_key="hidden_activation",
        complete=complete_gemma4,
    )
)

# Files do not distinguish this model_type; they are read as the other one, which computes the same.
ARCHITECTURES.register("gemma4_unified_text")(replace(GEMMA4_GGUF, reads=lambda file: False, variants=()))
