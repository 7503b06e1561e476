"""Attention by Paddle's FlashMask kernel (Wang et al. 2024, arXiv:2410.01359). Needs a GPU.

Not run on the machine it was written on: tests/ops/test_attention_flashmask.py holds the mask that it builds to the
dense one, and the call to the documented signature.
Shapes: B batch, S sequence, N query heads, K key-value heads, H head dimension.
"""

from __future__ import annotations

import math

import numpy as np
import paddle
import paddle.nn.functional as F

from paddlenlp_ext.ops.attention_layout import AttentionLayout, KeyValuePrefix
from paddlenlp_ext.ops.attention_prefix import prefixed_documents


def flashmask_attention(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKH: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    prefix: KeyValuePrefix | None = None,
) -> paddle.Tensor:
    """Causal attention inside each document, as `attention_reference`."""
    if prefix is not None:
        spread = prefixed_documents(layout, prefix[0].shape[0])
        q, k, v = spread.spread(q_BSNH, None), spread.spread(k_BSKH, prefix[0]), spread.spread(v_BSKH, prefix[1])
        return spread.gather(flashmask_attention(q, k, v, spread.layout, scale), q_BSNH.shape)
    rows_B1S1 = layout.cached("flashmask", lambda: paddle.to_tensor(start_rows(layout), place=q_BSNH.place))
    kernels_scale = q_BSNH.shape[-1] ** -0.5  # FlashAttention 2's kernel takes no other: the queries carry the rest
    if not math.isclose(scale, kernels_scale):
        q_BSNH = q_BSNH * (scale / kernels_scale)
    return F.flashmask_attention(q_BSNH, k_BSKH, v_BSKH, startend_row_indices=rows_B1S1, causal=True)


def start_rows(layout: AttentionLayout) -> np.ndarray:
    """int32 [B, 1, S, 1]: for each key the first query, counted in the row, that may no longer look at it.

    With `causal`, FlashMask hides a key from the queries before it and from this one on: from its document's end, or
    from where it has left the window.
    """
    ends_BS = np.stack([np.repeat(np.cumsum(row), row) for row in layout.document_lengths])
    if layout.window is not None:
        ends_BS = np.minimum(ends_BS, np.arange(layout.row_length) + layout.window)
    return ends_BS.astype(np.int32)[:, None, :, None]
