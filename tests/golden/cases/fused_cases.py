"""Adapters of fused layers in the golden files, on the tiny models of `model_cases`; plain data for both libraries."""

from __future__ import annotations

from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "fused_rslora_patterns": {
        "base": "phi3_window_tied",
        "lora": {
            "r": 4,
            "lora_alpha": 6,
            "use_rslora": True,
            "target_modules": ["qkv_proj", "o_proj", "gate_up_proj"],
            "rank_pattern": {"gate_up_proj": 3, r"layers\.1\.self_attn\.qkv_proj": 5},
            "alpha_pattern": {"layers.0.self_attn.qkv_proj": 9},
        },
    },
    "fused_dora": {
        "base": "phi3_window_tied",
        "lora": {
            "r": 3,
            "lora_alpha": 5,
            "use_dora": True,
            "target_modules": ["qkv_proj", "down_proj"],
            "exclude_modules": r".*layers\.1.*qkv_proj",
        },
    },
    "fused_modules_to_save": {
        "base": "phi3_window_tied",
        "lora": {"r": 2, "lora_alpha": 3, "target_modules": ["qkv_proj"], "modules_to_save": ["gate_up_proj"]},
    },
}
