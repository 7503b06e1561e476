"""Sampled completions of the tiny model `MODEL`, and cases of GRPO's options."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.golden.cases.model_cases import VOCAB, make_weight

MODEL = "llama_odd_sizes"
"""Case of model_cases.py whose configuration the model has."""
GRADIENT = "model.layers.0.self_attn.q_proj.weight"
"""Parameter whose gradient is compared value by value."""
NUM_GENERATIONS = 4
MAX_LENGTH = 12
END_TOKEN = 2
PROMPT_LENGTHS = (9, 1, 6)
LENGTHS = ((5, 3, 7, 2), (4, 12, 1, 6), (3, 3, 8, 2))
"""Tokens of each completion of each prompt."""
REWARD_NAMES = ("correct", "short")
REWARD_WEIGHTS = (1.0, 0.5)
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2}
CORRECTION = {"importance_sampling_correction": True, "importance_sampling_clip_max": 1.5}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "bnpo": {"loss_type": "bnpo", "scale_rewards": "batch"},
    "gspo": {"loss_type": "grpo", **SEQUENCE},
    "gspo_kl": {"loss_type": "dapo", "beta": 0.3, **SEQUENCE},
    "clip": {"loss_type": "grpo", "epsilon": 0.05, "epsilon_high": 0.5},
    "delta": {"loss_type": "dapo", "delta": 1.3},
    "kl": {"loss_type": "dapo", "beta": 0.2},
    "kl_without_ratio": {"loss_type": "dr_grpo", "beta": 0.2, "use_bias_correction_kl": False},
    "truncated": {"loss_type": "dapo", "beta": 0.1, "mask_truncated_completions": True},
    "truncated_grpo": {"loss_type": "grpo", "mask_truncated_completions": True},
    "temperature": {"loss_type": "grpo", "beta": 0.1, "temperature": 0.7},
    "token_truncate": {"loss_type": "dapo", "importance_sampling_mode": "token_truncate", **CORRECTION},
    "token_mask": {"loss_type": "dapo", "importance_sampling_mode": "token_mask", **CORRECTION},
    "sequence_truncate": {"loss_type": "grpo", "importance_sampling_mode": "sequence_truncate", **CORRECTION},
    "sequence_mask": {"loss_type": "bnpo", "importance_sampling_mode": "sequence_mask", **CORRECTION},
}
"""Name of a case -> keys that differ from TRL's defaults."""
IN_MICRO_BATCHES = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo_kl", "truncated", "sequence_mask")
"""Cases that are also computed in a micro-batch for each group."""


def weight(version: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a parameter of the model that sampled ("old"), that is trained ("new"), or of the reference model."""
    base = make_weight(MODEL, name, shape)
    if version == "old":
        return base
    return (base + 0.1 * (make_weight(version, name, shape) - make_weight("mean", name, shape))).astype(np.float32)


def make_groups() -> list[tuple[list[int], list[list[int]]]]:
    """Return the prompt and the completions of each group; most completions end with `END_TOKEN`."""
    generator = np.random.default_rng(41)
    groups = []
    for length, lengths in zip(PROMPT_LENGTHS, LENGTHS, strict=True):
        prompt = generator.integers(3, VOCAB, length).tolist()
        completions = [generator.integers(3, VOCAB, each).tolist() for each in lengths]
        for number, completion in enumerate(completions):
            if number != 1:
                completion[-1] = END_TOKEN
        groups.append((prompt, completions))
    return groups


def make_rewards() -> np.ndarray:
    """Return the reward of each completion by each function, [completions, functions]; NaN: no reward."""
    count = len(PROMPT_LENGTHS) * NUM_GENERATIONS
    generator = np.random.default_rng(42)
    rewards = np.stack([generator.integers(0, 2, count).astype(float), generator.uniform(0, 1, count)], axis=1)
    rewards[2, 1] = rewards[5] = np.nan
    rewards[8:] = 1.0  # all completions of the last group are equally good
    return rewards


def make_sampling_noise() -> list[np.ndarray]:
    """Return the difference between the log-probabilities in sampling and in training, for each completion."""
    generator = np.random.default_rng(43)
    return [generator.normal(0, 0.2, length).astype(np.float32) for lengths in LENGTHS for length in lengths]
