"""OLMo 2: norms after attention and feed-forward, and QK norms over all heads. arXiv:2501.00656."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import POST_NORM, QK_NORMS, Architecture, attention_bias
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.sharding_spec import TensorPlan

OLMO2_TENSOR_PLAN: TensorPlan = {
    **DECODER_TENSOR_PLAN,
    "model.layers.*.self_attn.q_norm": "norm",
    "model.layers.*.self_attn.k_norm": "norm",
}


def olmo2_differences(config: ConfigReader) -> dict[str, Any]:
    """Return the `DecoderConfig` attributes of OLMo 2, which has full attention in every layer."""
    bias = bool(config.value("attention_bias"))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "qk_norm": QKNorm(per_head=False),
        "layer": "post_norm",
        "windows": full_attention(config),
    }


FAMILIES.register("olmo2")(Family("Olmo2ForCausalLM", olmo2_differences, OLMO2_TENSOR_PLAN, {"rms_norm_eps": 1e-5}))

ARCHITECTURES.register("olmo2")(
    Architecture("olmo2", "Olmo2ForCausalLM", {**POST_NORM, **QK_NORMS}, settings=attention_bias)
)
