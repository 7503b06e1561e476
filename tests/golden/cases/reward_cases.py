"""Pairs of answers for reward models with the tiny models of model_cases.py."""

from __future__ import annotations

from typing import Any

from tests.golden.cases.preference_training_cases import MODEL, make_pairs

LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "centered": {"center_rewards_coefficient": 0.05},
    "margin": {"margins": (0.5, 0.0, 1.25)},
}
"""Name of a case -> options of TRL's RewardTrainer, and margins of the pairs."""
FAMILIES = (
    *(MODEL, "mistral_window", "qwen2", "qwen3", "smollm3", "olmo2", "olmo3_yarn", "hunyuan_alpha", "gemma3_text"),
    *("phi3_partial_longrope_short", "glm4_share_of_channels", "deepseek_v3_dense", "minicpm3", "gemma2", "mixtral"),
)
"""Cases of model_cases.py whose families have a sequence classifier in transformers, with the case of the losses."""
PAD_TOKEN_ID = int(make_pairs()[0][1][-1])
"""Padding token of config.json; the first chosen answer ends with it, so that the token before it is scored."""
