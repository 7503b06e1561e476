"""Reference for decoding over cached keys, computed with one dense mask.

Shapes: B batch, S query positions, T key positions, N query heads, K key-value heads, H head dimension.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention.reference import masked_attention


def cached_attention(
    q_BSNH: paddle.Tensor,
    k_BTKH: paddle.Tensor,
    v_BTKH: paddle.Tensor,
    key_starts_B: paddle.Tensor,
    window: int | None,
    scale: float,
) -> paddle.Tensor:
    """Compute attention of the last S positions over T cached ones; `key_starts_B` is the first key of each row.

    A query inside the left padding attends only to itself, which keeps its unused row finite.
    """
    length, total = q_BSNH.shape[1], k_BTKH.shape[1]
    query_1S1 = paddle.arange(total - length, total).reshape([1, -1, 1])
    key_11T = paddle.arange(total).reshape([1, 1, -1])
    mask_BST = (key_11T <= query_1S1) & (key_11T >= key_starts_B.reshape([-1, 1, 1]))
    if window is not None:
        mask_BST = mask_BST & (key_11T > query_1S1 - window)
    return masked_attention(q_BSNH, k_BTKH, v_BTKH, mask_BST | (key_11T == query_1S1), scale)
