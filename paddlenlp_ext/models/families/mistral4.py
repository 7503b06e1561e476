"""Mistral Small 4: latent attention of DeepSeek, queries scaled by their position as in Ministral 3. Mistral AI 2026.

Files store the experts of a layer as two stacked tensors without `.weight`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.gguf.architecture import Key, count, number
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.mla_tensors import LATENT_ATTENTION, latent_settings
from paddlenlp_ext.checkpoint.gguf.moe_tensors import GROUPED_EXPERT_KEYS, SHARED_EXPERTS, softmax_scores
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.deepseek_v2 import DEEPSEEK_GGUF, latent_experts
from paddlenlp_ext.models.families.ministral3 import QUERY_SCALE_BETA, complete_query_scale, query_scale
from paddlenlp_ext.models.latent_attention_config import complete_latent
from paddlenlp_ext.models.moe_config import EXPERT_FILES, sigmoid_router
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.rope import stored_settings

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_TENSORS = {f"model.layers.*.{name}": f"model.layers.*.{name.removesuffix('.weight')}" for name in EXPERT_FILES}
_FILES = RenamedTensors({}, tensors=_TENSORS)


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of a config with the query scale, and rope settings relative to `qk_rope_head_dim`.

    In files, `partial_rotary_factor` is `qk_rope_head_dim` divided by the size of a query head.
    """
    completed = complete_latent(complete_query_scale(config, _YARN))
    ropes = {key: value for key, value in stored_settings(completed).items() if key != "partial_rotary_factor"}
    return {**completed, "rope_scaling": None, "rope_parameters": ropes}


def _differences(config: ConfigReader) -> dict[str, Any]:
    first = config.value("first_k_dense_replace") or 0
    router = dataclasses.replace(sigmoid_router(config), kind="softmax", correction_dims=0)
    changes = {"interleaved_rope": bool(config.value("rope_interleave")), "query_scale": query_scale(config)}
    return {**latent_experts(config, router, lambda layer: layer >= first, **changes), "file_layout": _FILES}


FAMILIES.register("mistral4")(
    Family(
        "Mistral4ForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            "q_lora_rank": 1024,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 0,
            "max_position_embeddings": 1_048_576,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "rope_interleave": True,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
        },
        complete=_complete,
    )
)


def _gguf_settings(file: GgufFile) -> dict[str, Any]:
    """Return the sizes of latent attention and the query scale; files without the scale do not scale queries.

    Raises:
        ValueError: the routers do not compute softmax scores, or metadata is damaged.
    """
    beta = number(file, "attention.temperature_scale", 0.0) or None
    settings = {**latent_settings(file), **softmax_scores(file), QUERY_SCALE_BETA: beta}
    if beta:
        settings["original_max_position_embeddings"] = count(file, "attention.temperature_length")
    return settings


def _gguf_metadata(config: Any) -> dict[str, int]:
    return {} if config.query_scale is None else {"attention.temperature_length": config.query_scale.context}


ARCHITECTURES.register("mistral4")(
    dataclasses.replace(
        DEEPSEEK_GGUF,
        name="mistral4",
        class_name="Mistral4ForCausalLM",
        in_block={
            **LATENT_ATTENTION,
            **SHARED_EXPERTS,
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
            "ffn_down_exps.weight": "mlp.experts.down_proj",
        },
        keys={**GROUPED_EXPERT_KEYS, QUERY_SCALE_BETA: Key("attention.temperature_scale", float, default=0.0)},
        settings=_gguf_settings,
        reads=lambda file: True,
        metadata=_gguf_metadata,
    )
)
