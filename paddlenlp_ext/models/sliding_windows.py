"""Sliding window of each layer, from `layer_types`, `sliding_window` and similar keys of config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paddlenlp_ext.models.registry import ConfigReader


def full_attention(config: ConfigReader) -> tuple[None, ...]:
    """Return the windows of a decoder with full attention: None for every layer."""
    return (None,) * config.size("num_hidden_layers")


def layer_types_of_pattern(pattern: int | str, num_layers: int) -> list[str]:
    """Return `layer_types` for a repeated pattern.

    Args:
        pattern: distance between layers with full attention, or a letter for each layer of the pattern: L for a sliding
            window, G for full attention.
        num_layers: number of layers.

    Raises:
        ValueError: the pattern has other letters.
    """
    if isinstance(pattern, str) and (not pattern or {*pattern} - {*"LG"}):
        raise ValueError(
            f"sliding_window_pattern {pattern!r} in config.json must be a number of layers, or the letters L and G"
        )
    letters = pattern if isinstance(pattern, str) else "L" * (pattern - 1) + "G"
    return [
        "sliding_attention" if letters[layer % len(letters)] == "L" else "full_attention" for layer in range(num_layers)
    ]


def with_rope_by_layer_type(
    config: Mapping[str, Any], period: int | str, thetas: Mapping[str, float]
) -> Mapping[str, Any]:
    """Return a config.json dict with `layer_types`, and with `rope_parameters` for each layer type.

    `rope_scaling` applies only to the layers with full attention, as in transformers.

    Args:
        config: contents of config.json.
        period: pattern of the layers (`layer_types_of_pattern`), for configs without `layer_types`.
        thetas: default `rope_theta` by layer type.
    """
    types = config.get("layer_types") or layer_types_of_pattern(period, config.get("num_hidden_layers") or 0)
    stored = config.get("rope_parameters") or {}
    scaling = {"full_attention": config.get("rope_scaling") or {}}
    settings = {
        kind: {"rope_theta": theta, **(stored.get(kind) or {}), **scaling.get(kind, {})}
        for kind, theta in thetas.items()
    }
    return {**config, "layer_types": types, "rope_scaling": None, "rope_parameters": settings}


def windows_by_type(config: ConfigReader, default: Sequence[str]) -> tuple[int | None, ...]:
    """Return the window of each layer from `layer_types`; `default` replaces absent `layer_types`.

    Raises:
        ValueError: `layer_types` has an unknown entry, its length is not the number of layers, or `sliding_window` is
            missing.
    """
    types = config.value("layer_types") or default
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown or len(types) != config.size("num_hidden_layers"):
        raise ValueError(
            f"layer_types in config.json must be full_attention or sliding_attention for each of the "
            f"{config.size('num_hidden_layers')} layers, got {len(types)} entries: {', '.join(sorted(set(types)))}"
        )
    if "sliding_attention" not in types:
        return full_attention(config)
    window = config.size("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def window_layers(config: ConfigReader) -> int:
    """Return `max_window_layers` of a model with sliding windows.

    Raises:
        ValueError: the value is null.
    """
    number = config.value("max_window_layers")
    if number is None:
        raise ValueError("max_window_layers in config.json must be an integer if use_sliding_window is true, got null")
    return number


def sliding_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Return the window of each layer from Qwen's config keys.

    Without `use_sliding_window` or `sliding_window`, no layer has a window. Without `layer_types`, layers with an index
    of at least `max_window_layers` have a window.

    Raises:
        ValueError: see `window_layers` and `windows_by_type`.
    """
    if not config.value("use_sliding_window") or config.value("sliding_window") is None:
        return full_attention(config)
    first = window_layers(config)
    layers = range(config.size("num_hidden_layers"))
    return windows_by_type(config, ["sliding_attention" if layer >= first else "full_attention" for layer in layers])
