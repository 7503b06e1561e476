"""Tiny decoders with random weights, and greedy decoding without a cache as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import paddle

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.models.decoder_config import DecoderConfig
from tests.common.models import (
    TINY_DELTA,
    TINY_KIMI_DELTA,
    TINY_LATENT,
    TINY_LATENT_EXPERTS,
    TINY_MAMBA,
    TINY_SINGLE_BLOCKS,
    TINY_SIZES,
    TINY_SPLIT_DELTA,
    TINY_TWO_MIXERS,
    slow_decays,
)
from tests.golden.cases.model_cases import CASES, make_weight

SIZES = {**TINY_SIZES, "vocab_size": 97, "max_position_embeddings": 512, "initializer_range": 0.3}
FAMILIES = {
    "llama_grouped_heads": {"model_type": "llama"},
    "mistral_window": {"model_type": "mistral", "sliding_window": 8},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3_qk_norm": {"model_type": "qwen3", "head_dim": 16},
    "ernie4_5_interleaved": {"model_type": "ernie4_5", "head_dim": 16},
    "smollm3_layer_without_rotation": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "granite_multipliers": {"model_type": "granite", "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "olmo2_post_norm": {"model_type": "olmo2"},
    "gemma_scaled_embeddings": {"model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1},
    "gemma2_softcaps": {
        "model_type": "gemma2",
        "head_dim": 16,
        "sliding_window": 8,
        "attn_logit_softcapping": 5.0,
    },
    "gemma3_sandwich": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_theta": 1000.0,
    },
    "gemma4_keys_as_values": {
        "model_type": "gemma4_text",
        "head_dim": 12,
        "global_head_dim": 20,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "tie_word_embeddings": False,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "gemma4_e_shared_keys": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 5,
        "head_dim": 12,
        "global_head_dim": 20,
        "tie_word_embeddings": False,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
        "sliding_window": 8,
    },
    "granite_swa_sinks": {"model_type": "granite_swa", "sliding_window": 8, "layer_rope_theta": [0, 1000.0]},
    "granite_4_without_rope": {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * 2,
        "mamba_n_heads": 4,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
    "exaone4_windows_alone_rotate": {"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": 2},
    "ministral3_scaled_queries": {
        "model_type": "ministral3",
        "head_dim": 16,
        "original_max_position_embeddings": 20,
    },
    "arcee_without_gate": {"model_type": "arcee"},
    "apertus_xielu": {"model_type": "apertus", "rope_theta": 1000.0},
    "afmoe_gated_attention": {
        "model_type": "afmoe",
        "head_dim": 16,
        "global_attn_every_n_layers": 2,
        "sliding_window": 8,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "hunyuan_norms_after_rotation": {"model_type": "hunyuan_v1_dense"},
    "phi3_partial_rotation": {"model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": 8},
    "glm4_partial_interleaved": {"model_type": "glm4", "head_dim": 16},
    "mixtral_experts": {"model_type": "mixtral", "num_local_experts": 5},
    "minimax_m2_partial_rotation": {
        "model_type": "minimax_m2",
        "head_dim": 16,
        "rotary_dim": 8,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "gpt_oss_sinks": {"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 5, "sliding_window": 8},
    "lfm2_convolutions": {
        "model_type": "lfm2",
        "full_attn_idxs": [1],
        "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": False,
    },
    "qwen3_5_gated_delta": TINY_DELTA,
    "qwen3_next_fused_delta": {**TINY_DELTA, "model_type": "qwen3_next", "num_experts": 5, "num_experts_per_tok": 2},
    "olmo_hybrid_split_delta": TINY_SPLIT_DELTA,
    "granite_4_mamba2": TINY_MAMBA,
    "kimi_linear_delta": TINY_KIMI_DELTA,
    "falcon_h1_two_mixers": TINY_TWO_MIXERS,
    "nemotron_h_single_blocks": TINY_SINGLE_BLOCKS,
    "granite_4_mamba2_experts": {**TINY_MAMBA, "num_local_experts": 5},
    "lfm2_without_attention": {"model_type": "lfm2", "full_attn_idxs": [], "block_auto_adjust_ff_dim": False},
    "cohere2_parallel": {"model_type": "cohere2", "sliding_window": 8, "sliding_window_pattern": 2},
    "deepseek_v3_latents": {**TINY_LATENT, "q_lora_rank": 12},
    "deepseek_v2_experts": {**TINY_LATENT, **TINY_LATENT_EXPERTS, "model_type": "deepseek_v2"},
    "mistral4_scaled_latents": {
        **TINY_LATENT,
        **TINY_LATENT_EXPERTS,
        "model_type": "mistral4",
        "original_max_position_embeddings": 20,
    },
    "minicpm3_latents": {**TINY_LATENT, "model_type": "minicpm3", "scale_emb": 1, "tie_word_embeddings": False},
}


@cache
def tiny_model(family: str) -> CausalLM:
    """Build a decoder of the family; every call returns the same weights."""
    return slow_decays(AutoModelForCausalLM.from_config({**SIZES, **FAMILIES[family]}))


def golden_model(case: str) -> CausalLM:
    """Build a model of `tests.golden.cases.model_cases` with the weights of the golden files."""
    model = CausalLM(DecoderConfig.from_dict(CASES[case]))
    for name, parameter in model.named_parameters():
        parameter.set_value(make_weight(case, name, tuple(parameter.shape)))
    return model


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return random token ids of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, SIZES["vocab_size"], length).tolist() for length in lengths]


def greedy_without_cache(
    model: CausalLM, prompt: Sequence[int], max_new_tokens: int, end_tokens: Sequence[int] = ()
) -> list[int]:
    """Decode greedily without a cache: the full sequence again for every token."""
    sequence = list(prompt)
    for _ in range(max_new_tokens):
        with paddle.no_grad():
            token = int(model(paddle.to_tensor([sequence]))[0, -1].argmax())
        if token in end_tokens:
            break
        sequence.append(token)
    return sequence[len(prompt) :]
