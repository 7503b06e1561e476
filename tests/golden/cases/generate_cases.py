"""Greedy continuations of the golden file: tiny models, options and prompts, in NumPy only."""

from __future__ import annotations

import zlib

import numpy as np

from tests.golden.cases.model_cases import VOCAB

NUM_NEW = 24
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
OPTIONS: dict[str, dict[str, float]] = {"greedy": {}, "penalty": {"repetition_penalty": 1.3}}


def make_prompts(case: str) -> list[list[int]]:
    """Return prompts of unequal lengths, as token ids."""
    generator = np.random.default_rng(zlib.crc32(f"{case}/prompts".encode()))
    return [generator.integers(0, VOCAB, length).tolist() for length in PROMPT_LENGTHS]
