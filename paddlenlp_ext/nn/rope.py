"""Rotary position embedding: inverse frequencies from a config's settings, rotation tables from positions.

Sources: rotary angles arXiv:2104.09864; linear interpolation arXiv:2306.15595; YaRN arXiv:2309.00071; dynamic
NTK-aware scaling as published with YaRN; the smoothed scaling of Llama 3.1 as its model card's config describes it.
Shapes: B batch, S sequence, H head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

_NON_SCALING_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class RopeSettings:
    """Rotary settings of a model.

    Attributes:
        head_dim: H, even.
        theta: base of the frequencies.
        rope_type: "default" or the name of a scaling.
        max_position_embeddings: maximum context in the config.
        scaling: parameters of the scaling (`factor`, `low_freq_factor`, ...).
    """

    head_dim: int
    theta: float
    rope_type: str
    max_position_embeddings: int
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> RopeSettings:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before) from a config.json dict.

        Contradictions are resolved as in transformers: `rope_scaling` takes precedence over `rope_parameters`, and a
        top-level `original_max_position_embeddings` over the one inside them.

        Raises:
            ValueError: an unknown rope type, an odd head dimension, or settings that differ by layer type.
        """
        settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if any(isinstance(value, Mapping) for value in settings.values()):
            raise ValueError(
                f"rope settings by layer type ({', '.join(settings)}) are not supported; use one for all layers"
            )
        rope_type = settings.get("rope_type") or settings.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"unknown rope type {rope_type!r} in config.json; known: {', '.join(ROPE_TYPES)}")
        if head_dim % 2:
            raise ValueError(
                f"head_dim {head_dim} in config.json must be even: rotary embedding rotates pairs of channels"
            )
        rotated_share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if rotated_share not in (None, 1, 1.0):
            raise ValueError(f"partial_rotary_factor {rotated_share} in config.json is not supported; only 1.0 is")
        theta = settings.get("rope_theta", config.get("rope_theta"))
        scaling = {key: value for key, value in settings.items() if key not in _NON_SCALING_KEYS}
        trained = config.get("original_max_position_embeddings")
        if trained is not None and rope_type in ("llama3", "yarn"):
            scaling["original_max_position_embeddings"] = trained
        longest = int(config.get("max_position_embeddings", 2048))
        return cls(head_dim, 10000.0 if theta is None else float(theta), rope_type, longest, scaling)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the scaling's parameters.

        Raises:
            ValueError: the number is missing and has no default.
        """
        value = self.scaling.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"rope type {self.rope_type!r} needs {key!r} in the rope settings of config.json")
        return float(value)

    @property
    def max_context(self) -> int:
        """Maximum number of positions that the frequencies cover, scaling included."""
        if self.rope_type not in ("linear", "dynamic", "yarn"):
            return self.max_position_embeddings
        trained = self.number("original_max_position_embeddings", self.max_position_embeddings)
        return max(self.max_position_embeddings, int(self.number("factor", 1.0) * trained))


def _unscaled(settings: RopeSettings, theta: float | None = None) -> np.ndarray:
    """Return the inverse frequencies without scaling, fp32 [H / 2]."""
    exponents = np.arange(0, settings.head_dim, 2, dtype=np.float32) / np.float32(settings.head_dim)
    return (1.0 / np.power(np.float32(settings.theta if theta is None else theta), exponents)).astype(np.float32)


def _default(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    return _unscaled(settings), 1.0


def _linear(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    return _unscaled(settings) / np.float32(settings.number("factor")), 1.0


def _dynamic(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Increase the base for lengths beyond the trained context, so that the slowest frequency covers the length."""
    factor, dim, trained = settings.number("factor"), settings.head_dim, settings.max_position_embeddings
    stretch = factor * max(length, trained) / trained - (factor - 1)
    return _unscaled(settings, settings.theta * stretch ** (dim / (dim - 2))), 1.0


def _llama3(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Stretch long wavelengths by `factor`, keep short ones, and interpolate in between by the number of turns."""
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    trained = settings.number("original_max_position_embeddings")
    unscaled = _unscaled(settings)
    turns = trained * unscaled / (2 * math.pi)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (unscaled * (keep + (1 - keep) / settings.number("factor"))).astype(np.float32), 1.0


def _yarn(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Interpolate slow frequencies, keep fast ones, ramp between; scale the tables by YaRN's temperature."""
    longest, dim = settings.max_position_embeddings, settings.head_dim
    trained = settings.number("original_max_position_embeddings", longest)
    factor = settings.number("factor", longest / trained)

    def dimension_of(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(settings.theta))

    low, high = dimension_of(settings.number("beta_fast", 32)), dimension_of(settings.number("beta_slow", 1))
    if settings.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0.0, 1.0)
    unscaled = _unscaled(settings)
    return (unscaled * (1 - ramp) + unscaled / factor * ramp).astype(np.float32), _yarn_temperature(settings, factor)


def _yarn_temperature(settings: RopeSettings, factor: float) -> float:
    """Return the factor of the cosine and sine tables."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.scaling.get("attention_factor") is not None:
        return settings.number("attention_factor")
    if settings.scaling.get("mscale") and settings.scaling.get("mscale_all_dim"):
        return temperature(settings.number("mscale")) / temperature(settings.number("mscale_all_dim"))
    return temperature(1.0)


ROPE_TYPES: dict[str, Callable[[RopeSettings, int], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}


class RotaryEmbedding:
    """Cosine and sine tables of positions; has no parameters."""

    def __init__(self, settings: RopeSettings) -> None:
        self.settings = settings
        self._inverse_frequencies(0)  # raise for a missing number now, not at the first batch

    def __call__(self, position_ids_BS: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Return (cos, sin), each fp32 [B, S, H]."""
        depends_on_length = self.settings.rope_type == "dynamic"
        length = int(position_ids_BS.max()) + 1 if depends_on_length else 0
        inverse_frequencies, amplitude = self._inverse_frequencies(length)
        frequencies_H = paddle.to_tensor(np.concatenate([inverse_frequencies, inverse_frequencies]))
        angles_BSH = position_ids_BS.astype("float32").unsqueeze(-1) * frequencies_H
        return angles_BSH.cos() * amplitude, angles_BSH.sin() * amplitude

    def _inverse_frequencies(self, length: int) -> tuple[np.ndarray, float]:
        """Return the inverse frequencies, fp32 [H / 2], and the factor of the tables."""
        return ROPE_TYPES[self.settings.rope_type](self.settings, length)
