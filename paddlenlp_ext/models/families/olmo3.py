"""OLMo 3: OLMo 2 with a sliding window in three of every four layers, and rope scaling in the fourth. Ai2 2025."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.models.families.olmo2 import OLMO2_TENSOR_PLAN, olmo2_differences
from paddlenlp_ext.models.registry import FAMILIES, ConfigReader, Family
from paddlenlp_ext.models.sliding_windows import windows_by_type, with_rope_by_layer_type

_THETA, _PATTERN = 500_000.0, 4


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # `rope_theta` applies only to the layers with full attention, as in the transformers library.
    thetas = {"full_attention": config.get("rope_theta") or _THETA, "sliding_attention": _THETA}
    return with_rope_by_layer_type(config, _PATTERN, thetas)


def _differences(config: ConfigReader) -> dict[str, Any]:
    return {**olmo2_differences(config), "windows": windows_by_type(config, ())}


FAMILIES.register("olmo3")(
    Family(
        "Olmo3ForCausalLM",
        _differences,
        OLMO2_TENSOR_PLAN,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096},
        complete=_complete,
    )
)
