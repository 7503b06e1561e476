"""Read the Kimi delta attention of a model from its config.json.

| key | default | meaning |
| --- | --- | --- |
| `layer_types` | none | linear_attention (Kimi delta attention) or full_attention, for each layer |
| `linear_num_heads`, `linear_head_dim` | 32, 128 | heads and their channels |
| `linear_conv_kernel_dim` | 4 | taps of the convolution |
| `linear_attn_config` | none | the published models' dict of these settings, see `complete_kimi_delta` |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.models.registry import ConfigReader
from paddlenlp_ext.nn.kimi_delta_attention import KimiDeltaShape
from paddlenlp_ext.sharding_spec import TensorPlan

KIMI_DELTA_DEFAULTS: dict[str, Any] = {"linear_conv_kernel_dim": 4, "linear_head_dim": 128, "linear_num_heads": 32}
_ATTENTION = "model.layers.*.self_attn"
KIMI_DELTA_TENSOR_PLAN: TensorPlan = {
    f"{_ATTENTION}.q_proj": "colwise",
    f"{_ATTENTION}.k_proj": "colwise",
    f"{_ATTENTION}.v_proj": "colwise",
    f"{_ATTENTION}.b_proj": "colwise",
    f"{_ATTENTION}.conv1d": "replicated",
    f"{_ATTENTION}.forget_gate.f_a_proj": "replicated",
    f"{_ATTENTION}.forget_gate.f_b_proj": "inner_colwise",
    f"{_ATTENTION}.g_a_proj": "replicated",
    f"{_ATTENTION}.g_b_proj": "inner_colwise",
    f"{_ATTENTION}.o_norm": "replicated",
}
_KIMI_DELTA, _FULL = "linear_attention", "full_attention"
_PUBLISHED_NAMES = {
    "linear_conv_kernel_dim": "short_conv_kernel_size",
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
}
"""Common key -> key of `linear_attn_config` of the published models."""


def complete_kimi_delta(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config with the settings in `linear_attn_config` under the common keys.

    Without `layer_types`, `full_attn_layers` lists the layers with full attention, numbered from 1. Without both keys,
    the layers 5, 9, 13 and so on have full attention.

    Args:
        config: contents of config.json.

    Raises:
        ValueError: `full_attn_layers` is not a list of layer numbers.
    """
    settings, layers = config.get("linear_attn_config") or {}, config["num_hidden_layers"]
    completed = {**config, **{key: settings[name] for key, name in _PUBLISHED_NAMES.items() if name in settings}}
    if not config.get("layer_types"):
        full = _full_layers(settings.get("full_attn_layers"), layers)
        completed["layer_types"] = [_FULL if layer in full else _KIMI_DELTA for layer in range(layers)]
    return completed


def kimi_delta_mixers(config: ConfigReader) -> tuple[KimiDeltaShape | None, ...]:
    """Return the sizes of the Kimi delta attention of each layer, with None for layers with full attention.

    Raises:
        ValueError: `layer_types` has an unknown entry, or its length is not the number of layers.
    """
    layers, types = config.size("num_hidden_layers"), config.value("layer_types")
    if {*types} - {_KIMI_DELTA, _FULL} or len(types) != layers:
        raise ValueError(
            f"layer_types in config.json must be {_KIMI_DELTA} or {_FULL} for each of the {layers} layers, got "
            f"{len(types)} entries: {', '.join(sorted({*types}))}"
        )
    shape = KimiDeltaShape(
        hidden_size=config.size("hidden_size"),
        num_heads=config.size("linear_num_heads"),
        head_dim=config.size("linear_head_dim"),
        num_taps=config.size("linear_conv_kernel_dim"),
        norm_epsilon=float(config.value("rms_norm_eps")),
    )
    return tuple(shape if kind == _KIMI_DELTA else None for kind in types)


def _full_layers(numbers: Any, count: int) -> list[int]:
    """Return the indices of the layers with full attention, given their numbers from 1; None: every fourth index."""
    if numbers is None:
        return list(range(4, count, 4))
    if not isinstance(numbers, list) or not all(type(number) is int and 1 <= number <= count for number in numbers):
        raise ValueError(
            "full_attn_layers of linear_attn_config in config.json must be a list of layer numbers from 1 to "
            f"{count}, got {numbers!r}"
        )
    return [number - 1 for number in numbers]
