"""Attention masks of the GPU kernels: one range of queries per key (start rows).

One range per key cannot represent prefixes and some parent documents. Keys and values of prefixes and of these parents
are therefore copied into each document that attends to them.

Shapes: B batch, S sequence, E positions with the copies, P prefix positions, X heads, H head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.ops.attention.document_layout import AttentionLayout, KeyValuePrefix


def attend_in_copies(
    attend: Callable[[paddle.Tensor, paddle.Tensor, paddle.Tensor, AttentionLayout], paddle.Tensor],
    tensors: tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor],
    layout: AttentionLayout,
    prefix: KeyValuePrefix | None,
    uses_distances: bool = False,
) -> paddle.Tensor:
    """Call `attend` with a layout that `start_rows` can describe, after copying prefix and parents into the documents.

    Every document gets a copy of the prefix as its first P positions. With a prefix, a window or `uses_distances`, a
    branch also gets a copy of its parent. In all other cases, a branch attends to the parent's own keys.

    Args:
        attend: function that computes the attention of q, k and v under a layout.
        tensors: q, k and v, with the shapes of the arguments of `attention`.
        layout: documents of the batch.
        prefix: keys and values before every document.
        uses_distances: whether `attend` derives distances from the indices of positions in the row.
    """
    q, k, v = tensors
    has_parents = layout.document_parents is not None
    if prefix is None and not (has_parents and (uses_distances or layout.window is not None)):
        return attend(q, k, v, layout)
    k_PKH, v_PKE = (x[0, :0] for x in (k, v)) if prefix is None else prefix
    documents = prefixed_documents(layout, k_PKH.shape[0])
    copies = documents.insert(q, None), documents.insert(k, k_PKH), documents.insert(v, v_PKE)
    return documents.gather(attend(*copies, documents.layout), [*q.shape[:3], v.shape[3]])


def start_rows_on(place: Any, layout: AttentionLayout) -> paddle.Tensor:
    """Return `start_rows` as a tensor on a device, created once per layout."""
    return layout.cached("start rows", lambda: paddle.to_tensor(start_rows(layout), place=place))


def start_rows(layout: AttentionLayout) -> np.ndarray:
    """Return int32 [B, 1, S, 1]: for each key, the first later query of the row that does not attend to the key.

    The returned index is the end of the key's document (including its branches), or the first query whose window
    excludes the key, if this query comes first.
    """
    starts, lengths = layout.documents()
    ends, parents = starts + lengths, layout.parents()
    np.maximum.at(ends, parents[parents >= 0], (starts + lengths)[parents >= 0])  # branches follow their parent
    rows_B1 = np.arange(len(layout.document_lengths))[:, None]
    ends_BS = np.repeat(ends, lengths).reshape([len(rows_B1), layout.row_length]) - rows_B1 * layout.row_length
    if layout.window is not None:
        ends_BS = np.minimum(ends_BS, np.arange(layout.row_length) + layout.window)
    return ends_BS.astype(np.int32)[:, None, :, None]


@dataclass(frozen=True)
class PrefixedDocuments:
    """Packed row in which every document starts with copies of the prefix and of its parent, if any.

    Attributes:
        prefix_length: P, which may be 0.
        layout: layout of the documents including the copies.
        sources: int64 [E], source of each position: an index into the concatenation of the P prefix positions and the
            positions of the batch.
        own_positions: int64 [B * S], index of each original position in the row.
    """

    prefix_length: int
    layout: AttentionLayout
    sources: paddle.Tensor
    own_positions: paddle.Tensor

    def insert(self, x_BSXH: paddle.Tensor, prefix_PXH: paddle.Tensor | None) -> paddle.Tensor:
        """Return the row with all copies, [1, E, X, H]; without `prefix_PXH` (for queries), its rows are zeros."""
        rows = x_BSXH.flatten(0, 1)
        if prefix_PXH is None:
            prefix_PXH = paddle.zeros([self.prefix_length, *rows.shape[1:]], rows.dtype)
        return paddle.gather(paddle.concat([prefix_PXH, rows]), self.sources).unsqueeze(0)

    def gather(self, x_1EXH: paddle.Tensor, shape: Sequence[int]) -> paddle.Tensor:
        """Return the original positions without the copies, reshaped to `shape`."""
        return paddle.gather(x_1EXH[0], self.own_positions).reshape(list(shape))


def prefixed_documents(layout: AttentionLayout, prefix_length: int) -> PrefixedDocuments:
    """Return the packed row for a prefix of this length, built once per layout."""
    return layout.cached(("prefixed", prefix_length), lambda: _insert_prefixes(layout, prefix_length))


def _insert_prefixes(layout: AttentionLayout, prefix_length: int) -> PrefixedDocuments:
    starts, lengths = layout.documents()
    own = [prefix_length + np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    before = [np.arange(0) if parent < 0 else own[parent] for parent in layout.parents()]
    sources = [np.concatenate([np.arange(prefix_length), *pair]) for pair in zip(before, own, strict=True)]
    longer = AttentionLayout.from_documents([[len(positions) for positions in sources]], layout.window)
    ends = np.cumsum([len(positions) for positions in sources])
    own_positions = [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return PrefixedDocuments(
        prefix_length,
        longer,
        paddle.to_tensor(np.concatenate(sources)),
        paddle.to_tensor(np.concatenate(own_positions)),
    )
