"""LoRA adapters of the golden files, on the tiny models of `model_cases`; plain data, imported by both libraries."""

from __future__ import annotations

from typing import Any

from tests.golden.cases.model_cases import CASES as MODELS

LEARNING_RATE, WEIGHT_DECAY, EPSILON, STEPS = 1e-3, 0.01, 1e-6, 3

# PEFT trains the factors of a tied pair (`ties_factors`) as two parameters over one storage: their gradients are added
# up here, and there are no steps. `merges` is False for adapters that cannot be merged.
# `plus_ratio` is 1 and `weight_decay` is WEIGHT_DECAY where absent. PEFT decays other parameters than LoRA's by
# other rules than this project does, so cases that train them have no decay.
_LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
CASES: dict[str, dict[str, Any]] = {
    "llama_some_targets": {
        "base": "llama_odd_sizes",
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]},
        "plus_ratio": 1.0,
    },
    "llama_rslora_all_linear": {
        "base": "llama_odd_sizes",
        "lora": {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"},
        "plus_ratio": 1.0,
    },
    "qwen2_all_linear_plus": {
        "base": "qwen2",
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "plus_ratio": 16.0,
    },
    "qwen2_patterns": {
        "base": "qwen2",
        "lora": {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": r".*\.(q_proj|k_proj|o_proj|up_proj)",
            "rank_pattern": {"up_proj": 3, r"layers\.1\.self_attn\.q_proj": 2},
            "alpha_pattern": {"k_proj": 5},
        },
        "plus_ratio": 1.0,
    },
    "llama_second_layer": {
        "base": "llama_odd_sizes",
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
        "plus_ratio": 4.0,
    },
    "qwen2_all_biases": {
        "weight_decay": 0.0,
        "base": "qwen2",
        "lora": {
            "r": 2,
            "lora_alpha": 3,
            "bias": "all",
            "target_modules": ["q_proj", "down_proj"],
            "exclude_modules": ["layers.0.self_attn.q_proj"],
        },
    },
    "qwen2_lora_biases": {
        "weight_decay": 0.0,
        "base": "qwen2",
        "lora": {
            "r": 2,
            "lora_alpha": 3,
            "bias": "lora_only",
            "lora_bias": True,
            "target_modules": ["q_proj", "v_proj"],
            "exclude_modules": r".*layers\.0.*v_proj",
        },
    },
    "llama_modules_to_save": {
        "weight_decay": 0.0,
        "base": "llama_odd_sizes",
        "lora": {
            "r": 2,
            "lora_alpha": 3,
            "modules_to_save": ["embed_tokens", "lm_head", "post_attention_layernorm", "k_proj"],
            "target_modules": ["q_proj", "k_proj"],
        },
    },
    "qwen2_tied_modules_to_save": {
        "weight_decay": 0.0,
        "base": "qwen2",
        "lora": {
            "r": 2,
            "lora_alpha": 3,
            "modules_to_save": ["lm_head"],
            "ensure_weight_tying": True,
            "target_modules": ["q_proj"],
        },
    },
    "llama_embedding_and_head": {
        "base": "llama_odd_sizes",
        "lora": {
            "r": 3,
            "lora_alpha": 5,
            "target_modules": ["v_proj", "embed_tokens", "lm_head"],
            "rank_pattern": {"lm_head": 2},
        },
    },
    "llama_head_with_bias": {
        "weight_decay": 0.0,
        "base": "llama_odd_sizes",
        "lora": {"r": 2, "lora_alpha": 3, "lora_bias": True, "target_modules": ["lm_head"]},
        "merges": False,  # the base has no bias
    },
    "qwen2_tied_embedding": {
        "base": "qwen2",
        "lora": {
            "r": 2,
            "lora_alpha": 3,
            "ensure_weight_tying": True,
            "target_modules": ["q_proj", "embed_tokens"],
        },
        "ties_factors": True,
    },
    "qwen2_embedding_without_head": {
        "base": "qwen2",
        "lora": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "embed_tokens"]},
        "merges": False,  # PEFT changes the tied lm_head too
    },
    "llama_token_indices": {
        "weight_decay": 0.0,
        "base": "llama_odd_sizes",
        "lora": {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [7, 3, 90], "lm_head": [5]},
        },
    },
    "qwen2_token_indices": {
        "weight_decay": 0.0,
        "base": "qwen2",
        "lora": {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": ["q_proj"],
            "trainable_token_indices": [0, 95, 12],
        },
    },
    "mixtral_experts": {
        "base": "mixtral_idle_expert",
        "lora": {
            "r": 3,
            "lora_alpha": 5,
            "target_modules": [],
            "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
            "rank_pattern": {"gate_up_proj": 2},
            "alpha_pattern": {"down_proj": 7},
        },
    },
    "qwen3_moe_router_and_experts": {
        "base": "qwen3_moe_dense_layer",
        "lora": {
            "r": 2,
            "lora_alpha": 3,
            "use_rslora": True,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.down_proj", "mlp.gate.weight"],
            "rank_pattern": {"gate.weight": 1},
        },
    },
    "gpt_oss_experts_and_router": {
        "base": "gpt_oss",
        "lora": {
            "r": 3,
            "lora_alpha": 5,
            "target_modules": ["o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.router.weight"],
            "rank_pattern": {"router.weight": 2},
        },
    },
    "gpt_oss_down_proj": {
        "base": "gpt_oss",
        "lora": {"r": 2, "lora_alpha": 3, "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    },
    "deepseek_v2_latent": {
        "base": "deepseek_v2_experts",
        "lora": {"r": 2, "lora_alpha": 3, "target_modules": _LATENT, "rank_pattern": {"kv_b_proj": 3}},
    },
    "deepseek_v3_latent_and_experts": {
        "base": "deepseek_v3_experts",
        "lora": {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
            "target_parameters": ["mlp.experts.down_proj"],
        },
    },
    "glm4_moe_lite_latent": {
        "base": "glm4_moe_lite",
        "lora": {"r": 2, "lora_alpha": 3, "use_rslora": True, "target_modules": _LATENT},
    },
    "minicpm3_latent": {
        "base": "minicpm3",
        "lora": {"r": 2, "lora_alpha": 3, "target_modules": _LATENT, "layers_to_transform": [1]},
    },
    "llama_saved_embeddings": {
        "base": "llama_odd_sizes",
        "lora": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]},
        "save_embedding_layers": True,
    },
}

# An adapter in the format of transformers 4, where each expert has layers of its own; PEFT stacks it while loading.
SINGLE_EXPERTS = "mixtral_single_experts"
SINGLE_EXPERTS_BASE = "mixtral_idle_expert"
SINGLE_EXPERTS_FIELDS = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 2,
    "lora_alpha": 3,
    "target_modules": ["w1", "w2", "w3", "gate", "k_proj"],
}


def single_expert_layers() -> dict[str, tuple[int, int]]:
    """Return the adapted layers of the case `SINGLE_EXPERTS`, by name, with their outputs and inputs."""
    config = MODELS[SINGLE_EXPERTS_BASE]
    hidden, inner, number = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    keys = config["num_key_value_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
    layers = {}
    for layer in range(config["num_hidden_layers"]):
        own = f"model.layers.{layer}"
        layers[f"{own}.self_attn.k_proj"] = (keys, hidden)
        layers[f"{own}.block_sparse_moe.gate"] = (number, hidden)
        for expert in range(number):
            experts = f"{own}.block_sparse_moe.experts.{expert}"
            layers |= dict.fromkeys((f"{experts}.w1", f"{experts}.w3"), (inner, hidden))
            layers[f"{experts}.w2"] = (hidden, inner)
    return layers


# Adapters over a base whose embedding and lm_head were resized to `num_rows`; PEFT stores both tables.
NEW_TOKENS = [96, 97, 98, 99, 100]
RESIZED_CASES: dict[str, dict[str, Any]] = {
    "llama_resized_rows": {
        "base": "llama_odd_sizes",
        "num_rows": 101,
        "lora": {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": NEW_TOKENS, "lm_head": NEW_TOKENS},
        },
        "save_embedding_layers": True,
    },
    "qwen2_resized_rows": {
        "base": "qwen2",
        "num_rows": 101,
        "lora": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"], "trainable_token_indices": NEW_TOKENS},
        "save_embedding_layers": True,
    },
    "qwen2_resized_embedding": {
        "base": "qwen2",
        "num_rows": 101,
        "lora": {"r": 2, "lora_alpha": 3, "ensure_weight_tying": True, "target_modules": ["q_proj", "embed_tokens"]},
        "ties_factors": True,
    },
    "llama_shrunk_saved": {
        "base": "llama_odd_sizes",
        "num_rows": 90,
        "lora": {
            "r": 2,
            "lora_alpha": 3,
            "target_modules": ["q_proj"],
            "modules_to_save": ["embed_tokens", "lm_head"],
        },
    },
}


def resized_inputs(ids: Any, num_rows: int) -> Any:
    """Return token ids or labels [B, S] for a resized vocabulary; new tokens, if any, replace the first ids."""
    ids = ids % num_rows * (ids >= 0) + ids * (ids < 0)  # -100 marks positions without a target
    if num_rows > max(NEW_TOKENS):
        ids[0, : len(NEW_TOKENS)] = NEW_TOKENS
    return ids
