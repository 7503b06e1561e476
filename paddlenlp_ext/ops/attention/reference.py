"""Causal attention within documents in plain Paddle, with a dense mask.

Shapes: B batch, S query positions, T key positions, P prefix positions, N query heads, K key-value heads, G = N / K,
H head dimension of queries and keys, E head dimension of values.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention.document_layout import AttentionLayout, KeyValuePrefix
from paddlenlp_ext.ops.attention.score_options import PLAIN, ScoreOptions, attention_weights


def masked_attention(
    q_BSNH: paddle.Tensor,
    k_BTKH: paddle.Tensor,
    v_BTKE: paddle.Tensor,
    mask_BST: paddle.Tensor,
    scale: float,
    options: ScoreOptions = PLAIN,
    linear_bias_BNST: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """Compute softmax attention under a boolean mask [B, S, T] (True = visible); N is a multiple of K."""
    batch, length, heads, head_dim = q_BSNH.shape
    kv_heads = k_BTKH.shape[2]
    q_BKGSH = q_BSNH.reshape([batch, length, kv_heads, heads // kv_heads, head_dim]).transpose([0, 2, 3, 1, 4])
    k_BK1TH = k_BTKH.transpose([0, 2, 1, 3]).unsqueeze(2)
    v_BK1TE = v_BTKE.transpose([0, 2, 1, 3]).unsqueeze(2)
    scores_BKGST = paddle.matmul(q_BKGSH, k_BK1TH, transpose_y=True).astype("float32") * scale
    scores_BNST = scores_BKGST.reshape([batch, heads, length, -1])
    bias_BNST = paddle.where(mask_BST, paddle.zeros([]), paddle.full([], float("-inf"))).unsqueeze(1)
    if linear_bias_BNST is not None:
        bias_BNST = bias_BNST + linear_bias_BNST
    weights_BNST = attention_weights(scores_BNST, bias_BNST, options.softcap, options.sinks)
    out_BKGSE = paddle.matmul(weights_BNST.reshape(scores_BKGST.shape).astype(v_BTKE.dtype), v_BK1TE)
    return out_BKGSE.transpose([0, 3, 1, 2, 4]).reshape([batch, length, heads, -1])


def attention_reference(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKE: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    prefix: KeyValuePrefix | None = None,
    options: ScoreOptions = PLAIN,
) -> paddle.Tensor:
    """Compute `attention` with a dense mask; tests compare all other backends with this definition."""
    prefix_length = 0 if prefix is None else prefix[0].shape[0]
    if prefix is not None:
        before = [x_PKH.unsqueeze(0).expand([q_BSNH.shape[0], *x_PKH.shape]) for x_PKH in prefix]
        k_BSKH, v_BSKE = paddle.concat([before[0], k_BSKH], axis=1), paddle.concat([before[1], v_BSKE], axis=1)
    mask_BST = paddle.to_tensor(layout.dense_mask(prefix_length))
    bias_BNST = None
    if options.slopes is not None:
        bias_BNST = paddle.to_tensor(-options.slopes[:, None, None] * layout.distances(prefix_length)[:, None])
    return masked_attention(q_BSNH, k_BSKH, v_BSKE, mask_BST, scale, options, bias_BNST)
