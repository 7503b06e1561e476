"""Attention with linear biases: slopes, all backends and decoding against the formula of arXiv:2108.12409 in NumPy."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation import kv_cache
from paddlenlp_ext.generation.kv_cache import KVCache
from paddlenlp_ext.ops.attention import AttentionLayout, alibi_slopes, attention, biased_attention_op, blockwise
from paddlenlp_ext.ops.attention.decode import decode_attention_reference
from paddlenlp_ext.ops.cpu.bf16 import bf16_matmuls
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.marks import needs_cpp

BACKENDS = [pytest.param("native", marks=needs_cpp), "blocks", "reference"]
LAYOUTS = {
    "one document": ([[70]], None),
    "packed": ([[3, 41, 1, 67, 2]], None),
    "rows of a batch": ([[9, 9, 2], [20]], None),
    "window": ([[50, 12]], 7),
}
HEADS = {"grouped": (6, 2), "one key head": (3, 1), "as many key heads": (12, 12)}


def formula(
    inputs: list[np.ndarray],
    gradient: np.ndarray,
    layout: AttentionLayout,
    scale: float,
    prefix_length: int = 0,
    slopes: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return output and gradients in float64; the first `prefix_length` keys and values precede every document."""
    q, k, v = (array.astype(np.float64) for array in inputs)
    slopes = alibi_slopes(q.shape[2]) if slopes is None else slopes
    group = q.shape[2] // k.shape[2]
    out, grads = np.zeros_like(q), [np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)]
    for row, lengths in enumerate(layout.document_lengths):
        for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
            own = np.arange(start, start + length)
            keys = [*range(prefix_length), *(prefix_length + own)]
            distance = np.arange(length)[:, None] - np.arange(-prefix_length, length)
            seen = (distance >= 0) & (distance < (layout.window or np.inf))
            for head in range(q.shape[2]):
                q_, k_, v_ = q[row, own, head], k[row, keys, head // group], v[row, keys, head // group]
                scores = np.where(seen, scale * q_ @ k_.T - slopes[head] * distance, -np.inf)
                weights = np.exp(scores - scores.max(1, keepdims=True))
                weights /= weights.sum(1, keepdims=True)
                out[row, own, head] = weights @ v_
                d_out = gradient[row, own, head].astype(np.float64)
                d_weights = d_out @ v_.T
                d_scores = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True)) * scale
                grads[0][row, own, head] = d_scores @ k_
                grads[1][row, keys, head // group] += d_scores.T @ q_
                grads[2][row, keys, head // group] += weights.T @ d_out
    return [out, *grads]


@pytest.mark.parametrize(
    ("num_heads", "expected"),
    [
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (8, [2.0**-i for i in range(1, 9)]),
        (1, [2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_alibi_slopes_follow_the_paper(num_heads, expected):
    np.testing.assert_allclose(alibi_slopes(num_heads), expected, rtol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("documents", "window"), LAYOUTS.values(), ids=LAYOUTS)
def test_alibi_attention_matches_the_formula_and_its_gradients(documents, window, heads, backend, monkeypatch):
    monkeypatch.setattr(blockwise, "QUERY_BLOCK", 16)
    layout = AttentionLayout.from_documents(documents, window)
    shape = (len(documents), layout.row_length)
    inputs = [normal(seed, *shape, n, 5) for seed, n in enumerate((heads[0], heads[1], heads[1]))]
    gradient = normal(9, *inputs[0].shape)
    slopes = alibi_slopes(heads[0])
    run = run_both_ways(lambda q, k, v: attention(q, k, v, layout, 0.3, backend, slopes_N=slopes), inputs, gradient)
    assert_all_close(run, formula(inputs, gradient, layout, 0.3), atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_alibi_attention_of_a_branch_counts_distances_from_its_parent(backend):
    """Compare two branches of a parent with the parent and one branch as a single document."""
    layout = AttentionLayout.from_documents([[40, 7, 30]], None, [[None, 0, 0]])
    q, k, v = (normal(seed, 1, 77, n, 5) for seed, n in enumerate((6, 2, 2)))
    out = attention(*map(paddle.to_tensor, (q, k, v)), layout, 0.3, backend, slopes_N=alibi_slopes(6)).numpy()
    for branch in (range(40, 47), range(47, 77)):
        alone = [x[:, [*range(40), *branch]] for x in (q, k, v)]
        single = AttentionLayout.from_documents([[40 + len(branch)]])
        expected = formula(alone, np.zeros_like(alone[0]), single, 0.3)[0]
        np.testing.assert_allclose(out[:, list(branch)], expected[:, 40:], atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 6])
def test_alibi_attention_with_prefix_counts_distances_from_the_prefix(backend, window):
    layout, slopes = AttentionLayout.from_documents([[20, 5, 66]], window), alibi_slopes(6)
    q = normal(0, 1, layout.row_length, 6, 4)
    k, v = (normal(seed, 1, 3 + layout.row_length, 2, 4) for seed in (1, 2))
    gradient = normal(9, *q.shape)

    def run(q, k, v):
        return attention(q, k[:, 3:], v[:, 3:], layout, 0.3, backend, (k[0, :3], v[0, :3]), slopes)

    assert_all_close(run_both_ways(run, [q, k, v], gradient), formula([q, k, v], gradient, layout, 0.3, 3), atol=5e-6)


@needs_cpp
def test_alibi_attention_in_bf16_is_close_to_the_formula():
    layout, slopes = AttentionLayout.from_documents([[70, 30]]), alibi_slopes(3)
    inputs = [normal(seed, 1, 100, n, 16) for seed, n in enumerate((3, 1, 1))]
    gradient = normal(9, *inputs[0].shape)
    with bf16_matmuls():
        run = run_both_ways(
            lambda q, k, v: attention(q, k, v, layout, 0.25, "native", slopes_N=slopes), inputs, gradient
        )
    assert_all_close(run, formula(inputs, gradient, layout, 0.25), atol=0.1)


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_cpp), False])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("prefix_length", [0, 3])
def test_alibi_decoding_of_padded_rows_matches_full_attention(prefix_length, window, is_native, monkeypatch):
    """Decode one, then several positions, with 4 positions of padding in the second row, after a prefix."""
    if not is_native:
        monkeypatch.setattr(kv_cache, "decode_attention", decode_attention_reference)
    length, pad, slopes = 23, 4, alibi_slopes(6)
    q = normal(0, 2, length, 6, 4)
    k, v = (normal(seed, 2, length, 2, 4) for seed in (1, 2))
    prefix = [normal(seed, prefix_length, 2, 4) for seed in (3, 4)]
    cache = KVCache([0, pad])
    if prefix_length:
        cache.set_prefix({0: tuple(map(paddle.to_tensor, prefix))})
    parts = [
        cache.attend(0, *(paddle.to_tensor(x[:, first:end]) for x in (q, k, v)), window, 0.3, None, slopes).numpy()
        for first, end in ((0, 9), (9, 10), (10, 15), (15, length))
    ]
    out = np.concatenate(parts, axis=1)
    before = [np.broadcast_to(x, (2, *x.shape)) for x in prefix]
    inputs = [q, *(np.concatenate([p, x], axis=1) for p, x in zip(before, (k, v), strict=True))]
    layout = AttentionLayout.from_documents([[length], [pad, length - pad]], window)
    expected = formula(inputs, np.zeros_like(q), layout, 0.3, prefix_length)[0]
    np.testing.assert_allclose(out[0], expected[0], atol=5e-6)
    np.testing.assert_allclose(out[1, pad:], expected[1, pad:], atol=5e-6)


def test_alibi_attention_with_flashmask_raises_and_falls_back(monkeypatch):
    """Check the rule as on a GPU: FlashMask refuses by name, and the choice without a name is another backend."""
    layout = AttentionLayout.from_documents([[3]])
    q = paddle.ones([1, 3, 2, 4])
    monkeypatch.setattr("paddlenlp_ext.ops.attention.on_gpu_in_half_precision", lambda x: None)
    with pytest.raises(ValueError, match="'flashmask' was requested, but FlashMask's kernel adds no biases"):
        attention(q, q, q, layout, 0.3, "flashmask", slopes_N=alibi_slopes(2))
    assert biased_attention_op._pick(q, None)[0] != "flashmask"
