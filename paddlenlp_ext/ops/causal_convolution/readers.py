"""Inverse of the taps of a convolution, in NumPy; independent of Paddle."""

from __future__ import annotations

import numpy as np


def readers_of(rows_TL: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the taps that read each input row.

    The entries of a row are sorted by tap, the last tap first, and then by output, so that their order does not depend
    on the layout of other documents.

    Args:
        rows_TL: index of the input row of each output and tap.
        num_rows: number of input rows; taps with larger indices are left out.

    Returns:
        The index of each row's first entry, int32 [num_rows + 1]; and the entries `output * L + tap`, int32.
    """
    num_outputs, num_taps = rows_TL.shape
    from_last = rows_TL[:, ::-1].T.reshape(-1)
    order = np.argsort(from_last, kind="stable")
    starts = np.searchsorted(from_last[order], np.arange(num_rows + 1))
    entries = order % num_outputs * num_taps + num_taps - 1 - order // num_outputs
    return starts.astype(np.int32), entries[: starts[-1]].astype(np.int32)
