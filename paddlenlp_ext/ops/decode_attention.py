"""Attention of a few new positions over stored keys and values: what every decoding step does in every layer.

The keys lie as [B, K, T, H], so that both matmuls read them where they are. Stored as [B, T, K, H] they would be copied
transposed at each step and layer: on two CPU cores, 8 rows, 9 heads on 3 and 256 keys, 6.8 ms instead of 0.2 ms.
Shapes: B batch, S new positions, T stored positions, N query heads, K key-value heads, G = N / K, H head dimension.
"""

from __future__ import annotations

import paddle
import paddle.nn.functional as F


def decode_attention(
    q_BSNH: paddle.Tensor, k_BKTH: paddle.Tensor, v_BKTH: paddle.Tensor, bias_BST: paddle.Tensor, scale: float
) -> paddle.Tensor:
    """Softmax attention with a bias (0 = may look, -inf = may not); returns [B, S, N, H].

    Args:
        q_BSNH: queries of the new positions.
        k_BKTH: stored keys, contiguous for speed.
        v_BKTH: stored values.
        bias_BST: fp32, added to every head's scores.
        scale: multiplies the queries, 1 / sqrt(H) as a rule.
    """
    batch, length, heads, head_dim = q_BSNH.shape
    kv_heads, total = k_BKTH.shape[1], k_BKTH.shape[2]
    group = heads // kv_heads
    q_BSNH = q_BSNH * scale
    if length == 1:
        q_BKQH = q_BSNH.reshape([batch, kv_heads, group, head_dim])
    else:
        q_BKGSH = q_BSNH.reshape([batch, length, kv_heads, group, head_dim]).transpose([0, 2, 3, 1, 4])
        q_BKQH = q_BKGSH.reshape([batch, kv_heads, group * length, head_dim])
    scores_BKQT = paddle.matmul(q_BKQH, k_BKTH, transpose_y=True).astype("float32")
    scores_BKGST = scores_BKQT.reshape([batch, kv_heads, group, length, total]) + bias_BST.unsqueeze([1, 2])
    probabilities_BKQT = F.softmax(scores_BKGST, axis=-1).astype(v_BKTH.dtype).reshape(scores_BKQT.shape)
    out_BKQH = paddle.matmul(probabilities_BKQT, v_BKTH)
    if length == 1:
        return out_BKQH.reshape([batch, 1, heads, head_dim])
    out_BKGSH = out_BKQH.reshape([batch, kv_heads, group, length, head_dim])
    return out_BKGSH.transpose([0, 3, 1, 2, 4]).reshape([batch, length, heads, head_dim])
