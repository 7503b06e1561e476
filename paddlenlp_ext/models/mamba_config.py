"""Read the Mamba-2 layers of a model from its config.json.

| key | default | meaning |
| --- | --- | --- |
| `layer_types` | all mamba | mamba or attention, for each layer; in transformers 5 linear_attention, full_attention |
| `mamba_n_heads`, `mamba_d_head` | 128, "auto" | heads and their channels; "auto": the channels divided by the heads |
| `mamba_n_groups` | 1 | groups of heads that share B and C |
| `mamba_d_state`, `mamba_d_conv` | 256, 4 | state dimension, taps of the convolution |
| `mamba_expand` | 2 | channels divided by the hidden size |
| `mamba_d_ssm` | none | channels; null: `mamba_expand` times the hidden size |
| `time_step_limit` | none | smallest and largest step size |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paddlenlp_ext.models.registry import ConfigReader
from paddlenlp_ext.nn.mamba2 import Mamba2Shape
from paddlenlp_ext.sharding_spec import TensorPlan

MAMBA_DEFAULTS: dict[str, Any] = {
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
    "mamba_proj_bias": False,
}
MAMBA_TENSOR_PLAN: TensorPlan = {
    "model.layers.*.mamba.in_proj": "replicated",
    "model.layers.*.mamba.conv1d": "replicated",
    "model.layers.*.mamba.norm": "norm",
    "model.layers.*.mamba.out_proj": "rowwise",
}
_MAMBA, _ATTENTION = "linear_attention", "full_attention"
_TYPES = {"mamba": _MAMBA, "attention": _ATTENTION}
"""Layer types of the published models -> layer types of transformers 5."""


def layer_types_with_mamba(config: Mapping[str, Any]) -> list[str]:
    """Return the layer types of a config.json dict as transformers 5 names them."""
    return transformers_layer_types(config.get("layer_types") or [_MAMBA] * config["num_hidden_layers"])


def transformers_layer_types(types: Sequence[str]) -> list[str]:
    """Rename the layer types of published models as transformers 5 names them; keep other types."""
    return [_TYPES.get(kind, kind) for kind in types]


def mamba_mixers(config: ConfigReader) -> tuple[Mamba2Shape | None, ...] | None:
    """Return the sizes of the Mamba-2 mixer of each layer, with None for attention; None without Mamba-2 layers.

    Raises:
        ValueError: `layer_types` has an unknown entry, or its length is not the number of layers; see `mamba_shape`.
    """
    layers, types = config.size("num_hidden_layers"), config.value("layer_types")
    if {*types} - {_MAMBA, _ATTENTION} or len(types) != layers:
        raise ValueError(
            f"layer_types in config.json must be mamba or attention for each of the {layers} layers, got {len(types)} "
            f"entries: {', '.join(sorted({*types}))}"
        )
    if _MAMBA not in types:
        return None
    shape = mamba_shape(config)
    return tuple(shape if kind == _MAMBA else None for kind in types)


def mamba_shape(config: ConfigReader, **options: Any) -> Mamba2Shape:
    """Return the sizes of the Mamba-2 layers.

    Args:
        config: config of the model.
        options: further attributes of the shape.

    Raises:
        ValueError: the counts of heads, groups and channels do not match, or `time_step_limit` is not an interval.
    """
    heads, groups = config.size("mamba_n_heads"), config.size("mamba_n_groups")
    inner = config.size("mamba_d_ssm", config.size("mamba_expand") * config.size("hidden_size"))
    head_dim = config.value("mamba_d_head")
    head_dim = inner // heads if head_dim in (None, "auto") else config.size("mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        key = "mamba_expand * hidden_size" if config.value("mamba_d_ssm") is None else "mamba_d_ssm"
        raise ValueError(
            f"config.json: mamba_n_heads {heads} heads with {head_dim} channels must have {key} = {inner} channels, "
            f"and mamba_n_groups {groups} must divide the number of heads"
        )
    limits = config.value("time_step_limit") or (0.0, math.inf)
    numbers = [float(limit["__float__"] if isinstance(limit, Mapping) else limit) for limit in limits]
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise ValueError(f"time_step_limit {limits} in config.json must contain the smallest and the largest step size")
    return Mamba2Shape(
        hidden_size=config.size("hidden_size"),
        num_heads=heads,
        num_groups=groups,
        head_dim=head_dim,
        state_dim=config.size("mamba_d_state"),
        num_taps=config.size("mamba_d_conv"),
        conv_bias=bool(config.value("mamba_conv_bias")),
        bias=bool(config.value("mamba_proj_bias")),
        step_limits=(numbers[0], numbers[1]),
        norm_epsilon=float(config.value("rms_norm_eps")),
        **options,
    )
