"""Write models as GGUF files as llama.cpp's converter (convert_hf_to_gguf.py) does, for tests and peer checks.

Tensor names come from the gguf package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import paddle

from paddlenlp_ext.checkpoint.file_layouts.fused_projections import join_fused
from paddlenlp_ext.checkpoint.file_layouts.renamed_experts import RenamedExperts
from paddlenlp_ext.checkpoint.safetensors import as_lazy
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from tests.common.arrays import normal

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
    "rope_theta": 5000.0,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 6}
_LATENT = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-6,  # llama.cpp uses it for the norms of latents too
}
_LATENT_EXPERTS = {
    **_LATENT,
    "tie_word_embeddings": False,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_DELTA_NETS = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 3,
    "rms_norm_eps": 1e-6,  # llama.cpp also adds it in the norms of queries and keys of gated delta nets
}
_GRANITE_4 = {
    "model_type": "granitemoehybrid",
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
    "shared_intermediate_size": 96,
    "num_local_experts": 0,
    "layer_types": ["attention"] * 8,
    "position_embedding_type": None,
}
_GRANITE_4_H = {
    **_GRANITE_4,
    "layer_types": ["mamba", "attention"] * 4,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
}
_GRANITE_4_EXPERTS = {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 3}
_NEMOTRON_H = {
    "model_type": "nemotron_h",
    "head_dim": 32,
    "layer_norm_epsilon": 1e-4,
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "n_groups": 2,
    "ssm_state_size": 16,
    "tie_word_embeddings": False,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 72,
    "moe_shared_expert_intermediate_size": 48,
}
_FALCON_H1 = {
    "model_type": "falcon_h1",
    "head_dim": 32,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 1.2,
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 1.1,
    "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2],
    "mlp_multipliers": [0.9, 0.8],
}
_GEMMA_4 = {
    "model_type": "gemma4_text",
    "head_dim": 32,
    "global_head_dim": 48,
    "sliding_window": 6,
    "final_logit_softcapping": 7.0,
    "hidden_size_per_layer_input": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "phi3": {"partial_rotary_factor": 0.75, "tie_word_embeddings": False},
    "glm4": {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": False},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
    },
    "smollm3": {},
    "ernie4_5": {"head_dim": 32},
    "hunyuan-dense": {"model_type": "hunyuan_v1_dense", "head_dim": 32, "rope_scaling": {"alpha": 50.0}},
    "olmo2": {"tie_word_embeddings": False},
    "exaone4": {"sliding_window": None, "tie_word_embeddings": False},
    "seed_oss": {"head_dim": 32, "tie_word_embeddings": False},
    "arcee": {"tie_word_embeddings": False},
    "granitemoehybrid": _GRANITE_4,
    "granitehybrid": _GRANITE_4_H,
    "nemotron_h": {
        **{key: value for key, value in _NEMOTRON_H.items() if "experts" not in key and "moe" not in key},
        "hybrid_override_pattern": "M-*-MM*-",
    },
    "mistral3": {
        "model_type": "ministral3",
        "head_dim": 32,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "falcon-h1": _FALCON_H1,
    "falcon-h1_norm": {
        **_FALCON_H1,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "tie_word_embeddings": False,
        "ssm_multipliers": None,
    },
    "lfm2": {
        "norm_eps": 1e-4,
        "conv_L_cache": 4,
        "intermediate_size": 210,  # two thirds of it, rounded up to a multiple of 16, are 144
        "block_multiple_of": 16,
        "full_attn_idxs": [2, 5],
    },
    "qwen35": {**_DELTA_NETS, "model_type": "qwen3_5_text"},
    "apertus": {
        "head_dim": 32,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "cohere2": {"layer_norm_eps": 1e-5, "logit_scale": 0.3, "sliding_window": 6},
    "gemma": {"head_dim": 32, "num_key_value_heads": 1},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0},
    "gemma3": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "gemma4": {**_GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_e": {
        **_GEMMA_4,
        "hidden_size_per_layer_input": 20,
        "vocab_size_per_layer_input": 96,
        "layer_types": [*["sliding_attention", "full_attention"] * 4],
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "initializer_range": 0.1,  # larger weights amplify rounding errors of this model
    },
    "gemma4_experts": {
        **_GEMMA_4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 24,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2moe": {
        **_EXPERTS,
        "model_type": "qwen2_moe",
        "num_key_value_heads": 4,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
    },
    "granitemoe": {**_GRANITE_4, **_GRANITE_4_EXPERTS, "position_embedding_type": "rope"},
    "granitehybrid_experts": {**_GRANITE_4_H, **_GRANITE_4_EXPERTS},
    "nemotron_h_moe": {
        **_NEMOTRON_H,
        "hybrid_override_pattern": "ME*EMM*E",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
        "n_shared_experts": 1,
    },
    "nemotron_h_latents": {
        **_NEMOTRON_H,
        "hybrid_override_pattern": "EM*EMMEE",
        "moe_latent_size": 36,
        "initializer_range": 0.1,  # larger weights amplify rounding errors of this model
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        "head_dim": 32,
        "rotary_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": False,
    },
    "hunyuan-moe": {"model_type": "hunyuan_v1_moe", "head_dim": 32, "num_experts": 6, "moe_topk": 3},
    "qwen3moe": {**_EXPERTS, "model_type": "qwen3_moe", "head_dim": 32, "norm_topk_prob": True},
    "qwen35moe": {
        **_EXPERTS,
        **_DELTA_NETS,
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,  # larger weights amplify rounding errors of this model
    },
    "lfm2moe": {
        **_EXPERTS,
        "model_type": "lfm2_moe",
        "conv_L_cache": 3,
        "num_dense_layers": 2,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    },
    "afmoe": {
        **_EXPERTS,
        "head_dim": 32,
        "num_dense_layers": 2,
        "num_shared_experts": 2,
        "route_scale": 1.7,
        "sliding_window": 6,
        "mup_enabled": True,
        "tie_word_embeddings": False,
    },
    "ernie4_5-moe": {
        "model_type": "ernie4_5_moe",
        "head_dim": 32,
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 2,
    },
    "glm4moe": {
        "model_type": "glm4_moe",
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "tie_word_embeddings": False,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 1.7,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 6,
        "tie_word_embeddings": False,
        "rope_theta": 3096.0,  # YaRN's bounds are whole numbers, so that llama.cpp's rounding changes nothing
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
    },
    "deepseek2": {
        **_LATENT_EXPERTS,
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 2,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,  # llama.cpp reads no others
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
    "mistral4": {
        **_LATENT_EXPERTS,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "deepseek_v2_lite": {
        **_LATENT_EXPERTS,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "num_hidden_layers": 27,  # llama.cpp requires compressed queries of models of other depths
        "first_k_dense_replace": 26,
    },
    "deepseek_v3": {
        **_LATENT_EXPERTS,
        "first_k_dense_replace": 3,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
    },
    "glm4_moe_lite": {**_LATENT_EXPERTS, "n_group": 1, "topk_group": 1},
    "minicpm3": {
        **_LATENT,
        "v_head_dim": 16,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "max_position_embeddings": 512,
        "rope_scaling": {
            "rope_type": "longrope",
            "original_max_position_embeddings": 512,
            "short_factor": [1.0, 1.1, 1.3, 2.0],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    },
}
"""Settings of a model by the architecture of its file, or name; 8 layers have every kind of layer of each family."""
ARCHITECTURE_OF = {
    "mixtral": "llama",
    "granitemoehybrid": "granite",
    "granitehybrid_experts": "granitehybrid",
    "nemotron_h_latents": "nemotron_h_moe",
    "falcon-h1_norm": "falcon-h1",
    **dict.fromkeys(("gemma4_e", "gemma4_experts"), "gemma4"),
    **dict.fromkeys(("deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite"), "deepseek2"),
}
"""Architecture of the file of a model with another name."""
END = 3
"""Id of the end token."""
_GRANITE = ("granitemoehybrid", "granitehybrid", "granitemoe", "granitehybrid_experts")
_NEMOTRON = ("nemotron_h", "nemotron_h_moe", "nemotron_h_latents")
_PERMUTED = ("llama", "granite", *_GRANITE, "smollm3", "mixtral", "mistral3", "arcee")
_SCALES_OF_NORMS = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe")


def make_model(architecture: str, **changes: Any) -> CausalLM:
    """Build a model of random weights, norms around 1 included, with `changes` of its settings."""
    config = {**_SIZES, "model_type": architecture, **MODELS[architecture], **changes}
    model = AutoModelForCausalLM.from_config(config, seed=5)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "norm" in name or "bias" in name:
            parameter.set_value((1 + 0.3 * normal(number, *parameter.shape)).astype(np.float32))
        if name.endswith("A_log"):  # slow decays, so that the states reach far
            parameter.set_value(np.linspace(-4, 1.5, parameter.shape[0], dtype=np.float32))
        if ".act_fn." in name:
            parameter.set_value(paddle.full_like(parameter, -abs(float(normal(number, 1)[0]))))
    model.eval()
    return model


def write_model(model: CausalLM, architecture: str, path: Path) -> Path:
    """Write the file of a model that `make_model` built, in float32."""
    config = model.config
    source = config.source
    writer = gguf.GGUFWriter(path, ARCHITECTURE_OF.get(architecture, architecture))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if architecture == "lfm2":
        width, multiple = 2 * source["intermediate_size"] // 3, source["block_multiple_of"]
        writer.add_feed_forward_length(multiple * -(-width // multiple))
    elif "global_head_dim" in source:
        _add_shapes(writer, config)
    elif architecture in _NEMOTRON:
        width = source["intermediate_size"]
        writer.add_feed_forward_length([width if kind in "-E" else 0 for kind in source["hybrid_override_pattern"]])
    elif architecture != "qwen35moe":
        writer.add_feed_forward_length(source["intermediate_size"])
    writer.add_head_count(config.num_attention_heads)
    kv_heads = 1 if config.latent and config.experts else config.num_key_value_heads
    if architecture in ("qwen35", "qwen35moe"):
        _add_delta_nets(writer, config)
    if {"mamba_n_heads", "mamba_num_heads"} & source.keys():
        _add_mamba(writer, config)
    if architecture in ("lfm2", "lfm2moe", "granitehybrid", "granitehybrid_experts", *_NEMOTRON):
        writer.add_head_count_kv([0 if mixer else kv_heads for mixer in config.mixers])
    elif "global_head_dim" not in source:
        writer.add_head_count_kv(kv_heads)
    if architecture in _NEMOTRON:
        writer.add_layer_norm_eps(config.rms_norm_eps)
    add_epsilon = writer.add_layer_norm_eps if "layer_norm_eps" in source else writer.add_layer_norm_rms_eps
    add_epsilon(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    theta = source["rope_theta"]
    if config.latent is not None:
        _add_latent_sizes(writer, model)
    elif "head_dim" in source and "global_head_dim" not in source:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "hunyuan-dense":
        theta *= source["rope_scaling"]["alpha"] ** (config.head_dim / (config.head_dim - 2))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1.0)
        writer.add_rope_scaling_orig_ctx_len(256 * 1024)
    if architecture == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(source["rope_scaling"]["factor"])
    writer.add_rope_freq_base(1e6 if "global_head_dim" in source else theta)
    if architecture == "ernie4_5-moe":
        writer.add_expert_shared_feed_forward_length(source["moe_num_shared_experts"] * source["moe_intermediate_size"])
    if architecture in _GRANITE:
        writer.add_rope_scaling_finetuned(source["position_embedding_type"] == "rope")
        if source["num_local_experts"]:
            writer.add_expert_shared_feed_forward_length(source["shared_intermediate_size"])
    if architecture == "mistral3":
        scaling = source["rope_scaling"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(scaling["mscale_all_dim"])
        writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])
    if architecture == "hunyuan-moe":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(1)
    if architecture == "gpt-oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(source["rope_scaling"]["factor"])
        writer.add_rope_scaling_orig_ctx_len(source["rope_scaling"]["original_max_position_embeddings"])
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture in ("deepseek2", "mistral4"):
        scaling = source.get("rope_parameters") or source["rope_scaling"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
        if "llama_4_scaling_beta" in scaling:
            writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])
            writer.add_attn_temperature_length(scaling["original_max_position_embeddings"])
    normalizing = ("glm4moe", "deepseek_v3", "glm4_moe_lite", "afmoe", "mistral4", "nemotron_h_moe")
    if architecture in (*normalizing, "nemotron_h_latents"):
        writer.add_expert_weights_norm(True)
    if architecture in ("glm4moe", "deepseek_v3", "glm4_moe_lite", "lfm2moe", "minimax-m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "apertus":
        _add_apertus(writer, model)
    if architecture == "minimax-m2":
        writer.add_expert_feed_forward_length(source["intermediate_size"])
    if architecture in ("phi3", "glm4", "glm4moe", "qwen35", "qwen35moe", "minimax-m2"):
        writer.add_rope_dimension_count(config.ropes[0].rotary_dim)
    for key, add in (
        ("attention_multiplier", writer.add_attention_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
        ("sliding_window", lambda window: window and writer.add_sliding_window(window)),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("num_local_experts", lambda number: number and writer.add_expert_count(number)),
        ("num_experts", writer.add_expert_count),
        ("moe_num_experts", writer.add_expert_count),
        ("n_routed_experts", writer.add_expert_count),
        ("num_experts_per_tok", writer.add_expert_used_count),
        ("top_k_experts", writer.add_expert_used_count),
        ("moe_k", writer.add_expert_used_count),
        ("moe_topk", writer.add_expert_used_count),
        ("n_shared_experts", writer.add_expert_shared_count),
        ("num_shared_experts", writer.add_expert_shared_count),
        ("moe_num_shared_experts", writer.add_expert_shared_count),
        ("first_k_dense_replace", writer.add_leading_dense_block_count),
        ("num_dense_layers", writer.add_leading_dense_block_count),
        ("moe_layer_start_index", writer.add_leading_dense_block_count),
        ("moe_layer_interval", writer.add_interleave_moe_layer_step),
        ("n_group", writer.add_expert_group_count),
        ("topk_group", writer.add_expert_group_used_count),
        ("routed_scaling_factor", writer.add_expert_weights_scale),
        ("route_scale", writer.add_expert_weights_scale),
        ("conv_L_cache", writer.add_shortconv_l_cache),
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("moe_shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("moe_latent_size", writer.add_moe_latent_size),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
    ):
        if key in source and (key != "embedding_multiplier" or config.side_mixer is None):
            add(source[key])
    _add_tokenizer(writer, config.vocab_size)
    _add_tensors(writer, model, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_latent_sizes(writer: gguf.GGUFWriter, model: CausalLM) -> None:
    """Write the sizes of latent attention; in DeepSeek's files, key and value lengths describe the latents."""
    latent = model.config.latent
    head_dim = latent.unrotated_dim + latent.rotated_dim
    if latent.query_rank is not None:
        writer.add_q_lora_rank(latent.query_rank)
    writer.add_kv_lora_rank(latent.kv_rank)
    writer.add_rope_dimension_count(latent.rotated_dim)
    if model.config.experts is None:
        writer.add_key_length(head_dim)
        scaling = model.config.source["rope_scaling"]
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(scaling[f"{name}_factor"], np.float32))
        return
    writer.add_key_length(latent.kv_rank + latent.rotated_dim)
    writer.add_value_length(latent.kv_rank)
    writer.add_key_length_mla(head_dim)
    writer.add_value_length_mla(latent.value_dim)
    if "first_k_dense_replace" not in model.config.source:
        writer.add_leading_dense_block_count(1)


def _add_delta_nets(writer: gguf.GGUFWriter, config: DecoderConfig) -> None:
    """Write the sizes of the gated delta nets, and the channel pairs of each axis of the multimodal RoPE."""
    source = config.source
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(source["linear_key_head_dim"])
    writer.add_ssm_group_count(source["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(source["linear_num_value_heads"])
    writer.add_ssm_inner_size(source["linear_num_value_heads"] * source["linear_value_head_dim"])
    writer.add_full_attention_interval(source["full_attention_interval"])
    writer.add_rope_dimension_sections([2, 1, 1, 0])


def _add_mamba(writer: gguf.GGUFWriter, config: DecoderConfig) -> None:
    """Write the sizes of the Mamba-2 layers."""
    shape: Any = next(mixer for mixer in config.other_mixers if mixer.kind == "Mamba-2")
    writer.add_ssm_conv_kernel(shape.num_taps)
    writer.add_ssm_state_size(shape.state_dim)
    writer.add_ssm_group_count(shape.num_groups)
    writer.add_ssm_inner_size(shape.num_heads * shape.head_dim)
    writer.add_ssm_time_step_rank(shape.num_heads)


def _add_shapes(writer: gguf.GGUFWriter, config: DecoderConfig) -> None:
    """Write the sizes of layers with full attention and with windows, and the frequencies that rotate nothing."""
    source = config.source
    has_window = [window is not None for window in config.windows]
    shared, width = source.get("num_kv_shared_layers", 0), source["intermediate_size"]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(source["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(has_window)
    for add, size in (
        (writer.add_key_length, source["global_head_dim"]),
        (writer.add_value_length, source["global_head_dim"]),
        (writer.add_rope_dimension_count, source["global_head_dim"]),
        (writer.add_key_length_swa, source["head_dim"]),
        (writer.add_value_length_swa, source["head_dim"]),
        (writer.add_rope_dimension_count_swa, source["head_dim"]),
    ):
        add(size)
    writer.add_rope_freq_base_swa(1e4)
    layers = config.num_hidden_layers
    if source.get("use_double_wide_mlp"):
        writer.add_feed_forward_length([width * (1 if layer < layers - shared else 2) for layer in range(layers)])
    else:
        writer.add_feed_forward_length(width)
    full = source.get("num_global_key_value_heads")
    heads = source["num_key_value_heads"]
    writer.add_head_count_kv([heads if each else full for each in has_window] if full else heads)
    pairs = source["global_head_dim"] // 2
    divisors = np.array([1.0] * (pairs // 4) + [1e30] * (pairs - pairs // 4), np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


def _shaped_tensor(name: str) -> str:
    """Return the name under which the converter looks up a tensor, or its GGUF name."""
    layer = name.split(".")[2]
    if name.endswith("router.scale"):
        return f"blk.{layer}.ffn_gate_inp.scale"
    if name.endswith("per_expert_scale"):
        return f"blk.{layer}.ffn_down_exps.scale"
    return f"{name}.weight" if ".experts." in name or name.endswith("layer_scalar") else name


def _mamba_tensor(name: str, values: np.ndarray, config: DecoderConfig) -> tuple[str, np.ndarray]:
    """Return the converter's name and values of a tensor of a Mamba-2 layer."""
    if name.endswith("A_log"):
        values = -np.exp(values.astype(np.float64)).astype(np.float32)[:, None]
    if name.endswith(".D"):
        values = values[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        values = np.stack(np.split(values, config.source.get("mamba_n_groups") or config.source["n_groups"]))
    if name.endswith("conv1d.weight"):
        values = values.squeeze(1)
    return name.replace("dt_bias", "dt_proj.bias"), values


def _add_apertus(writer: gguf.GGUFWriter, model: CausalLM) -> None:
    """Write the activations' parameters of all layers, and the divisors of Llama 3's rotary frequencies."""
    activations = [layer.mlp.act_fn for layer in model.model.layers]
    writer.add_xielu_alpha_p([each.alpha_p.item() for each in activations])
    writer.add_xielu_alpha_n([each.alpha_n.item() for each in activations])
    writer.add_xielu_beta([each.beta.item() for each in activations])
    writer.add_xielu_eps([each.eps.item() for each in activations])
    source, head_dim = model.config.source, model.config.head_dim
    scaling = source["rope_scaling"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelengths = 2 * np.pi * source["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    divisors = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    assert divisors.min() == 1 < divisors.max() == scaling["factor"]
    writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(chr(33 + i) for i in range(vocab_size - 3)), "AB", "CD", "EF"])
    writer.add_token_types([3 if index == END else 1 for index in range(vocab_size)])
    writer.add_token_merges(["A B", "C D", "E F"])
    writer.add_eos_token_id(END)


def _add_tensors(writer: gguf.GGUFWriter, model: CausalLM, architecture: str) -> None:
    config = model.config
    stored = ARCHITECTURE_OF.get(architecture, architecture)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == stored)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    parameters = dict(model.named_parameters())
    fused = {} if architecture in _GRANITE else config.fused_layers
    as_files = stored in ("qwen", "lfm2", "falcon-h1")
    tensors = config.to_files(parameters) if as_files else join_fused(parameters, fused)
    if stored == "gemma4":
        tensors = config.to_files(parameters)
    if isinstance(config.file_layout, RenamedExperts):
        tensors = config.file_layout.names.to_files(tensors)
    values_of = {name: as_lazy(tensor).read() for name, tensor in tensors.items()}
    if stored == "falcon-h1":
        values_of = _with_multipliers(values_of, config)
    arrays = iter(values_of.items()) if stored == "mistral4" else _with_split_experts(values_of)
    for name, values in _with_split_latents(arrays, config) if stored in ("deepseek2", "mistral4") else arrays:
        if architecture in _PERMUTED and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            half = len(values) // heads // 2
            values = values.reshape(heads, 2, half, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture in _SCALES_OF_NORMS and "norm" in name and not name.endswith("linear_attn.norm.weight"):
            values = values + 1
        if architecture in _GRANITE and config.experts:
            name = name.replace(".mlp.", ".mlp.shared_experts.").replace(".moe.", ".mlp.")
        if architecture in _NEMOTRON:
            name = (
                name.replace(".mixer.experts.", ".mlp.experts.")
                if ".experts." in name
                else re.sub("^model", "backbone", name)
            )
        if ".linear_attn." in name:
            name, values = _delta_net_tensor(name, values, config)
        if ".mamba." in name or ".mixer." in name:
            name, values = _mamba_tensor(name, values, config)
        if ".act_fn." in name:
            continue
        if name.endswith("conv.conv.weight"):
            values = values.squeeze(1)
        if architecture in ("lfm2moe", "afmoe"):
            name = re.sub(r"(router\.)?gate\.e_score_correction_bias", "expert_bias.bias", name)
        if name.endswith(("shared_expert_gate.weight", "e_score_correction_bias")):
            values = values.reshape(-1)
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if name.endswith("sinks"):
            name += ".weight"
        if stored == "gemma4":
            name = _shaped_tensor(name)
            if name.startswith("blk."):
                writer.add_tensor(name, values)
                continue
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(values))


def _delta_net_tensor(name: str, values: np.ndarray, config: DecoderConfig) -> tuple[str, np.ndarray]:
    """Return the converter's name of a tensor, and its values with the value heads sorted by their place in a group."""
    sizes = config.other_mixers[0]
    group = sizes.num_value_heads // sizes.num_key_heads
    order = [key * group + place for place in range(group) for key in range(sizes.num_key_heads)]

    def tiled(rows: np.ndarray) -> np.ndarray:
        heads = np.split(rows, len(order))
        return np.concatenate([heads[head] for head in order])

    if "in_proj_qkv" in name or "conv1d" in name:
        start = 2 * sizes.num_key_heads * sizes.key_dim
        values = np.concatenate([values[:start], tiled(values[start:])])
    elif "out_proj" in name:
        values = tiled(values.T).T
    elif not name.endswith("norm.weight"):
        values = tiled(values)
    if name.endswith("A_log"):
        values = -np.exp(values.astype(np.float64)).astype(np.float32)
    return name.replace("dt_bias", "dt_proj.bias"), values.squeeze(1) if "conv1d" in name else values


def _with_multipliers(tensors: dict[str, np.ndarray], config: DecoderConfig) -> dict[str, np.ndarray]:
    """Return tensors whose weights contain the multipliers of the config."""
    source = config.source
    if "lm_head.weight" not in tensors:
        tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    gate, down = source["mlp_multipliers"]
    inner, groups = source["mamba_d_ssm"], source["mamba_n_groups"] * source["mamba_d_state"]
    sections = [inner, inner, groups, groups, source["mamba_n_heads"]]
    rows = np.repeat(source["ssm_multipliers"] or [1.0] * 5, sections).astype(np.float32)
    scales = {
        "down_proj": [down],
        "gate_proj": [gate],
        "k_proj": [source["key_multiplier"], source["attention_in_multiplier"]],
        "q_proj": [source["attention_in_multiplier"]],
        "v_proj": [source["attention_in_multiplier"]],
        ".o_proj": [source["attention_out_multiplier"]],
        "out_proj": [source["ssm_out_multiplier"]],
        "in_proj": [source["ssm_in_multiplier"], rows[:, None]],
        "lm_head": [source["lm_head_multiplier"]],
        "embed_tokens": [source["embedding_multiplier"]],
    }
    result = {}
    for name, values in tensors.items():
        for scale in next((found for part, found in scales.items() if part in name), ()):
            values = values * np.float32(scale)
        result[name] = values
    return result


def _with_split_experts(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors with the gates of all experts, [E, F, D], apart from their upper projections."""
    for name, values in tensors.items():
        name = name.replace("_proj_bias", "_proj.bias")
        if ".experts.gate_up_proj." in name:
            for part, half in zip(("gate_proj", "up_proj"), np.split(values, 2, axis=1), strict=True):
                yield name.replace("gate_up_proj", part), half
        else:
            yield name, values


def _with_split_latents(
    tensors: Iterator[tuple[str, np.ndarray]], config: DecoderConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors, with separate matrices for keys, transposed, [N, L, U], and for values, [N, E, L]."""
    for name, values in tensors:
        if "kv_b_proj" in name:
            by_head = values.reshape(config.num_attention_heads, -1, values.shape[-1])
            keys, values = np.split(by_head, [config.latent.unrotated_dim], axis=1)
            yield name.replace("kv_b_proj", "k_b_proj"), np.swapaxes(keys, 1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        else:
            yield name, values
