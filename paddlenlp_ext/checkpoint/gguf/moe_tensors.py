"""Tensor names and metadata keys of mixture-of-experts layers in GGUF files, shared by several families.

A GGUF tensor stacks the weights of all experts in a layer, and is read as one tensor per expert.
"""

from __future__ import annotations

from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import Key, count, number
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile

ROUTED_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
GATED_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SQUEEZED_GATE = {"mlp.shared_expert_gate.weight": 0}
"""`Architecture.squeezed` of a gated shared expert."""
EXPERT_KEYS = {
    "num_experts": Key("expert_count"),
    "num_experts_per_tok": Key("expert_used_count"),
    "moe_intermediate_size": Key("expert_feed_forward_length"),
}
"""Keys of config.json for routed experts -> metadata keys."""
GROUPED_EXPERT_KEYS = {
    "n_routed_experts": Key("expert_count"),
    "num_experts_per_tok": Key("expert_used_count"),
    "n_shared_experts": Key("expert_shared_count", default=0, minimum=0),
    "moe_intermediate_size": Key("expert_feed_forward_length"),
    "first_k_dense_replace": Key("leading_dense_block_count", minimum=0),
    "n_group": Key("expert_group_count", default=1),
    "topk_group": Key("expert_group_used_count", default=1),
    "routed_scaling_factor": Key("expert_weights_scale", float, default=1.0),
    "norm_topk_prob": Key("expert_weights_norm", bool, default=False),
}
"""Keys of config.json for group-limited routing and for shared experts -> metadata keys."""


def plain_softmax(file: GgufFile) -> dict[str, Any]:
    """Check that the router is a plain softmax over all experts; return an empty dict for `Architecture.settings`.

    Raises:
        ValueError: the model has a different kind of router.
    """
    groups, scale = count(file, "expert_group_count", 1, minimum=0), number(file, "expert_weights_scale", 1.0)
    if count(file, "expert_gating_func", 1, minimum=0) not in (0, 1) or groups > 1 or scale not in (0.0, 1.0):
        raise ValueError(
            f"{file.path}: {file.architecture} in GGUF is supported only with a softmax router without expert groups "
            "and without a scale of the routing weights; use the model's safetensors folder"
        )
    return {}


def sigmoid_scores(file: GgufFile) -> dict[str, Any]:
    """Check that the routers compute sigmoid scores; return an empty dict for `Architecture.settings`.

    Raises:
        ValueError: the routers compute other scores.
    """
    return _known_scores(file, 2, "sigmoid")


def softmax_scores(file: GgufFile) -> dict[str, Any]:
    """Check that the routers compute softmax scores; return an empty dict for `Architecture.settings`.

    Raises:
        ValueError: the routers compute other scores.
    """
    return _known_scores(file, 1, "softmax")


def _known_scores(file: GgufFile, known: int, name: str) -> dict[str, Any]:
    scores = count(file, "expert_gating_func", known, minimum=0)
    if scores not in (0, known):
        raise ValueError(
            f"{file.path}: {file.architecture} with expert_gating_func {scores} is not supported; "
            f"known: {known} ({name})"
        )
    return {}


def normalized_sigmoid(file: GgufFile) -> dict[str, Any]:
    """Check that the routers normalize the sigmoid scores of a token's experts; return an empty dict.

    Raises:
        ValueError: the routers do not normalize the scores, or compute other scores.
    """
    key = file.architecture_key("expert_weights_norm")
    if not file.require(key, bool):
        raise ValueError(f"{file.path}: {key} is false, which is not supported; use the model's safetensors folder")
    return sigmoid_scores(file)
