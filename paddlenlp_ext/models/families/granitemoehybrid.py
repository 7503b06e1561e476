"""Granite 4 without Mamba layers (micro, 1B, 350M): Granite with a fused feed-forward, with or without RoPE. IBM 2025.

Models with Mamba layers or experts ("h" in the name) are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_tensors import RenamedTensors
from paddlenlp_ext.checkpoint.gguf.architecture import PRE_NORM, Architecture, Key, attention_bias
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.joined_rows import JoinedRows, split_rows
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES
from paddlenlp_ext.models.families.granite import (
    GRANITE_KEYS,
    GRANITE_MULTIPLIERS,
    HYBRID_KEY,
    granite_differences,
)
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, FAMILIES, ConfigReader, Family

_LAYER = "model.layers.*"
_FILES = RenamedTensors(
    {f"{_LAYER}.mlp": f"{_LAYER}.shared_mlp", f"{_LAYER}.mlp.down_proj": f"{_LAYER}.shared_mlp.output_linear"},
    in_adapters=True,
)
_FUSED = {"input_linear": ("gate_proj", "up_proj")}
_HAS_ROPE = "has_rope"
"""Key of completed configs for the presence of RoPE, which GGUF files store."""


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **config,
        "intermediate_size": config.get("shared_intermediate_size") or 1024,
        _HAS_ROPE: config.get("position_embedding_type") == "rope",
    }


def _differences(config: ConfigReader) -> dict[str, Any]:
    layers = config.size("num_hidden_layers")
    others = sorted({*(config.value("layer_types") or ["mamba"])} - {"attention", "full_attention"})
    if others:
        raise ValueError(
            f"layer_types in config.json: layers of type {', '.join(others)} (Mamba-2) are not supported for "
            "granitemoehybrid; use a Granite 4 model without Mamba layers, such as granite-4.0-micro"
        )
    if config.value("num_local_experts"):
        raise ValueError(
            f"num_local_experts {config.value('num_local_experts')} in config.json: experts are not supported for "
            "granitemoehybrid; use a dense Granite 4 model, such as granite-4.0-micro"
        )
    return {
        **granite_differences(config),
        "rotates": (bool(config.value(_HAS_ROPE)),) * layers,
        "file_layout": _FILES,
    }


FAMILIES.register("granitemoehybrid")(
    Family(
        "GraniteMoeHybridForCausalLM",
        _differences,
        DECODER_TENSOR_PLAN,
        {**GRANITE_MULTIPLIERS, "num_local_experts": 8, "intermediate_size": 11008},
        complete=_complete,
        fused_layers=_FUSED,
    )
)


def _gguf_settings(file: GgufFile) -> dict[str, Any]:
    has_rope = file.get(file.architecture_key(HYBRID_KEY), bool, True)
    return {
        **attention_bias(file),
        "layer_types": ["attention"] * file.require(file.architecture_key("block_count"), int),
        "num_local_experts": 0,
        "position_embedding_type": "rope" if has_rope else None,
        "shared_intermediate_size": file.require(file.architecture_key("feed_forward_length"), int),
    }


_ROWS = {"shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj")}

ARCHITECTURES.register("granitemoehybrid")(
    Architecture(
        "granite",  # the converter of llama.cpp writes models without Mamba layers as granite
        "GraniteMoeHybridForCausalLM",
        PRE_NORM,
        keys={**GRANITE_KEYS, _HAS_ROPE: Key(HYBRID_KEY, bool)},
        settings=_gguf_settings,
        reads=lambda file: file.architecture_key(HYBRID_KEY) in file.metadata,
        permutes=True,
        restore=lambda source: JoinedRows(_FILES.stored(source), _ROWS),
        split=lambda tensors, config: {
            _FILES.name_in_memory(name): tensor for name, tensor in split_rows(tensors, _ROWS).items()
        },
    )
)
