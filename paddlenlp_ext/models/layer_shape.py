"""Sizes of a decoder layer that may differ between the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddlenlp_ext.models.registry import ConfigReader


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one decoder layer.

    Attributes:
        head_dim: channels of a query or key.
        value_dim: channels of a value.
        num_kv_heads: number of key-value heads.
        has_v_proj: see `AttentionShape`.
        intermediate_size: output features of the gate and up projections.
    """

    head_dim: int
    value_dim: int
    num_kv_heads: int
    intermediate_size: int
    has_v_proj: bool = True

    @property
    def projected_size(self) -> int:
        """Number of output features of `k_proj` and `v_proj`."""
        return self.key_size + (self.value_size if self.has_v_proj else 0)

    @property
    def key_size(self) -> int:
        """Number of channels of the keys of all heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """Number of channels of the values of all heads."""
        return self.num_kv_heads * self.value_dim


def layer_shapes(config: ConfigReader, windows: Sequence[int | None]) -> tuple[LayerShape, ...]:
    """Return the sizes of each layer of a model whose layers with full attention have heads of another size.

    The sizes are stored under `global_head_dim` and `num_global_key_value_heads`, or under `per_layer_config` by layer
    index, as transformers 5.23 saves them. With `attention_k_eq_v`, layers with full attention have no `v_proj`.

    Args:
        config: config of the model.
        windows: sliding window of each layer; None: full attention.

    Raises:
        ValueError: `per_layer_config` has other keys than sizes of heads, or a layer's number of key-value heads does
            not divide the number of heads.
    """
    shares_keys, heads = bool(config.value("attention_k_eq_v")), config.size("num_attention_heads")
    stored: Mapping[str, Any] | None = config.value("per_layer_config")
    of_full = {"head_dim": config.size("global_head_dim")}
    if shares_keys and config.value("num_global_key_value_heads") is not None:
        of_full["num_key_value_heads"] = config.size("num_global_key_value_heads")
    by_layer = {int(layer): sizes for layer, sizes in (stored or {}).items()}
    if stored is None:
        by_layer = {layer: of_full for layer, window in enumerate(windows) if window is None}
    shapes = []
    for layer, window in enumerate(windows):
        sizes = {key: config.size(key) for key in ("head_dim", "num_key_value_heads")} | dict(by_layer.get(layer, {}))
        if len(sizes) > 2 or heads % sizes["num_key_value_heads"]:
            raise ValueError(
                f"per_layer_config of layer {layer} in config.json must have only head_dim and num_key_value_heads, "
                f"and num_attention_heads {heads} must be a multiple of num_key_value_heads, got {sizes}"
            )
        has_v_proj = window is not None or not shares_keys
        head_dim, inner = sizes["head_dim"], config.size("intermediate_size")
        shapes.append(LayerShape(head_dim, head_dim, sizes["num_key_value_heads"], inner, has_v_proj))
    return tuple(shapes)
