"""FLOPs of a training step by formula, as the numerator of a roofline.

A product of [m, k] and [k, n] takes 2 m n k operations. Elementwise work and recomputed
products are not counted.
T tokens, D hidden, I feed-forward, V vocabulary, N query heads, K key-value heads, H head dimension, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def linear_shapes(shape: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return (in, out) of the seven linear layers of a Llama-like decoder layer: q, k, v, o, gate, up, down."""
    hidden, inner, head_dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    return [*attention, (hidden, inner), (hidden, inner), (inner, hidden)]


def step_operations(
    shape: Mapping[str, Any], lengths: Sequence[int], num_target_tokens: int, rank: int | None
) -> dict[str, float]:
    """Return the operations of one step, forward and backward, by part.

    Args:
        shape: a config.json of a Llama-like model with a tied lm_head.
        lengths: lengths of the documents; a token attends to itself and the tokens before it in its document.
        num_target_tokens: tokens in the loss. lm_head and the last feed-forward are computed only for these tokens.
        rank: rank of LoRA on all linear layers of a frozen base; None: all weights are trained.

    Returns:
        `linear forward`, `linear input gradient`, `linear weight gradient`, `lora`, `attention`, `head`.
    """
    tokens, layers = sum(lengths), shape["num_hidden_layers"]
    linears, skipped = linear_shapes(shape), tokens - num_target_tokens
    feed_forward = linears[4:]
    forward = 2.0 * tokens * layers * sum(rows * columns for rows, columns in linears)
    forward -= 2.0 * skipped * sum(rows * columns for rows, columns in feed_forward)
    # With a frozen embedding, the first layer's q, k and v need no gradient of their input.
    unwanted = 2.0 * tokens * sum(rows * columns for rows, columns in linears[:3]) if rank else 0.0
    through_rank = 2.0 * tokens * layers * (rank or 0) * sum(rows + columns for rows, columns in linears)
    through_rank -= 2.0 * skipped * (rank or 0) * sum(rows + columns for rows, columns in feed_forward)
    unwanted_rank = 2.0 * tokens * (rank or 0) * sum(rows for rows, _ in linears[:3])
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    products = 2.0 * pairs * shape["num_attention_heads"] * shape["head_dim"] * layers
    head = 2.0 * num_target_tokens * shape["hidden_size"] * shape["vocab_size"]
    return {
        "linear forward": forward,
        "linear input gradient": forward - unwanted,
        "linear weight gradient": 0.0 if rank else forward,
        "lora": 3 * through_rank - unwanted_rank,
        "attention": 6 * products,  # 2 in the forward pass (scores and weighted values), 4 in the backward pass
        "head": head * (2 if rank else 3),
    }
