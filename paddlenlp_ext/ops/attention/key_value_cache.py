"""Base of the key-value caches that attention layers append to, and attention over their contents.

Shapes: B batch, S new positions, N query heads, K key-value heads, H head dimension of keys, E that of values.
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
    """Keys and values of earlier positions."""

    @property
    @abstractmethod
    def key_starts(self) -> paddle.Tensor:
        """Index of the first token of each row, int64 [B]."""

    @property
    @abstractmethod
    def length(self) -> Any:
        """Number of positions in every layer, padding included; a tensor in a static graph."""

    @abstractmethod
    def next_positions(self, count: int) -> paddle.Tensor:
        """Return the positions of each row's next `count` tokens, int64 [B, S], from 0 for its first; padding has 0."""

    @abstractmethod
    def note_frequency_sets(self, frequency_sets: tuple[bool, ...]) -> None:
        """Record the sets of rotary frequencies of a forward pass (`nn.rope.RotaryEmbeddings.frequency_sets`)."""

    @abstractmethod
    def append(self, layer_index: int, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, window: int | None) -> CachedLayer:
        """Append the keys and values of a layer, and return its contents.

        A layer with latent attention (nn/latent_attention.py) appends latents and rotated keys, as one head each.
        """

    @abstractmethod
    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, computed once per `key`: weights in another form, which do not change."""

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

        The stored tensors are read in place. If all positions are new, `implementation` computes attention as in
        training.
        """
        cached = self.append(layer_index, k_BSKH, v_BSKE, window)
        if cached.layout is not None:
            rest = (scale, implementation, cached.prefix, options)
            return attention(q_BSNH, k_BSKH, v_BSKE, cached.layout, *rest)
        assert cached.visible is not None, "a layer has a layout or visible positions"
        return decode_attention(q_BSNH, *cached.tensors, cached.visible, scale, options)


class ReservingCache(KeyValueCache):
    """Cache whose new positions may be written by the caller (models/decoding/cpp_layers.py)."""

    @property
    @abstractmethod
    def has_positions(self) -> bool:
        """True if every layer has stored positions, so that `reserve` works."""

    @abstractmethod
    def reserve(self, layers: Sequence[int], length: int) -> ReservedPositions:
        """Make room for `length` positions of each row in some layers, which the caller writes, and count them."""
