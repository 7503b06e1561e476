"""Attention with its score options, and its gradients, in NumPy and float64."""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.ops.attention import AttentionLayout


def formula(
    inputs: list[np.ndarray],
    gradient: np.ndarray,
    layout: AttentionLayout,
    scale: float,
    prefix_length: int = 0,
    slopes: np.ndarray | None = None,
    softcap: float | None = None,
) -> list[np.ndarray]:
    """Return the output and the gradients of q, k, v and the sinks, if `inputs` has them.

    The first `prefix_length` keys and values precede every document.
    """
    q, k, v, *sinks = (array.astype(np.float64) for array in inputs)
    num_heads = q.shape[2]
    group, slopes = num_heads // k.shape[2], np.zeros(num_heads) if slopes is None else slopes
    sinks_N = sinks[0] if sinks else np.full(num_heads, -np.inf)
    out, grads = np.zeros([*q.shape[:3], v.shape[3]]), [np.zeros_like(x) for x in (q, k, v, *sinks)]
    for row, lengths in enumerate(layout.document_lengths):
        for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
            own = np.arange(start, start + length)
            keys = [*range(prefix_length), *(prefix_length + own)]
            distance = np.arange(length)[:, None] - np.arange(-prefix_length, length)
            seen = (distance >= 0) & (distance < (layout.window or np.inf))
            for head in range(num_heads):
                q_, k_, v_ = q[row, own, head], k[row, keys, head // group], v[row, keys, head // group]
                scores, slope_of_cap = scale * q_ @ k_.T, 1.0
                if softcap is not None:
                    ratio = np.tanh(scores / softcap)
                    scores, slope_of_cap = softcap * ratio, 1 - ratio**2
                scores = np.where(seen, scores - slopes[head] * distance, -np.inf)
                scores = np.concatenate([scores, np.full((length, 1), sinks_N[head])], axis=1)
                weights = np.exp(scores - scores.max(1, keepdims=True))
                weights /= weights.sum(1, keepdims=True)
                out[row, own, head] = weights[:, :-1] @ v_
                d_out = gradient[row, own, head].astype(np.float64)
                d_weights = np.concatenate([d_out @ v_.T, np.zeros((length, 1))], axis=1)
                d_scores = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True))
                d_products = d_scores[:, :-1] * slope_of_cap * scale
                grads[0][row, own, head] = d_products @ k_
                grads[1][row, keys, head // group] += d_products.T @ q_
                grads[2][row, keys, head // group] += weights[:, :-1].T @ d_out
                if sinks:
                    grads[3][head] += d_scores[:, -1].sum()
    return [out, *grads]
