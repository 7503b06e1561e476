"""MiniCPM3: latent attention, and scaled embeddings, residuals and logits. Hu et al. 2024, arXiv:2404.06395."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import Architecture, Key
from paddlenlp_ext.checkpoint.gguf.mla_tensors import LATENT_ATTENTION, JoinedLatents, latent_settings
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.latent_attention_config import complete_latent, latent_differences
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if config.get("v_head_dim") is None:
        config = {**config, "v_head_dim": config["hidden_size"] // config["num_attention_heads"]}
    return complete_latent(config, rotated_dim=32)


def _differences(config: ConfigReader) -> dict[str, Any]:
    depth, base = config.value("scale_depth"), config.value("dim_model_base")
    return {
        **latent_differences(config),
        "interleaved_rope": False,
        "embedding_multiplier": float(config.value("scale_emb")),
        "residual_multiplier": 1.0 if depth is None else depth / config.size("num_hidden_layers") ** 0.5,
        "logit_scale": 1.0 if base is None else base / config.size("hidden_size"),
    }


FAMILIES.register("minicpm3")(
    Family(
        "MiniCPM3ForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            "q_lora_rank": 768,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,
            "initializer_range": 0.1,
            "tie_word_embeddings": True,
        },
        complete=_complete,
    )
)

ARCHITECTURES.register("minicpm3")(
    Architecture(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        LATENT_ATTENTION,
        keys={"original_max_position_embeddings": Key("context_length")},
        constants={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},  # llama.cpp hard-codes these values
        settings=latent_settings,
        is_latent=True,
        yarn_multiplier=0.1,
        restore=JoinedLatents,
    )
)
