"""Attention: the reference against its definition, and the backends against the reference."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle.base.core import AmpLevel
from paddle.base.framework import _dygraph_tracer

from paddlenlp_ext.ops.attention import AttentionLayout, attention, attention_reference, blockwise
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.attention import cached_attention

LAYOUTS = {
    "one document": ([[50]], None),
    "single tokens": ([[1, 1, 1]], None),
    "unlike lengths": ([[3, 41, 1, 17, 40, 2]], None),
    "rows of a batch": ([[9, 9, 2], [20]], None),
    "window": ([[50, 12]], 7),
    "window of one": ([[9, 4]], 1),
    "window longer than the documents": ([[9, 4]], 100),
}
HEADS = {"grouped": (6, 2), "one key head": (3, 1), "as many key heads": (2, 2)}


def softmax_attention(q, k, v, layout: AttentionLayout, scale: float) -> np.ndarray:
    """Compute attention by its definition, with loops over rows, heads and positions."""
    out = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    group = q.shape[2] // k.shape[2]
    for row, lengths in enumerate(layout.document_lengths):
        for start, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
            for position in range(start, start + length):
                first = start if layout.window is None else max(start, position - layout.window + 1)
                seen = slice(first, position + 1)
                for head in range(q.shape[2]):
                    scores = k[row, seen, head // group].astype(np.float64) @ q[row, position, head] * scale
                    weights = np.exp(scores - scores.max())
                    out[row, position, head] = weights / weights.sum() @ v[row, seen, head // group]
    return out


def make(layout: AttentionLayout, num_heads: int, num_kv_heads: int) -> list[np.ndarray]:
    """Return queries and keys of 5 channels, and values of 7."""
    shape = (len(layout.document_lengths), layout.row_length)
    return [
        normal(seed, *shape, *size) for seed, size in enumerate(((num_heads, 5), (num_kv_heads, 5), (num_kv_heads, 7)))
    ]


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("documents", "window"), LAYOUTS.values(), ids=LAYOUTS)
def test_attention_reference_matches_the_definition(documents, window, heads):
    layout = AttentionLayout.from_documents(documents, window)
    inputs = make(layout, *heads)
    actual = attention_reference(*map(paddle.to_tensor, inputs), layout, 0.3)
    np.testing.assert_allclose(actual.numpy(), softmax_attention(*inputs, layout, 0.3), rtol=0, atol=2e-6)


@pytest.mark.parametrize("query_block", [4, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("documents", "window"), LAYOUTS.values(), ids=LAYOUTS)
def test_blockwise_attention_matches_the_reference_and_its_gradients(
    documents, window, heads, query_block, monkeypatch
):
    monkeypatch.setattr(blockwise, "QUERY_BLOCK", query_block)
    layout = AttentionLayout.from_documents(documents, window)
    inputs = make(layout, *heads)
    runs = [
        run_both_ways(
            lambda q, k, v, backend=backend: attention(q, k, v, layout, 0.3, backend),
            inputs,
            normal(9, *inputs[0].shape[:3], 7),
        )
        for backend in ("blocks", "reference")
    ]
    assert_all_close(*runs, atol=5e-6)


def test_attention_ignores_other_documents():
    """Check that outputs are bitwise independent of other documents, even of NaN in them."""
    layout = AttentionLayout.from_documents([[30, 25, 28]])
    inputs = make(layout, 4, 2)
    changed = [array.copy() for array in inputs]
    for array in changed:
        array[:, 30:55] = np.nan
    gradient = normal(9, *inputs[0].shape[:3], 7)
    before, after = (
        run_both_ways(lambda q, k, v: attention(q, k, v, layout, 0.3), run, gradient) for run in (inputs, changed)
    )
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[:, :30], other[:, :30])
        np.testing.assert_array_equal(one[:, 55:], other[:, 55:])
        assert np.isnan(other[:, 30:55]).any()


def test_cached_attention_of_last_queries_matches_full_attention():
    layout = AttentionLayout.from_documents([[3, 9], [12]], window=6)
    inputs = make(layout, 4, 2)
    full = softmax_attention(*inputs, layout, 0.3)
    q, k, v = map(paddle.to_tensor, inputs)
    actual = cached_attention(q[:, 7:], k, v, paddle.to_tensor([3, 0]), 6, 0.3)
    np.testing.assert_allclose(actual.numpy(), full[:, 7:], rtol=0, atol=2e-6)


def test_blockwise_attention_under_autocast_disables_it_in_tiles(monkeypatch):
    """Check that tiles disable autocast: it is off in the backward pass, which must recompute equal probabilities."""
    tracer, made, levels = _dygraph_tracer(), blockwise._probabilities, []
    layout = AttentionLayout.from_documents([[5]])
    inputs = [paddle.to_tensor(array) for array in make(layout, 2, 1)]

    def probabilities(*arguments):
        levels.append(tracer._amp_level)
        return made(*arguments)

    monkeypatch.setattr(blockwise, "_probabilities", probabilities)
    monkeypatch.setattr(tracer, "_amp_dtype", "bfloat16")
    monkeypatch.setattr(tracer, "_amp_level", AmpLevel.O1)  # paddle.amp.auto_cast has no effect without a GPU
    attention(*inputs, layout, 0.3, "blocks")
    assert levels == [AmpLevel.O0] and tracer._amp_level == AmpLevel.O1


@pytest.mark.parametrize(
    ("documents", "window", "message"),
    [
        ([[3, 0]], None, "at least one token"),
        ([[3], [4]], None, "pad the rows"),
        ([[3]], 0, "sliding window 0"),
        ([], None, "at least"),
    ],
)
def test_attention_layout_with_invalid_lengths_raises_value_error(documents, window, message):
    with pytest.raises(ValueError, match=message):
        AttentionLayout.from_documents(documents, window)


def test_attention_flashmask_on_cpu_raises_value_error():
    layout = AttentionLayout.from_documents([[3]])
    with pytest.raises(ValueError, match="'flashmask' was requested, but the backend needs a GPU"):
        attention(*map(paddle.to_tensor, make(layout, 2, 2)), layout, 0.3, "flashmask")
