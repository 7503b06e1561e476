"""Causal attention within the documents of a pack: the reference, its fast backends, and the dispatch between them.

Shapes: B batch, S query positions, T key positions, P prefix positions, N query heads, K key-value heads, G = N / K,
H head dimension of queries and keys, E head dimension of values, usually H.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention.alibi import alibi_slopes
from paddlenlp_ext.ops.attention.blockwise import blockwise_attention
from paddlenlp_ext.ops.attention.cpu import attention_cpp
from paddlenlp_ext.ops.attention.flashmask import MAX_HEAD_DIM, flashmask_attention
from paddlenlp_ext.ops.attention.layout import AttentionLayout, DocumentParents, KeyValuePrefix
from paddlenlp_ext.ops.attention.scores import PLAIN, ScoreOptions, attention_weights
from paddlenlp_ext.ops.attention.triton import attention_triton
from paddlenlp_ext.ops.cpu.library import usable
from paddlenlp_ext.ops.dispatch import Condition, DispatchedOp, anywhere, on_gpu_with_flash_attention
from paddlenlp_ext.ops.triton_attention import LARGEST_ROW
from paddlenlp_ext.ops.triton_launch import floats_on_gpu_with_triton

__all__ = [
    "AttentionLayout",
    "DocumentParents",
    "KeyValuePrefix",
    "ScoreOptions",
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
    """Compute softmax attention with a dense mask: the definition against which the backends are tested."""
    prefix_length = 0 if prefix is None else prefix[0].shape[0]
    if prefix is not None:
        before = [x_PKH.unsqueeze(0).expand([q_BSNH.shape[0], *x_PKH.shape]) for x_PKH in prefix]
        k_BSKH, v_BSKE = paddle.concat([before[0], k_BSKH], axis=1), paddle.concat([before[1], v_BSKE], axis=1)
    mask_BST = paddle.to_tensor(layout.dense_mask(prefix_length))
    bias_BNST = None
    if options.slopes is not None:
        bias_BNST = paddle.to_tensor(-options.slopes[:, None, None] * layout.distances(prefix_length)[:, None])
    return masked_attention(q_BSNH, k_BSKH, v_BSKE, mask_BST, scale, options, bias_BNST)


def _never_flashmask(x: paddle.Tensor) -> str:
    """Return why FlashMask cannot compute `modified_attention_op` and `wide_attention_op`."""
    return on_gpu_with_flash_attention(x) or (
        "FlashMask's kernel only scales and masks the scores of heads of at most "
        f"{MAX_HEAD_DIM} channels: it has no soft-cap, linear biases (ALiBi) or sinks"
    )


def _never_triton(x: paddle.Tensor) -> str:
    """Return why the kernels in Triton cannot compute `wide_attention_op`."""
    return floats_on_gpu_with_triton(x) or (
        f"the tiles of its heads fit shared memory up to {LARGEST_ROW // 2} channels in half precision "
        f"and {LARGEST_ROW // 4} in float32"
    )


def _op(name: str, flashmask: Condition, triton: Condition) -> DispatchedOp:
    """Return the op of attention with these conditions of its GPU kernels."""
    return DispatchedOp(
        name,
        flashmask=(flashmask_attention, flashmask),
        triton=(attention_triton, triton),
        native=(attention_cpp, usable),
        blocks=(blockwise_attention, anywhere),
        reference=attention_reference,
    )


attention_op = _op("attention", on_gpu_with_flash_attention, floats_on_gpu_with_triton)
modified_attention_op = _op(
    "attention with soft-cap, linear biases, sinks or wide heads", _never_flashmask, floats_on_gpu_with_triton
)
wide_attention_op = _op("attention with heads too wide for GPU kernels", _never_flashmask, _never_triton)


def attention(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKE: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    implementation: str | None = None,
    prefix: KeyValuePrefix | None = None,
    options: ScoreOptions = PLAIN,
) -> paddle.Tensor:
    """Compute causal attention within each document of `layout`, its parent and its sliding window.

    Args:
        q_BSNH: queries; N is a multiple of K.
        k_BSKH: keys.
        v_BSKE: values.
        layout: the documents of the batch.
        scale: factor of the scores, usually 1 / sqrt(H).
        implementation: "flashmask", "triton", "native", "blocks" or "reference"; None selects the best available one.
        prefix: keys and values placed before every document.
        options: soft-cap, linear biases and sinks.

    Returns:
        [B, S, N, E].

    Raises:
        ValueError: the requested implementation is unknown or cannot run here.
    """
    widest = max(q_BSNH.shape[3], v_BSKE.shape[3])
    fits_triton = widest * q_BSNH.element_size() <= LARGEST_ROW
    if options.is_plain and widest <= MAX_HEAD_DIM and fits_triton:
        return attention_op.choose(q_BSNH, implementation)(q_BSNH, k_BSKH, v_BSKE, layout, scale, prefix)
    op = modified_attention_op if fits_triton else wide_attention_op
    run = op.choose(q_BSNH, implementation)
    return run(q_BSNH, k_BSKH, v_BSKE, layout, scale, prefix, options)
