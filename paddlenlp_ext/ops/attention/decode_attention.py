"""Attention of a few new positions over the key-value cache, for decoding.

The cache has the layout [B, K, C, H], so that the matmuls of the reference read the cache in place. With [B, C, K, H],
every layer would transpose the cache in every step. Time of a step on two CPU cores with 8 rows, 9 query heads, 3
key-value heads and 256 keys:

    [B, C, K, H]    6.8 ms
    [B, K, C, H]    0.2 ms

Shapes: B batch, S new positions, C cache slots, P positions of a prefix, N query heads, K key-value heads, G = N / K,
H head dimension of keys, E head dimension of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import paddle

from paddlenlp_ext.ops.attention.document_layout import AttentionLayout, KeyValuePrefix
from paddlenlp_ext.ops.attention.score_options import PLAIN, ScoreOptions, attention_weights
from paddlenlp_ext.ops.cpp.library import empty, function, pointer, usable
from paddlenlp_ext.ops.dispatch import DispatchedOp


class VisibleSlots(Protocol):
    """Cache slots that each new position attends to, as biases for the reference backends."""

    def bias(self, num_slots: int) -> paddle.Tensor:
        """Return the mask as an additive bias, fp32 [B, S, C]: 0 for visible slots, -inf for other slots."""

    def linear_bias(self, num_slots: int, slopes_N: np.ndarray) -> paddle.Tensor:
        """Return the linear biases, fp32 [B, N, S, C]: -slope of the head * distance to the slot."""


@dataclass(frozen=True)
class VisiblePositions:
    """Cache slots visible to each new position.

    Attributes:
        ranges: int64 [B, S, 4], start and end of the visible prefix slots, then start and end of the visible slots of
            the row, which end with the new position. A range may be empty.
        positions: int64 [B, S], index of each new position in its document, for linear biases.
    """

    ranges: np.ndarray
    positions: np.ndarray | None = None
    _biases: dict[int, paddle.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_rows(
        cls, queries_BS: np.ndarray, starts_B: np.ndarray, prefix_length: int, window: int | None
    ) -> VisiblePositions:
        """Return the slots that each query attends to: the prefix, and the slots of the row up to the query.

        A query in the padding attends only to the prefix and itself, so that its unused result is finite.

        Args:
            queries_BS: int64 [B, S] or [1, S], position of each query among the slots after the prefix.
            starts_B: int64 [B], position of the first token of each row.
            prefix_length: number of slots of the prefix, which precedes the tokens of each row.
            window: maximum number of positions that a query attends to, including its own; None: no limit.
        """
        starts_B1 = starts_B[:, None]
        own_first_BS = np.minimum(starts_B1, queries_BS)
        prefix_first_BS = np.zeros_like(own_first_BS)
        if window is not None:
            oldest_BS = queries_BS - window + 1
            own_first_BS = np.maximum(own_first_BS, oldest_BS)
            prefix_first_BS = np.clip(prefix_length + oldest_BS - starts_B1, 0, prefix_length)
        own_end_BS = np.broadcast_to(queries_BS + 1, own_first_BS.shape)
        prefix_end_BS = np.full_like(own_first_BS, prefix_length)
        ranges = (prefix_first_BS, prefix_end_BS, prefix_length + own_first_BS, prefix_length + own_end_BS)
        positions_BS = np.maximum(queries_BS - starts_B1, 0)
        return cls(np.ascontiguousarray(np.stack(ranges, axis=-1)), positions_BS)

    def bias(self, num_slots: int) -> paddle.Tensor:
        if num_slots not in self._biases:
            slots_C, ranges = np.arange(num_slots), self.ranges[..., None]
            in_prefix_BSC = (ranges[:, :, 0] <= slots_C) & (slots_C < ranges[:, :, 1])
            in_own_BSC = (ranges[:, :, 2] <= slots_C) & (slots_C < ranges[:, :, 3])
            bias_BSC = np.where(in_prefix_BSC | in_own_BSC, np.float32(0), np.float32(-np.inf))
            self._biases[num_slots] = paddle.to_tensor(bias_BSC)
        return self._biases[num_slots]

    def linear_bias(self, num_slots: int, slopes_N: np.ndarray) -> paddle.Tensor:
        assert self.positions is not None, "linear biases need positions"
        slots_C, ranges, positions_BS1 = np.arange(num_slots), self.ranges[..., None], self.positions[..., None]
        in_own_BSC = slots_C >= ranges[:, :, 2]
        distances_BSC = np.where(
            in_own_BSC, ranges[:, :, 3] - 1 - slots_C, positions_BS1 + ranges[:, :, 1] - slots_C
        ).astype(np.float32)
        return paddle.to_tensor(-slopes_N[:, None, None] * distances_BSC[:, None])


@dataclass(frozen=True)
class CachedLayer:
    """Contents of a layer's cache after new positions were appended.

    Attributes:
        tensors: keys [B, K, C, H] and values [B, K, C, E].
        prefix: keys [P, K, H] and values [P, K, E] that precede all rows; None without a prefix.
        layout: documents of the new positions if the cache was empty, with padding as a separate document; otherwise
            None.
        visible: slots that each new position attends to; None if `layout` is set.
    """

    tensors: tuple[paddle.Tensor, paddle.Tensor]
    prefix: KeyValuePrefix | None
    layout: AttentionLayout | None = None
    visible: VisibleSlots | None = None


class ReservedPositions(NamedTuple):
    """Reserved cache slots of new positions, into which the caller writes keys and values.

    Attributes:
        starts: slot of the first new position of each of the B rows.
        firsts: slot of the first position of each row.
        prefix: number of slots of the prefix, which precede all rows.
        stored: keys [R, K, C, H] and values [R, K, C, E] of each layer, with R >= B rows.
        first_row: index of the first of the B rows among the R stored rows.
    """

    starts: Sequence[int]
    firsts: Sequence[int]
    prefix: int
    stored: Sequence[tuple[paddle.Tensor, paddle.Tensor]]
    first_row: int = 0


def decode_attention_reference(
    q_BSNH: paddle.Tensor,
    k_BKCH: paddle.Tensor,
    v_BKCH: paddle.Tensor,
    seen: VisibleSlots,
    scale: float,
    options: ScoreOptions = PLAIN,
) -> paddle.Tensor:
    """Compute softmax attention over all slots; invisible slots have a bias of -inf."""
    length, heads, head_dim = q_BSNH.shape[1:]
    kv_heads, num_slots = k_BKCH.shape[1], k_BKCH.shape[2]
    group = heads // kv_heads
    q_BSNH = q_BSNH * scale
    # In `reshape`, 0 keeps the size of an axis and -1 is inferred: B, S and C are unknown in a static graph.
    if length == 1:
        q_BKQH = q_BSNH.reshape([0, kv_heads, group, head_dim])
    else:
        q_BKGSH = q_BSNH.reshape([0, 0, kv_heads, group, head_dim]).transpose([0, 2, 3, 1, 4])
        q_BKQH = q_BKGSH.reshape([0, kv_heads, -1, head_dim])
    scores_BKQC = paddle.matmul(q_BKQH, k_BKCH, transpose_y=True).astype("float32")
    bias_BNSC = seen.bias(num_slots).unsqueeze(1)
    if options.slopes is not None:
        bias_BNSC = bias_BNSC + seen.linear_bias(num_slots, options.slopes)
    scores_BNSC = scores_BKQC.reshape([0, heads, -1, 0])
    weights_BNSC = attention_weights(scores_BNSC, bias_BNSC, options.softcap, options.sinks)
    probabilities_BKQC = weights_BNSC.astype(v_BKCH.dtype).reshape([0, kv_heads, -1, 0])
    out_BKQH = paddle.matmul(probabilities_BKQC, v_BKCH)
    if length == 1:
        return out_BKQH.reshape([0, 1, heads, head_dim])
    out_BKGSH = out_BKQH.reshape([0, kv_heads, group, -1, head_dim])
    return out_BKGSH.transpose([0, 3, 1, 2, 4]).reshape([0, 0, heads, head_dim])


def decode_attention_cpp(
    q_BSNH: paddle.Tensor,
    k_BKCH: paddle.Tensor,
    v_BKCH: paddle.Tensor,
    seen: VisiblePositions,
    scale: float,
    options: ScoreOptions = PLAIN,
) -> paddle.Tensor:
    """Compute decode attention in C++ (csrc/decode_attention.cpp), reading only the visible slots."""
    batch, length, heads, head_dim = shape = q_BSNH.shape
    assert k_BKCH.shape == v_BKCH.shape == [batch, k_BKCH.shape[1], k_BKCH.shape[2], head_dim], (
        "the cache does not match the keys or queries"
    )
    assert seen.ranges.shape == (batch, length, 4) and heads % k_BKCH.shape[1] == 0, "`seen` does not match the queries"
    out_BSNH = empty(shape)
    ranges = np.ascontiguousarray(seen.ranges, np.int64)
    run = function("decode_attention")
    tensors = (q_BSNH.contiguous(), k_BKCH, v_BKCH, out_BSNH)
    terms: list[int | None] = [None, None, None]
    sinks = options.sink_tensors
    assert all(sinks_N.shape == [heads] for sinks_N in sinks), f"{heads} heads need one sink each"
    if options.slopes is not None:
        assert seen.positions is not None and options.slopes.shape == (heads,), (
            "linear biases need positions and slopes"
        )
        slopes = np.ascontiguousarray(options.slopes, np.float32)
        positions = np.ascontiguousarray(seen.positions, np.int64)
        terms[:2] = slopes.ctypes.data, positions.ctypes.data
    if sinks:
        terms[2] = pointer(sinks[0])
    sizes = (batch, length, heads, k_BKCH.shape[1], head_dim, k_BKCH.shape[2])
    run(*map(pointer, tensors), ranges.ctypes.data, *terms, options.softcap or 0.0, scale, *sizes)
    return out_BSNH


decode_attention_op = DispatchedOp(
    "decode_attention", cpp=(decode_attention_cpp, usable), reference=decode_attention_reference
)


def decode_attention(
    q_BSNH: paddle.Tensor,
    k_BKCH: paddle.Tensor,
    v_BKCH: paddle.Tensor,
    seen: VisibleSlots,
    scale: float,
    options: ScoreOptions = PLAIN,
) -> paddle.Tensor:
    """Compute softmax attention of new positions over their visible slots, [B, S, N, H].

    The C++ backend has no gradient.

    With 16 or more positions, the C++ backend computes blocks of 64 positions. Processor time of a chunk of 256
    positions with 9 query heads and 3 key-value heads, on an AMD EPYC (Zen 4):

        slots       2,048    3,900
        C++         11 ms    22 ms
        matmuls     99 ms    188 ms

    Args:
        q_BSNH: queries of the new positions.
        k_BKCH: cached keys, contiguous.
        v_BKCH: cached values, contiguous.
        seen: visible slots of each position, at least one per position.
        scale: factor of the scores, usually 1 / sqrt(H).
        options: soft-cap, linear biases and sinks.
    """
    return decode_attention_op.choose(q_BSNH)(q_BSNH, k_BKCH, v_BKCH, seen, scale, options)


def store_positions_reference(x_BSKH: paddle.Tensor, cache_BKCH: paddle.Tensor, starts_B: np.ndarray) -> None:
    """Write new keys or values with slice assignments: one if all rows start at the same slot, else one per row."""
    x_BKSH, length, starts = x_BSKH.transpose([0, 2, 1, 3]), x_BSKH.shape[1], starts_B.tolist()
    if len(set(starts)) == 1:
        cache_BKCH[:, :, starts[0] : starts[0] + length] = x_BKSH
        return
    for row, start in enumerate(starts):
        cache_BKCH[row, :, start : start + length] = x_BKSH[row]


def store_positions_cpp(x_BSKH: paddle.Tensor, cache_BKCH: paddle.Tensor, starts_B: np.ndarray) -> None:
    """Write new keys or values in C++ (csrc/decode_attention.cpp)."""
    batch, length, kv_heads, size = x_BSKH.shape
    capacity = cache_BKCH.shape[2]
    assert cache_BKCH.shape == [batch, kv_heads, capacity, size], (
        "the cache must have the same heads and size as the keys or values"
    )
    assert starts_B.shape == (batch,), "every row must have a start"
    assert starts_B.min() >= 0 and starts_B.max() <= capacity - length, (
        f"{length} positions at offset {starts_B.max()} exceed a cache of {capacity}"
    )
    starts = np.ascontiguousarray(starts_B, np.int64)
    tensors = (pointer(x_BSKH.contiguous()), pointer(cache_BKCH))
    function("store_positions")(*tensors, starts.ctypes.data, *x_BSKH.shape, capacity)


store_positions_op = DispatchedOp(
    "store_positions", cpp=(store_positions_cpp, usable), reference=store_positions_reference
)


def store_positions(x_BSKH: paddle.Tensor, cache_BKCH: paddle.Tensor, starts_B: np.ndarray) -> None:
    """Write the keys or values of new positions into the cache; row b starts at slot `starts_B[b]`."""
    store_positions_op.choose(x_BSKH)(x_BSKH, cache_BKCH, starts_B)
