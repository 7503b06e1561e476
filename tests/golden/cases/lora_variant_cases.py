"""DoRA, PiSSA and OLoRA adapters of the golden files, on the tiny models of `model_cases`."""

from __future__ import annotations

from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "llama_dora_all_linear": {
        "base": "llama_odd_sizes",
        "lora": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": "all-linear"},
    },
    "qwen2_dora_biases": {
        "base": "qwen2",
        "lora": {
            "r": 4,
            "lora_alpha": 6,
            "use_dora": True,
            "use_rslora": True,
            "target_modules": ["q_proj", "v_proj", "up_proj"],
            "rank_pattern": {"up_proj": 3},
        },
    },
    "llama_pissa": {
        "base": "llama_odd_sizes",
        "lora": {
            "r": 4,
            "lora_alpha": 8,
            "init_lora_weights": "pissa",
            "target_modules": ["q_proj", "k_proj", "down_proj"],
        },
    },
    "qwen2_pissa": {
        "base": "qwen2",
        "lora": {
            "r": 4,
            "lora_alpha": 4,
            "use_rslora": True,
            "init_lora_weights": "pissa",
            "target_modules": ["v_proj", "up_proj"],
            "rank_pattern": {"v_proj": 2},
        },
    },
    "llama_olora": {
        "base": "llama_odd_sizes",
        "lora": {
            "r": 4,
            "lora_alpha": 6,
            "init_lora_weights": "olora",
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"k_proj": 3},
        },
    },
}
GRADIENT_CASE = "llama_odd_sizes"
