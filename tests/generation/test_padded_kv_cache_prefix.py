"""Test a key-value cache with a prefix that all rows attend to, whatever their padding."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation import padded_kv_cache
from paddlenlp_ext.generation.padded_kv_cache import KVCache
from paddlenlp_ext.ops.attention import AttentionLayout, attention_reference

B, N, K, H, P = 3, 6, 2, 8, 5
STARTS = [0, 2, 5]


def random(seed: int, *shape: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


@pytest.mark.parametrize("window", [None, 3, 7])
def test_kv_cache_rows_see_prefix_and_own_keys(window, monkeypatch):
    monkeypatch.setattr(padded_kv_cache, "BLOCK", 4)
    prefixes = {layer: (random(layer, P, K, H), random(50 + layer, P, K, H)) for layer in (3, 5)}
    cache = KVCache(STARTS)
    assert cache.is_new
    cache.set_prefix(prefixes)
    assert not cache.is_new and cache.length == 0
    told = {layer: [] for layer in prefixes}
    for step, length in enumerate((4, 6, 1, 1, 4, 1)):
        cache.begin_pass(length)
        for layer, steps in told.items():
            seed = 100 + 10 * step + layer
            new = random(seed, B, length, N, H), random(seed + 1, B, length, K, H), random(seed + 2, B, length, K, H)
            steps.append(new)
            out = cache.attend(layer, *new, window, 0.3).numpy()
            assert np.isfinite(out).all()
            q, k, v = (paddle.concat(parts, axis=1) for parts in zip(*steps, strict=True))
            first = q.shape[1] - length
            for row, start in enumerate(STARTS):
                if start >= q.shape[1]:
                    continue
                own = slice(row, row + 1), slice(start, None)
                layout = AttentionLayout.from_documents([[q.shape[1] - start]], window)
                expected = attention_reference(q[own], k[own], v[own], layout, 0.3, prefixes[layer]).numpy()
                num_skipped = max(0, start - first)
                np.testing.assert_allclose(
                    out[row, num_skipped:], expected[0, -(length - num_skipped) :], rtol=1e-5, atol=2e-6
                )
        assert cache.length == q.shape[1]


def test_as_prefix_returns_all_keys_and_values():
    cache = KVCache([0])
    k, v = random(1, 1, 7, K, H), random(2, 1, 7, K, H)
    cache.begin_pass(7)
    cache.attend(0, random(3, 1, 7, N, H), k, v, None, 1.0)
    ((k_prefix, v_prefix),) = cache.as_prefix().key_values.values()
    np.testing.assert_array_equal(k_prefix.numpy(), k[0].numpy())
    np.testing.assert_array_equal(v_prefix.numpy(), v[0].numpy())
    other = KVCache(STARTS)
    other.set_prefix({0: (k_prefix, v_prefix)})
    with pytest.raises(AssertionError, match="before positions are appended"):
        other.set_prefix({0: (k_prefix, v_prefix)})


def test_select_rows_keeps_prefix():
    prefix = (random(1, P, K, H), random(2, P, K, H))
    cache = KVCache(STARTS)
    cache.set_prefix({0: prefix})
    steps = [
        [random(seed + part, B, length, *rest) for part, rest in enumerate(((N, H), (K, H), (K, H)))]
        for seed, length in ((3, 6), (20, 1))
    ]
    for step in steps:
        cache.begin_pass(step[0].shape[1])
        cache.attend(0, *step, None, 0.3)
    full = [paddle.concat([step[part] for step in steps], axis=1) for part in (1, 2)]
    cache.select_rows([2, 0])
    q = random(8, 2, 1, N, H)
    cache.begin_pass(1)
    out = cache.attend(0, q, random(9, 2, 1, K, H), random(10, 2, 1, K, H), None, 0.3).numpy()
    for position, row in enumerate((2, 0)):
        keys = paddle.concat([full[0][row : row + 1, STARTS[row] :], random(9, 2, 1, K, H)[position : position + 1]], 1)
        values = paddle.concat(
            [full[1][row : row + 1, STARTS[row] :], random(10, 2, 1, K, H)[position : position + 1]], 1
        )
        queries = paddle.concat([paddle.zeros([1, keys.shape[1] - 1, N, H]), q[position : position + 1]], 1)
        layout = AttentionLayout.from_documents([[keys.shape[1]]])
        expected = attention_reference(queries, keys, values, layout, 0.3, prefix).numpy()[0, -1]
        np.testing.assert_allclose(out[position, 0], expected, rtol=1e-5, atol=2e-6)
