"""A prefix for kernels that know none: a copy of it before every document, as if it were its first tokens.

Costs P positions more for each document; the twin in attention_blocks.py reads one copy instead.
Shapes: B batch, S sequence, E positions with the copies, P positions of the prefix, X heads, H head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from paddlenlp_ext.ops.attention_layout import AttentionLayout


@dataclass(frozen=True)
class PrefixedDocuments:
    """One row of documents that each begin with the prefix.

    Attributes:
        prefix_length: P.
        layout: of the longer documents.
        sources: int64 [E], which of P prefix positions and then B * S positions stands at each place.
        kept: int64 [B * S], where the documents' own positions stand.
    """

    prefix_length: int
    layout: AttentionLayout
    sources: paddle.Tensor
    kept: paddle.Tensor

    def spread(self, x_BSXH: paddle.Tensor, prefix_PXH: paddle.Tensor | None) -> paddle.Tensor:
        """[1, E, X, H]; zeros for the prefix where it is None (nobody reads what its own queries see)."""
        rows = x_BSXH.flatten(0, 1)
        if prefix_PXH is None:
            prefix_PXH = paddle.zeros([self.prefix_length, *rows.shape[1:]], rows.dtype)
        return paddle.gather(paddle.concat([prefix_PXH, rows]), self.sources).unsqueeze(0)

    def gather(self, x_1EXH: paddle.Tensor, shape: Sequence[int]) -> paddle.Tensor:
        """The documents' own positions, in the batch's `shape`."""
        return paddle.gather(x_1EXH[0], self.kept).reshape(list(shape))


def prefixed_documents(layout: AttentionLayout, prefix_length: int) -> PrefixedDocuments:
    """The places for a prefix of that length; computed once for a layout."""
    return layout.cached(("prefixed", prefix_length), lambda: _place(layout, prefix_length))


def _place(layout: AttentionLayout, prefix_length: int) -> PrefixedDocuments:
    starts, lengths = layout.documents()
    prefix = np.arange(prefix_length)
    own = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    sources = np.concatenate([part for positions in own for part in (prefix, prefix_length + positions)])
    longer = AttentionLayout.from_documents([(lengths + prefix_length).tolist()], layout.window)
    kept = np.flatnonzero(sources >= prefix_length)
    return PrefixedDocuments(prefix_length, longer, paddle.to_tensor(sources), paddle.to_tensor(kept))
