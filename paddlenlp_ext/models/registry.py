"""Registry of model families by the `model_type` of config.json, and helpers for the windows of their layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paddlenlp_ext.sharding_spec import TensorPlan
from paddlenlp_ext.utils.registry import Registry


class ConfigReader(Protocol):
    """Interface through which a family reads its config. Values of config.json take precedence over defaults."""

    def value(self, key: str) -> Any:
        """Return the value of `key`; None if it is null or absent."""
        ...

    def size(self, key: str, default: int | None = None) -> int:
        """Return the positive integer under `key`."""
        ...


@dataclass(frozen=True)
class Family:
    """Model family: default config values, differences from the common decoder, sharding of the weights.

    Attributes:
        architecture: class name in config.json for transformers and inference servers.
        classifier: class name of the family's sequence classifiers; None: derived from `architecture`.
        differences: function from the config to `windows` and the other attributes of `DecoderConfig` that the family
            sets.
        tensor_plan: map from layer name patterns to sharding styles (sharding_spec.py).
        defaults: values of keys that config.json may leave out. Partial RoPE is supported if `partial_rotary_factor` is
            one of them.
        activation_key: key of the activation of the feed-forward gate.
        complete: function that rewrites special cases of config.json, such as older keys; the result is only read and
            never saved.
        fused_layers: layers that the family's files store as one -> their parts in the decoder
            (file_layouts/fused_projections.py).
    """

    architecture: str
    differences: Callable[[ConfigReader], dict[str, Any]]
    tensor_plan: TensorPlan
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activation_key: str = "hidden_act"
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    fused_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classifier: str | None = None

    @property
    def classifier_architecture(self) -> str:
        """Class name of sequence classifiers in config.json."""
        return self.classifier or self.architecture.replace("ForCausalLM", "ForSequenceClassification")


DECODER_TENSOR_PLAN: TensorPlan = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "vocab",
}
"""Sharding of the common decoder."""

FAMILIES: Registry[Family] = Registry("model_type", "paddlenlp_ext.models.families")


def full_attention(config: ConfigReader) -> tuple[None, ...]:
    """Return the windows of a decoder with full attention in every layer: None for each."""
    return (None,) * config.size("num_hidden_layers")


def with_rope_by_layer_type(config: Mapping[str, Any], period: int, thetas: Mapping[str, float]) -> Mapping[str, Any]:
    """Return a config.json dict with `layer_types`, and with `rope_parameters` for each layer type.

    As in transformers, `rope_scaling` applies to the layers with full attention.

    Args:
        config: contents of config.json.
        period: without `layer_types`, every layer of this period has full attention, and the others have a window.
        thetas: default `rope_theta` by layer type.
    """
    types = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % period else "full_attention"
        for layer in range(config.get("num_hidden_layers") or 0)
    ]
    stored = config.get("rope_parameters") or {}
    scaling = {"full_attention": config.get("rope_scaling") or {}}
    settings = {
        kind: {"rope_theta": theta, **(stored.get(kind) or {}), **scaling.get(kind, {})}
        for kind, theta in thetas.items()
    }
    return {**config, "layer_types": types, "rope_scaling": None, "rope_parameters": settings}


def windows_by_type(config: ConfigReader, default: Sequence[str]) -> tuple[int | None, ...]:
    """Return the window of each layer from `layer_types`, or from `default` if the config has no `layer_types`.

    Raises:
        ValueError: `layer_types` has an unknown entry, or its length is not the number of layers.
    """
    types = config.value("layer_types") or default
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown or len(types) != config.size("num_hidden_layers"):
        raise ValueError(
            f"layer_types in config.json: {len(types)} entries for {config.size('num_hidden_layers')} layers, unknown "
            f"{unknown}; known: full_attention, sliding_attention"
        )
    if "sliding_attention" not in types:
        return full_attention(config)
    window = config.size("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def window_layers(config: ConfigReader) -> int:
    """Return `max_window_layers` of a model with windows.

    Raises:
        ValueError: the value is null.
    """
    number = config.value("max_window_layers")
    if number is None:
        raise ValueError("max_window_layers in config.json must be an integer if use_sliding_window is true, got None")
    return number


def sliding_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Return the window of each layer from Qwen's config keys.

    Without `layer_types`, the layers from `max_window_layers` on have a window.

    Raises:
        ValueError: see `windows_by_type`.
    """
    if not config.value("use_sliding_window") or config.value("sliding_window") is None:
        return full_attention(config)
    first = window_layers(config)
    layers = range(config.size("num_hidden_layers"))
    return windows_by_type(config, ["sliding_attention" if layer >= first else "full_attention" for layer in layers])
