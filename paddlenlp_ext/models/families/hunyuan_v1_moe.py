"""Hunyuan with routed experts and a shared expert (Hunyuan-A13B). Tencent 2025."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_experts import RenamedExperts
from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.gguf.architecture import Architecture, Key
from paddlenlp_ext.checkpoint.gguf.moe_tensors import ROUTED_EXPERTS, plain_softmax
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.hunyuan_v1_dense import (
    HUNYUAN_NAMES,
    HUNYUAN_TENSOR_PLAN,
    complete_hunyuan,
    hunyuan_differences,
)
from paddlenlp_ext.models.moe_config import EXPERT_LAYOUT, expert_differences
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.nn.experts import ExpertShape
from paddlenlp_ext.nn.routers import RouterOptions

_FILES = RenamedExperts(
    RenamedTensors({"model.layers.*.mlp.gate": "model.layers.*.mlp.gate.wg"}, in_adapters=True), EXPERT_LAYOUT
)


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace lists that repeat one value for every layer with this value; add the keys that GGUF files store.

    Raises:
        ValueError: a list contains different values.
    """
    config = dict(complete_hunyuan(config))
    for key in ("num_experts", "moe_topk"):
        values = config.get(key)
        if isinstance(values, list):
            if len(set(values)) != 1:
                raise ValueError(f"{key} in config.json must have the same value in all layers, got {values}")
            config[key] = values[0]
    return {**config, "moe_intermediate_size": config["intermediate_size"], "num_shared_expert": 1}


def _differences(config: ConfigReader) -> dict[str, Any]:
    inner = config.size("intermediate_size")
    shape = ExpertShape(
        num_experts=config.size("num_experts"),
        intermediate_size=inner,
        router=RouterOptions(kind="softmax", top_k=config.size("moe_topk")),
        shared_size=inner,
        shared_name="shared_mlp",
    )
    return {
        **hunyuan_differences(config),
        **expert_differences(config, HUNYUAN_TENSOR_PLAN, shape, file_layout=_FILES),
    }


FAMILIES.register("hunyuan_v1_moe")(
    Family(
        "HunYuanMoEV1ForCausalLM",
        _differences,
        HUNYUAN_TENSOR_PLAN,
        {"moe_topk": 1, "num_experts": 1, "rms_norm_eps": 1e-5},
        complete=_complete,
        is_translated_by_peft=True,
    )
)

ARCHITECTURES.register("hunyuan_v1_moe")(
    Architecture(
        "hunyuan-moe",
        "HunYuanMoEV1ForCausalLM",
        {
            **HUNYUAN_NAMES,
            **ROUTED_EXPERTS,
            "ffn_gate_inp": "mlp.gate.wg",
            "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
            "ffn_up_shexp": "mlp.shared_mlp.up_proj",
            "ffn_down_shexp": "mlp.shared_mlp.down_proj",
        },
        keys={
            "num_experts": Key("expert_count"),
            "moe_topk": Key("expert_used_count"),
            "moe_intermediate_size": Key("expert_feed_forward_length"),
            "num_shared_expert": Key("expert_shared_count"),
        },
        settings=plain_softmax,
        has_experts=True,
    )
)
