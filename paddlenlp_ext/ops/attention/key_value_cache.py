"""Interface of key-value caches, and attention over their contents.

Attention layers append keys and values. Layers such as short convolutions keep a state instead: tensors of fixed size
that summarize all earlier positions of a row. New tensors replace the state; a pass overwrites the old tensors only if
`owns_state` allows it.

Shapes: B batch, S new positions, N query heads, K key-value heads, H head dimension of keys, E head dimension of
values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import paddle

from paddlenlp_ext.ops.attention import AttentionLayout, ScoreOptions, attention
from paddlenlp_ext.ops.attention.decode_attention import CachedLayer, ReservedPositions, decode_attention
from paddlenlp_ext.ops.attention.score_options import PLAIN

LayerState = tuple[paddle.Tensor, ...]
"""State of a layer for each row, tensors [B, ...]."""
StateShapes = Sequence[tuple[Sequence[int], paddle.dtype]]
"""Shape and dtype of each tensor in the state of one row."""


class KeyValueCache(ABC):
    """Cached keys, values and states of all layers."""

    @property
    @abstractmethod
    def key_starts(self) -> paddle.Tensor:
        """Column of the first token of each row, after the padding, int64 [B]."""

    @property
    @abstractmethod
    def length(self) -> Any:
        """Column of the first position of the next forward pass; a tensor in a static graph."""

    @abstractmethod
    def next_positions(self, count: int) -> paddle.Tensor:
        """Return the position ids of the next `count` tokens of each row, int64 [B, S]; padding has position 0."""

    @abstractmethod
    def begin_pass(self, num_new: int) -> None:
        """Begin a forward pass over `num_new` new positions of each row; `length` then includes these positions."""

    @abstractmethod
    def note_frequency_sets(self, frequency_sets: tuple[bool, ...]) -> None:
        """Record which RoPE frequencies a forward pass used (`nn.rotary_embedding.RotaryEmbeddings.frequency_sets`)."""

    @abstractmethod
    def append(self, layer_index: int, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, window: int | None) -> CachedLayer:
        """Append new keys and values of a layer, and return the contents of its cache.

        Layers with latent attention (nn/latent_attention.py) append latents and rotated keys instead, each as one head.
        """

    @abstractmethod
    def contents(
        self, layer_index: int, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, window: int | None
    ) -> CachedLayer:
        """Return the contents of a layer's cache after these keys and values were appended in this pass."""

    def new_documents(self) -> AttentionLayout:
        """Return the documents of the new positions; the padding of a row is a separate document before its tokens."""
        raise NotImplementedError(f"{type(self).__name__} does not store states")

    def state(self, layer_index: int, shapes: StateShapes) -> LayerState:
        """Return the state of a layer before the new positions, for each row.

        A row without earlier tokens has the state after the prefix, or zeros if the cache has no prefix.

        Args:
            layer_index: index of the layer.
            shapes: shape and dtype of each tensor of the state, for one row.
        """
        raise NotImplementedError(f"{type(self).__name__} does not store states")

    def owns_state(self, layer_index: int) -> bool:
        """Return whether the caller may overwrite the tensors of `state` before it calls `keep_state`.

        The result is False if other rows, saved states or a prefix refer to the tensors.
        """
        return False

    def keep_state(self, layer_index: int, state: LayerState) -> None:
        """Store the state of a layer after the new positions; the caller must not write into its tensors."""
        raise NotImplementedError(f"{type(self).__name__} does not store states")

    @abstractmethod
    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the cached result of `make`, such as a weight in a different layout; `make` runs once per `key`."""

    @paddle.no_grad()
    def attend(
        self,
        layer_index: int,
        q_BSNH: paddle.Tensor,
        k_BSKH: paddle.Tensor,
        v_BSKE: paddle.Tensor,
        window: int | None,
        scale: float,
        implementation: str | None = None,
        options: ScoreOptions = PLAIN,
        is_stored: bool = False,
    ) -> paddle.Tensor:
        """Append the keys and values of a layer; return the attention of the new queries over all keys, [B, S, N, E].

        If the cache was empty, attention is computed as in training, with the backend `implementation`. With
        `is_stored`, the layer has already appended the keys and values in this pass, and another layer reads them.
        """
        read = self.contents if is_stored else self.append
        cached = read(layer_index, k_BSKH, v_BSKE, window)
        if cached.layout is not None:
            rest = (scale, implementation, cached.prefix, options)
            return attention(q_BSNH, k_BSKH, v_BSKE, cached.layout, *rest)
        assert cached.visible is not None, "a layer without a layout must have visible positions"
        return decode_attention(q_BSNH, *cached.tensors, cached.visible, scale, options)


class ReservingCache(KeyValueCache):
    """Cache that can reserve slots for a caller that writes keys and values (models/decoding/cpp_layers.py)."""

    @abstractmethod
    def has_positions(self, layer_index: int) -> bool:
        """Return whether a layer has stored positions or states; `reserve` may be called only then."""

    @abstractmethod
    def reserve(self, layers: Sequence[int], length: int) -> ReservedPositions:
        """Reserve slots for `length` new positions of each row in the layers with the indices `layers`."""
