"""GGUF layout of decoders whose layers have one block each: Mamba-2, attention, a feed-forward or experts.

Two lists in the metadata determine the block of a layer: attention has key-value heads, a feed-forward and experts have
a width, and Mamba-2 has neither. Models with feed-forwards have no experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paddlenlp_ext.checkpoint.file_layouts.renamed_experts import RenamedExperts
from paddlenlp_ext.checkpoint.gguf.architecture import Architecture, Key, count, counts_by_layer, kv_heads_by_layer
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.mamba_tensors import MAMBA, head_channels, with_mamba
from paddlenlp_ext.checkpoint.gguf.moe_tensors import GROUPED_EXPERT_KEYS, sigmoid_scores

_IN_BLOCK = {
    "attn_norm": "norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_DENSE = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
}
_EXPERT_KEYS = {
    **{name: key for name, key in GROUPED_EXPERT_KEYS.items() if name != "first_k_dense_replace"},
    "moe_latent_size": Key("moe_latent_size", default=0, minimum=0),
    "moe_shared_expert_intermediate_size": Key("expert_shared_feed_forward_length"),
}
_MAMBA_KEYS = {
    "conv_kernel": Key("ssm.conv_kernel"),
    "mamba_num_heads": Key("ssm.time_step_rank"),
    "n_groups": Key("ssm.group_count"),
    "ssm_state_size": Key("ssm.state_size"),
}
_SMALLEST_STEP = 1e-3
"""Smallest step size in the published models, which files do not store."""


def single_block_architecture(name: str, class_name: str, names: RenamedExperts) -> Architecture:
    """Return the GGUF layout of a family.

    Args:
        name: `general.architecture` of models without experts; models with experts have the name with "_moe".
        class_name: see `Architecture`.
        names: names of the layers in the Hugging Face checkpoint.
    """
    blocks = Architecture(
        name,
        class_name,
        {**_IN_BLOCK, **_DENSE},
        constants={"mlp_hidden_act": "relu2", "time_step_min": _SMALLEST_STEP},
        norm_epsilon=("attention.layer_norm_rms_epsilon", "layer_norm_epsilon"),
        has_single_blocks=True,
        restore=names.stored,
        split=lambda tensors, config: {names.layer_in_memory(each): tensor for each, tensor in tensors.items()},
        metadata=_metadata,
    )
    experts = replace(
        blocks,
        name=f"{name}_moe",
        in_block={**_IN_BLOCK, **_EXPERTS},
        keys=_EXPERT_KEYS,
        settings=sigmoid_scores,
        has_experts=True,
        unadapted=("ffn_latent_down", "ffn_latent_up"),
        writes=lambda config: any(config.experts or ()),
    )
    layouts = [
        with_mamba(each, each.name, _MAMBA_KEYS, _settings, smallest_step=_SMALLEST_STEP) for each in (blocks, experts)
    ]
    return replace(layouts[0], variants=(layouts[1],))


def _settings(file: GgufFile) -> dict[str, Any]:
    """Return the block of each layer, and the keys of config.json that several keys of the metadata determine.

    Raises:
        ValueError: a list does not have one item for each layer, or see `head_channels`.
    """
    feed_forward = "moe" if count(file, "expert_count", 0, minimum=0) else "mlp"
    sizes = zip(kv_heads_by_layer(file), counts_by_layer(file, "feed_forward_length"), strict=True)
    kinds = ["attention" if heads else feed_forward if width else "mamba" for heads, width in sizes]
    return {"layers_block_type": kinds, "mamba_head_dim": head_channels(file)}


def _metadata(config: Any) -> dict[str, Any]:
    has_width = [mixer is not None and mixer.kind != MAMBA for mixer in config.mixers]
    return {
        "attention.layer_norm_epsilon": config.rms_norm_eps,  # llama.cpp does not use this key, but requires it
        "feed_forward_length": [config.intermediate_size if each else 0 for each in has_width],
    }
