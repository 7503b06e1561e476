"""ERNIE 4.5 with routed and shared experts. Baidu 2025, ERNIE 4.5 Technical Report."""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.stacked_experts import StackedExperts
from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, Key, has_bias
from paddlenlp_ext.checkpoint.gguf.moe_tensors import ROUTED_EXPERTS, SHARED_EXPERTS, plain_softmax
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.moe_config import EXPERT_FILES, expert_differences
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions

_FILES = StackedExperts(
    EXPERT_FILES,
    {"mlp.gate.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"},
    unused=r"model\.mtp_.*",
)


def _differences(config: ConfigReader) -> dict[str, Any]:
    if config.value("use_bias"):
        raise ValueError("use_bias in config.json: biases of linear layers are not supported; set it to false")
    num_layers = config.size("num_hidden_layers")
    inner, last = config.size("moe_intermediate_size"), config.value("moe_layer_end_index")
    first, interval = config.value("moe_layer_start_index"), config.size("moe_layer_interval")
    shape = ExpertShape(
        num_experts=config.size("moe_num_experts"),
        intermediate_size=inner,
        router=RouterOptions(
            kind="softmax",
            top_k=config.size("moe_k"),
            smallest_sum=float(config.value("moe_norm_min")),
            correction_dims=2,
        ),
        shared_size=inner * (config.value("moe_num_shared_experts") or 0),
    )
    last = num_layers - 1 if last == -1 else last
    return {
        "interleaved_rope": True,
        "windows": full_attention(config),
        **expert_differences(
            config,
            DECODER_TENSOR_PLAN,
            shape,
            lambda layer: (layer + 1) % interval == 0 and first <= layer <= last,
            _FILES,
        ),
    }


FAMILIES.register("ernie4_5_moe")(
    Family(
        "Ernie4_5_MoeForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
            "router_aux_loss_coef": 0.001,
        },
        is_translated_by_peft=True,
    )
)

ARCHITECTURES.register("ernie4_5_moe")(
    Architecture(
        "ernie4_5-moe",
        "Ernie4_5_MoeForCausalLM",
        {
            **PRE_NORM,
            **ROUTED_EXPERTS,
            **SHARED_EXPERTS,
            "exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias",
        },
        keys={
            "moe_num_experts": Key("expert_count"),
            "moe_k": Key("expert_used_count"),
            "moe_intermediate_size": Key("expert_feed_forward_length"),
            "moe_num_shared_experts": Key("expert_shared_count", default=0, minimum=0),
            "moe_layer_start_index": Key("leading_dense_block_count", minimum=0),
            "moe_layer_interval": Key("interleave_moe_layer_step"),
        },
        settings=lambda file: {**plain_softmax(file), "use_bias": has_bias(file, "attn_q")},
        has_experts=True,
        squeezed={"mlp.moe_statics.e_score_correction_bias": 0},
    )
)
