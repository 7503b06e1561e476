"""ReFT interventions of the golden files, on the tiny models of `model_cases`; plain data for both libraries.

Prompts are at least twice as long as the number of positions changed at either end: pyreft changes at most half of a
prompt at each end, so shorter prompts are treated differently.
"""

from __future__ import annotations

from typing import Any

LEARNING_RATE, EPSILON, STEPS = 1e-3, 1e-6, 3
PROMPT_LENGTHS = (9, 16)

CASES: dict[str, dict[str, Any]] = {
    "llama_loreft": {
        "base": "llama_odd_sizes",
        "reft": {"intervention_type": "LoreftIntervention", "rank": 5, "position": "f3+l2"},
    },
    "qwen2_loreft_relu_upper_layer": {
        "base": "qwen2_sliding_upper_layer",
        "reft": {
            "intervention_type": "LoreftIntervention",
            "rank": 3,
            "position": "l4",
            "act_fn": "relu",
            "layers": "1",
        },
    },
    "qwen2_direft_gelu": {
        "base": "qwen2",
        "reft": {"intervention_type": "DireftIntervention", "rank": 4, "position": "f4", "act_fn": "gelu"},
    },
    "mistral_noreft_bias": {
        "base": "mistral_window",
        "reft": {"intervention_type": "NoreftIntervention", "rank": 4, "position": "f2+l3", "add_bias": True},
    },
    "llama_nodireft": {
        "base": "llama_odd_sizes",
        "reft": {"intervention_type": "NodireftIntervention", "rank": 4, "position": "f1+l1"},
    },
}
