"""VeRA adapters of the golden files, on the tiny models of `model_cases`; plain data, imported by both libraries."""

from __future__ import annotations

from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "vera_llama_stored_pair": {
        "base": "llama_odd_sizes",
        "settings": {"r": 12, "projection_prng_key": 3, "target_modules": ["q_proj", "k_proj", "down_proj"]},
    },
    "vera_qwen2_seeded_pair": {
        "base": "qwen2",
        "settings": {
            "r": 24,
            "projection_prng_key": 2**33 + 11,
            "save_projection": False,
            "target_modules": "all-linear",
        },
    },
}
