"""Taps of causal convolutions over packed documents.

Shapes: T outputs, N input rows, B rows of the batch, L taps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.ops.causal_convolution.readers import readers_of
from paddlenlp_ext.ops.tensor_utils import Indices


@dataclass(frozen=True, eq=False)
class Taps:
    """Input rows that the outputs of a convolution read.

    Attributes:
        rows: index of the row of each output and tap, int64 [T, L]; N for a tap that counts as 0.
        num_rows: N.
    """

    rows: Indices
    num_rows: int

    def on_device(self, place: Any) -> tuple[paddle.Tensor, ...]:
        """Return `rows` as int32, and the two arrays of `readers_of`, on a device; they are copied to a device once."""
        if str(place) not in self._copies:
            arrays = self.rows.astype(np.int32), *readers_of(self.rows, self.num_rows)
            self._copies[str(place)] = tuple(paddle.to_tensor(array, place=place) for array in arrays)
        return self._copies[str(place)]

    @functools.cached_property
    def _copies(self) -> dict[str, tuple[paddle.Tensor, ...]]:
        return {}


@functools.singledispatch
def document_taps(layout: Any, num_taps: int, has_windows: bool = False) -> Taps:
    """Return the taps of the positions of packed documents.

    The last tap of a position is the position itself. A document that continues a parent reads the last positions of
    the parent.

    Args:
        layout: `AttentionLayout` of the batch, with T positions; in a static graph, a `GraphDocuments`.
        num_taps: L.
        has_windows: whether a window of L - 1 rows precedes every document of a row of the batch. The windows
            [B, L - 1] are stored after the T rows.
    """
    starts, lengths = layout.documents()
    parents, firsts = layout.parents(), layout.first_positions()
    document = np.repeat(np.arange(len(starts)), lengths)
    local_T = np.arange(layout.num_positions) - starts[document]
    back_L = np.arange(num_taps)[::-1]
    local_TL = local_T[:, None] - back_L
    in_own_TL = local_TL >= 0
    own_TL = starts[document][:, None] + local_TL
    before_TL = firsts[document][:, None] + local_TL  # position within the sequence of the parent
    in_parent_TL = ~in_own_TL & (before_TL >= 0)
    parent_TL = starts[parents[document]][:, None] + before_TL
    num_rows, batch = layout.num_positions, len(layout.document_lengths)
    if has_windows:
        window_ends = num_rows + (layout.rows() + 1) * (num_taps - 1)
        outside_TL = window_ends[document][:, None] + before_TL  # the last row of a window has position -1
        num_rows += batch * (num_taps - 1)
    else:
        outside_TL = np.full_like(own_TL, num_rows)
    return Taps(np.where(in_own_TL, own_TL, np.where(in_parent_TL, parent_TL, outside_TL)), num_rows)
