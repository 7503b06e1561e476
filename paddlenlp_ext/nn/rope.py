"""Rotary position embedding (RoPE): settings in config.json, and the inverse frequencies of each rope type.

Sources: RoPE arXiv:2104.09864; linear interpolation arXiv:2306.15595; YaRN and dynamic NTK-aware scaling
arXiv:2309.00071; LongRoPE arXiv:2402.13753; Llama 3.1 scaling from transformers. Models with ALiBi (arXiv:2108.12409)
have no rotation: attention adds distance-dependent biases instead.

Shapes: R rotated channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import paddle

ALIBI = "alibi"
"""Rope type of models with ALiBi. transformers rejects a config.json with this rope type."""
FULL_ATTENTION = "full_attention"
_NON_SCALING_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class RopeSettings:
    """Rope settings of a layer.

    Attributes:
        rotary_dim: R, an even number: the head dimension for "proportional", else the head dimension times
            `partial_rotary_factor`.
        theta: base of the frequencies.
        rope_type: "default" or the name of a scaling.
        max_position_embeddings: maximum context length in config.json.
        scaling: parameters of the scaling (`factor`, `low_freq_factor`, ...).
    """

    rotary_dim: int
    theta: float
    rope_type: str
    max_position_embeddings: int
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> RopeSettings:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older) from a config.json dict.

        As in transformers, `rope_scaling` takes precedence over `rope_parameters`. For llama3, longrope and yarn, a
        top-level `original_max_position_embeddings` takes precedence over the nested key.

        Raises:
            ValueError: the rope type is unknown, `partial_rotary_factor` is invalid, or the number of rotated channels
                is odd.
        """
        settings = stored_settings(config)
        rope_type = settings.get("rope_type") or settings.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"unknown rope type {rope_type!r} in config.json; known: {', '.join(ROPE_TYPES)}")
        theta = settings.get("rope_theta", config.get("rope_theta"))
        scaling = {key: value for key, value in settings.items() if key not in _NON_SCALING_KEYS}
        share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if rope_type == "proportional":
            scaling["partial_rotary_factor"], share = share, None
        rotary_dim = _rotary_dim(share, head_dim)
        trained = config.get("original_max_position_embeddings")
        if trained is not None and rope_type in ("llama3", "longrope", "yarn"):
            scaling["original_max_position_embeddings"] = trained
        longest = config.get("max_position_embeddings")
        longest = 2048 if longest is None else int(longest)
        return cls(rotary_dim, 10000.0 if theta is None else float(theta), rope_type, longest, scaling)

    def constant_until(self, length: int) -> float:
        """Return the length to which a row of `length` tokens can grow before its frequencies change; inf: no limit."""
        if self.rope_type not in LENGTH_DEPENDENT:
            return math.inf
        trained = short_context(self) if self.rope_type == "longrope" else self.max_position_embeddings
        if length <= trained:
            return trained
        return math.inf if self.rope_type == "longrope" else length

    def number(self, key: str, default: float | None = None) -> float:
        """Return a numeric parameter of the scaling.

        Raises:
            ValueError: the parameter is missing and has no default, or it is not a number.
        """
        value = self.scaling.get(key)
        if value is None:
            value = default
        if value is None:
            raise ValueError(f"rope type {self.rope_type!r} needs {key!r} in the rope settings of config.json")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key} {value!r} in the rope settings of config.json is not a number")
        return float(value)

    def numbers(self, key: str) -> np.ndarray:
        """Return a list-valued scaling parameter with one factor per frequency, fp32 [R / 2].

        Raises:
            ValueError: the value is not a list with R / 2 entries.
        """
        values = self.scaling.get(key)
        if not isinstance(values, list) or len(values) != self.rotary_dim // 2:
            found = f"{len(values)} numbers" if isinstance(values, list) else repr(values)
            raise ValueError(
                f"rope type {self.rope_type!r} needs a list of {self.rotary_dim // 2} numbers as {key!r} in the rope "
                f"settings of config.json, not {found}"
            )
        return np.asarray(values, np.float32)

    def inverse_frequencies(self, length: int) -> tuple[np.ndarray, float]:
        """Return the fp32 inverse frequencies [R / 2] for `length` tokens, and the factor of cosines and sines.

        Raises:
            ValueError: a parameter of the scaling is missing or invalid.
        """
        return ROPE_TYPES[self.rope_type](self, length)

    @property
    def max_context(self) -> int:
        """Length of the context that the scaled frequencies cover."""
        if self.rope_type not in ("linear", "dynamic", "yarn"):
            return self.max_position_embeddings
        trained = self.number("original_max_position_embeddings", self.max_position_embeddings)
        return max(self.max_position_embeddings, int(self.number("factor", 1.0) * trained))


def _rotary_dim(share: Any, head_dim: int) -> int:
    """Return the number of rotated channels of a head. `share` is `partial_rotary_factor`; None: rotate all channels.

    Raises:
        ValueError: `share` is not a number above 0 and at most 1, or the number of rotated channels is odd.
    """
    if share is None:
        share = 1.0
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor {share!r} in config.json must be a number above 0 and at most 1")
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not rotary_dim:
        of_share = "" if share == 1 else f" with partial_rotary_factor {share}"
        raise ValueError(
            f"head_dim {head_dim}{of_share} in config.json must give an even number of rotated channels, because RoPE "
            "rotates pairs of channels"
        )
    return rotary_dim


def stored_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `rope_scaling` of a config.json dict, or else `rope_parameters`; {} if neither is set."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def is_by_layer_type(settings: Mapping[str, Any]) -> bool:
    """Return whether stored rope settings have a dict for each layer type."""
    return any(isinstance(value, Mapping) for value in settings.values())


def rope_by_layer(config: Mapping[str, Any], head_dims: Sequence[int]) -> tuple[RopeSettings, ...]:
    """Return the rope settings of each layer, given the head dimension of each layer.

    If `rope_parameters` has settings per layer type, `layer_types` selects the settings. `layer_rope_theta` replaces
    the base of each layer; 0 marks a layer without RoPE.

    Raises:
        ValueError: the settings are invalid, or a layer type has no settings.
    """
    stored, num_layers = stored_settings(config), len(head_dims)
    if not is_by_layer_type(stored):
        common = [RopeSettings.from_config(config, head_dim) for head_dim in head_dims]
        thetas = config.get("layer_rope_theta") or [0] * num_layers
        if len(thetas) != num_layers:
            raise ValueError(
                f"layer_rope_theta in config.json needs {num_layers} entries, one per layer, not {len(thetas)}"
            )
        return tuple(replace(rope, theta=float(base or rope.theta)) for rope, base in zip(common, thetas, strict=True))
    types = config.get("layer_types")
    if not isinstance(types, list) or len(types) != num_layers:
        raise ValueError(
            f"rope_parameters in config.json are keyed by layer type ({', '.join(stored)}), so config.json needs "
            f"layer_types with {num_layers} entries"
        )
    missing = sorted({kind for kind in types if not isinstance(stored.get(kind), Mapping)})
    if missing:
        raise ValueError(f"rope_parameters in config.json have no settings for layers of type {', '.join(missing)}")
    own = ("rope_scaling", "original_max_position_embeddings")
    shared = {key: value for key, value in config.items() if key not in own}
    return tuple(
        RopeSettings.from_config({**shared, "rope_parameters": stored[kind]}, head_dim)
        for kind, head_dim in zip(types, head_dims, strict=True)
    )


def _power(base: float, exponent: Any) -> Any:
    """Return a correctly rounded float32 power. An error in the last bit shifts angles at position 10,000 by 1e-3."""
    return np.power(np.float64(np.float32(base)), np.asarray(exponent, np.float64)).astype(np.float32)


def _wavelengths(settings: RopeSettings, theta: float | None = None) -> np.ndarray:
    """Return the unscaled wavelengths in positions per radian, fp32 [R / 2]."""
    exponents = np.arange(0, settings.rotary_dim, 2, dtype=np.float32) / np.float32(settings.rotary_dim)
    return _power(settings.theta if theta is None else theta, exponents)


def _unscaled(settings: RopeSettings, theta: float | None = None) -> np.ndarray:
    """Return the unscaled inverse frequencies, fp32 [R / 2]."""
    return np.float32(1) / _wavelengths(settings, theta)


def _default(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    return _unscaled(settings), 1.0


def _linear(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    return _unscaled(settings) / np.float32(settings.number("factor")), 1.0


def _proportional(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Return unscaled frequencies for the first share of the pairs, and 0 for the other pairs (Gemma 4)."""
    frequencies = _unscaled(settings) / np.float32(settings.number("factor", 1.0))
    frequencies[int(settings.number("partial_rotary_factor", 1.0) * settings.rotary_dim // 2) :] = 0
    return frequencies, 1.0


def _dynamic(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Return dynamic NTK frequencies: beyond the trained context, the base grows with the row length."""
    factor, dim, trained = settings.number("factor"), settings.rotary_dim, settings.max_position_embeddings
    stretch = np.float32(factor * max(length, trained)) / np.float32(trained) - np.float32(factor - 1)
    if dim == 2:
        raise ValueError("rope type 'dynamic' in config.json needs a head_dim above 2")
    return _unscaled(settings, settings.theta * _power(stretch, dim / (dim - 2))), 1.0


def dynamic_in_graph(settings: RopeSettings, length: paddle.Tensor) -> paddle.Tensor:
    """Return the frequencies of `_dynamic` in a static graph, where the length is known only at run time."""
    _dynamic(settings, 0)  # raises an error for missing parameters
    factor, dim, trained = settings.number("factor"), settings.rotary_dim, settings.max_position_embeddings
    length = paddle.clip(length.astype("float64"), min=float(trained))
    stretch = (length * factor).astype("float32") / float(trained) - float(np.float32(factor - 1))
    theta = settings.theta * stretch.astype("float64").pow(dim / (dim - 2)).astype("float32")
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return 1.0 / paddle.pow(theta.astype("float64"), paddle.to_tensor(exponents.astype(np.float64))).astype("float32")


def _llama3(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Return Llama 3.1 frequencies: stretch long wavelengths, keep short wavelengths, interpolate in between."""
    low, high = settings.number("low_freq_factor"), settings.number("high_freq_factor")
    if not low < high:
        raise ValueError(
            f"low_freq_factor {low} in the rope settings of config.json is not below high_freq_factor {high}"
        )
    trained = settings.number("original_max_position_embeddings")
    unscaled, factor = _unscaled(settings), np.float32(settings.number("factor"))
    turns = np.float32(trained) / (np.float32(2 * math.pi) / unscaled)
    keep = np.clip((turns - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    return (1 - keep) * unscaled / factor + keep * unscaled, 1.0


def _yarn(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Return YaRN frequencies: divide low frequencies by the factor, keep high frequencies, with a ramp in between."""
    longest, dim = settings.max_position_embeddings, settings.rotary_dim
    trained = settings.number("original_max_position_embeddings", longest)
    factor = settings.number("factor", longest / trained)

    def dimension_of(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(settings.theta))

    low, high = dimension_of(settings.number("beta_fast", 32)), dimension_of(settings.number("beta_slow", 1))
    if settings.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0.0, 1.0)
    wavelengths, keep = _wavelengths(settings), (1 - ramp).astype(np.float32)
    interpolated, own = np.float32(1) / (np.float32(factor) * wavelengths), np.float32(1) / wavelengths
    return interpolated * (1 - keep) + own * keep, _table_factor(settings, factor)


def _longrope(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Return LongRoPE frequencies: divided by `short_factor`, or by `long_factor` beyond the short context."""
    longest = settings.max_position_embeddings
    trained = short_context(settings)
    short, long = settings.numbers("short_factor"), settings.numbers("long_factor")
    factor = settings.number("factor", longest / trained)
    temperature = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    stretch = long if length > trained else short
    return np.float32(1) / (stretch * _wavelengths(settings)), settings.number("attention_factor", temperature)


def short_context(settings: RopeSettings) -> float:
    """Return the length up to which LongRoPE uses `short_factor`."""
    return settings.number("original_max_position_embeddings", settings.max_position_embeddings)


def _alibi(settings: RopeSettings, length: int) -> tuple[np.ndarray, float]:
    """Return frequencies of 0, which make RoPE the identity."""
    return np.zeros(settings.rotary_dim // 2, np.float32), 1.0


def yarn_temperature(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's factor of queries and keys for a context extended by `factor` (arXiv:2309.00071, eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _table_factor(settings: RopeSettings, factor: float) -> float:
    """Return the factor by which YaRN multiplies all cosines and sines."""
    if settings.scaling.get("attention_factor") is not None:
        return settings.number("attention_factor")
    if settings.scaling.get("mscale") and settings.scaling.get("mscale_all_dim"):
        weights = settings.number("mscale"), settings.number("mscale_all_dim")
        return yarn_temperature(factor, weights[0]) / yarn_temperature(factor, weights[1])
    return yarn_temperature(factor)


ROPE_TYPES: dict[str, Callable[[RopeSettings, int], tuple[np.ndarray, float]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    ALIBI: _alibi,
}
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rope types whose frequencies depend on the length of the row."""
