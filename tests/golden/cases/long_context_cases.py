"""Long-sequence strategies of the golden file: keys of config.json as transformers reads them, models and positions.

`make_long_context_golden.py` feeds them to transformers; tests/models/test_context_extension.py to this package.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FACTOR = 4.0
TRAINED, HEAD_DIM = 2048, 64
"""Sizes of the models whose rotation tables are compared."""
POSITIONS = {
    "within the trained context": [0, 1, 7, 100, 1023, 2047],
    "beyond the trained context": [0, 1, 7, 2047, 2048, 5001, 8191],
}
TABLE_SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 2 * HEAD_DIM,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": TRAINED,
    "rope_theta": 10000.0,
}
TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
"""Model whose logits are compared, on inputs longer than its trained context."""
LOGIT_POSITIONS = [0, 15, 16, 23]
STRATEGIES = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "NTKScalingRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "LongRoPEScalingRotaryEmbedding",
    "Llama3ScalingRotaryEmbedding",
)
BY_LAYER_TYPE: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def long_factor(head_dim: int) -> list[float]:
    """Return one factor per frequency, from 1 up to beyond the scaling factor."""
    return np.linspace(1.0, FACTOR + 1.5, head_dim // 2).round(3).tolist()


def expected_keys(strategy: str, trained: int, head_dim: int) -> dict[str, Any]:
    """Return the keys of config.json that extend a model with theta 10000 by FACTOR."""
    longer = int(FACTOR * trained)
    original = {"factor": FACTOR, "original_max_position_embeddings": trained}
    return {
        "RotaryEmbedding": {"max_position_embeddings": longer},
        "LinearScalingRotaryEmbedding": {
            "max_position_embeddings": trained,
            "rope_scaling": {"rope_type": "linear", "factor": FACTOR},
        },
        "NTKScalingRotaryEmbedding": {
            "max_position_embeddings": longer,
            "rope_theta": 10000.0 * FACTOR ** (head_dim / (head_dim - 2)),
        },
        "DynamicNTKScalingRotaryEmbedding": {
            "max_position_embeddings": trained,
            "rope_scaling": {"rope_type": "dynamic", "factor": FACTOR},
        },
        "YaRNScalingRotaryEmbedding": {
            "max_position_embeddings": longer,
            "rope_scaling": {"rope_type": "yarn", **original},
        },
        "LongRoPEScalingRotaryEmbedding": {
            "max_position_embeddings": longer,
            "rope_scaling": {
                "rope_type": "longrope",
                **original,
                "short_factor": [1.0] * (head_dim // 2),
                "long_factor": long_factor(head_dim),
            },
        },
        "Llama3ScalingRotaryEmbedding": {
            "max_position_embeddings": longer,
            "rope_scaling": {"rope_type": "llama3", **original, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    }[strategy]
