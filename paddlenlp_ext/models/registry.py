"""Families of decoders by the `model_type` of their config.json; the walk of this package fills the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paddlenlp_ext.sharding_spec import TensorPlan
from paddlenlp_ext.utils.registry import Registry


class ConfigReader(Protocol):
    """What a family reads its config through: the file's values over the defaults."""

    def value(self, key: str) -> Any:
        """The value of `key`, None where it is null or absent."""
        ...

    def size(self, key: str, default: int | None = None) -> int:
        """The positive whole number under `key`."""
        ...


@dataclass(frozen=True)
class Family:
    """A family: what its config leaves out, where it differs from Llama, how its weights are cut.

    Attributes:
        architecture: the class that config.json names to transformers and to servers.
        differences: from the config to `DecoderConfig`'s `qkv_bias`, `output_bias`, `qk_norm` and `windows`.
        tensor_plan: layer name patterns to styles (plan.py).
        defaults: what the family's config.json means where it says nothing.
    """

    architecture: str
    differences: Callable[[ConfigReader], dict[str, Any]]
    tensor_plan: TensorPlan
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Registry[Family] = Registry("model_type", "paddlenlp_ext.models")


def full_attention(config: ConfigReader) -> tuple[None, ...]:
    """No window on any layer."""
    return (None,) * config.size("num_hidden_layers")


def sliding_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """The windows of Qwen's configs: `layer_types`, or else every layer from `max_window_layers` on slides.

    Raises:
        ValueError: `layer_types` holds an unknown word or has another length than there are layers.
    """
    num_layers = config.size("num_hidden_layers")
    if not config.value("use_sliding_window") or config.value("sliding_window") is None:
        return full_attention(config)
    first = config.value("max_window_layers")
    types = config.value("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"layer_types in config.json: {len(types)} entries for {num_layers} layers, unknown words {unknown}. "
            "Known: full_attention, sliding_attention."
        )
    window = config.size("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
