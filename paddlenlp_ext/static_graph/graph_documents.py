"""Documents of the new positions of a traced program, with indices that are tensors of the program.

Each row has one document. Padding before the document does not change the state of the row, which is zero until the
first token.

Shapes: B batch, S new positions, T = B * S, L taps, W = L - 1 positions of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import paddle

from paddlenlp_ext.ops.causal_convolution.taps import Taps, document_taps
from paddlenlp_ext.ops.gated_delta_rule.document_chunks import DocumentChunks, Level, document_chunks


class GraphDocuments:
    """Documents of the new positions, in place of an `AttentionLayout`.

    Attributes:
        is_token_BS: whether a position is a token, not padding.
        positions_BS: index of each position in the flattened batch, int64.
    """

    def __init__(self, is_token_BS: paddle.Tensor) -> None:
        self.is_token_BS = is_token_BS
        batch, length = paddle.shape(is_token_BS)
        self.positions_BS = paddle.arange(batch * length).reshape([batch, length]).astype("int64")
        self._results: dict[Hashable, Any] = {}

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which is called once per `key`."""
        if key not in self._results:
            self._results[key] = make()
        return self._results[key]

    def rows(self) -> paddle.Tensor:
        """Return the index of each document's row, int64 [B]."""
        return paddle.arange(paddle.shape(self.is_token_BS)[0])

    last_documents = rows

    def last_positions(self) -> paddle.Tensor:
        """Return the index of the last position of each row in the flattened batch, int64 [B]."""
        return self.positions_BS[:, -1]


@document_taps.register
def _(layout: GraphDocuments, num_taps: int, has_windows: bool = False) -> Taps:
    """Return the taps; taps of padding read the window of the row, which is zero before the first token."""
    assert has_windows, "a program continues windows"
    width, num_positions = num_taps - 1, layout.positions_BS.size
    first_B1 = num_positions + width * layout.rows().unsqueeze(1)
    window_BW = first_B1 + paddle.arange(width)
    own_BS = paddle.where(layout.is_token_BS, layout.positions_BS, first_B1)
    rows_BX = paddle.concat([window_BW, own_BS], axis=1)
    taps = [rows_BX[:, tap : tap - width or None] for tap in range(num_taps)]
    return Taps(paddle.stack(taps, axis=2).flatten(0, 1), num_positions + width * layout.rows().size)


@document_chunks.register
def _(layout: GraphDocuments, size: int = 1) -> DocumentChunks:
    """Return one chunk per row, with a multiple of `size` slots; slots of padding and further slots are empty."""
    positions_BS, rows_B = layout.positions_BS, layout.rows()
    num_positions = paddle.to_tensor(positions_BS.size)
    filled_BC = paddle.where(layout.is_token_BS, positions_BS, num_positions)
    own_BS = positions_BS
    if size > 1:
        batch, length = paddle.shape(positions_BS)
        width = (length + size - 1) // size * size
        further = paddle.full([batch, width - length], 1, "int64") * num_positions
        filled_BC = paddle.concat([filled_BC, further], axis=1)
        own_BS = width * rows_B.unsqueeze(1) + paddle.arange(length)
    level = Level(slice(None), previous=rows_B, ending=rows_B, ended=rows_B)
    return DocumentChunks(filled_BC, slots=own_BS.flatten(), levels=[level], order=rows_B)
