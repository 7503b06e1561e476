"""Causal attention within the documents of a pack: the reference, its fast backends, and the dispatch between them.

Shapes: B batch, S query positions, T key positions, P prefix positions, N query heads, K key-value heads, G = N / K,
H head dimension of queries and keys, E head dimension of values, usually H.
"""

from __future__ import annotations

import numpy as np
import paddle
import paddle.nn.functional as F

from paddlenlp_ext.ops.attention.alibi import alibi_slopes
from paddlenlp_ext.ops.attention.blockwise import blockwise_attention
from paddlenlp_ext.ops.attention.cpu import attention_cpp
from paddlenlp_ext.ops.attention.flashmask import flashmask_attention
from paddlenlp_ext.ops.attention.layout import AttentionLayout, DocumentParents, KeyValuePrefix
from paddlenlp_ext.ops.cpu.library import usable
from paddlenlp_ext.ops.dispatch import DispatchedOp, anywhere, on_gpu_in_half_precision

__all__ = [
    "AttentionLayout",
    "DocumentParents",
    "KeyValuePrefix",
    "alibi_slopes",
    "attention",
    "attention_reference",
]


def masked_attention(
    q_BSNH: paddle.Tensor,
    k_BTKH: paddle.Tensor,
    v_BTKE: paddle.Tensor,
    mask_BST: paddle.Tensor,
    scale: float,
    bias_BNST: paddle.Tensor | None = None,
) -> paddle.Tensor:
    """Compute softmax attention under a boolean mask [B, S, T] (True = visible); N is a multiple of K.

    `bias_BNST` is added to the scaled scores.
    """
    batch, length, heads, head_dim = q_BSNH.shape
    kv_heads = k_BTKH.shape[2]
    q_BKGSH = q_BSNH.reshape([batch, length, kv_heads, heads // kv_heads, head_dim]).transpose([0, 2, 3, 1, 4])
    k_BK1TH = k_BTKH.transpose([0, 2, 1, 3]).unsqueeze(2)
    v_BK1TE = v_BTKE.transpose([0, 2, 1, 3]).unsqueeze(2)
    scores = paddle.matmul(q_BKGSH, k_BK1TH, transpose_y=True).astype("float32") * scale
    if bias_BNST is not None:
        scores = scores + bias_BNST.reshape(scores.shape)
    bias = paddle.where(mask_BST, paddle.zeros([]), paddle.full([], float("-inf")))
    probabilities = F.softmax(scores + bias.unsqueeze([1, 2]), axis=-1).astype(v_BTKE.dtype)
    out_BKGSE = paddle.matmul(probabilities, v_BK1TE)
    return out_BKGSE.transpose([0, 3, 1, 2, 4]).reshape([batch, length, heads, -1])


def attention_reference(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKE: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    prefix: KeyValuePrefix | None = None,
    slopes_N: np.ndarray | None = None,
) -> paddle.Tensor:
    """Compute softmax attention with a dense mask: the definition against which the backends are tested."""
    prefix_length = 0 if prefix is None else prefix[0].shape[0]
    if prefix is not None:
        before = [x_PKH.unsqueeze(0).expand([q_BSNH.shape[0], *x_PKH.shape]) for x_PKH in prefix]
        k_BSKH, v_BSKE = paddle.concat([before[0], k_BSKH], axis=1), paddle.concat([before[1], v_BSKE], axis=1)
    bias_BNST = None
    if slopes_N is not None:
        bias_BNST = paddle.to_tensor(-slopes_N[:, None, None] * layout.distances(prefix_length)[:, None])
    mask_BST = paddle.to_tensor(layout.dense_mask(prefix_length))
    return masked_attention(q_BSNH, k_BSKH, v_BSKE, mask_BST, scale, bias_BNST)


def _without_biases(x: paddle.Tensor) -> str:
    """Return why FlashMask cannot compute attention with linear biases."""
    return on_gpu_in_half_precision(x) or "FlashMask's kernel adds no biases to the scores (ALiBi)"


attention_op = DispatchedOp(
    "attention",
    flashmask=(flashmask_attention, on_gpu_in_half_precision),
    native=(attention_cpp, usable),
    blocks=(blockwise_attention, anywhere),
    reference=attention_reference,
)
biased_attention_op = DispatchedOp(
    "attention with linear biases",
    flashmask=(flashmask_attention, _without_biases),
    native=(attention_cpp, usable),
    blocks=(blockwise_attention, anywhere),
    reference=attention_reference,
)


def attention(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKE: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    implementation: str | None = None,
    prefix: KeyValuePrefix | None = None,
    slopes_N: np.ndarray | None = None,
) -> paddle.Tensor:
    """Compute causal attention within each document of `layout`, its parent and its sliding window.

    Args:
        q_BSNH: queries; N is a multiple of K.
        k_BSKH: keys.
        v_BSKE: values.
        layout: the documents of the batch.
        scale: factor of the scores, usually 1 / sqrt(H).
        implementation: "flashmask", "native", "blocks" or "reference"; None selects the best available one.
        prefix: keys and values placed before every document.
        slopes_N: slopes of the linear biases (alibi.py); None: no biases.

    Returns:
        [B, S, N, E].

    Raises:
        ValueError: the requested implementation is unknown or cannot run here.
    """
    if slopes_N is None:
        return attention_op.choose(q_BSNH, implementation)(q_BSNH, k_BSKH, v_BSKE, layout, scale, prefix)
    run = biased_attention_op.choose(q_BSNH, implementation)
    return run(q_BSNH, k_BSKH, v_BSKE, layout, scale, prefix, slopes_N)
