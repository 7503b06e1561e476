"""Decode attention over cached keys and values against the formula, on odd shapes."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention import decode_attention as ops
from paddlenlp_ext.ops.attention.decode_attention import VisiblePositions
from paddlenlp_ext.ops.attention.score_options import ScoreOptions
from tests.common.arrays import normal
from tests.common.marks import needs_cpp

BACKENDS = [pytest.param(ops.decode_attention_cpp, marks=needs_cpp), ops.decode_attention_reference]
STORES = [pytest.param(ops.store_positions_cpp, marks=needs_cpp), ops.store_positions_reference]


def formula(q_BSNH, k_BKCH, v_BKCH, ranges_BS4, scale):
    """Compute attention over the visible positions in float64, one query and head at a time."""
    out = np.empty(q_BSNH.shape)
    group = q_BSNH.shape[2] // k_BKCH.shape[1]
    for row, position, head in np.ndindex(*q_BSNH.shape[:3]):
        first, end, own_first, own_end = ranges_BS4[row, position]
        seen = [*range(first, end), *range(own_first, own_end)]
        keys, values = (x[row, head // group, seen].astype(np.float64) for x in (k_BKCH, v_BKCH))
        scores = scale * keys @ q_BSNH[row, position, head]
        weights = np.exp(scores - scores.max())
        out[row, position, head] = weights / weights.sum() @ values
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "places", "head_dim"),
    [(1, 1, 1, 1, 1, 2), (2, 1, 9, 3, 37, 64), (3, 1, 4, 1, 7, 6), (2, 5, 6, 2, 41, 16), (1, 3, 4, 4, 16, 21)],
)
def test_decode_attention_matches_the_formula(backend, batch, length, heads, kv_heads, places, head_dim):
    """Compare the backends with the formula; the C++ backend gets NaN at invisible positions."""
    rng = np.random.default_rng(places)
    q = normal(1, batch, length, heads, head_dim)
    k, v = normal(2, batch, kv_heads, places, head_dim), normal(3, batch, kv_heads, places, head_dim)
    prefix_end = places // 3
    prefix_first = rng.integers(0, prefix_end + 1, (batch, length))
    own_first = rng.integers(prefix_end, places, (batch, length))
    own_end = rng.integers(own_first + 1, places + 1)
    ranges = np.stack([prefix_first, np.full_like(own_first, prefix_end), own_first, own_end], axis=-1)
    out = backend(*map(paddle.to_tensor, (q, k, v)), VisiblePositions(ranges), 0.37)
    np.testing.assert_allclose(out.numpy(), formula(q, k, v, ranges, 0.37), rtol=1e-5, atol=2e-6)


CHUNKS = [
    # (length, slots before the chunk, start of each row, prefix, window, heads, kv_heads, head_dim)
    pytest.param((70, 90, (0,), 0, None, 4, 2, 16), id="two blocks, the second short"),
    pytest.param((33, 50, (0, 11), 7, None, 6, 3, 21), id="prefix, rows with different starts"),
    pytest.param((80, 130, (0,), 0, 19, 2, 1, 8), id="window shorter than a block"),
    pytest.param((64, 200, (3,), 5, 100, 2, 2, 16), id="window that ends within the chunk, and a prefix"),
    pytest.param((40, 0, (25,), 0, None, 2, 1, 16), id="padding within the chunk"),
    pytest.param((40, 0, (25,), 3, None, 2, 1, 16), id="padding within the chunk, and a prefix"),
    pytest.param((16, 0, (0,), 0, None, 3, 1, 16), id="no earlier slots"),
]
OPTIONS = [
    pytest.param(ScoreOptions(), id="plain"),
    pytest.param(ScoreOptions(softcap=3.0), id="softcap"),
    pytest.param("slopes", id="slopes"),
    pytest.param("sinks", id="sinks"),
]


@needs_cpp
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_decode_attention_cpp_of_a_chunk_matches_the_reference(chunk, options):
    """Compare the C++ backend, which computes chunks in blocks of queries, with the reference."""
    length, before, starts, prefix, window, heads, kv_heads, head_dim = chunk
    if options == "slopes":
        options = ScoreOptions(slopes=np.linspace(0.1, 0.5, heads))
    elif options == "sinks":
        options = ScoreOptions(sinks=paddle.to_tensor(normal(4, heads)))
    batch, slots = len(starts), prefix + before + length
    q = paddle.to_tensor(2 * normal(1, batch, length, heads, head_dim))
    k, v = (paddle.to_tensor(normal(seed, batch, kv_heads, slots, head_dim)) for seed in (2, 3))
    queries_1S = np.arange(before, before + length)[None]
    seen = VisiblePositions.of_rows(np.repeat(queries_1S, batch, 0), np.array(starts), prefix, window)
    out = ops.decode_attention_cpp(q, k, v, seen, 0.37, options).numpy()
    expected = ops.decode_attention_reference(q, k, v, seen, 0.37, options).numpy()
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=5e-6)


@needs_cpp
@pytest.mark.parametrize("first", [0, 50])
def test_decode_attention_cpp_of_a_chunk_does_not_read_invisible_slots(first):
    """NaN before the first slot of the row and after the last query does not reach the output."""
    q, stores = normal(1, 1, 70, 2, 16), [normal(seed, 1, 1, 200, 16) for seed in (2, 3)]
    for store in stores:
        store[:, :, :first], store[:, :, 170:] = np.nan, np.nan
    seen = VisiblePositions.of_rows(np.arange(100, 170)[None], np.array([first]), 0, None)
    out = ops.decode_attention_cpp(*map(paddle.to_tensor, (q, *stores)), seen, 1.0)
    assert np.isfinite(out.numpy()).all()


@needs_cpp
def test_decode_attention_cpp_reads_only_visible_positions():
    q, stores = normal(1, 1, 1, 2, 16), [normal(seed, 1, 1, 40, 16) for seed in (2, 3)]
    ranges = np.array([[[2, 7, 11, 30]]])
    outputs = []
    for rest in (0.0, np.nan):
        for store in stores:
            store[:, :, [0, 1, 7, 8, 9, 10, *range(30, 40)]] = rest
        outputs.append(ops.decode_attention_cpp(*map(paddle.to_tensor, (q, *stores)), VisiblePositions(ranges), 1.0))
    np.testing.assert_array_equal(outputs[0].numpy(), outputs[1].numpy())


@pytest.mark.parametrize("backend", STORES)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("starts", [(4, 4), (6, 1)])
def test_store_positions_writes_each_row_at_its_slot(backend, length, starts):
    new, store = normal(1, 2, length, 3, 5), normal(2, 2, 3, 9, 5)
    tensor = paddle.to_tensor(store)
    backend(paddle.to_tensor(new), tensor, np.array(starts))
    for row, start in enumerate(starts):
        store[row, :, start : start + length] = new[row].transpose(1, 0, 2)
    np.testing.assert_array_equal(tensor.numpy(), store)


@needs_cpp
def test_store_positions_cpp_past_the_end_raises_assertion_error():
    k, store = paddle.zeros([2, 3, 2, 8]), paddle.zeros([2, 2, 16, 8])
    ops.store_positions_cpp(k, store, np.array([0, 13]))
    with pytest.raises(AssertionError, match="3 positions at offset 14 exceed a cache of 16"):
        ops.store_positions_cpp(k, store, np.array([0, 14]))
