"""Tiny models with odd sizes and grouped queries, and helpers that run, train and compare them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.models.causal_lm import CausalLM
from paddlenlp_ext.peft.config import PeftConfig
from paddlenlp_ext.peft.registry import PEFT_METHODS
from paddlenlp_ext.trainer.optimizers.build_optimizer import build_optimizer
from tests.common.models import (
    ODD_SIZES,
    TINY_DELTA,
    TINY_KIMI_DELTA,
    TINY_LATENT,
    TINY_MAMBA,
    TINY_SINGLE_BLOCKS,
    TINY_SPLIT_DELTA,
    TINY_TWO_MIXERS,
)

_SIZES = {
    **ODD_SIZES,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "model_type": "llama", "tie_word_embeddings": False},
    "qwen2": {**_SIZES, "model_type": "qwen2", "tie_word_embeddings": True},
}
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "latent": {**_SIZES, **TINY_LATENT, "num_key_value_heads": 6, "kv_lora_rank": 36, "v_head_dim": 8},
    "latent_experts": {
        **_SIZES,
        **TINY_LATENT,
        "num_key_value_heads": 6,
        "kv_lora_rank": 36,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 36,
        "n_group": 1,
        "topk_group": 1,
    },
    "sandwich": {
        **_SIZES,
        "model_type": "gemma2",
        "head_dim": 6,
        "query_pre_attn_scalar": 6,
        "sliding_window": 5,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 7.0,
        "tie_word_embeddings": True,
    },
    "convolutions": {
        **_SIZES,
        "model_type": "lfm2",
        "full_attn_idxs": [1],
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": False,
    },
    "gated_delta": {
        **_SIZES,
        **TINY_DELTA,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
        "tie_word_embeddings": True,
    },
    "split_delta": {
        **_SIZES,
        **TINY_SPLIT_DELTA,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
        "tie_word_embeddings": False,
    },
    "experts_beside": {
        **_SIZES,
        "model_type": "gemma4_text",
        "head_dim": 6,
        "global_head_dim": 14,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 36,
        "tie_word_embeddings": False,
    },
    "layer_embeddings": {
        **_SIZES,
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "head_dim": 6,
        "global_head_dim": 14,
        "hidden_size_per_layer_input": 36,
        "vocab_size_per_layer_input": 61,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 5,
        "tie_word_embeddings": True,
    },
    "mamba2": {**_SIZES, **TINY_MAMBA, "mamba_n_heads": 6, "tie_word_embeddings": True},
    "two_mixers": {**_SIZES, **TINY_TWO_MIXERS, "mamba_n_heads": 6, "mamba_d_ssm": 36, "tie_word_embeddings": True},
    "kimi_delta": {
        **_SIZES,
        **TINY_KIMI_DELTA,
        "linear_head_dim": 36,
        "linear_num_heads": 12,
        "kv_lora_rank": 36,
        "num_key_value_heads": 6,
        "qk_nope_head_dim": 12,
        "v_head_dim": 8,
        "moe_intermediate_size": 36,
    },
    "single_blocks": {
        **_SIZES,
        **TINY_SINGLE_BLOCKS,
        "head_dim": 6,
        "mamba_head_dim": 9,
        "moe_intermediate_size": 36,
        "moe_shared_expert_intermediate_size": 36,
        "tie_word_embeddings": False,
    },
    "parallel": {**_SIZES, "model_type": "cohere2", "sliding_window": 5, "layer_norm_eps": 1e-5, "logit_scale": 0.3},
    "sinks": {
        **_SIZES,
        "model_type": "gpt_oss",
        "head_dim": 6,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
        "tie_word_embeddings": False,
        "rope_scaling": None,
    },
    "experts": {
        **_SIZES,
        "model_type": "ernie4_5_moe",
        "tie_word_embeddings": False,
        "moe_num_experts": 5,
        "moe_k": 2,
        "moe_intermediate_size": 36,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    },
}
MORE_FAMILIES |= {
    f"{family}_layer": {**MORE_FAMILIES[family], "num_hidden_layers": 1}
    for family in ("llama", "qwen2", "experts", "latent")
}
"""With models of other kinds of layers, and some with a single layer."""
INPUT_IDS = np.random.default_rng(0).integers(0, 61, (2, 11))
CHANGES_LOGITS_AT_START = ("p_tuning", "prefix_tuning", "prompt_tuning")
REQUIRED_OPTIONS: dict[str, dict[str, Any]] = {"trainable_tokens": {"indices": (51, 38, 3)}}
LABELS = np.random.default_rng(1).integers(0, 61, (2, 11))


def tiny_model(family: str = "llama") -> CausalLM:
    """Build a tiny model in evaluation mode; every call returns the same weights."""
    model = AutoModelForCausalLM.from_config(MORE_FAMILIES[family], seed=3)
    model.eval()
    return model


def default_config(switch: str, **options: Any) -> PeftConfig:
    """Return a method's config with its defaults, `options`, and those options that have no default."""
    return PEFT_METHODS.get(switch)(**REQUIRED_OPTIONS.get(switch, {}), **options)


def logits_of(model: Any) -> np.ndarray:
    """Return the logits of the fixed prompts."""
    with paddle.no_grad():
        return model(paddle.to_tensor(INPUT_IDS)).numpy()


def loss_of(model: Any) -> paddle.Tensor:
    """Return the loss of the fixed prompts, with its graph."""
    hidden_TD = model.hidden_states(paddle.to_tensor(INPUT_IDS)).flatten(0, 1)
    return model.cross_entropy(hidden_TD, paddle.to_tensor(LABELS.flatten()))[0]


def train(model: Any, steps: int = 1, until: float = 0.0) -> float:
    """Train for some AdamW steps, or until the loss is at most `until`; return the last loss before a step."""
    options = SimpleNamespace(
        optim="adamw", learning_rate=0.01, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8
    )
    optimizer = build_optimizer(model, options)
    model.train()
    value = float("inf")
    for _ in range(steps):
        loss = loss_of(model)
        value = float(loss)
        if value <= until:
            break
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    model.eval()
    return value


def state_of(model: Any) -> dict[str, np.ndarray]:
    """Return copies of all tensors by name."""
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if two sets of named arrays are bitwise equal."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def run_keys(run_folders: Path, **more: Any) -> dict[str, Any]:
    """Return the keys of a run of three steps on the files of the fixture `run_folders`, and `more`."""
    folders = {
        "model_name_or_path": "model",
        "dataset_name_or_path": "data",
        "data_cache_dir": "cache",
        "output_dir": "out",
    }
    paths = {key: str(run_folders / folder) for key, folder in folders.items()}
    return {**paths, "chat_template": "none", "do_train": True, "max_steps": 3, "device": "cpu", **more}
