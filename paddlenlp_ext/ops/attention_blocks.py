"""Attention in plain Paddle whose work and memory follow the documents, not the pack.

The scores are made a tile at a time (attention_tiles.py) and the backward pass makes a tile's probabilities again, as
FlashAttention does (arXiv:2205.14135); here a tile has whole rows of keys, so that a plain softmax serves.

Shapes: B batch, S sequence, N query heads, K key-value heads, H head dimension; those of a tile as in
attention_tiles.py; rows are positions x heads of the whole batch, flattened.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from paddlenlp_ext.ops.attention_layout import AttentionLayout, KeyValuePrefix
from paddlenlp_ext.ops.attention_tiles import BlockPlan, Tile, plan_blocks


def blockwise_attention(
    q_BSNH: paddle.Tensor,
    k_BSKH: paddle.Tensor,
    v_BSKH: paddle.Tensor,
    layout: AttentionLayout,
    scale: float,
    prefix: KeyValuePrefix | None = None,
) -> paddle.Tensor:
    """Causal attention inside each document, as `attention_reference`, in memory linear in the pack's length."""
    sizes = (q_BSNH.shape[2], k_BSKH.shape[2], 0 if prefix is None else prefix[0].shape[0])
    plan = layout.cached(("blocks", *sizes), lambda: plan_blocks(layout, *sizes))
    if prefix is not None:
        k_BSKH, v_BSKH = (
            paddle.concat([before_PKH, own_BSKH.flatten(0, 1)]).unsqueeze(0)
            for before_PKH, own_BSKH in zip(prefix, (k_BSKH, v_BSKH), strict=True)
        )
    return _BlockwiseAttention.apply(q_BSNH, k_BSKH, v_BSKH, plan, scale)


class _BlockwiseAttention(PyLayer):
    @staticmethod
    def forward(ctx, q_BSNH, k_BSKH, v_BSKH, plan, scale):
        ctx.save_for_backward(q_BSNH, k_BSKH, v_BSKH)
        ctx.plan, ctx.scale = plan, scale
        q_rows, k_rows, v_rows = _rows(q_BSNH * scale, plan), _rows(k_BSKH, plan), _rows(v_BSKH, plan)
        outputs = []
        with paddle.amp.auto_cast(enable=False):  # as in the backward pass, which has to make the same numbers again
            for tile in plan.tiles:
                probabilities = _probabilities(_take_queries(q_rows, tile), _take_keys(k_rows, tile), tile)
                outputs.append(paddle.matmul(probabilities, _take_keys(v_rows, tile)))
        return _untile(outputs, plan).reshape(q_BSNH.shape)

    @staticmethod
    def backward(ctx, out_gradient_BSNH):
        plan, (q_BSNH, k_BSKH, v_BSKH) = ctx.plan, ctx.saved_tensor()
        q_rows, k_rows, v_rows = _rows(q_BSNH * ctx.scale, plan), _rows(k_BSKH, plan), _rows(v_BSKH, plan)
        gradient_rows = _rows(out_gradient_BSNH, plan)
        q_gradients = []
        k_gradient, v_gradient = _zero_rows(k_BSKH), _zero_rows(v_BSKH)
        for tile in plan.tiles:
            queries, keys = _take_queries(q_rows, tile), _take_keys(k_rows, tile)
            out_gradient = _take_queries(gradient_rows, tile)
            queries.stop_gradient = keys.stop_gradient = False
            with paddle.enable_grad():
                probabilities = _probabilities(queries, keys, tile)
            p_gradient = paddle.matmul(out_gradient, _take_keys(v_rows, tile), transpose_y=True)
            query_part, key_part = paddle.grad([probabilities], [queries, keys], [p_gradient])
            value_part = paddle.matmul(probabilities.detach(), out_gradient, transpose_x=True)
            q_gradients.append(query_part)
            paddle.index_add_(k_gradient, tile.key_rows, 0, key_part.flatten(0, 1))
            paddle.index_add_(v_gradient, tile.key_rows, 0, value_part.flatten(0, 1))
        q_gradient = _untile(q_gradients, plan).scale_(ctx.scale).reshape(q_BSNH.shape)
        gradients = (q_gradient, k_gradient[:-1].reshape(k_BSKH.shape), v_gradient[:-1].reshape(v_BSKH.shape))
        # Paddle refuses a gradient that nobody wants, as of a frozen projection beside an adapted one.
        wanted = [not x.stop_gradient for x in (q_BSNH, k_BSKH, v_BSKH)]
        return tuple(gradient if wants else None for gradient, wants in zip(gradients, wanted, strict=True))


def _probabilities(queries: paddle.Tensor, keys: paddle.Tensor, tile: Tile) -> paddle.Tensor:
    """Softmax of a tile's masked scores, [M*K, G*Q, T]."""
    scores = paddle.matmul(queries, keys, transpose_y=True)
    masked = scores.reshape([-1, *tile.mask.shape]).add_(tile.mask.astype(scores.dtype))
    return F.softmax(masked, axis=-1).reshape(tile.shape)


def _rows(x_BSNH: paddle.Tensor, plan: BlockPlan) -> paddle.Tensor:
    """Positions x heads as rows [.., H]; with padding about, a row of zeros behind the last."""
    rows = x_BSNH.reshape([-1, x_BSNH.shape[-1]])
    return paddle.concat([rows, paddle.zeros([1, rows.shape[1]], rows.dtype)]) if plan.is_padded else rows


def _zero_rows(x_BSKH: paddle.Tensor) -> paddle.Tensor:
    """Zeros for every row of `x` and one more, which takes what padding adds."""
    batch, length, heads, head_dim = x_BSKH.shape
    return paddle.zeros([batch * length * heads + 1, head_dim], x_BSKH.dtype)


def _take_queries(rows: paddle.Tensor, tile: Tile) -> paddle.Tensor:
    return paddle.gather(rows, tile.query_rows).reshape([tile.shape[0], tile.shape[1], -1])


def _take_keys(rows: paddle.Tensor, tile: Tile) -> paddle.Tensor:
    return paddle.gather(rows, tile.key_rows).reshape([tile.shape[0], tile.shape[2], -1])


def _untile(parts: Sequence[paddle.Tensor], plan: BlockPlan) -> paddle.Tensor:
    """Bring the tiles' query rows back into the batch's order."""
    rows = paddle.concat([part.flatten(0, 1) for part in parts]) if len(parts) > 1 else parts[0].flatten(0, 1)
    return paddle.gather(rows, plan.row_positions)
