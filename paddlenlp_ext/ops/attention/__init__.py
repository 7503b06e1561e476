"""Causal attention within the documents of a packed batch.

Shapes: B batch, S query positions, T key positions, P prefix positions, N query heads, K key-value heads, G = N / K,
H head dimension of queries and keys, E head dimension of values, usually H.
"""

from __future__ import annotations

import paddle

from paddlenlp_ext.ops.attention.alibi import alibi_slopes
from paddlenlp_ext.ops.attention.blockwise import blockwise_attention
from paddlenlp_ext.ops.attention.cpp import attention_cpp
from paddlenlp_ext.ops.attention.document_layout import AttentionLayout, DocumentParents, KeyValuePrefix
from paddlenlp_ext.ops.attention.flashmask import MAX_HEAD_DIM, flashmask_attention
from paddlenlp_ext.ops.attention.kernels import LARGEST_ROW
from paddlenlp_ext.ops.attention.reference import attention_reference
from paddlenlp_ext.ops.attention.score_options import PLAIN, ScoreOptions
from paddlenlp_ext.ops.attention.triton import attention_triton
from paddlenlp_ext.ops.cpp.library import usable
from paddlenlp_ext.ops.dispatch import Condition, DispatchedOp, anywhere, with_flash_attention
from paddlenlp_ext.ops.triton_utils.launch import floats_on_gpu_with_triton

__all__ = [
    "AttentionLayout",
    "DocumentParents",
    "KeyValuePrefix",
    "ScoreOptions",
    "alibi_slopes",
    "attention",
    "attention_reference",
]


def _never_flashmask(x: paddle.Tensor) -> str:
    """Return the reason why FlashMask cannot run `modified_attention_op` and `wide_attention_op`."""
    return with_flash_attention(x) or (
        f"FlashMask supports at most {MAX_HEAD_DIM} channels per head, and does not support soft-caps, linear biases "
        "(ALiBi) or sinks"
    )


def _never_triton(x: paddle.Tensor) -> str:
    """Return the reason why the Triton kernels cannot run `wide_attention_op`."""
    return floats_on_gpu_with_triton(x) or (
        f"the tiles of the Triton kernels fit into shared memory only up to {LARGEST_ROW // 2} channels per head in "
        f"half precision and {LARGEST_ROW // 4} in float32"
    )


def _op(name: str, flashmask: Condition, triton: Condition) -> DispatchedOp:
    """Return an attention op whose GPU backends have the given conditions."""
    return DispatchedOp(
        name,
        flashmask=(flashmask_attention, flashmask),
        triton=(attention_triton, triton),
        cpp=(attention_cpp, usable),
        blocks=(blockwise_attention, anywhere),
        reference=attention_reference,
    )


attention_op = _op("attention", with_flash_attention, floats_on_gpu_with_triton)
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
    """Compute causal attention within the documents, parent documents and sliding window of `layout`.

    Args:
        q_BSNH: queries; N is a multiple of K.
        k_BSKH: keys.
        v_BSKE: values.
        layout: documents of the batch.
        scale: factor of the scores, usually 1 / sqrt(H).
        implementation: backend: "flashmask", "triton", "cpp", "blocks" or "reference"; None: the best available
            backend.
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
