"""Feed-forwards and experts whose checkpoints fuse the gate and up projections, which GGUF files store separately.

in a GGUF file                           in the checkpoint
ffn_gate, ffn_up [F, D]                  shared_mlp.input_linear [2F, D]
ffn_gate_exps, ffn_up_exps [E, F, D]     block_sparse_moe.input_linear [E, 2F, D]

Shapes: F channels of the feed-forward or of an expert, D hidden size, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.joined_rows import FusedRows, JoinedRows, split_rows
from paddlenlp_ext.checkpoint.gguf.architecture import Architecture, Key
from paddlenlp_ext.checkpoint.safetensors import LazyTensor
from paddlenlp_ext.checkpoint.weight_source import WeightSource

FEED_FORWARD = {
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.output_linear",
}
"""Name in a GGUF block -> name in a decoder layer with separate projections, of a model without experts."""
_EXPERTS = {
    **{f"{name}_shexp": layer for name, layer in FEED_FORWARD.items()},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.gate_proj",
    "ffn_up_exps": "block_sparse_moe.up_proj",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
"""Names in a model with experts, whose shared expert is the feed-forward of models without experts."""


def _fused(layer: str) -> FusedRows:
    return {f"{layer}.input_linear": {f"{layer}.gate_proj": 1, f"{layer}.up_proj": 1}}


_SHARED, _STACKED = _fused("shared_mlp"), _fused("block_sparse_moe")


def split_gates(tensors: Mapping[str, LazyTensor], config: Any) -> dict[str, LazyTensor]:
    """Split the fused projections; the inverse of `join_gates`.

    Args:
        tensors: Hugging Face name -> tensor.
        config: unused argument of `Architecture.split`.
    """
    return split_rows(split_rows(tensors, _SHARED), _STACKED, axis=1)


def join_gates(source: WeightSource) -> WeightSource:
    """Fuse the gate and up projections, as in the Hugging Face checkpoint.

    Raises:
        ValueError: one of two projections to fuse is missing.
    """
    return JoinedRows(JoinedRows(source, _SHARED), _STACKED, axis=1)


def with_experts(dense: Architecture, name: str) -> Architecture:
    """Return the layout of a family's models with experts, given the layout of its models without experts.

    Args:
        dense: the layout of models with a feed-forward in every layer.
        name: `general.architecture` of models with experts.
    """
    return dataclasses.replace(
        dense,
        name=name,
        in_block={**{name: layer for name, layer in dense.in_block.items() if name not in FEED_FORWARD}, **_EXPERTS},
        keys={
            **dense.keys,
            "num_local_experts": Key("expert_count"),
            "num_experts_per_tok": Key("expert_used_count"),
        },
        constants={name: value for name, value in dense.constants.items() if name != "num_local_experts"},
        has_experts=True,
        writes=lambda config: bool(config.experts),
        metadata=lambda config: {
            **dense.metadata(config),
            "feed_forward_length": config.experts[0].intermediate_size,
        },
    )
