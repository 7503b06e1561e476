"""Config of models whose layers have one block each: Mamba-2, attention, a feed-forward or experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paddlenlp_ext.models.layer_shape import LayerShape
from paddlenlp_ext.models.mamba_config import MAMBA_TENSOR_PLAN, transformers_layer_types
from paddlenlp_ext.models.registry import DECODER_TENSOR_PLAN, ConfigReader
from paddlenlp_ext.nn.mamba2 import Mamba2Shape
from paddlenlp_ext.nn.token_mixer import MixerShape, NoMixer
from paddlenlp_ext.sharding_spec import TensorPlan

MAMBA, ATTENTION, DENSE, SPARSE = "linear_attention", "full_attention", "mlp", "moe"
"""Kinds of blocks, as transformers 5 names them."""
_LETTERS = {"M": MAMBA, "*": ATTENTION, "-": DENSE, "E": SPARSE}


def block_kinds(kinds: Sequence[str]) -> list[str]:
    """Return the kind of each layer, given names of kinds, or a pattern such as "M-M*" with a letter per layer."""
    return transformers_layer_types([_LETTERS.get(kind, kind) for kind in kinds])


def single_block_differences(config: ConfigReader, kinds: Sequence[str], mamba: Mamba2Shape) -> dict[str, Any]:
    """Return the `DecoderConfig` attributes of a model without experts, whose feed-forwards have no gate.

    Args:
        config: config of the model.
        kinds: kind of each layer.
        mamba: sizes of the Mamba-2 layers.

    Raises:
        ValueError: a kind is unknown, or the groups of Mamba-2 do not divide the heads.
    """
    if {*kinds} - {MAMBA, ATTENTION, DENSE, SPARSE}:
        raise ValueError(
            "each layer in config.json must be mamba (M), attention (*), mlp (-) or moe (E), got "
            f"{', '.join(sorted({*kinds}))}"
        )
    if mamba.num_heads % mamba.num_groups:
        raise ValueError(
            f"config.json: {mamba.num_groups} groups of Mamba-2 (n_groups) must divide the {mamba.num_heads} heads"
        )
    mixers: dict[str, MixerShape | None] = {ATTENTION: None, MAMBA: mamba}
    head_dim, inner = config.size("head_dim"), config.size("intermediate_size")
    kv_heads = config.size("num_key_value_heads", config.size("num_attention_heads"))
    return {
        "layer": "single_block",
        "mixers": tuple(mixers.get(kind, NoMixer()) for kind in kinds),
        "shapes": tuple(LayerShape(head_dim, head_dim, kv_heads, inner if kind == DENSE else 0) for kind in kinds),
        "tensor_plan": _tensor_plan({*kinds}),
    }


def _tensor_plan(kinds: set[str]) -> TensorPlan:
    """Return the sharding styles of the blocks that a model has."""
    absent = [block for block, kind in ((".self_attn.", ATTENTION), (".mlp.", DENSE)) if kind not in kinds]
    plan = {
        name: style
        for name, style in DECODER_TENSOR_PLAN.items()
        if not name.endswith(".gate_proj") and not any(block in name for block in absent)
    }
    return {**plan, **MAMBA_TENSOR_PLAN} if MAMBA in kinds else plan
