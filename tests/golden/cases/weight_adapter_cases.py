"""Adapters that change weights, of the golden files, on the tiny models of `model_cases`; plain data.

`config` is the class in Hugging Face PEFT, `settings` its arguments; `mean` and `deviation` make the stored values.
`second_copies` are keys of PEFT's file that repeat another tensor.
`weight_decay` replaces WEIGHT_DECAY for parameters that never decay here.
"""

from __future__ import annotations

from typing import Any

LEARNING_RATE, WEIGHT_DECAY, EPSILON, STEPS = 1e-3, 0.01, 1e-6, 3

_SOME = ["q_proj", "k_proj", "down_proj"]
_LLAMA = {"base": "llama_odd_sizes", "mean": 0.0, "deviation": 0.1}
_VECTORS = {"weight_decay": 0.0, "deviation": 0.3, "config": "ShiraConfig"}  # this package decays no vectors
_QWEN2 = {"base": "qwen2", "mean": 0.0, "deviation": 0.1}

CASES: dict[str, dict[str, Any]] = {
    "lokr_whole_factors": {**_LLAMA, "config": "LoKrConfig", "settings": {"r": 8, "target_modules": "all-linear"}},
    "lokr_decomposed": {
        **_QWEN2,
        "config": "LoKrConfig",
        "settings": {
            "r": 2,
            "alpha": 3,
            "decompose_both": True,
            "target_modules": [*_SOME, "v_proj"],
            "rank_pattern": {"k_proj": 1},
            "alpha_pattern": {"v_proj": 5},
        },
    },
    "lokr_factor": {
        **_LLAMA,
        "config": "LoKrConfig",
        "settings": {"r": 3, "alpha": 6, "decompose_factor": 6, "target_modules": [*_SOME, "up_proj"]},
    },
    "loha_through_its_rank": {
        **_LLAMA,
        "deviation": 0.3,
        "config": "LoHaConfig",
        "settings": {"r": 3, "alpha": 6, "target_modules": [*_SOME, "v_proj", "up_proj"]},
    },
    "loha_elementwise": {
        **_QWEN2,
        "deviation": 0.2,
        "config": "LoHaConfig",
        "settings": {"r": 8, "target_modules": _SOME, "rank_pattern": {"q_proj": 2}},
    },
    "ia3_llama": {**_LLAMA, "mean": 1.0, "config": "IA3Config", "settings": {}},
    "ia3_with_biases": {
        **_QWEN2,
        "mean": 1.0,
        "config": "IA3Config",
        "settings": {
            "target_modules": ["k_proj", "v_proj", "up_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
        },
    },
    "tokens_llama": {
        **_LLAMA,
        "config": "TrainableTokensConfig",
        "settings": {"token_indices": [7, 3, 90], "target_modules": ["embed_tokens", "lm_head"]},
    },
    "tokens_embedding": {
        **_LLAMA,
        "config": "TrainableTokensConfig",
        "settings": {"token_indices": [5, 80]},
    },
    "tokens_qwen2_tied": {
        **_QWEN2,
        "config": "TrainableTokensConfig",
        "settings": {"token_indices": [0, 95, 12]},
        "second_copies": ("base_model.model.lm_head.trainable_tokens_delta",),
    },
    "ln_tuning_llama": {**_LLAMA, "mean": 1.0, "weight_decay": 0.0, "config": "LNTuningConfig", "settings": {}},
    "ln_tuning_qwen3": {
        "base": "qwen3",
        "mean": 1.0,
        "deviation": 0.2,
        "weight_decay": 0.0,
        "config": "LNTuningConfig",
        "settings": {"target_modules": ["q_norm", "k_norm", "post_attention_layernorm"]},
    },
    "ln_tuning_cohere2": {
        "base": "cohere2",
        "mean": 1.0,
        "deviation": 0.2,
        "weight_decay": 0.0,
        "config": "LNTuningConfig",
        "settings": {"target_modules": ["input_layernorm", "norm"]},
    },
    "hra_llama": {**_LLAMA, "config": "HRAConfig", "settings": {"target_modules": "all-linear"}},
    "hra_odd_rank": {**_QWEN2, "config": "HRAConfig", "settings": {"r": 3, "target_modules": _SOME}},
    "hra_gram_schmidt": {
        **_LLAMA,
        "config": "HRAConfig",
        "settings": {"r": 5, "apply_GS": True, "target_modules": [*_SOME, "up_proj"]},
    },
    "oft_series": {**_LLAMA, "config": "OFTConfig", "settings": {"target_modules": _SOME}},
    "oft_exact": {
        **_QWEN2,
        "config": "OFTConfig",
        "settings": {"oft_block_size": 8, "use_cayley_neumann": False, "target_modules": "all-linear"},
    },
    "oft_shared_blocks": {
        **_LLAMA,
        "config": "OFTConfig",
        "settings": {
            "r": 4,
            "oft_block_size": 0,
            "block_share": True,
            "num_cayley_neumann_terms": 3,
            "target_modules": _SOME,
        },
    },
    "hira_all_linear": {
        **_LLAMA,
        "deviation": 0.3,
        "config": "HiraConfig",
        "settings": {"r": 5, "target_modules": "all-linear"},
    },
    "hira_ignored_pattern": {
        **_QWEN2,
        "deviation": 0.3,
        "config": "HiraConfig",
        "settings": {
            "r": 8,
            "target_modules": [*_SOME, "v_proj"],
            "rank_pattern": {"k_proj": 1},
        },
    },
    "shira_all_linear": {
        **_LLAMA,
        **_VECTORS,
        "settings": {"r": 1, "random_seed": 5, "target_modules": "all-linear"},
    },
    "shira_with_biases": {
        **_QWEN2,
        **_VECTORS,
        "settings": {"r": 2, "target_modules": _SOME},
    },
    "boft_one_factor": {
        **_QWEN2,
        "config": "BOFTConfig",
        "settings": {"boft_block_size": 4, "target_modules": "all-linear"},
    },
    "boft_two_factors": {
        **_LLAMA,
        "deviation": 0.3,
        "config": "BOFTConfig",
        "settings": {"boft_block_size": 2, "boft_n_butterfly_factor": 2, "target_modules": _SOME},
    },
    "boft_three_factors": {
        **_QWEN2,
        "deviation": 0.3,
        "config": "BOFTConfig",
        "settings": {
            "boft_block_size": 0,
            "boft_block_num": 8,
            "boft_n_butterfly_factor": 3,
            "target_modules": ["q_proj", "k_proj", "up_proj"],
        },
    },
    "miss_balance": {**_LLAMA, "config": "MissConfig", "settings": {"r": 8, "target_modules": "all-linear"}},
    "miss_mini": {
        **_QWEN2,
        "config": "MissConfig",
        "settings": {"r": 6, "mini_r": 4, "init_weights": "mini", "target_modules": [*_SOME, "up_proj"]},
    },
    "miss_bat": {
        **_LLAMA,
        "config": "MissConfig",
        "settings": {"r": 4, "init_weights": "bat", "target_modules": [*_SOME, "v_proj", "up_proj"]},
    },
}
