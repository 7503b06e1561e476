"""Test cases of the attention ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.doctor.op_checks.case import Inputs, op_case
from paddlenlp_ext.ops.attention import AttentionLayout, ScoreOptions, alibi_slopes, attention
from paddlenlp_ext.ops.attention.decode_attention import VisiblePositions, decode_attention, store_positions

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SCALE = 0.3
LAYOUTS = (
    AttentionLayout.from_documents([[5, 13], [18]]),
    AttentionLayout.from_documents([[5, 13], [18]], 4),
    AttentionLayout.from_documents([[6, 7, 5], [18]], None, [[None, 0, 0], [None]]),
)
"""Packed documents, packed documents with a sliding window, and several answers to one prompt."""
LONG = AttentionLayout.from_documents([[40, 260]])
"""Documents that span several tiles of a GPU kernel, including tiles without masked positions."""


def _attend(inputs: Inputs, layout: AttentionLayout, head_dim: int = HEAD_DIM, **options: Any) -> paddle.Tensor:
    """Call attention with a copy of the layout, because the layout caches tensors of one device."""
    layout = AttentionLayout(layout.document_lengths, layout.window, layout.document_parents)
    shape = len(layout.document_lengths), layout.row_length
    q, k, v = (inputs.trained(*shape, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return attention(q, k, v, layout, SCALE, **options)


@op_case("attention")
def run_attention(inputs: Inputs) -> list[paddle.Tensor]:
    """Call attention with each layout, and with prefix keys and values."""
    results = [_attend(inputs, layout) for layout in (*LAYOUTS, LONG)]
    prefix = inputs.trained(3, KV_HEADS, HEAD_DIM), inputs.trained(3, KV_HEADS, HEAD_DIM)
    return [*results, _attend(inputs, LAYOUTS[0], prefix=prefix)]


@op_case("attention with soft-cap, linear biases, sinks or wide heads")
def run_modified_attention(inputs: Inputs) -> list[paddle.Tensor]:
    """Call attention with a soft-cap, ALiBi slopes and sinks, separately and combined."""
    options = (
        ScoreOptions(softcap=5.0),
        ScoreOptions(slopes=alibi_slopes(HEADS)),
        ScoreOptions(sinks=inputs.trained(HEADS)),
    )
    every = ScoreOptions(5.0, alibi_slopes(HEADS), inputs.trained(HEADS))
    return [
        *(_attend(inputs, LAYOUTS[0], options=each) for each in options),
        *(_attend(inputs, layout, options=every) for layout in (*LAYOUTS[1:], LONG)),
    ]


@op_case("attention with heads too wide for GPU kernels")
def run_wide_attention(inputs: Inputs) -> list[paddle.Tensor]:
    """Call attention with heads so wide that tiles exceed a GPU's shared memory in every dtype."""
    return [_attend(inputs, LAYOUTS[0], head_dim=520)]


@op_case("decode_attention")
def run_decode_attention(inputs: Inputs) -> list[paddle.Tensor]:
    """Call decode_attention for one new position in each of two rows."""
    keys, values = (inputs.frozen(2, KV_HEADS, 9, HEAD_DIM) for _ in range(2))
    visible = VisiblePositions(np.array([[[0, 0, 0, 5]], [[0, 0, 2, 7]]], np.int64))
    return [decode_attention(inputs.frozen(2, 1, HEADS, HEAD_DIM), keys, values, visible, SCALE)]


@op_case("store_positions")
def run_store_positions(inputs: Inputs) -> list[paddle.Tensor]:
    """Write new positions into the KV cache of each row."""
    cache = inputs.frozen(2, KV_HEADS, 9, HEAD_DIM)
    store_positions(inputs.frozen(2, 3, KV_HEADS, HEAD_DIM), cache, np.array([4, 1]))
    return [cache]
