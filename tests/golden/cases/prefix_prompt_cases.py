"""Prefixes and prompts of the golden files, on the tiny models of `model_cases`; plain data for both libraries."""

from __future__ import annotations

from typing import Any

LEARNING_RATE, WEIGHT_DECAY, EPSILON, STEPS = 1e-3, 0.01, 1e-6, 3

CASES: dict[str, dict[str, Any]] = {
    "prefix_llama": {"base": "llama_odd_sizes", "method": "prefix", "options": {"num_virtual_tokens": 5}},
    "prefix_qwen3": {"base": "qwen3", "method": "prefix", "options": {"num_virtual_tokens": 3}},
    "prefix_window": {"base": "mistral_window", "method": "prefix", "options": {"num_virtual_tokens": 9}},
    "prefix_projected": {
        "base": "llama_odd_sizes",
        "method": "prefix",
        "options": {"num_virtual_tokens": 5, "prefix_projection": True, "encoder_hidden_size": 7},
    },
    "prompt_llama": {"base": "llama_odd_sizes", "method": "prompt", "options": {"num_virtual_tokens": 5}},
    "prompt_qwen2_tied": {"base": "qwen2", "method": "prompt", "options": {"num_virtual_tokens": 3}},
    "prompt_dynamic_rope": {
        "base": "llama_rope_dynamic",
        "method": "prompt",
        "options": {"num_virtual_tokens": 5},
    },
    "prompt_window": {"base": "mistral_window", "method": "prompt", "options": {"num_virtual_tokens": 9}},
    "p_tuning_mlp": {
        "base": "llama_odd_sizes",
        "method": "p_tuning",
        "options": {"num_virtual_tokens": 5, "encoder_hidden_size": 7},
    },
    "p_tuning_lstm": {
        "base": "qwen2",
        "method": "p_tuning",
        "options": {
            "num_virtual_tokens": 4,
            "encoder_reparameterization_type": "LSTM",
            "encoder_hidden_size": 3,
            "encoder_num_layers": 2,
        },
    },
}
