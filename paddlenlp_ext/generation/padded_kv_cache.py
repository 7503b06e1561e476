"""Key-value cache of a left-padded batch, updated in place.

Each layer stores keys and values. A layer with latent attention (nn/latent_attention.py) stores latents and rotated
keys instead, each as a single head. A layer without attention stores a state of each row (layer_states.py).

Rows of unequal length are padded on the left, so the newest token of every row is in the same column. The keys and
values of a prefix can precede the rows; the positions of the prefix are not counted in `length` and `key_starts`.
Example with a prefix of P = 2 positions and prompts of 3 and 1 tokens, after two decoding steps:

                  prefix  prompt  new   free
    row 0         p p     a a a   a a   0 0 ...    key_starts 0
    row 1         p p     . . b   b b   0 0 ...    key_starts 2
                          |<-length->|

A query attends to the prefix, and to the positions of its row from `key_starts` to the query itself. With a sliding
window, a query attends only to the newest positions, up to the size of the window.

Shapes: B batch, S new positions, C capacity, P positions of the prefix, K key-value heads, H head dimension of keys,
E head dimension of values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import paddle

from paddlenlp_ext.generation.layer_states import LayerStates
from paddlenlp_ext.ops.attention import AttentionLayout, KeyValuePrefix
from paddlenlp_ext.ops.attention.decode_attention import (
    CachedLayer,
    ReservedPositions,
    VisiblePositions,
    store_positions,
)
from paddlenlp_ext.ops.attention.key_value_cache import LayerState, ReservingCache, StateShapes

BLOCK = 128  # the capacity grows in blocks of 128 positions, so that the stored keys and values are rarely copied


class CachePrefix(NamedTuple):
    """Contents of a cache that precede all rows of another cache.

    Attributes:
        key_values: keys and values of each attention layer, by layer index.
        states: state of each other layer as one row, by layer index.
    """

    key_values: Mapping[int, KeyValuePrefix]
    states: Mapping[int, LayerState]


class _LayerKeyValues:
    """Keys [B, K, C, H] and values [B, K, C, E] of one layer: the prefix, the positions of each row, and zeros."""

    def __init__(self, prefix: KeyValuePrefix | None = None) -> None:
        self.prefix = prefix
        self.prefix_length = 0 if prefix is None else prefix[0].shape[0]
        self.capacity = 0
        self._stored: tuple[paddle.Tensor, paddle.Tensor] | None = None

    @property
    def is_empty(self) -> bool:
        """True until the first positions are stored."""
        return self._stored is None

    @property
    def tensors(self) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Stored keys and values; the layer must not be empty."""
        assert self._stored is not None, "the layer is empty"
        return self._stored

    def store(self, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, column: int) -> None:
        """Store the keys and values of new positions; `column` is the column of the first one."""
        start = self.prefix_length + column
        end = start + k_BSKH.shape[1]
        self._grow(end, [[x.shape[0], x.shape[2], 0, x.shape[3]] for x in (k_BSKH, v_BSKE)], k_BSKH.dtype)
        starts_B = np.full(k_BSKH.shape[0], start, np.int64)
        for new, stored in zip((k_BSKH, v_BSKE), self.tensors, strict=True):
            store_positions(new, stored, starts_B)

    def select_rows(self, index: paddle.Tensor) -> None:
        """Keep only the rows at the indices `index` (int64), in this order."""
        k_BKCH, v_BKCE = self.tensors
        self._stored = paddle.index_select(k_BKCH, index, axis=0), paddle.index_select(v_BKCE, index, axis=0)

    def grow(self, end: int) -> None:
        """Grow the capacity to at least `end` slots; the layer must not be empty."""
        k_BKCH, v_BKCE = self.tensors
        self._grow(end, [k_BKCH.shape, v_BKCE.shape], k_BKCH.dtype)

    def _grow(self, end: int, shapes: Sequence[Sequence[int]], dtype: paddle.dtype) -> None:
        """Grow the capacity to at least `end` slots; `shapes` are the shapes of keys and values [B, K, any, H or E]."""
        if end <= self.capacity:
            return
        missing = -(-end // BLOCK) * BLOCK - self.capacity
        k_empty, v_empty = (paddle.zeros([*shape[:2], missing, shape[3]], dtype) for shape in shapes)
        if self._stored is not None:
            k_BKCH, v_BKCE = self._stored
            self._stored = paddle.concat([k_BKCH, k_empty], axis=2), paddle.concat([v_BKCE, v_empty], axis=2)
        else:
            self._stored = k_empty, v_empty
            if self.prefix is not None:
                self._store_prefix(self._stored, self.prefix)
        self.capacity += missing  # set after the allocation, because C++ writes up to the capacity without a check

    def _store_prefix(self, stored: tuple[paddle.Tensor, paddle.Tensor], prefix: KeyValuePrefix) -> None:
        for store_BKCH, own_PKH in zip(stored, prefix, strict=True):
            own_1KPH = own_PKH.transpose([1, 0, 2]).unsqueeze(0).astype(store_BKCH.dtype)
            store_BKCH[:, :, : self.prefix_length] = own_1KPH.expand([store_BKCH.shape[0], *own_1KPH.shape[1:]])


class KVCache(ReservingCache):
    """Keys, values and states of the layers in this process, without gradients.

    Attributes:
        prompt_end: column at which all prompts end; None if unknown.
        is_stale: whether the rotary frequencies have changed since the first forward pass, for example with LongRoPE
            beyond the original context. The cached keys are then invalid, and all tokens need a new prefill.
    """

    def __init__(self, key_starts: Sequence[int], prompt_end: int | None = None) -> None:
        self.prompt_end, self.is_stale = prompt_end, False
        self._frequency_sets: tuple[bool, ...] | None = None
        self._starts_B = np.asarray(key_starts, dtype=np.int64)
        self._start, self._length = 0, 0  # columns of the first position of the last pass, and of the next pass
        self._layers: dict[int, _LayerKeyValues] = {}
        self._states, self._saved = LayerStates(), (0, LayerStates())
        self._layouts: dict[tuple[bytes, int, int | None], AttentionLayout] = {}
        self._visible: dict[tuple[int, int, int | None], VisiblePositions] = {}
        self._derived: dict[Hashable, Any] = {}

    @property
    def is_new(self) -> bool:
        """True while the cache is empty and has no prefix."""
        return not self._layers and self._states.is_new

    @property
    def tensors(self) -> list[paddle.Tensor]:
        """Stored keys and values of each layer, including unused slots; [] in a new cache.

        Not available between `set_prefix` and the first forward pass, which stores the prefix.
        """
        return [tensor for layer in self._layers.values() for tensor in layer.tensors]

    def begin_pass(self, num_new: int) -> None:
        """Begin a forward pass over `num_new` new positions of each row."""
        self._start, self._length = self._length, self._length + num_new

    def note_frequency_sets(self, frequency_sets: tuple[bool, ...]) -> None:
        """Record the rotary frequencies that a forward pass uses, and update `is_stale`."""
        if self._frequency_sets is None:
            self._frequency_sets = frequency_sets
        self.is_stale |= frequency_sets != self._frequency_sets

    @paddle.no_grad()
    def set_prefix(
        self, key_values: Mapping[int, KeyValuePrefix], states: Mapping[int, LayerState] = MappingProxyType({})
    ) -> None:
        """Store a prefix in a new cache; see `CachePrefix` for the arguments."""
        assert self.is_new, "the prefix must be set before positions are appended"
        for index, (k_PKH, v_PKH) in key_values.items():
            self._layers[index] = _LayerKeyValues((k_PKH.detach(), v_PKH.detach()))
        self._states = LayerStates(states)
        self.save_states()

    @paddle.no_grad()
    def as_prefix(self) -> CachePrefix:
        """Return the contents of this cache as a prefix for another cache.

        The cache must have exactly one row, without padding.
        """
        assert self._starts_B.tolist() == [0], "a prefix must be a cache of one row without padding"

        def positions_first(x_BKCH: paddle.Tensor, end: int) -> paddle.Tensor:
            return x_BKCH[0, :, :end].transpose([1, 0, 2]).contiguous()

        key_values = {}
        for index, layer in self._layers.items():
            (k_BKCH, v_BKCE), end = layer.tensors, layer.prefix_length + self._length
            key_values[index] = positions_first(k_BKCH, end), positions_first(v_BKCE, end)
        return CachePrefix(key_values, self._states.of_first_row())

    @property
    def key_starts(self) -> paddle.Tensor:
        """Index of the first token of each left-padded row, int64 [B]."""
        return paddle.to_tensor(self._starts_B)

    @property
    def length(self) -> int:
        """Number of stored positions, including padding; also the column at which the next forward pass starts."""
        return self._length

    def next_positions(self, count: int) -> paddle.Tensor:
        """Return the positions of the next `count` tokens of each row, int64 [B, S].

        The padding and the first token of a row have position 0.
        """
        positions_BS = np.arange(self._length, self._length + count) - self._starts_B[:, None]
        return paddle.to_tensor(np.maximum(positions_BS, 0))

    @paddle.no_grad()
    def append(self, layer_index: int, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, window: int | None) -> CachedLayer:
        """Append new keys and values to a layer, and return the contents of the layer.

        All layers with the same sliding window share the visible positions, which are computed once per step.
        """
        self._check_pass(k_BSKH.shape[1])
        self._layer(layer_index).store(k_BSKH, v_BSKE, self._start)
        return self.contents(layer_index, k_BSKH, v_BSKE, window)

    @paddle.no_grad()
    def contents(
        self, layer_index: int, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, window: int | None
    ) -> CachedLayer:
        """Return the contents of a layer after these keys and values were appended in this pass."""
        layer = self._layers[layer_index]
        prefix = layer.prefix
        if prefix is not None:
            prefix = (prefix[0].astype(k_BSKH.dtype), prefix[1].astype(v_BSKE.dtype))
        if self._start == 0:
            return CachedLayer(layer.tensors, prefix, layout=self._layout(window))
        return CachedLayer(layer.tensors, prefix, visible=self._visible_positions(layer, window))

    def new_documents(self) -> AttentionLayout:
        """Return the documents of the new positions; the padding of a row is a separate document before its tokens."""
        return self._layout(None)

    @paddle.no_grad()
    def state(self, layer_index: int, shapes: StateShapes) -> LayerState:
        """Return the state of a layer before the new positions; rows that start in this pass have the initial state."""
        return self._states.read(layer_index, shapes, 0, self._starts_B >= self._start)

    def owns_state(self, layer_index: int) -> bool:
        """Return whether only the rows of this pass refer to the tensors of `state`, not saved states or other rows."""
        return self._states.owns(layer_index, 0, self._starts_B >= self._start)

    @paddle.no_grad()
    def keep_state(self, layer_index: int, state: LayerState) -> None:
        """Store the state of a layer after the new positions."""
        self._states.keep(layer_index, state, 0)

    def save_states(self) -> None:
        """Save the states of all layers at the current length, for `truncate`."""
        self._saved = self._length, self._states.copy()

    def has_positions(self, layer_index: int) -> bool:
        """Return whether a layer has stored positions or states, which `reserve` requires."""
        layer = self._layers.get(layer_index)
        return self._states.has_rows(layer_index) or (layer is not None and not layer.is_empty)

    def reserve(self, layers: Sequence[int], length: int) -> ReservedPositions:
        """Reserve slots for the `length` new positions of each row in the given layers.

        The caller must write the keys and values of the returned slots.
        """
        self._check_pass(length)
        reserved = [self._layers[index] for index in layers]
        prefix = reserved[0].prefix_length
        slot = prefix + self._start
        for layer in reserved:
            assert layer.prefix_length == prefix, "all layers must have a prefix of the same length"
            if slot + length > layer.capacity:
                layer.grow(slot + length)
        firsts = [prefix + start for start in self._starts_B.tolist()]
        return ReservedPositions([slot] * len(firsts), firsts, prefix, [layer.tensors for layer in reserved])

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, such as converted weights; `make` is called once per `key`."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    @paddle.no_grad()
    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only the given rows, in the given order."""
        index = paddle.to_tensor(np.asarray(rows, dtype=np.int64))
        for layer in self._layers.values():
            layer.select_rows(index)
        self._states.select_rows(rows)
        self._saved = 0, self._states.emptied()
        self._starts_B = self._starts_B[list(rows)]
        self._visible.clear()

    def truncate(self, length: int) -> int:
        """Keep at most `length` columns, and return the new length, which can be less than `length`.

        A state cannot be truncated. If a layer has a state, the cache returns to the positions of the last
        `save_states` call. If these are more than `length` positions, the cache becomes empty.
        """
        if length < self._length and not self._states.is_new:
            if self._saved[0] > length:
                self._saved = 0, self._states.emptied()
            length, self._states = self._saved[0], self._saved[1].copy()
        self._start = self._length = min(length, self._length)
        self._visible.clear()
        return self._length

    def _check_pass(self, num_new: int) -> None:
        assert num_new == self._length - self._start, "begin_pass must have been called with the number of positions"

    def _layer(self, index: int) -> _LayerKeyValues:
        if index not in self._layers:
            self._layers[index] = _LayerKeyValues()
        return self._layers[index]

    def _layout(self, window: int | None) -> AttentionLayout:
        """Return the documents of the new positions."""
        num_new = self._length - self._start
        padding_B = np.clip(self._starts_B - self._start, 0, num_new)
        key = (padding_B.tobytes(), num_new, window)
        if key not in self._layouts:
            documents = [[part for part in (pad, num_new - pad) if part > 0] for pad in padding_B.tolist()]
            self._layouts[key] = AttentionLayout.from_documents(documents, window)
        return self._layouts[key]

    def _visible_positions(self, layer: _LayerKeyValues, window: int | None) -> VisiblePositions:
        """Return the positions that the new positions attend to."""
        key = (self._start, self._length, window)
        if key not in self._visible:
            if any(cached[:2] != key[:2] for cached in self._visible):
                self._visible.clear()
            queries_1S = np.arange(self._start, self._length)[None]
            self._visible[key] = VisiblePositions.of_rows(queries_1S, self._starts_B, layer.prefix_length, window)
        return self._visible[key]
