"""Key-value cache for continuous batching: rows join and leave between forward passes.

Every row starts in column 0, and the rows have different lengths. The rows in use precede the free rows, so that a
forward pass reads its rows as a slice of the stored tensors, without a copy. When a row leaves, the last row moves to
its index:

              prefix  tokens       free                     prefix  tokens       free
    row 0       p p   a a a a a    0 0         a leaves       p p   c c c        0 0
    row 1       p p   b b          0 0         ------->       p p   b b          0 0
    row 2       p p   c c c        0 0

Shapes: B rows of a pass, S new positions, R stored rows, C capacity, P positions of a prefix, K key-value heads, H head
dimension of keys, E head dimension of values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.generation.layer_states import LayerStates
from paddlenlp_ext.generation.padded_kv_cache import BLOCK
from paddlenlp_ext.ops.attention import AttentionLayout, KeyValuePrefix
from paddlenlp_ext.ops.attention.decode_attention import (
    CachedLayer,
    ReservedPositions,
    VisiblePositions,
    store_positions,
)
from paddlenlp_ext.ops.attention.key_value_cache import LayerState, ReservingCache, StateShapes
from paddlenlp_ext.ops.tensor_utils import slices_share_memory

_ROW_BLOCK = 4  # several rows are allocated in blocks of 4, so that the stored keys and values are rarely copied


class _Layer:
    """Keys [R, K, C, H] and values [R, K, C, E] of one layer; the first P columns of each row hold the prefix."""

    def __init__(self, prefix: KeyValuePrefix | None = None) -> None:
        self.prefix = prefix
        self.prefix_length = 0 if prefix is None else prefix[0].shape[0]
        self.stored: tuple[paddle.Tensor, paddle.Tensor] | None = None
        self._rows, self._columns, self._used_columns = 0, 0, 0

    def reserve(
        self, rows: int, columns: int, heads: Sequence[Sequence[int]], dtype: paddle.dtype
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Grow the stored tensors to at least `rows` rows of `columns` columns, and return them.

        Only columns that an earlier call reserved are copied. The columns in a block after them are empty.

        Args:
            rows: minimum number of rows.
            columns: minimum number of columns.
            heads: (K, H) of the keys and (K, E) of the values.
            dtype: dtype of keys and values.
        """
        copied, self._used_columns = self._used_columns, max(columns, self._used_columns)
        if self.stored is not None and rows <= self._rows and columns <= self._columns:
            return self.stored
        rows = max(1 if rows == 1 else -(-rows // _ROW_BLOCK) * _ROW_BLOCK, self._rows)
        columns = max(-(-columns // BLOCK) * BLOCK, self._columns)
        k_new, v_new = (paddle.zeros([rows, number, columns, size], dtype) for number, size in heads)
        for index, store in enumerate((k_new, v_new)):
            if self.prefix is not None:
                _write(store, slice(0, rows), self.prefix[index].astype(store.dtype))
            if self.stored is not None:
                used = self.stored[index][:, :, :copied]
                _write(store, slice(0, self._rows), used.transpose([0, 2, 1, 3]))
        self.stored, self._rows, self._columns = (k_new, v_new), rows, columns
        return self.stored

    def grow(self, rows: int, columns: int) -> tuple[paddle.Tensor, paddle.Tensor]:
        """Grow the stored tensors of a layer that is not empty, and return them."""
        assert self.stored is not None, "the layer is empty"
        return self.reserve(rows, columns, *self.kind)

    def copy_row(self, source: _Layer, row: int, targets: slice, length: int) -> None:
        """Copy a row of a layer, with `length` positions after the prefix, to rows of this layer."""
        assert source.stored is not None, "the layer is empty"
        copied, columns = source.stored, source.prefix_length + length
        for own, store in zip(copied, self.reserve(targets.stop, columns, *source.kind), strict=True):
            _write(store, targets, own[row, :, :columns].transpose([1, 0, 2]))

    @property
    def kind(self) -> tuple[list[list[int]], paddle.dtype]:
        """Heads and dtype of the stored tensors, as arguments of `reserve`."""
        assert self.stored is not None, "the layer is empty"
        return [[store.shape[1], store.shape[3]] for store in self.stored], self.stored[0].dtype


def _write(stored_RKCH: paddle.Tensor, rows: slice, x_BSKH: paddle.Tensor, starts_B: np.ndarray | None = None) -> None:
    """Write keys or values to rows of a stored tensor; Paddle's slice assignment would take time for all rows.

    Args:
        stored_RKCH: stored keys or values.
        rows: indices of the rows.
        x_BSKH: keys or values of S positions for each of the rows, or [S, K, H] for all rows.
        starts_B: first column of each row; None: 0.
    """
    num_rows = rows.stop - rows.start
    if x_BSKH.ndim == 3:
        x_BSKH = x_BSKH.unsqueeze(0).expand([num_rows, *x_BSKH.shape])
    view = stored_RKCH[rows]
    store_positions(x_BSKH, view, np.zeros(num_rows, np.int64) if starts_B is None else starts_B)
    if not slices_share_memory(stored_RKCH):
        stored_RKCH[rows] = view


class SlotCache:
    """Keys, values and states of rows that join and leave, without gradients.

    Args:
        derived_tensors: results of `RowsOfCache.derived` by key, which several caches of a model can share.

    Attributes:
        lengths: number of stored positions of each row in use, excluding the prefix.
        layers: keys and values of each attention layer, by layer index.
        states: states of the other layers.
    """

    def __init__(self, derived_tensors: dict[Hashable, Any] | None = None) -> None:
        self.lengths: list[int] = []
        self.frequency_sets: list[tuple[bool, ...] | None] = []
        self.layers: dict[int, _Layer] = {}
        self.states = LayerStates()
        self.has_prefix = False
        self.derived_tensors: dict[Hashable, Any] = {} if derived_tensors is None else derived_tensors

    def add_row(self) -> int:
        """Add an empty row after the rows in use; return its index."""
        self.lengths.append(0)
        self.frequency_sets.append(None)
        return len(self.lengths) - 1

    @paddle.no_grad()
    def take_row(self, other: SlotCache, copies: int = 1) -> None:
        """Move the only row of another cache of the same model to the end of this cache; do not use `other` afterwards.

        An empty cache takes the tensors of `other`; otherwise, the row is copied.

        Args:
            other: the other cache.
            copies: number of equal rows that this cache gets.
        """
        (length,), first = other.lengths, len(self.lengths)
        self.lengths += [length] * copies
        self.frequency_sets += other.frequency_sets * copies
        self.has_prefix = other.has_prefix
        if first == 0:
            self.layers, self.states, first = other.layers, other.states, 1
        targets = slice(first, len(self.lengths))
        for row in range(targets.start, targets.stop):
            self.states.take_row(other.states, row)
        for index, source in other.layers.items() if targets.start < targets.stop else ():
            self.layers[index].copy_row(source, 0, targets, length)

    def clear_row(self, row: int) -> None:
        """Remove all positions of a row. The row stays in use."""
        self.lengths[row], self.frequency_sets[row] = 0, None

    @paddle.no_grad()
    def move_row(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        for layer in self.layers.values() if source != target else ():
            if layer.stored is not None:
                layer.copy_row(layer, source, slice(target, target + 1), self.lengths[source])
        self.states.move_row(source, target)
        self.lengths[target], self.frequency_sets[target] = self.lengths[source], self.frequency_sets[source]

    def remove_last_row(self) -> None:
        """Remove the last row in use. The memory is freed when no row is left."""
        self.lengths.pop()
        self.frequency_sets.pop()
        self.states.remove_row(len(self.lengths))
        if not self.lengths:
            self.layers = {index: _Layer(layer.prefix) for index, layer in self.layers.items()}
            self.states = self.states.emptied()

    def rows(self, first: int, num_rows: int, prompt_lengths: Sequence[int]) -> RowsOfCache:
        """Return a view of `num_rows` rows, starting at index `first`, for one forward pass.

        Args:
            first: index of the first row.
            num_rows: number of rows.
            prompt_lengths: number of prompt tokens of each row.
        """
        return RowsOfCache(self, first, num_rows, prompt_lengths)


class RowsOfCache(ReservingCache):
    """View of consecutive rows of a `SlotCache` for one forward pass.

    Columns are relative to the first new position: `length` is 0, and stored tokens have negative columns.

    Attributes:
        prompt_end: column at which the prompt ends, for each row.
    """

    def __init__(self, cache: SlotCache, first: int, num_rows: int, prompt_lengths: Sequence[int]) -> None:
        self._cache, self._rows = cache, slice(first, first + num_rows)
        self._lengths_B = np.asarray(cache.lengths[self._rows], np.int64)
        self.prompt_end = (np.asarray(prompt_lengths, np.int64) - self._lengths_B).tolist()
        self._num_new = 0
        self._layouts: dict[int | None, AttentionLayout] = {}
        self._visible: dict[tuple[int | None, int], VisiblePositions] = {}

    @property
    def key_starts(self) -> paddle.Tensor:
        """Column of the first token of each row, int64 [B]: the negative number of stored tokens."""
        return paddle.to_tensor(-self._lengths_B)

    @property
    def length(self) -> int:
        """Column of the first new position."""
        return 0

    @property
    def is_new(self) -> bool:
        """True while the cache contains neither positions nor a prefix."""
        return not self._cache.layers and self._cache.states.is_new and not self._cache.has_prefix

    def next_positions(self, count: int) -> paddle.Tensor:
        """Return the positions of the next `count` tokens of each row, int64 [B, S]."""
        return paddle.to_tensor(self._lengths_B[:, None] + np.arange(count))

    def begin_pass(self, num_new: int) -> None:
        """Begin the forward pass over `num_new` new positions of each row."""
        self._num_new = num_new

    def note_frequency_sets(self, frequency_sets: tuple[bool, ...]) -> None:
        """Record the rotary frequencies that this forward pass uses, for `advance`."""
        self._sets = frequency_sets

    def advance(self) -> list[int]:
        """Add the new positions of this forward pass to the length of each row; return the indices of stale rows.

        The rotary frequencies of a stale row changed in this pass, so its earlier keys are invalid.
        """
        rows, sets = range(self._rows.start, self._rows.stop), self._cache.frequency_sets
        stale = [row for row in rows if sets[row] not in (None, self._sets)]
        for row in rows:
            self._cache.lengths[row] += self._num_new
            sets[row] = self._sets
        return stale

    def set_prefix(
        self, key_values: Mapping[int, KeyValuePrefix], states: Mapping[int, LayerState] = MappingProxyType({})
    ) -> None:
        """Store a prefix for all rows in a new cache; see `CachePrefix` for the arguments."""
        assert self.is_new, "the prefix must be set before positions are appended"
        for index, (k_PKH, v_PKH) in key_values.items():
            self._cache.layers[index] = _Layer((k_PKH.detach(), v_PKH.detach()))
        self._cache.states = LayerStates(states)
        self._cache.has_prefix = True

    @paddle.no_grad()
    def append(self, layer_index: int, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, window: int | None) -> CachedLayer:
        """Append new keys and values to the rows of a layer, and return the contents of the layer."""
        layer = self._cache.layers.setdefault(layer_index, _Layer())
        self._check_pass(k_BSKH.shape[1])
        starts_B = layer.prefix_length + self._lengths_B
        # The first chunk reserves the columns of the full prompt, because growing copies the stored keys and values.
        columns = layer.prefix_length + int((self._lengths_B + np.maximum(self._num_new, self.prompt_end)).max())
        k_RKCH, v_RKCE = layer.reserve(self._rows.stop, columns, [k_BSKH.shape[2:], v_BSKE.shape[2:]], k_BSKH.dtype)
        for new, stored in ((k_BSKH, k_RKCH), (v_BSKE, v_RKCE)):
            _write(stored, self._rows, new, starts_B)
        return self.contents(layer_index, k_BSKH, v_BSKE, window)

    @paddle.no_grad()
    def contents(
        self, layer_index: int, k_BSKH: paddle.Tensor, v_BSKE: paddle.Tensor, window: int | None
    ) -> CachedLayer:
        """Return the contents of a layer after these keys and values were appended in this pass."""
        layer = self._cache.layers[layer_index]
        assert layer.stored is not None, "the layer is empty"
        views = layer.stored[0][self._rows], layer.stored[1][self._rows]
        prefix = layer.prefix
        if prefix is not None:
            prefix = (prefix[0].astype(k_BSKH.dtype), prefix[1].astype(v_BSKE.dtype))
        if not self._lengths_B.any():
            return CachedLayer(views, prefix, layout=self._layout(window))
        return CachedLayer(views, prefix, visible=self._visible_positions(layer.prefix_length, window))

    def new_documents(self) -> AttentionLayout:
        """Return the documents of the new positions, one for each row."""
        return self._layout(None)

    @paddle.no_grad()
    def state(self, layer_index: int, shapes: StateShapes) -> LayerState:
        """Return the state of a layer before the new positions; an empty row has the initial state."""
        return self._cache.states.read(layer_index, shapes, self._rows.start, self._lengths_B == 0)

    def owns_state(self, layer_index: int) -> bool:
        """Return whether only the rows of this pass refer to the tensors of `state`."""
        return self._cache.states.owns(layer_index, self._rows.start, self._lengths_B == 0)

    @paddle.no_grad()
    def keep_state(self, layer_index: int, state: LayerState) -> None:
        """Store the state of a layer after the new positions."""
        self._cache.states.keep(layer_index, state, self._rows.start)

    def has_positions(self, layer_index: int) -> bool:
        """Return whether a layer has stored positions or states, which `reserve` requires."""
        return bool(self._lengths_B.any())

    def reserve(self, layers: Sequence[int], length: int) -> ReservedPositions:
        """Reserve slots for the `length` new positions of each row in the given layers.

        The caller must write the keys and values of the returned slots.
        """
        self._check_pass(length)
        reserved, prefix = [self._cache.layers[index] for index in layers], self._cache.layers[layers[0]].prefix_length
        starts = [prefix + own for own in self._lengths_B.tolist()]
        stored = [layer.grow(self._rows.stop, max(starts) + length) for layer in reserved]
        return ReservedPositions(starts, [prefix] * len(starts), prefix, stored, self._rows.start)

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, such as converted weights; `make` is called once per `key`, not in each pass."""
        if key not in self._cache.derived_tensors:
            self._cache.derived_tensors[key] = make()
        return self._cache.derived_tensors[key]

    def _check_pass(self, num_new: int) -> None:
        assert num_new == self._num_new, "begin_pass must have been called with the number of positions"

    def _layout(self, window: int | None) -> AttentionLayout:
        """Return the documents of the new positions."""
        if window not in self._layouts:
            self._layouts[window] = AttentionLayout.from_documents([[self._num_new]] * len(self._lengths_B), window)
        return self._layouts[window]

    def _visible_positions(self, prefix_length: int, window: int | None) -> VisiblePositions:
        """Return the stored positions that each new position attends to."""
        if (window, prefix_length) not in self._visible:
            queries_BS = self._lengths_B[:, None] + np.arange(self._num_new)
            starts_B = np.zeros_like(self._lengths_B)
            self._visible[window, prefix_length] = VisiblePositions.of_rows(queries_BS, starts_B, prefix_length, window)
        return self._visible[window, prefix_length]
