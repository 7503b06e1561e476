"""Attention with linear biases: slopes, all backends and decoding against the formula of arXiv:2108.12409 in NumPy."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.ops.attention import AttentionLayout, ScoreOptions, alibi_slopes, attention, blockwise
from paddlenlp_ext.ops.attention import key_value_cache as cache_module
from paddlenlp_ext.ops.attention.decode_attention import decode_attention_reference
from paddlenlp_ext.ops.cpp.bf16 import bf16_matmuls
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.marks import needs_cpp
from tests.ops.attention.formula import formula

BACKENDS = [pytest.param("cpp", marks=needs_cpp), "blocks", "reference"]
LAYOUTS = {
    "one document": ([[70]], None),
    "packed": ([[3, 41, 1, 67, 2]], None),
    "rows of a batch": ([[9, 9, 2], [20]], None),
    "window": ([[50, 12]], 7),
}
HEADS = {"grouped": (6, 2), "one key head": (3, 1), "as many key heads": (12, 12)}


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
    options = ScoreOptions(slopes=slopes)
    run = run_both_ways(lambda q, k, v: attention(q, k, v, layout, 0.3, backend, options=options), inputs, gradient)
    assert_all_close(run, formula(inputs, gradient, layout, 0.3, slopes=slopes), atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_alibi_attention_of_a_branch_counts_distances_from_its_parent(backend):
    """Compare two branches of a parent with the parent and one branch as a single document."""
    layout = AttentionLayout.from_documents([[40, 7, 30]], None, [[None, 0, 0]])
    q, k, v = (normal(seed, 1, 77, n, 5) for seed, n in enumerate((6, 2, 2)))
    options = ScoreOptions(slopes=alibi_slopes(6))
    out = attention(*map(paddle.to_tensor, (q, k, v)), layout, 0.3, backend, options=options).numpy()
    for branch in (range(40, 47), range(47, 77)):
        alone = [x[:, [*range(40), *branch]] for x in (q, k, v)]
        single = AttentionLayout.from_documents([[40 + len(branch)]])
        expected = formula(alone, np.zeros_like(alone[0]), single, 0.3, slopes=alibi_slopes(6))[0]
        np.testing.assert_allclose(out[:, list(branch)], expected[:, 40:], atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 6])
def test_alibi_attention_with_prefix_counts_distances_from_the_prefix(backend, window):
    layout, slopes = AttentionLayout.from_documents([[20, 5, 66]], window), alibi_slopes(6)
    q = normal(0, 1, layout.row_length, 6, 4)
    k, v = (normal(seed, 1, 3 + layout.row_length, 2, 4) for seed in (1, 2))
    gradient = normal(9, *q.shape)

    def run(q, k, v):
        return attention(q, k[:, 3:], v[:, 3:], layout, 0.3, backend, (k[0, :3], v[0, :3]), ScoreOptions(slopes=slopes))

    expected = formula([q, k, v], gradient, layout, 0.3, 3, slopes)
    assert_all_close(run_both_ways(run, [q, k, v], gradient), expected, atol=5e-6)


@needs_cpp
def test_alibi_attention_in_bf16_is_close_to_the_formula():
    layout, slopes = AttentionLayout.from_documents([[70, 30]]), alibi_slopes(3)
    inputs = [normal(seed, 1, 100, n, 16) for seed, n in enumerate((3, 1, 1))]
    gradient = normal(9, *inputs[0].shape)
    with bf16_matmuls():
        run = run_both_ways(
            lambda q, k, v: attention(q, k, v, layout, 0.25, "cpp", options=ScoreOptions(slopes=slopes)),
            inputs,
            gradient,
        )
    assert_all_close(run, formula(inputs, gradient, layout, 0.25, slopes=slopes), atol=0.1)


@pytest.mark.parametrize("is_cpp", [pytest.param(True, marks=needs_cpp), False])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("prefix_length", [0, 3])
def test_alibi_decoding_of_padded_rows_matches_full_attention(prefix_length, window, is_cpp, monkeypatch):
    """Decode one, then several positions, with 4 positions of padding in the second row, after a prefix."""
    if not is_cpp:
        monkeypatch.setattr(cache_module, "decode_attention", decode_attention_reference)
    length, pad, options = 23, 4, ScoreOptions(slopes=alibi_slopes(6))
    q = normal(0, 2, length, 6, 4)
    k, v = (normal(seed, 2, length, 2, 4) for seed in (1, 2))
    prefix = [normal(seed, prefix_length, 2, 4) for seed in (3, 4)]
    cache = KVCache([0, pad])
    if prefix_length:
        cache.set_prefix({0: tuple(map(paddle.to_tensor, prefix))})
    parts = []
    for first, end in ((0, 9), (9, 10), (10, 15), (15, length)):
        cache.begin_pass(end - first)
        new = (paddle.to_tensor(x[:, first:end]) for x in (q, k, v))
        parts.append(cache.attend(0, *new, window, 0.3, None, options).numpy())
    out = np.concatenate(parts, axis=1)
    before = [np.broadcast_to(x, (2, *x.shape)) for x in prefix]
    inputs = [q, *(np.concatenate([p, x], axis=1) for p, x in zip(before, (k, v), strict=True))]
    layout = AttentionLayout.from_documents([[length], [pad, length - pad]], window)
    expected = formula(inputs, np.zeros_like(q), layout, 0.3, prefix_length, options.slopes)[0]
    np.testing.assert_allclose(out[0], expected[0], atol=5e-6)
    np.testing.assert_allclose(out[1, pad:], expected[1, pad:], atol=5e-6)
