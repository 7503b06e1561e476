"""Soft-cap and sinks of attention scores: all backends and decoding against the formula in NumPy."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.ops.attention import (
    AttentionLayout,
    ScoreOptions,
    alibi_slopes,
    attention,
    blockwise,
    modified_attention_op,
)
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
SCALE = 0.8
CAP = 1.5
"""Below the standard deviation of the scaled scores: most of them change."""
OPTIONS = {
    "softcap": {"softcap": CAP},
    "sinks": {"sinks": True},
    "both and linear biases": {"softcap": CAP, "sinks": True, "slopes": True},
}


def arguments(heads: int, kv_heads: int, shape: tuple[int, int], sinks: bool, head_dim: int = 5) -> list[np.ndarray]:
    """Return q, k, v and sinks, if requested, one of which takes nearly all of the weight."""
    inputs = [normal(seed, *shape, n, head_dim) for seed, n in enumerate((heads, kv_heads, kv_heads))]
    return [*inputs, 2.0 * normal(7, heads) + np.eye(heads, dtype=np.float32)[0] * 9] if sinks else inputs


def options_of(heads: int, softcap: float | None, slopes: bool, sinks: tuple[paddle.Tensor, ...]) -> ScoreOptions:
    return ScoreOptions(softcap, alibi_slopes(heads) if slopes else None, sinks[0] if sinks else None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("documents", "window"), LAYOUTS.values(), ids=LAYOUTS)
def test_attention_with_score_options_matches_the_formula_and_its_gradients(
    documents, window, options, backend, monkeypatch
):
    monkeypatch.setattr(blockwise, "QUERY_BLOCK", 16)
    softcap, slopes = options.get("softcap"), "slopes" in options
    layout = AttentionLayout.from_documents(documents, window)
    inputs = arguments(6, 2, (len(documents), layout.row_length), "sinks" in options)
    gradient = normal(9, *inputs[0].shape)

    def run(q, k, v, *sinks):
        return attention(q, k, v, layout, SCALE, backend, options=options_of(6, softcap, slopes, sinks))

    expected = formula(inputs, gradient, layout, SCALE, 0, alibi_slopes(6) if slopes else None, softcap)
    assert_all_close(run_both_ways(run, inputs, gradient), expected, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 6])
def test_attention_with_prefix_softcap_and_sinks_matches_the_formula(backend, window):
    layout = AttentionLayout.from_documents([[20, 5, 66]], window)
    q, _, _, sinks = arguments(6, 2, (1, layout.row_length), True)
    k, v = (normal(seed, 1, 3 + layout.row_length, 2, 5) for seed in (1, 2))
    gradient = normal(9, *q.shape)

    def run(q, k, v, sinks):
        prefix = k[0, :3], v[0, :3]
        return attention(q, k[:, 3:], v[:, 3:], layout, SCALE, backend, prefix, ScoreOptions(CAP, sinks=sinks))

    expected = formula([q, k, v, sinks], gradient, layout, SCALE, 3, softcap=CAP)
    assert_all_close(run_both_ways(run, [q, k, v, sinks], gradient), expected, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_branches_with_softcap_and_sinks_equals_single_documents(backend):
    """Compare two branches of a parent with the parent and one branch as a single document."""
    layout = AttentionLayout.from_documents([[40, 7, 30]], None, [[None, 0, 0]])
    q, k, v, sinks = arguments(6, 2, (1, 77), True)
    options = ScoreOptions(CAP, sinks=paddle.to_tensor(sinks))
    out = attention(*map(paddle.to_tensor, (q, k, v)), layout, SCALE, backend, options=options).numpy()
    for branch in (range(40, 47), range(47, 77)):
        alone = [x[:, [*range(40), *branch]] for x in (q, k, v)]
        single = AttentionLayout.from_documents([[40 + len(branch)]])
        expected = formula([*alone, sinks], np.zeros_like(alone[0]), single, SCALE, softcap=CAP)[0]
        np.testing.assert_allclose(out[:, list(branch)], expected[:, 40:], atol=5e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_with_frozen_queries_trains_the_sinks_alone(backend):
    """Test values with fewer channels than keys, too."""
    layout = AttentionLayout.from_documents([[9]])
    q, k, v, sinks = arguments(4, 2, (1, 9), True)
    inputs, gradient = [q, k, v[..., :3], sinks], normal(9, *q.shape)[..., :3]

    def run(q, k, v, sinks):
        return attention(q, k, v, layout, SCALE, backend, options=ScoreOptions(sinks=sinks))

    _, *grads, sinks_gradient = run_both_ways(run, inputs, gradient, frozen=(0, 1, 2))
    assert grads == [None] * 3
    np.testing.assert_allclose(sinks_gradient, formula(inputs, gradient, layout, SCALE)[4], atol=1e-5)


@needs_cpp
def test_attention_in_bf16_with_softcap_and_sinks_is_close_to_the_formula():
    layout = AttentionLayout.from_documents([[70, 30]])
    inputs = arguments(3, 1, (1, 100), True, head_dim=16)
    gradient = normal(9, *inputs[0].shape)

    def run(q, k, v, sinks):
        return attention(q, k, v, layout, 0.25, "cpp", options=ScoreOptions(CAP, sinks=sinks))

    with bf16_matmuls():
        found = run_both_ways(run, inputs, gradient)
    for actual, exact in zip(found, formula(inputs, gradient, layout, 0.25, softcap=CAP), strict=True):
        assert np.linalg.norm(actual - exact) <= 0.02 * np.linalg.norm(exact)


@needs_cpp
def test_attention_cpp_with_other_thread_counts_gives_same_bits(cpp_threads):
    layout = AttentionLayout.from_documents([[90, 30]])
    inputs = arguments(6, 2, (1, 120), True)
    gradient, runs = normal(9, *inputs[0].shape), []

    def run(q, k, v, sinks):
        return attention(q, k, v, layout, SCALE, "cpp", options=ScoreOptions(CAP, sinks=sinks))

    for threads in (1, 2):
        cpp_threads(threads)
        runs.append(run_both_ways(run, inputs, gradient))
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("is_cpp", [pytest.param(True, marks=needs_cpp), False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("window", "prefix_length"), [(None, 0), (6, 3)])
def test_decoding_with_score_options_matches_full_attention(window, prefix_length, options, is_cpp, monkeypatch):
    """Decode one, then several positions, with 4 positions of padding in the second row, after a prefix."""
    if not is_cpp:
        monkeypatch.setattr(cache_module, "decode_attention", decode_attention_reference)
    length, pad, softcap, slopes = 23, 4, options.get("softcap"), "slopes" in options
    q, k, v, *sinks = arguments(6, 2, (2, length), "sinks" in options)
    score_options = options_of(6, softcap, slopes, tuple(map(paddle.to_tensor, sinks)))
    prefix = [normal(seed, prefix_length, 2, 5) for seed in (3, 4)]
    cache = KVCache([0, pad])
    if prefix_length:
        cache.set_prefix({0: tuple(map(paddle.to_tensor, prefix))})
    parts = []
    for first, end in ((0, 9), (9, 10), (10, 15), (15, length)):
        cache.begin_pass(end - first)
        new = (paddle.to_tensor(x[:, first:end]) for x in (q, k, v))
        parts.append(cache.attend(0, *new, window, SCALE, None, score_options))
    out = np.concatenate([part.numpy() for part in parts], axis=1)
    before = [np.broadcast_to(x, (2, *x.shape)) for x in prefix]
    inputs = [q, *(np.concatenate([p, x], axis=1) for p, x in zip(before, (k, v), strict=True)), *sinks]
    layout = AttentionLayout.from_documents([[length], [pad, length - pad]], window)
    expected = formula(inputs, np.zeros_like(q), layout, SCALE, prefix_length, score_options.slopes, softcap)[0]
    np.testing.assert_allclose(out[0], expected[0], atol=5e-6)
    np.testing.assert_allclose(out[1, pad:], expected[1, pad:], atol=5e-6)


@pytest.mark.parametrize(
    "options",
    [ScoreOptions(softcap=2.0), ScoreOptions(slopes=alibi_slopes(2)), ScoreOptions(sinks=paddle.zeros([2]))],
    ids=["softcap", "linear biases", "sinks"],
)
def test_attention_with_score_options_and_flashmask_raises_and_falls_back(options, monkeypatch):
    """Check the rule as on a GPU: FlashMask refuses by name, and the choice without a name is another backend."""
    layout = AttentionLayout.from_documents([[3]])
    q = paddle.ones([1, 3, 2, 4])
    monkeypatch.setattr("paddlenlp_ext.ops.attention.with_flash_attention", lambda x: None)
    with pytest.raises(ValueError, match="'flashmask' was requested, but FlashMask supports at most 256 channels"):
        attention(q, q, q, layout, 0.3, "flashmask", options=options)
    assert modified_attention_op.explain(q)[0] != "flashmask"
