"""Reader of config.json values with the defaults of a model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddlenlp_ext.models.registry import Family

_COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


class ConfigJsonReader:
    """Reader of config values: values in config.json, else the family's defaults, else the common defaults."""

    def __init__(self, source: Mapping[str, Any], family: Family) -> None:
        self._layers = (source, family.defaults, _COMMON_DEFAULTS)

    def value(self, key: str) -> Any:
        """Return the value of `key`; None if the value is null or absent."""
        for layer in self._layers:
            if key in layer:
                return layer[key]
        return None

    def size(self, key: str, default: int | None = None) -> int:
        """Return the value of `key`, a positive integer.

        Raises:
            ValueError: the value is missing, not an integer, or below 1.
        """
        value = self.value(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key} in config.json must be a positive integer, got {value!r}")
        return value
