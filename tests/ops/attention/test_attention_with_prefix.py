"""Attention with a prefix before every document: one copy of keys and values, visible whatever the window."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention import (
    AttentionLayout,
    attention,
    attention_reference,
    blockwise,
    flashmask,
    start_rows,
)
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.gpu import pretend_gpu

LAYOUTS = {
    "one document": ([[50]], None),
    "unlike lengths": ([[3, 41, 1, 17, 40, 2]], None),
    "rows of a batch": ([[9, 9, 2], [20]], None),
    "window": ([[50, 12]], 7),
    "window within the prefix": ([[3, 5]], 6),
}
HEADS = {"grouped": (6, 2), "as many key heads": (2, 2)}
P, H = 4, 5


def make(layout: AttentionLayout, num_heads: int, num_kv_heads: int) -> list[np.ndarray]:
    shape = (len(layout.document_lengths), layout.row_length)
    own = [normal(seed, *shape, n, H) for seed, n in enumerate((num_heads, num_kv_heads, num_kv_heads))]
    return [*own, normal(7, P, num_kv_heads, H), normal(8, P, num_kv_heads, H)]


def one_document(arrays: list[np.ndarray], row: int, start: int, length: int, window: int | None) -> np.ndarray:
    """Compute attention of a single document with the prefix's keys and values before its own, in float64."""
    q, k, v, k_prefix, v_prefix = (array.astype(np.float64) for array in arrays)
    keys = np.concatenate([k_prefix, k[row, start : start + length]])
    values = np.concatenate([v_prefix, v[row, start : start + length]])
    out = np.zeros((length, q.shape[2], H))
    for position in range(length):
        first = 0 if window is None else max(0, P + position - window + 1)
        seen = slice(first, P + position + 1)
        for head in range(q.shape[2]):
            kv_head = head // (q.shape[2] // k.shape[2])
            scores = keys[seen, kv_head] @ q[row, start + position, head] * 0.3
            weights = np.exp(scores - scores.max())
            out[position, head] = weights / weights.sum() @ values[seen, kv_head]
    return out


def definition(arrays: list[np.ndarray], layout: AttentionLayout) -> np.ndarray:
    rows = []
    for row, lengths in enumerate(layout.document_lengths):
        starts = np.cumsum((0, *lengths))
        parts = [one_document(arrays, row, s, n, layout.window) for s, n in zip(starts, lengths, strict=False)]
        rows.append(np.concatenate(parts))
    return np.stack(rows)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("documents", "window"), LAYOUTS.values(), ids=LAYOUTS)
def test_attention_reference_with_prefix_matches_the_definition(documents, window, heads):
    layout = AttentionLayout.from_documents(documents, window)
    arrays = make(layout, *heads)
    q, k, v, k_prefix, v_prefix = map(paddle.to_tensor, arrays)
    actual = attention_reference(q, k, v, layout, 0.3, (k_prefix, v_prefix))
    np.testing.assert_allclose(actual.numpy(), definition(arrays, layout), rtol=0, atol=2e-6)


@pytest.mark.parametrize("query_block", [4, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("documents", "window"), LAYOUTS.values(), ids=LAYOUTS)
def test_blockwise_attention_with_prefix_matches_the_reference_and_its_gradients(
    documents, window, heads, query_block, monkeypatch
):
    monkeypatch.setattr(blockwise, "QUERY_BLOCK", query_block)
    layout = AttentionLayout.from_documents(documents, window)
    arrays = make(layout, *heads)
    runs = [
        run_both_ways(
            lambda q, k, v, kp, vp, backend=backend: attention(q, k, v, layout, 0.3, backend, (kp, vp)),
            arrays,
            normal(9, *arrays[0].shape),
        )
        for backend in ("blocks", "reference")
    ]
    assert_all_close(*runs, atol=1e-5)


@pytest.mark.parametrize(("documents", "window"), LAYOUTS.values(), ids=LAYOUTS)
def test_flashmask_attention_with_prefix_copies_it_before_every_document(documents, window, monkeypatch):
    """Replace the kernel with the reference and record its inputs."""
    layout = AttentionLayout.from_documents(documents, window)
    arrays = make(layout, 6, 2)
    q, k, v, k_prefix, v_prefix = map(paddle.to_tensor, arrays)
    layouts = []

    def kernel(q, k, v, startend_row_indices, causal, softmax_scale):
        return attention_reference(q, k, v, layouts[-1], q.shape[-1] ** -0.5)

    def record(longer: AttentionLayout) -> np.ndarray:
        layouts.append(longer)
        return np.zeros(1, np.int32)

    pretend_gpu(monkeypatch)
    monkeypatch.setattr(flashmask.F, "flashmask_attention", kernel)
    monkeypatch.setattr(start_rows, "start_rows", record)
    actual = flashmask.flashmask_attention(q, k, v, layout, 0.3, (k_prefix, v_prefix))
    np.testing.assert_allclose(actual.numpy(), definition(arrays, layout), rtol=0, atol=2e-6)
    assert layouts[-1].document_lengths == (tuple(P + n for row in layout.document_lengths for n in row),)


def test_attention_with_only_prefix_trainable_returns_its_gradient():
    layout = AttentionLayout.from_documents([[5, 3]])
    q, k, v, k_prefix, v_prefix = map(paddle.to_tensor, make(layout, 4, 2))
    k_prefix.stop_gradient = v_prefix.stop_gradient = False
    attention(q, k, v, layout, 0.3, "blocks", (k_prefix, v_prefix)).sum().backward()
    assert np.abs(k_prefix.grad.numpy()).max() > 0 and np.abs(v_prefix.grad.numpy()).max() > 0
