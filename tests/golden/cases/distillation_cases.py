"""Rows, student and teachers of the golden file of distillation, and cases of its options."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.golden.cases.model_cases import VOCAB, make_weight

GRADIENT = "model.layers.0.self_attn.q_proj.weight"
"""Parameter whose gradient is compared value by value."""
LENGTHS = ((5, 7), (1, 12), (9, 3))
"""Number of tokens of the prompt and of the answer of each row."""
_LLAMA = {"student": "llama_odd_sizes", "teacher": "qwen3"}
CASES: dict[str, dict[str, Any]] = {
    "forward_kl": {**_LLAMA, "beta": 0.0, "temperature": 1.0},
    "reverse_kl": {**_LLAMA, "beta": 1.0, "temperature": 1.0},
    "jsd": {**_LLAMA, "beta": 0.5, "temperature": 1.0},
    "jsd_near_forward": {**_LLAMA, "beta": 0.1, "temperature": 1.0},
    "forward_kl_temperature": {**_LLAMA, "beta": 0.0, "temperature": 2.0},
    "jsd_temperature": {**_LLAMA, "beta": 0.7, "temperature": 0.5},
    "soft_cap": {"student": "gemma2", "teacher": "llama_odd_sizes", "beta": 0.3, "temperature": 1.5},
}
"""Name of a case -> models (cases of model_cases.py) and options of TRL's generalized_jsd_loss."""


def weight(role: str, model: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a parameter of the student or the teacher; the weights of the roles differ."""
    base = make_weight(model, name, shape)
    return base if role == "student" else 0.7 * base + 0.3 * make_weight("teacher", name, shape)


def make_rows() -> list[tuple[list[int], int]]:
    """Return the tokens of each row, and the number of tokens of its prompt."""
    generator = np.random.default_rng(51)
    return [(generator.integers(3, VOCAB, sum(lengths)).tolist(), lengths[0]) for lengths in LENGTHS]
