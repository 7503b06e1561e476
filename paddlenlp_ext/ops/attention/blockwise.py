"""Blockwise attention in plain Paddle, without computing the scores between different documents.

Documents of similar length are batched if their parents have equal lengths. A tile contains one block of queries of
each batched document, and all keys visible to the block. One batched matmul computes the scores of a tile. The query
heads that share a key-value head are rows of one matmul, so keys are not repeated. The backward pass recomputes the
probabilities of each tile, as in FlashAttention (arXiv:2205.14135). A tile contains all keys of a query, so a plain
softmax is sufficient.

Shapes: B batch, S sequence, M documents of a tile, N query heads, K key-value heads, G = N / K, Q queries of a block,
T keys visible to a block, H head dimension (values may have a different head dimension). "Rows" are positions x heads
of the full batch, flattened.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention.document_layout import AttentionLayout, KeyValuePrefix
from paddlenlp_ext.ops.attention.score_options import PLAIN, ScoreOptions, attention_weights
from paddlenlp_ext.ops.tensor_utils import contiguous

QUERY_BLOCK = 128
"""Maximum number of queries per block. Shorter blocks skip more masked scores; longer blocks need fewer matmuls."""
TILE_SCORES = 1 << 22
"""Maximum number of scores in a tile of several documents. A tile of a single document may have more."""
MIN_RELATIVE_LENGTH = 0.8
"""Minimum length of a document relative to the longest document in its tile; the difference is padding."""
SHORT = 32
"""Documents of at most this length are batched even if their lengths are not similar."""


@dataclass(frozen=True)
class Tile:
    """Rows of queries and keys of one batched matmul.

    Attributes:
        query_rows: int64 [M*K * G*Q], rows of q and of the output; padding has the index after the last row.
        key_rows: int64 [M*K * T], rows of k and v, which begin with the rows of a prefix; padding has the index after
            the last row.
        shape: (M*K, G*Q, T).
        mask: fp32 [Q, T], 0 for visible keys and -inf for masked keys. The mask ignores padding. Padding keys follow
            the document, so the causal mask hides them from its queries. Outputs of padding queries have zero
            gradients.
    """

    query_rows: paddle.Tensor
    key_rows: paddle.Tensor
    shape: tuple[int, int, int]
    mask: paddle.Tensor


@dataclass(frozen=True)
class BlockPlan:
    """All tiles of a layout for given head counts.

    Attributes:
        tiles: tiles that contain every row of q exactly once.
        row_positions: int64 [rows of q], index of each row in the concatenated queries of the tiles.
        is_padded: whether any tile has padding.
        num_heads: N.
    """

    tiles: tuple[Tile, ...]
    row_positions: paddle.Tensor
    is_padded: bool
    num_heads: int


@dataclass(frozen=True)
class _Documents:
    """Documents of a layout; all arrays are int64 [M].

    Attributes:
        starts: index of the first token of each document in the batch.
        lengths: number of tokens of each document.
        first_positions: position of the first token of each document.
        parent_starts: index of the parent's first token; 0 without a parent.
    """

    starts: np.ndarray
    lengths: np.ndarray
    first_positions: np.ndarray
    parent_starts: np.ndarray

    @classmethod
    def of(cls, layout: AttentionLayout) -> _Documents:
        starts, lengths = layout.documents()
        parents = layout.parents()
        return cls(starts, lengths, layout.first_positions(), np.where(parents < 0, 0, starts[parents]))

    def take(self, indices: np.ndarray) -> _Documents:
        return _Documents(*(getattr(self, item.name)[indices] for item in fields(self)))


def plan_blocks(layout: AttentionLayout, num_heads: int, num_kv_heads: int, prefix_length: int = 0) -> BlockPlan:
    """Split a layout into tiles for q with `num_heads` heads and k, v with `num_kv_heads` heads.

    The rows of a prefix come first in k and v.
    """
    documents = _Documents.of(layout)
    num_rows = layout.num_positions * num_heads
    tiles = [
        _make_tile(layout, batch, block, (num_heads, num_kv_heads), prefix_length)
        for batch in map(documents.take, _batch_documents(documents, num_heads, prefix_length))
        for block in _query_blocks(int(batch.lengths.max()))
    ]
    query_rows = np.concatenate([tile.query_rows.numpy() for tile in tiles])
    row_positions = np.empty(num_rows + 1, np.int64)
    row_positions[query_rows] = np.arange(len(query_rows))
    return BlockPlan(tuple(tiles), paddle.to_tensor(row_positions[:-1]), bool(query_rows.max() == num_rows), num_heads)


def _batch_documents(documents: _Documents, num_heads: int, prefix_length: int) -> list[np.ndarray]:
    """Group documents with the same first position and similar lengths, longest first. A group shares tiles."""
    lengths, first_positions = documents.lengths, documents.first_positions
    batches: list[list[int]] = []
    for document in np.lexsort((-lengths, first_positions)):
        longest = int(lengths[batches[-1][0]]) if batches else 0
        num_keys = longest + int(first_positions[document]) + prefix_length
        scores = (len(batches[-1]) + 1) * num_heads * min(longest, QUERY_BLOCK) * num_keys if batches else 0
        is_like = longest <= SHORT or lengths[document] >= MIN_RELATIVE_LENGTH * longest
        is_aligned = bool(batches) and first_positions[document] == first_positions[batches[-1][0]]
        if is_aligned and is_like and scores <= TILE_SCORES:
            batches[-1].append(int(document))
        else:
            batches.append([int(document)])
    return [np.array(batch) for batch in batches]


def _query_blocks(length: int) -> list[tuple[int, int]]:
    """Split `length` queries into equal blocks; return (first, end) of each block."""
    edges = np.linspace(0, length, -(-length // QUERY_BLOCK) + 1).round().astype(int).tolist()
    return list(itertools.pairwise(edges))


def _make_tile(
    layout: AttentionLayout, batch: _Documents, block: tuple[int, int], heads: tuple[int, int], prefix_length: int
) -> Tile:
    """Build the tile of one block of queries for a batch of documents.

    Positions count from the start of the parent, if the documents have parents. Positions in the prefix are negative.
    """
    (num_heads, num_kv_heads), offset = heads, int(batch.first_positions[0])
    first, end = block[0] + offset, block[1] + offset
    queries_Q = np.arange(first, end)
    oldest = -prefix_length
    keys_T = np.arange(oldest if layout.window is None else max(oldest, first - layout.window + 1), end)
    starts_M111, parent_starts_M111, lengths_M111 = (
        x_M[:, None, None, None] for x_M in (batch.starts, batch.parent_starts, batch.lengths)
    )

    def rows(positions: np.ndarray, heads_per_kv: int, num_before: int) -> np.ndarray:
        """Return the rows [M, K, heads_per_kv, positions] of each position and head in the batch.

        The rows of the `num_before` positions shared by all documents come first.
        """
        total_heads = num_kv_heads * heads_per_kv
        heads_KG1 = np.arange(total_heads).reshape(num_kv_heads, heads_per_kv, 1)
        indices_M11P = np.where(
            positions < offset, parent_starts_M111 * (positions >= 0) + positions, starts_M111 + positions - offset
        )
        rows_MKGP = (indices_M11P + num_before) * total_heads + heads_KG1
        is_padding = positions - offset >= lengths_M111
        num_rows = (layout.num_positions + num_before) * total_heads
        return np.where(is_padding, num_rows, rows_MKGP)

    query_rows, key_rows = rows(queries_Q, num_heads // num_kv_heads, 0), rows(keys_T, 1, prefix_length)
    num_matmuls = len(batch.lengths) * num_kv_heads
    mask_QT = np.where(layout.is_visible(queries_Q[:, None], keys_T), np.float32(0), np.float32(-np.inf))
    return Tile(
        query_rows=paddle.to_tensor(query_rows.ravel()),
        key_rows=paddle.to_tensor(key_rows.ravel()),
        shape=(num_matmuls, query_rows.size // num_matmuls, len(keys_T)),
        mask=paddle.to_tensor(mask_QT),
    )


def blockwise_attention(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKH: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    prefix: KeyValuePrefix | None = None,
    options: ScoreOptions = PLAIN,
) -> paddle.Tensor:
    """Compute `attention` tile by tile, with memory linear in the length of the pack."""
    sizes = (q_BSNH.shape[2], k_BSKH.shape[2], 0 if prefix is None else prefix[0].shape[0])
    plan = layout.cached(("blocks", *sizes), lambda: plan_blocks(layout, *sizes))
    if prefix is not None:
        k_BSKH, v_BSKH = (
            paddle.concat([before_PKH, own_BSKH.flatten(0, 1)]).unsqueeze(0)
            for before_PKH, own_BSKH in zip(prefix, (k_BSKH, v_BSKH), strict=True)
        )
    # The inputs are saved for the backward pass. A saved slice would keep the entire sliced tensor in memory.
    inputs = (contiguous(x) for x in (q_BSNH, k_BSKH, v_BSKH))
    return _BlockwiseAttention.apply(plan, scale, options, *inputs, *options.sink_tensors)


class _BlockwiseAttention(PyLayer):
    @staticmethod
    def forward(ctx, plan, scale, options, q_BSNH, k_BSKH, v_BSKH, *sinks):
        ctx.save_for_backward(q_BSNH, k_BSKH, v_BSKH, *sinks)
        ctx.plan, ctx.scale, ctx.options = plan, scale, options
        q_rows, k_rows, v_rows = _rows(q_BSNH * scale, plan), _rows(k_BSKH, plan), _rows(v_BSKH, plan)
        outputs = []
        with paddle.amp.auto_cast(enable=False):  # the backward pass recomputes the same values without autocast
            for tile in plan.tiles:
                scores = paddle.matmul(_take_queries(q_rows, tile), _take_keys(k_rows, tile), transpose_y=True)
                probabilities = _probabilities(scores, tile, plan.num_heads, options, *sinks)
                outputs.append(paddle.matmul(probabilities, _take_keys(v_rows, tile)))
        return _untile(outputs, plan).reshape([*q_BSNH.shape[:3], v_BSKH.shape[3]])

    @staticmethod
    def backward(ctx, out_gradient_BSNH):
        plan, (q_BSNH, k_BSKH, v_BSKH, *sinks) = ctx.plan, ctx.saved_tensor()
        q_rows, k_rows, v_rows = _rows(q_BSNH * ctx.scale, plan), _rows(k_BSKH, plan), _rows(v_BSKH, plan)
        gradient_rows = _rows(out_gradient_BSNH, plan)
        q_gradients = []
        k_gradient, v_gradient = _zero_rows(k_BSKH), _zero_rows(v_BSKH)
        own_sinks = [sinks_N.detach() for sinks_N in sinks]
        sink_gradients = [paddle.zeros_like(sinks_N) for sinks_N in sinks]
        for tile in plan.tiles:
            queries, keys = _take_queries(q_rows, tile), _take_keys(k_rows, tile)
            out_gradient = _take_queries(gradient_rows, tile)
            for leaf in (queries, keys, *own_sinks):
                leaf.stop_gradient = False
            with paddle.enable_grad():
                scores = paddle.matmul(queries, keys, transpose_y=True)
                probabilities = _probabilities(scores, tile, plan.num_heads, ctx.options, *own_sinks)
            p_gradient = paddle.matmul(out_gradient, _take_keys(v_rows, tile), transpose_y=True)
            query_part, key_part, *sink_parts = paddle.grad([probabilities], [queries, keys, *own_sinks], [p_gradient])
            value_part = paddle.matmul(probabilities.detach(), out_gradient, transpose_x=True)
            q_gradients.append(query_part)
            paddle.index_add_(k_gradient, tile.key_rows, 0, key_part.flatten(0, 1))
            paddle.index_add_(v_gradient, tile.key_rows, 0, value_part.flatten(0, 1))
            for total_N, part_N in zip(sink_gradients, sink_parts, strict=True):
                total_N.add_(part_N)
        q_gradient = _untile(q_gradients, plan).scale_(ctx.scale).reshape(q_BSNH.shape)
        key_gradients = (k_gradient[:-1].reshape(k_BSKH.shape), v_gradient[:-1].reshape(v_BSKH.shape))
        gradients = (q_gradient, *key_gradients, *sink_gradients)
        # Paddle rejects a gradient for an input that requires none, such as the output of a frozen projection.
        needs_grad = [not x.stop_gradient for x in (q_BSNH, k_BSKH, v_BSKH, *sinks)]
        return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs_grad, strict=True))


def _probabilities(
    scores: paddle.Tensor, tile: Tile, num_heads: int, options: ScoreOptions, sinks_N: paddle.Tensor | None = None
) -> paddle.Tensor:
    """Return the softmax of a tile's scores under the mask of the tile, [M*K, G*Q, T].

    `options` are applied in float32, because half precision is too coarse for the ALiBi biases of distant keys.
    """
    if options.is_plain:
        masked = scores.reshape([-1, *tile.mask.shape]).add_(tile.mask.astype(scores.dtype))
        return F.softmax(masked, axis=-1).reshape(tile.shape)
    bias = tile.mask
    if options.slopes is not None:
        num_queries, num_keys = tile.mask.shape  # the last query is at the position of the last key
        distances_QT = np.arange(num_queries)[:, None] - np.arange(num_keys) + (num_keys - num_queries)
        bias = bias - paddle.to_tensor(options.slopes[:, None, None] * distances_QT.astype(np.float32))
    scores_MNQT = scores.reshape([-1, num_heads, *tile.mask.shape])
    return attention_weights(scores_MNQT, bias, options.softcap, sinks_N).astype(scores.dtype).reshape(tile.shape)


def _rows(x_BSNH: paddle.Tensor, plan: BlockPlan) -> paddle.Tensor:
    """Flatten positions x heads to rows [.., H]; if the plan has padding, append a row of zeros."""
    rows = x_BSNH.reshape([-1, x_BSNH.shape[-1]])
    return paddle.concat([rows, paddle.zeros([1, rows.shape[1]], rows.dtype)]) if plan.is_padded else rows


def _zero_rows(x_BSKH: paddle.Tensor) -> paddle.Tensor:
    """Return a zero gradient for every row of `x`, plus a row that collects the gradients of padding."""
    batch, length, heads, head_dim = x_BSKH.shape
    return paddle.zeros([batch * length * heads + 1, head_dim], x_BSKH.dtype)


def _take_queries(rows: paddle.Tensor, tile: Tile) -> paddle.Tensor:
    return paddle.gather(rows, tile.query_rows).reshape([tile.shape[0], tile.shape[1], -1])


def _take_keys(rows: paddle.Tensor, tile: Tile) -> paddle.Tensor:
    return paddle.gather(rows, tile.key_rows).reshape([tile.shape[0], tile.shape[2], -1])


def _untile(parts: Sequence[paddle.Tensor], plan: BlockPlan) -> paddle.Tensor:
    """Return the tiles' query rows in the order of the batch."""
    rows = paddle.concat([part.flatten(0, 1) for part in parts]) if len(parts) > 1 else parts[0].flatten(0, 1)
    return paddle.gather(rows, plan.row_positions)
