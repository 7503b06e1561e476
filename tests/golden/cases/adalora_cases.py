"""AdaLoRA runs of the golden files, on the tiny models of `model_cases`; plain data, imported by both libraries."""

from __future__ import annotations

from typing import Any

LEARNING_RATE, WEIGHT_DECAY, EPSILON = 5e-3, 0.01, 1e-6

CASES: dict[str, dict[str, Any]] = {
    "llama": {
        "base": "llama_odd_sizes",
        "adalora": {
            "init_r": 4,
            "target_r": 1,
            "lora_alpha": 8,
            "tinit": 1,
            "tfinal": 3,
            "deltaT": 2,
            "total_step": 10,
            "orth_reg_weight": 0.5,
            "target_modules": ["q_proj", "k_proj", "down_proj"],
        },
    },
    "qwen2": {
        "base": "qwen2",
        "adalora": {
            "init_r": 3,
            "target_r": 2,
            "lora_alpha": 5,
            "tinit": 0,
            "tfinal": 0,
            "deltaT": 1,
            "total_step": 6,
            "beta1": 0.6,
            "beta2": 0.9,
            "orth_reg_weight": 0.1,
            "target_modules": ["v_proj", "o_proj", "up_proj"],
        },
    },
}
