"""States of layers that do not cache keys and values, such as short convolutions, for the rows of a cache.

The state of a row consists of tensors of fixed size, which summarize all earlier positions of the row. A pass computes
the states of several rows as tensors [B, ...], and each row refers to its part of these tensors. Rows can therefore be
moved, repeated and removed without copying tensors; the next pass gathers the rows that it reads. A pass may overwrite
tensors that only its own rows refer to.

Shapes: B rows of a pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import paddle

from paddlenlp_ext.ops.attention.key_value_cache import LayerState, StateShapes


@dataclass(eq=False)
class _Pass:
    """States that a pass has computed for its rows, tensors [B, ...]; `is_shared` if other rows may refer to them."""

    tensors: LayerState
    is_shared: bool = False


class _Row(NamedTuple):
    """State of one row of the cache: the row `index` of the tensors of a pass."""

    source: _Pass
    index: int


class LayerStates:
    """State of each row in each layer.

    Args:
        initial: state of each layer after the prefix of the cache, tensors [1, ...]. Layers that are not in `initial`
            start from zeros.
    """

    def __init__(self, initial: Mapping[int, LayerState] = MappingProxyType({})) -> None:
        self._initial = {index: tuple(x.detach() for x in state) for index, state in initial.items()}
        self._rows: dict[int, dict[int, _Row]] = {}  # by layer index and row index; empty rows may be missing

    @property
    def is_new(self) -> bool:
        """True if no layer has a state, not even an initial state."""
        return not self._rows and not self._initial

    def has_rows(self, layer_index: int) -> bool:
        """Return whether the layer has a state of a row."""
        return bool(self._rows.get(layer_index))

    def copy(self) -> LayerStates:
        """Return an object with the same states."""
        for rows in self._rows.values():
            _share(rows.values())
        states = self.emptied()
        states._rows = {index: dict(rows) for index, rows in self._rows.items()}
        return states

    def emptied(self) -> LayerStates:
        """Return an object with the same initial states and no rows."""
        return LayerStates(self._initial)

    def of_first_row(self) -> dict[int, LayerState]:
        """Return the state of the first row in each layer, tensors [1, ...]."""
        for rows in self._rows.values():
            _share([rows[0]])
        return {index: _gathered([rows[0]]) for index, rows in self._rows.items()}

    def read(self, layer_index: int, shapes: StateShapes, first_row: int, is_empty_B: np.ndarray) -> LayerState:
        """Return the state of a layer for consecutive rows, tensors [B, ...].

        Args:
            layer_index: index of the layer.
            shapes: shape and dtype of each tensor of the state, for one row.
            first_row: index of the first row.
            is_empty_B: whether each of the rows is empty; empty rows have the initial state.
        """
        initial = _Row(_Pass(self._initial_state(layer_index, shapes)), 0) if is_empty_B.any() else None
        stored = self._rows.get(layer_index, {})
        return _gathered(
            [initial if initial and is_empty else stored[row] for row, is_empty in enumerate(is_empty_B, first_row)]
        )

    def owns(self, layer_index: int, first_row: int, is_empty_B: np.ndarray) -> bool:
        """Return whether a pass over these rows may overwrite the tensors that `read` returns for them."""
        stored = self._rows.get(layer_index, {})
        rows = [stored.get(row) for row in range(first_row, first_row + len(is_empty_B))]
        source = rows[0].source if rows[0] else None
        if source is None or source.is_shared or is_empty_B.any() or source.tensors[0].shape[0] != len(rows):
            return False
        return rows == [_Row(source, index) for index in range(len(rows))]

    def keep(self, layer_index: int, state: LayerState, first_row: int) -> None:
        """Store the state of consecutive rows of a layer, tensors [B, ...]; `first_row` is the index of the first."""
        source = _Pass(tuple(x.detach() for x in state))
        new = {first_row + index: _Row(source, index) for index in range(state[0].shape[0])}
        self._rows.setdefault(layer_index, {}).update(new)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only the given rows, in the given order."""
        self._rows = {index: {new: own[row] for new, row in enumerate(rows)} for index, own in self._rows.items()}
        for selected in self._rows.values():
            _share(selected.values())

    def take_row(self, other: LayerStates, row: int) -> None:
        """Set a row to the first row of `other`."""
        for index, rows in other._rows.items():
            _share([rows[0]])
            self._rows.setdefault(index, {})[row] = rows[0]

    def move_row(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        for rows in self._rows.values():
            if source in rows:
                _share([rows[source]])
                rows[target] = rows[source]

    def remove_row(self, row: int) -> None:
        """Remove the state of a row."""
        for rows in self._rows.values():
            rows.pop(row, None)

    def _initial_state(self, layer_index: int, shapes: StateShapes) -> LayerState:
        if layer_index not in self._initial:
            return tuple(paddle.zeros([1, *shape], dtype) for shape, dtype in shapes)
        return tuple(x.astype(dtype) for x, (_, dtype) in zip(self._initial[layer_index], shapes, strict=True))


def _share(rows: Iterable[_Row]) -> None:
    """Mark states as shared before further rows refer to them."""
    for row in rows:
        row.source.is_shared = True


def _gathered(rows: Sequence[_Row]) -> LayerState:
    """Return the states of the rows as tensors [B, ...]."""
    groups = (list(group) for _, group in itertools.groupby(rows, lambda row: id(row.source)))
    parts = [_select(group[0].source.tensors, [row.index for row in group]) for group in groups]
    return parts[0] if len(parts) == 1 else tuple(map(paddle.concat, zip(*parts, strict=True)))


def _select(tensors: LayerState, index: list[int]) -> LayerState:
    """Return the rows `index` of the tensors, without a copy if `index` selects all rows in order."""
    if index == list(range(tensors[0].shape[0])):
        return tensors
    return tuple(paddle.index_select(x, paddle.to_tensor(index)) for x in tensors)
