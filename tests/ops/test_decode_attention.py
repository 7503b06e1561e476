"""Attention over stored keys against the masked reference, on odd shapes."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.decode_attention import decode_attention


def reference(q_BSNH, k_BKTH, v_BKTH, bias_BST, scale):
    """The formula in NumPy, a head at a time."""
    out = np.empty_like(q_BSNH)
    group = q_BSNH.shape[2] // k_BKTH.shape[1]
    for head in range(q_BSNH.shape[2]):
        k_BTH, v_BTH = k_BKTH[:, head // group], v_BKTH[:, head // group]
        scores_BST = scale * q_BSNH[:, :, head] @ k_BTH.transpose(0, 2, 1) + bias_BST
        weights_BST = np.exp(scores_BST - scores_BST.max(axis=-1, keepdims=True))
        out[:, :, head] = weights_BST / weights_BST.sum(axis=-1, keepdims=True) @ v_BTH
    return out


@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "total", "head_dim"),
    [(1, 1, 1, 1, 1, 2), (2, 1, 9, 3, 13, 8), (3, 1, 4, 1, 7, 6), (2, 5, 6, 2, 11, 4), (1, 3, 4, 4, 3, 8)],
)
def test_equals_the_formula(batch, length, heads, kv_heads, total, head_dim):
    rng = np.random.default_rng(total)
    q = rng.standard_normal((batch, length, heads, head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, batch, kv_heads, total, head_dim), dtype=np.float32)
    bias = np.where(rng.random((batch, length, total)) < 0.4, -np.inf, 0.0).astype(np.float32)
    bias[:, :, 0] = 0.0
    out = decode_attention(*map(paddle.to_tensor, (q, k, v, bias)), 0.37)
    np.testing.assert_allclose(out.numpy(), reference(q, k, v, bias, 0.37), rtol=1e-5, atol=1e-6)
