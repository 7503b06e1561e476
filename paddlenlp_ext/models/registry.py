"""Registry of decoder families by the `model_type` of config.json; importing a family's module registers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paddlenlp_ext.sharding_spec import TensorPlan
from paddlenlp_ext.utils.registry import Registry


class ConfigReader(Protocol):
    """Interface through which a family reads its config: values of the file take precedence over defaults."""

    def value(self, key: str) -> Any:
        """Return the value of `key`; None if it is null or absent."""
        ...

    def size(self, key: str, default: int | None = None) -> int:
        """Return the positive integer under `key`."""
        ...


@dataclass(frozen=True)
class Family:
    """Decoder family: default config values, differences from the common decoder, sharding of the weights.

    Attributes:
        architecture: class name in config.json for transformers and inference servers.
        classifier: class name of the family's sequence classifiers; unset: made from `architecture`.
        differences: function from the config to `windows` and the other attributes of `DecoderConfig` that the family
            sets.
        tensor_plan: map from layer name patterns to sharding styles (sharding_spec.py).
        defaults: values of keys that the family's config.json leaves out. A family with `partial_rotary_factor` among
            them may rotate only a share of the channels.
        activation_key: key of the activation of the feed-forward gate.
        complete: function from the contents of config.json to contents without the family's special cases; they are
            read, and never written.
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
    """Return None as the window of every layer."""
    return (None,) * config.size("num_hidden_layers")


def with_rope_by_layer_type(config: Mapping[str, Any], period: int, thetas: Mapping[str, float]) -> Mapping[str, Any]:
    """Return a config.json dict with `layer_types` and with `rope_parameters` for each layer type.

    As in transformers, a `rope_scaling` belongs to the layers with full attention.

    Args:
        config: contents of config.json.
        period: without `layer_types`, each layer of this number has full attention, and the others have a window.
        thetas: base of the rotary frequencies by layer type, where the settings have none.
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
    """Return the window of each layer by `layer_types`, or by `default` where the config has none.

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
        ValueError: it is null.
    """
    number = config.value("max_window_layers")
    if number is None:
        raise ValueError("max_window_layers in config.json must be an integer if use_sliding_window is true, got None")
    return number


def sliding_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Return the window of each layer in Qwen's configs.

    `layer_types` decides; without it every layer from `max_window_layers` on has a window.

    Raises:
        ValueError: see `windows_by_type`.
    """
    if not config.value("use_sliding_window") or config.value("sliding_window") is None:
        return full_attention(config)
    first = window_layers(config)
    layers = range(config.size("num_hidden_layers"))
    return windows_by_type(config, ["sliding_attention" if layer >= first else "full_attention" for layer in layers])
