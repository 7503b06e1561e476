"""Interface of key-value caches, and attention over their contents.

Shapes: B batch, S new positions, N query heads, K key-value heads, H head dimension of keys, E head dimension of
values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import paddle

from paddlenlp_ext.ops.attention import ScoreOptions, attention
from paddlenlp_ext.ops.attention.decode_attention import CachedLayer, ReservedPositions, decode_attention
from paddlenlp_ext.ops.attention.score_options import PLAIN


class KeyValueCache(ABC):
    """Cached keys and values of all layers."""

    @property
    @abstractmethod
    def key_starts(self) -> paddle.Tensor:
        """Column of the first token of each row, after the padding, int64 [B]."""

    @property
    @abstractmethod
    def length(self) -> Any:
        """Column of the first new position; a tensor in a static graph."""

    @abstractmethod
    def next_positions(self, count: int) -> paddle.Tensor:
        """Return the position ids of the next `count` tokens of each row, int64 [B, S]; padding has position 0."""

    @abstractmethod
    def note_frequency_sets(self, frequency_sets: tuple[bool, ...]) -> None:
        """Record which RoPE frequencies a forward pass used (`nn.rope.RotaryEmbeddings.frequency_sets`)."""

    @abstractmethod
    def append(self, layer_index: int, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, window: int | None) -> CachedLayer:
        """Append new keys and values of a layer, and return the contents of its cache.

        Layers with latent attention (nn/latent_attention.py) append latents and rotated keys instead, each as one head.
        """

    @abstractmethod
    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the cached result of `make`, such as a weight in another layout; `make` runs once per `key`."""

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
    ) -> paddle.Tensor:
        """Append the keys and values of a layer; return the attention of the new queries over all keys, [B, S, N, E].

        If the cache was empty, attention is computed as in training, with the backend `implementation`.
        """
        cached = self.append(layer_index, k_BSKH, v_BSKE, window)
        if cached.layout is not None:
            rest = (scale, implementation, cached.prefix, options)
            return attention(q_BSNH, k_BSKH, v_BSKE, cached.layout, *rest)
        assert cached.visible is not None, "a layer without a layout must have visible positions"
        return decode_attention(q_BSNH, *cached.tensors, cached.visible, scale, options)


class ReservingCache(KeyValueCache):
    """Cache that can reserve slots for a caller that writes keys and values (models/decoding/cpp_layers.py)."""

    @property
    @abstractmethod
    def has_positions(self) -> bool:
        """True if every layer has stored positions; `reserve` may be called only then."""

    @abstractmethod
    def reserve(self, layers: Sequence[int], length: int) -> ReservedPositions:
        """Reserve slots for `length` new positions of each row in the layers with these indices."""
