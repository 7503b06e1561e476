"""Log-likelihoods of the golden file: tiny models, prompts and their continuations, in NumPy only."""

from __future__ import annotations

import zlib

import numpy as np

from tests.golden.cases.model_cases import VOCAB

CASES = ("llama_head_dim_biases_tied", "mistral_window", "qwen3", "mixtral")
MAX_LENGTH = 16
_PROMPT_LENGTHS = (5, 1, 12, 20)
_CONTINUATION_LENGTHS = (1, 3, 8)


def make_pairs(case: str) -> list[tuple[list[int], list[int]]]:
    """Return pairs of prompt and continuation: three for each prompt, of which the first begins the second.

    Some exceed `MAX_LENGTH` positions.
    """
    generator = np.random.default_rng(zlib.crc32(f"{case}/pairs".encode()))
    pairs = []
    for length in _PROMPT_LENGTHS:
        prompt = generator.integers(0, VOCAB, length).tolist()
        continuations = [generator.integers(0, VOCAB, size).tolist() for size in _CONTINUATION_LENGTHS]
        continuations[1][:1] = continuations[0]
        pairs += [(prompt, tokens) for tokens in continuations]
    return pairs
