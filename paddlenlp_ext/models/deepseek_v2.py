"""DeepSeek V2 with dense layers: latent attention. DeepSeek-AI 2024, arXiv:2405.04434."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.models.latent import LATENT_DEFAULTS, complete_latent, latent_differences, require_dense
from paddlenlp_ext.models.llama import LLAMA_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family


def _differences(config: ConfigReader) -> dict[str, Any]:
    require_dense(config, config.value("first_k_dense_replace"))
    return latent_differences(config)


FAMILIES.register("deepseek_v2")(
    Family(
        "DeepseekV2ForCausalLM",
        _differences,
        LLAMA_TENSOR_PLAN,
        {**LATENT_DEFAULTS, "first_k_dense_replace": 0},
        complete=complete_latent,
    )
)
