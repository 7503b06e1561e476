"""Tiny models of the golden files: configurations, weights and inputs, made in NumPy for both libraries.

`make_model_golden.py` feeds them to transformers; tests/models/test_decoder_golden.py to this package.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

BATCH, LENGTH, VOCAB = 2, 24, 96
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_NO_PADDING = {"pad_token_id": None}  # transformers computes no gradient for the embedding of padding
_NO_DROPOUT = {"attention_dropout": 0.0, "residual_dropout": 0.0}
_GRANITE_4 = {
    "model_type": "granitemoehybrid",
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
    "shared_intermediate_size": 28,
    "num_local_experts": 0,
    "layer_types": ["attention", "attention"],
    "mamba_n_heads": 4,
}
_GRANITE_4_H = {
    **_GRANITE_4,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_expand": 3,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_chunk_size": 16,
}
_EXPERTS = {"num_experts_per_tok": 2}
_LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_PHI4_MINI = {
    "model_type": "phi3",
    "partial_rotary_factor": 0.75,
    "rope_theta": 500.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.2, 2.0, 4.0]},
}
_LATENT = {
    **_SMALL,
    **_NO_PADDING,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 2,
}
_LATENT_EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": None,
}
_GEMMA_4 = {
    "num_hidden_layers": 3,
    "head_dim": 12,
    "global_head_dim": 20,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 7,
    "tie_word_embeddings": True,
}
_LENGTHS = dict.fromkeys(("qwen3_5", "granite_4_h", "olmo_hybrid"), 131)  # more than two chunks
_DELTA_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 14,
    "linear_value_head_dim": 10,
}
_DELTA = {
    **_SMALL,
    **_NO_PADDING,
    "num_hidden_layers": 3,
    "head_dim": 12,
    **_DELTA_HEADS,
}
_DELTA_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
_YARN_OF_SCORES = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}

CASES: dict[str, dict[str, Any]] = {
    "llama_odd_sizes": {**_SMALL, "model_type": "llama", "hidden_size": 36, "num_attention_heads": 6},
    "llama_head_dim_biases_tied": {
        **_SMALL,
        "model_type": "llama",
        "head_dim": 12,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama_rope_llama3_old_spelling": {
        **_SMALL,
        "model_type": "llama",
        "rope_theta": 50000.0,
        "rope_scaling": _LLAMA31,
    },
    "llama_rope_llama3_new_spelling": {
        **_SMALL,
        "model_type": "llama",
        "num_key_value_heads": 1,
        "rope_parameters": {**_LLAMA31, "rope_theta": 500.0},
    },
    "llama_rope_linear": {**_SMALL, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama_rope_dynamic": {
        **_SMALL,
        "model_type": "llama",
        "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    "llama_rope_yarn": {
        **_SMALL,
        "model_type": "llama",
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral_window": {**_SMALL, "model_type": "mistral", "sliding_window": 7},
    "qwen2": {**_SMALL, "model_type": "qwen2", "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen2_sliding_upper_layer": {
        **_SMALL,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {**_SMALL, "model_type": "qwen3", "head_dim": 12, "num_key_value_heads": 4},
    "qwen3_layer_types_tied": {
        **_SMALL,
        "model_type": "qwen3",
        "head_dim": 8,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_window_layers": 28,
    },
    "ernie4_5": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "ernie4_5",
        "head_dim": 12,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    "smollm3": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "tie_word_embeddings": True,
    },
    "smollm3_window": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
    },
    "granite": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "granite",
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
    },
    "granite_swa_bases": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "granite_swa",
        "num_hidden_layers": 3,
        "head_dim": 12,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
        "layer_rope_theta": [500.0, 0, 100.0],
        "sliding_window": 7,
        "tie_word_embeddings": True,
    },
    "granite_4_without_rope": {
        **_SMALL,
        **_NO_PADDING,
        **_GRANITE_4,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "granite_4_with_rope": {**_SMALL, **_NO_PADDING, **_GRANITE_4, "position_embedding_type": "rope"},
    "granite_4_h": {**_SMALL, **_NO_PADDING, **_GRANITE_4_H},
    "granite_4_h_biases": {
        **_SMALL,
        **_NO_PADDING,
        **_GRANITE_4_H,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mamba_d_conv": 3,
        "mamba_n_groups": 3,
        "mamba_proj_bias": True,
        "time_step_limit": [0.1, 1.5],
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "granite_4_h_experts": {
        **_SMALL,
        **_NO_PADDING,
        **_GRANITE_4_H,
        "intermediate_size": 20,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "mamba_conv_bias": False,
        "mamba_n_groups": 1,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.2,
    },
    "exaone4_window": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "exaone4",
        "num_hidden_layers": 4,
        "head_dim": 12,
        "sliding_window": 7,
        "sliding_window_pattern": 4,
        "rope_parameters": {**_LLAMA31, "rope_theta": 500.0},
    },
    "exaone4_full": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "seed_oss": {
        **_SMALL,
        **_NO_PADDING,
        **_NO_DROPOUT,
        "model_type": "seed_oss",
        "head_dim": 12,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "ministral3_far_positions": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "ministral3",
        "head_dim": 12,
        "rope_parameters": {
            "type": "yarn",
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 16.0,
            "original_max_position_embeddings": 5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "arcee": {**_SMALL, **_NO_PADDING, "model_type": "arcee", "hidden_act": "relu2", "mlp_bias": True},
    "apertus": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "apertus",
        "hidden_act": "xielu",
        "rope_parameters": {**_LLAMA31, "rope_theta": 500.0},
    },
    "mellum_types": {
        **_SMALL,
        **_NO_PADDING,
        **_EXPERTS,
        "model_type": "mellum",
        "head_dim": 12,
        "num_experts": 6,
        "moe_intermediate_size": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 7,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "output_router_logits": True,
        "router_aux_loss_coef": 0.2,
    },
    "afmoe": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "afmoe",
        "num_hidden_layers": 3,
        "head_dim": 12,
        "global_attn_every_n_layers": 2,
        "sliding_window": 7,
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 20,
        "route_scale": 1.7,
        "mup_enabled": True,
    },
    "hunyuan_v1_moe": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "hunyuan_v1_moe",
        "head_dim": 12,
        "num_experts": 6,
        "moe_topk": [3, 3],
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "olmo2": {**_SMALL, **_NO_PADDING, "model_type": "olmo2"},
    "cohere2": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "cohere2",
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.3,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "tie_word_embeddings": True,
    },
    "hunyuan_alpha": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "hunyuan_v1_dense",
        "head_dim": 12,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "olmo3_yarn": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 7,
        "rope_theta": 5000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "lfm2": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 4,
        "conv_bias": True,
        "block_multiple_of": 12,
        "norm_eps": 1e-5,
    },
    "lfm2_hub_keys": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "lfm2",
        "hidden_size": 36,
        "num_attention_heads": 6,
        "full_attn_idxs": [1],
        "block_ff_dim": 40,
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": False,
        "norm_eps": 1e-5,
    },
    "lfm2_moe": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "lfm2_moe",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "routed_scaling_factor": 1.7,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {
        **_DELTA,
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "qwen3_5_interval": {
        **_DELTA,
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 2,
        "head_dim": 16,
        "full_attention_interval": 2,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_conv_kernel_dim": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe": {
        **_DELTA,
        **_DELTA_EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.2,
    },
    "qwen3_next": {
        **_DELTA,
        **_DELTA_EXPERTS,
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 16,
        "mlp_only_layers": [2],
    },
    "olmo_hybrid": {
        **_SMALL,
        **_NO_PADDING,
        **_DELTA_HEADS,
        "model_type": "olmo_hybrid",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "olmo_hybrid_defaults": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "olmo_hybrid",
        "num_attention_heads": 2,
        "attention_bias": True,
        "linear_allow_neg_eigval": False,
    },
    "mixtral": {**_SMALL, **_NO_PADDING, **_EXPERTS, "model_type": "mixtral", "num_local_experts": 5},
    "mixtral_ties": {**_SMALL, **_NO_PADDING, **_EXPERTS, "model_type": "mixtral", "num_local_experts": 8},
    "mixtral_idle_expert": {
        **_SMALL,
        **_NO_PADDING,
        **_EXPERTS,
        "model_type": "mixtral",
        "num_local_experts": 7,
        "sliding_window": 7,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.3,
    },
    "qwen3_moe_dense_layer": {
        **_SMALL,
        **_NO_PADDING,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "head_dim": 12,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "output_router_logits": True,
        "router_aux_loss_coef": 0.2,
    },
    "qwen2_moe_step": {
        **_SMALL,
        **_NO_PADDING,
        **_EXPERTS,
        "model_type": "qwen2_moe",
        "num_experts": 5,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "glm4_moe_groups_idle_expert": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "glm4_moe",
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 3,
        "topk_group": 2,
        "moe_intermediate_size": 20,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
    },
    "gpt_oss": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "gpt_oss",
        "head_dim": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "swiglu_limit": 0.6,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.2,
    },
    "ernie4_5_moe_idle_expert": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 3,
        "head_dim": 12,
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 2,
        "moe_layer_interval": 2,
        "moe_layer_start_index": 1,
        "moe_norm_min": 0.7,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.2,
        "tie_word_embeddings": True,
    },
    "gemma": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "gemma",
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_key_value_heads": 1,
        "head_dim": 6,
        "attention_bias": True,
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    "gemma2": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "gemma2",
        "hidden_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "head_dim": 10,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.5,
        "sliding_window": 7,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "gemma3_text",
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "tie_word_embeddings": True,
    },
    "gemma4_keys_as_values": {
        **_SMALL,
        **_NO_PADDING,
        **_GEMMA_4,
        "model_type": "gemma4_text",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 2.5,
    },
    "gemma4_experts": {
        **_SMALL,
        **_NO_PADDING,
        **_GEMMA_4,
        "model_type": "gemma4_text",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"01": {"head_dim": 20, "num_key_value_heads": 4}},
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 20,
    },
    "gemma4_e": {
        **_SMALL,
        **_NO_PADDING,
        **_GEMMA_4,
        "model_type": "gemma4_text",
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 2.5,
    },
    "gemma4_e_experts_biases": {
        **_SMALL,
        **_NO_PADDING,
        **_GEMMA_4,
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_bias": True,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 5,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 2,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
    "gemma4_unified_biases": {
        **_SMALL,
        **_NO_PADDING,
        **_GEMMA_4,
        "model_type": "gemma4_unified_text",
        "hidden_size": 36,
        "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.4,
                "rope_theta": 500.0,
                "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "phi3_window_tied": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "phi3",
        "hidden_size": 36,
        "num_attention_heads": 6,
        "sliding_window": 7,
        "tie_word_embeddings": True,
    },
    "phi3_partial_longrope_short": {**_SMALL, **_NO_PADDING, **_PHI4_MINI, "original_max_position_embeddings": 24},
    "phi3_partial_longrope_long": {**_SMALL, **_NO_PADDING, **_PHI4_MINI, "original_max_position_embeddings": 16},
    "glm_biases": {**_SMALL, **_NO_PADDING, "model_type": "glm", "head_dim": 12, "num_key_value_heads": 1},
    "glm4_share_of_channels": {
        **_SMALL,
        **_NO_PADDING,
        "model_type": "glm4",
        "head_dim": 12,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.34},
    },
    "deepseek_v2_dense_yarn": {
        **_LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "rope_theta": 100.0,
        "rope_scaling": _YARN_OF_SCORES,
    },
    "deepseek_v2_experts": {
        **_LATENT,
        **_LATENT_EXPERTS,
        "model_type": "deepseek_v2",
        "q_lora_rank": 14,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
    },
    "deepseek_v2_greedy": {
        **_LATENT,
        **_LATENT_EXPERTS,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3_experts": {**_LATENT, **_LATENT_EXPERTS, "model_type": "deepseek_v3", "first_k_dense_replace": 1},
    "glm4_moe_lite": {
        **_LATENT,
        **_LATENT_EXPERTS,
        "model_type": "glm4_moe_lite",
        "q_lora_rank": 14,
        "mlp_layer_types": ["sparse", "dense"],
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
    },
    "deepseek_v3_dense": {**_LATENT, "model_type": "deepseek_v3", "q_lora_rank": 14, "attention_bias": True},
    "deepseek_v3_dense_halves": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": 14,
        "rope_interleave": False,
        "tie_word_embeddings": True,
    },
    "minicpm3": {
        **_LATENT,
        "model_type": "minicpm3",
        "q_lora_rank": 14,
        "v_head_dim": None,
        "scale_emb": 3,
        "scale_depth": 0.9,
        "dim_model_base": 20,
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 16,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 1.5, 2.0, 4.0],
        },
        "tie_word_embeddings": True,
    },
}


_ROUTERS = (
    *("mlp.gate.weight", "mlp.router.gate.weight", "mlp.gate.wg.weight", "feed_forward.gate.weight"),
    *("router.proj.weight", "block_sparse_moe.router.weight"),
)


def make_weight(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the fp32 values of a parameter: matrices and biases around 0, norm weights around 1."""
    name = name.replace(".moe_statics.", ".")
    generator = np.random.default_rng(zlib.crc32(f"{case}/{name}".encode()))
    noise = generator.standard_normal(shape).astype(np.float32)
    if name.endswith(_ROUTERS):
        return _router_weight(case, noise)
    if name.endswith(("e_score_correction_bias", "expert_bias")):  # expert 2 is never chosen
        return np.where(np.arange(shape[-1]) == 2, np.float32(-2), 0.1 * noise)
    if name.endswith("A_log"):  # slow and fast decays, so that a document depends on many of its positions
        return np.linspace(-4, 1.5, *shape, dtype=np.float32)
    if name.endswith("dt_bias"):
        return generator.uniform(-3, 1, shape).astype(np.float32)
    if "conv1d" in name:
        return 0.5 * noise
    # The norm of a value head enlarges rounding, and so does a norm of the output of attention in the next layer.
    if "linear_attn.out_proj" in name:
        return 0.07 * noise
    if "linear_attn.o_proj" in name:
        return 0.03 * noise
    if case.startswith(("qwen3_5", "qwen3_next")) and "norm" in name and "linear_attn" not in name:  # scales 1 + w
        return 0.2 * noise
    if case in ("gemma4_e", "gemma4_e_experts_biases") and name.endswith(("q_norm.weight", "k_norm.weight")):
        return np.asarray(0.5 + 0.1 * noise, np.float32)  # large scores, which have no scale, enlarge rounding
    if "per_layer_input_gate" in name:  # gelu of large negative gates loses digits, which a norm enlarges
        return 0.03 * noise
    around_1 = "norm" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale", "mamba.D"))
    return np.asarray(1 + 0.2 * noise if around_1 else 0.15 * noise, np.float32)


def _router_weight(case: str, noise_ED: np.ndarray) -> np.ndarray:
    """Return the weight of a router, in some cases with experts that tie, or with one that no token chooses."""
    if case.endswith("ties"):  # 0 and 1, 2 and 3, ...: the best two always are a pair
        noise_ED = np.repeat(noise_ED[::2], 2, axis=0)
    if case.endswith("idle_expert"):  # the mean of the others is never the largest, and hardly ever the second
        noise_ED[3] = np.delete(noise_ED, 3, axis=0).mean(axis=0)
    return 0.3 * noise_ED


def make_inputs(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids and labels [B, S]; a label is the target of its own position, or -100."""
    generator = np.random.default_rng(zlib.crc32(case.encode()))
    shape = BATCH, _LENGTHS.get(case, LENGTH)
    input_ids = generator.integers(0, VOCAB, shape)
    labels = generator.integers(0, VOCAB, shape)
    labels[generator.random(shape) < 0.3] = -100
    return input_ids, labels
