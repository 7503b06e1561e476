"""DeepSeek V3 with dense layers: latent attention as in V2. DeepSeek-AI 2024, arXiv:2412.19437."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.latent import LATENT_DEFAULTS, complete_latent, latent_differences, require_dense
from paddlenlp_ext.models.llama import LLAMA_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family


def _differences(config: ConfigReader) -> dict[str, Any]:
    require_dense(config, config.value("first_k_dense_replace"))
    return {**latent_differences(config), "interleaved_rope": bool(config.value("rope_interleave"))}


FAMILIES.register("deepseek_v3")(
    Family(
        "DeepseekV3ForCausalLM",
        _differences,
        LLAMA_TENSOR_PLAN,
        {**LATENT_DEFAULTS, "first_k_dense_replace": 3, "rope_interleave": True, "max_position_embeddings": 4096},
        complete=complete_latent,
    )
)
