"""Gemma 4, text only: value norms, a different head size in layers with full attention, scaled layers. Google 2026.

Layers with full attention apply RoPE to a fraction of the channel pairs (rope type "proportional"), and in most models
compute values from the key projection. E2B and E4B have layer embeddings, and their last layers read the keys and
values of earlier layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.checkpoint.gguf.shapes_by_window import shapes_by_window_architecture
from paddlenlp_ext.models.families.gemma2 import soft_cap
from paddlenlp_ext.models.families.qwen3 import QWEN3_TENSOR_PLAN
from paddlenlp_ext.models.layer_shape import LayerShape, layer_embedding_shape, layer_shapes
from paddlenlp_ext.models.moe_config import expert_differences
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family, require
from paddlenlp_ext.models.sliding_windows import layer_types_of_pattern, windows_by_type
from paddlenlp_ext.nn.attention import QKNorm
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions
from paddlenlp_ext.sharding_spec import TensorPlan

GEMMA4_DEFAULTS: Mapping[str, Any] = {
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_PATTERN = 6
_LAYER = "model.layers.*"
_EXPERT_LAYERS = {
    f"{_LAYER}.moe.experts": f"{_LAYER}.experts",
    f"{_LAYER}.moe.norm": f"{_LAYER}.pre_feedforward_layernorm_2",
    f"{_LAYER}.moe.gate": f"{_LAYER}.router.proj",
}
_EXPERT_TENSORS = {
    f"{_LAYER}.moe.experts.gate_up_proj.weight": f"{_LAYER}.experts.gate_up_proj",
    f"{_LAYER}.moe.experts.down_proj.weight": f"{_LAYER}.experts.down_proj",
    f"{_LAYER}.moe.router_scale": f"{_LAYER}.router.scale",
    f"{_LAYER}.moe.per_expert_scale": f"{_LAYER}.router.per_expert_scale",
}


def complete_gemma4(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json dict with `layer_types`, in which the last layer has full attention, and RoPE settings."""
    types = config.get("layer_types") or layer_types_of_pattern(_PATTERN, config["num_hidden_layers"])
    ropes = config.get("rope_parameters") or _ROPES
    return {**config, "layer_types": [*types[:-1], "full_attention"], "rope_parameters": ropes}


def gemma4_differences(config: ConfigReader) -> dict[str, Any]:
    """Return the `DecoderConfig` attributes of a Gemma 4 model.

    Raises:
        ValueError: see `windows_by_type` and `layer_shapes`; or attention is bidirectional.
    """
    require(config, "use_bidirectional_attention", None, False, "vision")
    bias, windows = bool(config.value("attention_bias")), windows_by_type(config, ())
    shapes = layer_shapes(config, windows)
    has_values = any(shape.has_v_proj for shape in shapes)
    plan = {name: style for name, style in QWEN3_TENSOR_PLAN.items() if has_values or "v_proj" not in name}
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_scale": 1.0,
        "logit_softcap": soft_cap(config, "final_logit_softcapping"),
        "norms_values": True,
        "qk_norm": QKNorm(),
        "scales_embeddings": True,
        "layer": "scaled_sandwich",
        "shapes": shapes,
        "tensor_plan": plan,
        "windows": windows,
        "layer_embeddings": layer_embedding_shape(config),
        **_files_and_experts(config, plan, shapes),
    }


def _files_and_experts(config: ConfigReader, plan: TensorPlan, shapes: Sequence[LayerShape]) -> dict[str, Any]:
    """Return the file layout, and the attributes of a model with experts. Files may store keys that no layer reads."""
    readers = "|".join(str(layer) for layer, shape in enumerate(shapes) if shape.source is not None)
    unused = rf"model\.layers\.({readers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..+" if readers else None
    if not config.value("enable_moe_block"):
        return {} if unused is None else {"file_layout": RenamedTensors({}, unused=unused)}
    layout = RenamedTensors(_EXPERT_LAYERS, in_adapters=True, tensors=_EXPERT_TENSORS, unused=unused)
    shape = ExpertShape(
        num_experts=config.size("num_experts"),
        intermediate_size=config.size("moe_intermediate_size"),
        router=RouterOptions(kind="softmax", top_k=config.size("top_k_experts")),
        shared_size=config.size("intermediate_size"),
        shared_name=None,
        activation="gelu_tanh",
    )
    return {**expert_differences(config, plan, shape, file_layout=layout), "layer": "expert_sandwich"}


FAMILIES.register("gemma4_text")(
    Family(
        "Gemma4ForCausalLM",
        gemma4_differences,
        QWEN3_TENSOR_PLAN,
        {**GEMMA4_DEFAULTS, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144},
        activation_key="hidden_activation",
        complete=complete_gemma4,
    )
)

GEMMA4_GGUF = shapes_by_window_architecture("gemma4", "Gemma4ForCausalLM")
ARCHITECTURES.register("gemma4_text")(GEMMA4_GGUF)
