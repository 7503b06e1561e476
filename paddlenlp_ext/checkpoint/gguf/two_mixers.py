"""GGUF layout of decoders with attention and Mamba-2 side by side in every layer, and with multipliers.

Files store weights that contain the multipliers of config.json. A multiplier is a number, or a number for each row:

    (m W) x = W (m x)

Reading leaves the multipliers in the weights: the config of a file has no multipliers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.dtypes import cast
from paddlenlp_ext.checkpoint.gguf.architecture import PROJECTIONS, TOP_LEVEL, Architecture, Key, attention_bias
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.mamba_tensors import head_channels, with_mamba
from paddlenlp_ext.checkpoint.safetensors import LazyTensor

MULTIPLIERS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
"""Keys of config.json with one number."""
_IN_BLOCK = {
    **{name: layer.replace("mlp.", "feed_forward.") for name, layer in PROJECTIONS.items()},
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm.weight",  # stored without a suffix
}
_KEYS = {
    "mamba_d_conv": Key("ssm.conv_kernel"),
    "mamba_d_ssm": Key("ssm.inner_size"),
    "mamba_d_state": Key("ssm.state_size"),
    "mamba_n_groups": Key("ssm.group_count"),
    "mamba_n_heads": Key("ssm.time_step_rank"),
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def two_mixer_architecture(name: str, class_name: str) -> Architecture:
    """Return the layout of a family.

    Args:
        name: `general.architecture`.
        class_name: name of the model class in config.json.
    """
    attention = Architecture(
        name,
        class_name,
        _IN_BLOCK,
        top_level={**TOP_LEVEL, "output_norm": "model.final_layernorm"},
        equivalent=_equivalent,
        metadata=_metadata,
    )
    return replace(with_mamba(attention, name, _KEYS, _settings), has_layers_without_attention=False)


def _settings(file: GgufFile) -> dict[str, Any]:
    return {
        **attention_bias(file),
        "mamba_d_head": head_channels(file),
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
    }


def _metadata(config: Any) -> dict[str, Any]:
    """Return no metadata.

    Raises:
        ValueError: llama.cpp does not compute a part of the model.
    """
    if config.output_bias or config.side_mixer.shape.norm == "norm_first":
        raise ValueError(
            f"a GGUF file of {config.model_type} cannot express biases of attention (attention_bias), or a norm before "
            "the gate of Mamba-2 (mamba_norm_before_gate with mamba_rms_norm)"
        )
    return {}


def _equivalent(tensors: Mapping[str, LazyTensor], config: Any) -> tuple[dict[str, LazyTensor], Any]:
    """Multiply the multipliers of a model into its weights; tied embeddings become two tensors."""
    if config.tie_word_embeddings and _EMBEDDING in tensors:
        tensors = {**tensors, _HEAD: tensors[_EMBEDDING]}
    factors, result = _factors(config), dict(tensors)
    for name, tensor in tensors.items():
        own = next((found for layer, found in factors.items() if name.endswith(f"{layer}.weight")), None)
        if own is not None:
            result[name] = LazyTensor(tensor.shape, "float32", partial(_multiplied, tensor, own))
    ones = {**dict.fromkeys(MULTIPLIERS, 1.0), "mlp_multipliers": None, "ssm_multipliers": None}
    return result, type(config).from_dict({**config.source, **ones, "tie_word_embeddings": False})


def _factors(config: Any) -> dict[str, list[Any]]:
    """Return the multipliers of each layer, by the suffix of its name."""
    factor = {name: float(config.value(name)) for name in MULTIPLIERS}
    gate, down = config.feed_forward_scales or (1.0, 1.0)
    mamba, attention_in = config.side_mixer.shape, factor["attention_in_multiplier"]
    sections = [*[mamba.inner_size] * 2, *[mamba.group_size] * 2, mamba.num_heads]
    return {
        "embed_tokens": [factor["embedding_multiplier"]],
        "lm_head": [factor["lm_head_multiplier"]],
        "feed_forward.gate_proj": [gate],
        "feed_forward.down_proj": [down],
        "self_attn.q_proj": [attention_in],
        "self_attn.k_proj": [factor["key_multiplier"], attention_in],
        "self_attn.v_proj": [attention_in],
        "self_attn.o_proj": [factor["attention_out_multiplier"]],
        "mamba.in_proj": [factor["ssm_in_multiplier"], np.repeat(mamba.section_scales or [1.0] * 5, sections)],
        "mamba.out_proj": [factor["ssm_out_multiplier"]],
    }


def _multiplied(tensor: LazyTensor, factors: Sequence[Any]) -> np.ndarray:
    values = cast(tensor.read(), tensor.dtype, "float32")
    for factor in factors:
        values = values * np.asarray(factor, np.float32).reshape(-1, 1)
    return values
