"""EXAONE 4: norms after attention and feed-forward, QK norms per head. LG AI Research 2025, arXiv:2507.11407.

In the 32B model, three of every four layers have a sliding window, and the other layers have no RoPE. The 1.2B model
has no windows, and RoPE in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.checkpoint.gguf.architecture import POST_NORM, QK_NORMS, Architecture, has_window
from paddlenlp_ext.checkpoint.gguf.gguf_file import GgufFile
from paddlenlp_ext.checkpoint.gguf.registry import ARCHITECTURES, num_layers
from paddlenlp_ext.models.families.qwen3 import QWEN3_TENSOR_PLAN
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import full_attention, layer_types_of_pattern, windows_by_type
from paddlenlp_ext.nn.attention import QKNorm

_PATTERN, _WINDOW, _LAYERS_WITH_WINDOWS = 4, 4096, 64


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if config.get("layer_types") or config.get("sliding_window", _WINDOW) is None:
        return config
    pattern = config.get("sliding_window_pattern") or _PATTERN
    return {**config, "layer_types": layer_types_of_pattern(pattern, config["num_hidden_layers"])}


def _differences(config: ConfigReader) -> dict[str, Any]:
    shared = {"layer": "post_norm", "qk_norm": QKNorm()}
    if config.value("sliding_window") is None and "sliding_attention" not in (config.value("layer_types") or ()):
        return {**shared, "windows": full_attention(config)}
    windows = windows_by_type(config, ())
    return {**shared, "windows": windows, "rotates": tuple(window is not None for window in windows)}


FAMILIES.register("exaone4")(
    Family(
        "Exaone4ForCausalLM",
        _differences,
        QWEN3_TENSOR_PLAN,
        {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": _WINDOW},
        complete=_complete,
    )
)


def _gguf_settings(file: GgufFile) -> dict[str, Any]:
    """Return the windows of a GGUF file.

    Raises:
        ValueError: the file has windows, but llama.cpp does not apply windows in models with this number of layers.
    """
    if not has_window(file):
        return {"sliding_window": None}
    if num_layers(file) != _LAYERS_WITH_WINDOWS:
        raise ValueError(
            f"{file.path}: exaone4 with sliding windows and {num_layers(file)} layers is not supported, because "
            f"llama.cpp applies windows only in models with {_LAYERS_WITH_WINDOWS} layers"
        )
    return {"sliding_window_pattern": _PATTERN}


ARCHITECTURES.register("exaone4")(
    Architecture("exaone4", "Exaone4ForCausalLM", {**POST_NORM, **QK_NORMS}, settings=_gguf_settings, has_window=True)
)
