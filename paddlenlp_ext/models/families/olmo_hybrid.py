"""OLMo Hybrid: gated delta nets in three of four layers, and the attention layers of OLMo 2 in the others. Ai2 2026.

Layers with a gated delta net have norms before their blocks, and layers with attention have norms after their blocks.
The released models have no RoPE: `rope_theta` is null. Files store the convolution of a gated delta net in three parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.file_layouts.split_rows import SplitRows
from paddlenlp_ext.models.families.olmo2 import OLMO2_TENSOR_PLAN, olmo2_differences
from paddlenlp_ext.models.gated_delta_config import delta_net_mixers
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family, require
from paddlenlp_ext.nn.gated_delta_net import GatedDeltaShape, SplitGatedDeltaShape
from paddlenlp_ext.sharding_spec import TensorPlan

_MIXER = "model.layers.*.linear_attn"
_TENSOR_PLAN: TensorPlan = {
    **OLMO2_TENSOR_PLAN,
    f"{_MIXER}.q_proj": "colwise",
    f"{_MIXER}.k_proj": "colwise",
    f"{_MIXER}.v_proj": "colwise",
    f"{_MIXER}.g_proj": "colwise",
    f"{_MIXER}.a_proj": "colwise",
    f"{_MIXER}.b_proj": "colwise",
    f"{_MIXER}.conv1d": "replicated",
    f"{_MIXER}.o_norm": "replicated",
    f"{_MIXER}.o_proj": "rowwise",
}
_NORMS = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
"""Names of a gated delta net layer's norms in files. transformers 5 also writes the second name in other layers."""
_NORM_EPSILON = 1e-5  # of the gated delta nets, for any `rms_norm_eps`


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    types = ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(layers)]
    if layers < 4:
        types[-1] = "full_attention"
    key_heads = config.get("linear_num_key_heads") or heads
    key_dim = config.get("linear_key_head_dim") or int(0.75 * config["hidden_size"] / key_heads)
    return {
        **config,
        "layer_types": config.get("layer_types") or types,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": config.get("linear_num_value_heads") or heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * key_dim,
    }


def _file_layout(mixers: Sequence[GatedDeltaShape | None]) -> SplitRows:
    shape = next(mixer for mixer in mixers if mixer is not None)
    rows = {"q_conv1d": shape.key_size, "k_conv1d": shape.key_size, "v_conv1d": shape.value_size}
    written = [f"model.layers.{layer}." for layer, mixer in enumerate(mixers) if mixer is not None]
    return SplitRows(
        {"linear_attn.conv1d": {f"linear_attn.{part}": size for part, size in rows.items()}},
        read=_renamed_norms(["model.layers.*."]),
        written=_renamed_norms(written),
    )


def _renamed_norms(layers: Sequence[str]) -> RenamedTensors:
    return RenamedTensors({layer + own: layer + stored for layer in layers for own, stored in _NORMS.items()})


def _differences(config: ConfigReader) -> dict[str, Any]:
    require(config, "hidden_act", "silu")
    scale = 2.0 if config.value("linear_allow_neg_eigval") else 1.0
    mixers = delta_net_mixers(config, SplitGatedDeltaShape, _NORM_EPSILON, scale)
    if len({*mixers}) != 2:
        raise ValueError("layer_types in config.json must contain both linear_attention and full_attention")
    rope = config.value("rope_parameters") or {}
    has_rope = rope.get("rope_theta", 1.0) is not None
    return {
        **olmo2_differences(config),
        "file_layout": _file_layout(mixers),
        "layer": tuple("post_norm" if mixer is None else "pre_norm" for mixer in mixers),
        "mixers": mixers,
        "rotates": (has_rope,) * len(mixers),
    }


FAMILIES.register("olmo_hybrid")(
    Family(
        "OlmoHybridForCausalLM",
        _differences,
        _TENSOR_PLAN,
        {"linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4, "max_position_embeddings": 65536},
        complete=_complete,
    )
)
