"""Continuations of the golden files, greedy and by beam search: tiny models, options and prompts, in NumPy only."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from tests.golden.cases.model_cases import VOCAB

NUM_NEW = 24
ENDS = list(range(0, VOCAB, 5))  # so many that random models reach one
PROMPT_LENGTHS = (3, 20, 11, 1)
CASES = (
    "llama_head_dim_biases_tied",
    "llama_rope_llama3_new_spelling",
    "llama_rope_yarn",
    "mistral_window",
    "qwen2",
    "qwen2_sliding_upper_layer",
    "qwen3",
    "qwen3_layer_types_tied",
)
BEAM_CASES = ("llama_head_dim_biases_tied", "mistral_window", "qwen3")
BEAM_OPTIONS: dict[str, dict[str, Any]] = {
    "no_end": {"num_beams": 3, "eos_token_id": None},
    "short": {"num_beams": 4, "eos_token_id": ENDS[:1], "length_penalty": -1.0},
    "sums": {"num_beams": 4, "eos_token_id": ENDS, "length_penalty": 0.0},
    "means": {"num_beams": 2, "eos_token_id": ENDS},
    "long": {"num_beams": 5, "eos_token_id": ENDS, "length_penalty": 2.5},
    "penalty": {"num_beams": 3, "eos_token_id": ENDS, "repetition_penalty": 1.3},
    "minimum": {"num_beams": 3, "eos_token_id": ENDS, "length_penalty": -1.0, "min_new_tokens": 7},
}
"""Options of beam search, which have the same names in transformers."""

OPTIONS: dict[str, dict[str, float]] = {"greedy": {}, "penalty": {"repetition_penalty": 1.3}}


def make_prompts(case: str) -> list[list[int]]:
    """Return prompts of unequal lengths, as token ids."""
    generator = np.random.default_rng(zlib.crc32(f"{case}/prompts".encode()))
    return [generator.integers(0, VOCAB, length).tolist() for length in PROMPT_LENGTHS]
