"""Sizes of a decoder layer; they may differ between the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from paddlenlp_ext.models.registry import ConfigReader


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one decoder layer.

    Attributes:
        head_dim: channels of a query or key.
        value_dim: channels of a value.
        num_kv_heads: number of key-value heads.
        has_v_proj, source: see `AttentionShape`.
        intermediate_size: output features of the gate and up projections; 0: no feed-forward block.
    """

    head_dim: int
    value_dim: int
    num_kv_heads: int
    intermediate_size: int
    has_v_proj: bool = True
    source: int | None = None

    @property
    def projected_size(self) -> int:
        """Number of output features of `k_proj` and `v_proj`."""
        return self.key_size + (self.value_size if self.has_v_proj else 0)

    @property
    def key_size(self) -> int:
        """Number of key channels that the layer computes, over all heads."""
        return self.num_kv_heads * self.head_dim if self.source is None else 0

    @property
    def value_size(self) -> int:
        """Number of value channels that the layer computes, over all heads."""
        return self.num_kv_heads * self.value_dim if self.source is None else 0


@dataclass(frozen=True)
class LayerEmbeddingShape:
    """Sizes of layer embeddings (models/layer_embeddings.py).

    Attributes:
        vocab_size: number of rows of the table.
        size: channels that each layer reads.
    """

    vocab_size: int
    size: int


def attention_weights(config: Any) -> float:
    """Return the number of weights in the linear layers of attention, averaged over the layers of a `DecoderConfig`."""
    heads, hidden, latent = config.num_attention_heads, config.hidden_size, config.latent
    if latent is None:
        gate = 0 if config.attention_gate is None else heads
        return hidden * fmean(
            s.projected_size + gate * s.head_dim + heads * (s.head_dim + s.value_dim) for s in config.layer_shapes
        )
    output = heads * config.value_dim * hidden
    rank, queries = latent.query_rank, heads * config.head_dim
    projected = hidden * queries if rank is None else rank * (hidden + queries)
    compressed = hidden * (latent.kv_rank + latent.rotated_dim)
    return projected + compressed + latent.kv_rank * heads * (latent.unrotated_dim + latent.value_dim) + output


def exchanged_tensors(config: Any) -> str | None:
    """Describe the tensors that the layers of a `DecoderConfig` exchange besides hidden states; None: no tensors."""
    shares_keys = any(shape.source is not None for shape in config.layer_shapes)
    names = [*["layer embeddings"] * (config.layer_embeddings is not None), *["shared keys and values"] * shares_keys]
    return " and ".join(names) or None


def layer_shapes(config: ConfigReader, windows: Sequence[int | None]) -> tuple[LayerShape, ...]:
    """Return the sizes of each layer of a model with a different head size in layers with full attention.

    The sizes are stored under `global_head_dim` and `num_global_key_value_heads`, or under `per_layer_config` by layer
    index, as transformers 5.23 saves them. With `attention_k_eq_v`, layers with full attention have no `v_proj`. The
    last `num_kv_shared_layers` layers read the keys and values of the last earlier layer with the same window; with
    `use_double_wide_mlp`, their feed-forward is twice as wide.

    Args:
        config: config of the model.
        windows: sliding window of each layer; None: full attention.

    Raises:
        ValueError: `per_layer_config` has keys other than head sizes, a layer's number of key-value heads does not
            divide the number of heads, or no layer computes the keys and values that a layer reads.
    """
    shares_keys, heads = bool(config.value("attention_k_eq_v")), config.size("num_attention_heads")
    stored: Mapping[str, Any] | None = config.value("per_layer_config")
    of_full = {"head_dim": config.size("global_head_dim")}
    if shares_keys and config.value("num_global_key_value_heads") is not None:
        of_full["num_key_value_heads"] = config.size("num_global_key_value_heads")
    by_layer = {int(layer): sizes for layer, sizes in (stored or {}).items()}
    if stored is None:
        by_layer = {layer: of_full for layer, window in enumerate(windows) if window is None}
    shapes, sources = list[LayerShape](), _sources(config, windows)
    for layer, (window, source) in enumerate(zip(windows, sources, strict=True)):
        sizes = {key: config.size(key) for key in ("head_dim", "num_key_value_heads")} | dict(by_layer.get(layer, {}))
        if len(sizes) > 2 or heads % sizes["num_key_value_heads"]:
            raise ValueError(
                f"config.json: layer {layer} has the sizes {sizes}; only head_dim and num_key_value_heads are allowed, "
                f"and num_key_value_heads must divide num_attention_heads ({heads})"
            )
        has_v_proj = source is None and (window is not None or not shares_keys)
        is_wide = source is not None and bool(config.value("use_double_wide_mlp"))
        head_dim, inner = sizes["head_dim"], config.size("intermediate_size") * (2 if is_wide else 1)
        shapes.append(LayerShape(head_dim, head_dim, sizes["num_key_value_heads"], inner, has_v_proj, source))
    return tuple(shapes)


def layer_embedding_shape(config: ConfigReader) -> LayerEmbeddingShape | None:
    """Return the sizes of layer embeddings, from `hidden_size_per_layer_input` (0: none) and the table size.

    Raises:
        ValueError: the table has fewer rows than the embedding.
    """
    if not config.value("hidden_size_per_layer_input"):
        return None
    shape = LayerEmbeddingShape(config.size("vocab_size_per_layer_input"), config.size("hidden_size_per_layer_input"))
    if shape.vocab_size < config.size("vocab_size"):
        raise ValueError(
            f"vocab_size {config.size('vocab_size')} in config.json: tokens after {shape.vocab_size - 1} have no layer "
            "embeddings (vocab_size_per_layer_input); do not add tokens to this model"
        )
    return shape


def _sources(config: ConfigReader, windows: Sequence[int | None]) -> list[int | None]:
    """Return for each layer the index of the layer whose keys and values it reads; None: its own."""
    number = config.value("num_kv_shared_layers") or 0
    first = max(len(windows) - number, 0)
    own = {window: layer for layer, window in enumerate(windows[:first])}
    missing = [layer for layer in range(first, len(windows)) if windows[layer] not in own]
    if missing:
        raise ValueError(
            f"num_kv_shared_layers {number} in config.json: layer {missing[0]} reads keys and values of an "
            f"earlier layer, but no layer before layer {first} has its attention type; choose a smaller number"
        )
    return [None if layer < first else own[window] for layer, window in enumerate(windows)]
