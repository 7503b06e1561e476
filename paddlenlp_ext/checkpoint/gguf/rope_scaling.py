"""Convert RoPE scaling between the metadata of a GGUF file and `rope_scaling` of config.json.

GGUF files of Llama 3 models store the scaling in the tensor `rope_freqs.weight`, not in the metadata. The tensor holds
a divisor for each rotary frequency: 1 for short wavelengths, `factor` for long wavelengths, and interpolated values in
between. With t turns of a rotary pair over the original context,

    1 / divisor = keep + (1 - keep) / factor,    keep = clip((t - low) / (high - low), 0, 1)

With the rope type "proportional", the tensor holds 1 for pairs that are rotated, and 1e30 for the other pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paddlenlp_ext.checkpoint.gguf.architecture import shortest_decimal
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.read_weights import ROPE_FACTORS, read_gguf_tensor
from paddlenlp_ext.checkpoint.gguf.registry import architecture_of

_DIVISORS = "rope_freqs.weight"
_UNROTATED = float(np.float32(1e30))
"""Divisor of the frequencies of pairs that are not rotated."""
_READ = ("type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow", "finetuned")
"""Known scaling keys; `finetuned` does not change the computation."""
_MSCALE = "yarn_log_multiplier"
"""Scaling key for `mscale_all_dim` of config.json, multiplied by `yarn_multiplier` of the architecture."""
# Bounds in the config.json files of all published Llama 3.1, 3.2 and 3.3 models.
_LLAMA3_BOUNDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_theta(file: GgufFile) -> float:
    """Return the base of the rotary frequencies."""
    return shortest_decimal(file.get(file.architecture_key("rope.freq_base"), float, 10000.0))


def rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    """Return `rope_scaling` of config.json; None if the file has no scaling.

    Raises:
        ValueError: config.json cannot express the scaling.
    """
    if all(name in file.tensors for name in ROPE_FACTORS):
        short, long = ([shortest_decimal(x) for x in read_gguf_tensor(file, name)] for name in ROPE_FACTORS)
        temperature = file.get(file.architecture_key("rope.scaling.attn_factor"), float)
        settings = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        return settings if temperature is None else {**settings, "attention_factor": shortest_decimal(temperature)}
    kind = file.get(file.architecture_key("rope.scaling.type"), str, "none")
    factor = file.get(file.architecture_key("rope.scale_linear"), float, 1.0)
    factor = file.get(file.architecture_key("rope.scaling.factor"), float, factor)
    unscaled = kind == "none" and factor == 1.0
    if _DIVISORS in file.tensors:
        if not unscaled:
            raise ValueError(
                f"{file.path}: the file has both {_DIVISORS} and RoPE scaling metadata ({kind}, factor {factor}); use "
                "the model's safetensors folder"
            )
        return _from_divisors(file, head_dim)
    if unscaled:
        return None
    has_mscale = architecture_of(file).yarn_multiplier is not None
    prefix, known = file.architecture_key("rope.scaling."), (*_READ, *(_MSCALE,) * has_mscale)
    unread = sorted(key for key in file.metadata if key.startswith(prefix) and key.removeprefix(prefix) not in known)
    if unread:
        raise ValueError(
            f"{file.path}: unsupported RoPE scaling keys: {', '.join(unread)}; use the model's safetensors folder"
        )
    if kind in ("linear", "none"):
        return {"rope_type": "linear", "factor": shortest_decimal(factor)}
    if kind == "yarn":
        return _yarn(file, factor)
    raise ValueError(f"{file.path}: RoPE scaling {kind!r} is not supported; known: none, linear, yarn")


def rope_metadata(
    kind: str,
    theta: float,
    scaling: Mapping[str, Any],
    rotary_dim: int,
    temperature: float,
    yarn_multiplier: float | None,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the metadata and tensors for RoPE; the inverse of `rope_theta` and `rope_scaling`.

    Args:
        kind: `rope_type` of config.json.
        theta: base of the frequencies.
        scaling: `rope_scaling` of config.json.
        rotary_dim: number of rotated channels of a head.
        temperature: attention factor of LongRoPE.
        yarn_multiplier: see `Architecture`.

    Returns:
        Metadata without the prefix of the architecture, and tensors (name -> values).

    Raises:
        ValueError: GGUF cannot express the rope type.
    """
    keys: dict[str, Any] = {"rope.freq_base": float(theta)}
    original = scaling.get("original_max_position_embeddings")
    if kind == "default":
        return keys, {}
    if kind == "llama3":
        divisors = llama3_frequency_divisors(dict(scaling), theta, rotary_dim)
        return keys, {_DIVISORS: divisors.astype(np.float32)}
    if kind == "proportional":
        divisors = np.full(rotary_dim // 2, _UNROTATED, np.float32)
        divisors[: int(scaling["partial_rotary_factor"] * rotary_dim // 2)] = scaling.get("factor", 1.0)
        return keys, {_DIVISORS: divisors}
    if original is not None:
        keys["rope.scaling.original_context_length"] = int(original)
    if kind == "longrope":
        if temperature != 1.0:
            keys["rope.scaling.attn_factor"] = float(temperature)
        factors = (np.asarray(scaling[key], np.float32) for key in ("short_factor", "long_factor"))
        return keys, dict(zip(ROPE_FACTORS, factors, strict=True))
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"rope type {kind!r} in config.json cannot be written as GGUF; supported: default, linear, yarn, longrope, "
            "llama3 and proportional"
        )
    keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    for key in ("beta_fast", "beta_slow"):
        if scaling.get(key) is not None:
            keys[f"rope.scaling.yarn_{key}"] = float(scaling[key])
    if scaling.get("mscale_all_dim") and yarn_multiplier is not None:
        keys[f"rope.scaling.{_MSCALE}"] = yarn_multiplier * scaling["mscale_all_dim"]
    return keys, {}


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    """Return the YaRN settings; `mscale` is set to `mscale_all_dim`, as llama.cpp assumes."""
    original = file.require(file.architecture_key("rope.scaling.original_context_length"), int)
    settings = {
        "rope_type": "yarn",
        "factor": shortest_decimal(factor),
        "original_max_position_embeddings": original,
    }
    for key in ("beta_fast", "beta_slow"):
        bound = file.get(file.architecture_key(f"rope.scaling.yarn_{key}"), float)
        settings |= {} if bound is None else {key: shortest_decimal(bound)}
    weight = file.get(file.architecture_key(f"rope.scaling.{_MSCALE}"), float)
    architecture = architecture_of(file)
    if weight is not None and architecture.yarn_multiplier is not None:
        unscaled = shortest_decimal(weight / architecture.yarn_multiplier)
        settings |= dict.fromkeys(("mscale", "mscale_all_dim"), unscaled)
    return settings if architecture.truncates_yarn else {**settings, "truncate": False}


def _from_divisors(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    stored = read_gguf_tensor(file, _DIVISORS).astype(np.float64)
    if stored.shape != (head_dim // 2,):
        raise ValueError(
            f"{file.path}: {_DIVISORS} has {stored.size} values for heads of {head_dim} channels; the file is damaged"
        )
    is_partial = stored[-1] >= _UNROTATED
    scaling = _proportional(stored) if is_partial else llama3_scaling(stored, rope_theta(file))
    if scaling is None:
        raise ValueError(
            f"{file.path}: {_DIVISORS} has a RoPE scaling other than llama3 and proportional; use the model's "
            "safetensors folder"
        )
    return scaling if is_partial or scaling["factor"] != 1.0 else None


def _proportional(divisors: np.ndarray) -> dict[str, Any] | None:
    """Return the settings of RoPE that rotates the first pairs of channels; None if their divisors differ."""
    rotated = divisors[divisors < _UNROTATED]
    if not (rotated.size and (rotated == rotated[0]).all() and (divisors[rotated.size :] >= _UNROTATED).all()):
        return None
    scaling = {"rope_type": "proportional", "partial_rotary_factor": rotated.size / divisors.size}
    return {**scaling, "factor": shortest_decimal(rotated[0])} if rotated[0] != 1.0 else scaling


def llama3_scaling(divisors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """Return Llama 3 settings that reproduce the divisors, preferably the settings of the published models.

    The divisors determine the bounds only relative to the original context, so the returned settings may differ from
    the settings of the original model. The frequencies are equal.

    Args:
        divisors: divisors of the frequencies, [head_dim / 2], highest frequency first.
        theta: base of the frequencies.

    Returns:
        The settings, or None if no settings reproduce the divisors.
    """
    if not (np.isfinite(divisors).all() and divisors.min() >= 1.0):
        return None
    scaling = {"rope_type": "llama3", "factor": shortest_decimal(divisors.max())}
    zero, one = _bounds(divisors, theta)
    original = max(round(1 / zero), 1)
    candidates = (
        _LLAMA3_BOUNDS,
        {
            "low_freq_factor": 1.0,
            "high_freq_factor": float(f"{one / zero:.4g}"),
            "original_max_position_embeddings": original,
        },
        {
            "low_freq_factor": zero * original,
            "high_freq_factor": one * original,
            "original_max_position_embeddings": original,
        },
    )
    for bounds in candidates:
        made = llama3_frequency_divisors(scaling | bounds, theta, 2 * divisors.size)
        if np.allclose(made, divisors, rtol=1e-5, atol=0):
            return scaling | bounds
    return None


def _bounds(divisors: np.ndarray, theta: float) -> tuple[float, float]:
    """Return the bounds, in turns per position, between which `keep` rises from 0 to 1."""
    turns = 1 / _wavelengths(theta, 2 * divisors.size)
    factor = divisors.max()
    inside = (divisors > 1.0) & (divisors < factor)
    slowest_kept = turns[divisors == 1.0].min(initial=np.inf)
    fastest_scaled = turns[divisors == factor].max()
    if not np.isfinite(slowest_kept):
        slowest_kept = 16 * max(turns.max(), fastest_scaled)
    if inside.sum() == 0:  # any bounds between the two frequencies are valid; the exponents leave a margin for rounding
        ratio = slowest_kept / fastest_scaled
        return fastest_scaled * ratio**0.25, fastest_scaled * ratio**0.75
    keep = (1 / divisors[inside] - 1 / factor) / (1 - 1 / factor)
    if inside.sum() == 1:
        # Choose a line through the only point so that it reaches 0 and 1 between the neighbouring frequencies.
        (at,), (height,) = turns[inside], keep
        zero = max(fastest_scaled, (at - height * slowest_kept) / (1 - height))
        return zero, zero + (at - zero) / height
    slope, offset = np.polyfit(turns[inside], keep, 1)
    slope = max(slope, 1e-30)
    return max(-offset / slope, 1e-30), (1 - offset) / slope


def llama3_frequency_divisors(scaling: dict[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """Return the divisors of the rotary frequencies for `rope_type: llama3`, as in transformers.

    Returns:
        float64 [head_dim / 2].
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / _wavelengths(theta, head_dim)
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - keep) / scaling["factor"] + keep)


def _wavelengths(theta: float, head_dim: int) -> np.ndarray:
    return 2 * np.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
