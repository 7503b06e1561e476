"""Compare the cache's in-place attention with the reference over all keys and values."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.generation import padded_kv_cache
from paddlenlp_ext.generation.padded_kv_cache import KVCache
from tests.common.attention import cached_attention

B, N, K, H = 3, 6, 2, 8
STARTS = [0, 2, 5]


def random_step(length: int, seed: int) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    rng = np.random.default_rng(seed)
    shapes = ([B, length, N, H], [B, length, K, H], [B, length, K, H])
    return tuple(paddle.to_tensor(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes)


def assert_same_after_padding(out: paddle.Tensor, expected: paddle.Tensor, first: int) -> None:
    """Compare the outputs of real tokens; those of padding must only be finite."""
    for row, start in enumerate(STARTS):
        real = slice(max(0, start - first), None)
        np.testing.assert_allclose(out.numpy()[row, real], expected.numpy()[row, real], rtol=1e-5, atol=1e-6)
    assert np.isfinite(out.numpy()).all()


@pytest.mark.parametrize("window", [None, 3])
def test_kv_cache_attend_equals_attention_over_all_keys(window, monkeypatch):
    """Test chunks and single steps across several blocks of capacity, with two layers."""
    monkeypatch.setattr(padded_kv_cache, "BLOCK", 4)
    cache, told = KVCache(STARTS), {0: ([], []), 1: ([], [])}
    for step, length in enumerate((6, 3, 1, 1, 1, 4, 1)):
        cache.begin_pass(length)
        for layer, (keys, values) in told.items():
            q, k, v = random_step(length, seed=10 * step + layer)
            keys.append(k)
            values.append(v)
            all_k, all_v = paddle.concat(keys, axis=1), paddle.concat(values, axis=1)
            expected = cached_attention(q, all_k, all_v, paddle.to_tensor(STARTS), window, 0.3)
            out = cache.attend(layer, q, k, v, window, 0.3)
            assert_same_after_padding(out, expected, first=cache.length - length)
        assert cache.length == all_k.shape[1]


def test_kv_cache_append_after_a_failed_allocation_grows_again(monkeypatch):
    def fail(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(padded_kv_cache, "BLOCK", 4)
    cache, (q, k, v) = KVCache(STARTS), random_step(5, seed=0)
    cache.begin_pass(5)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(paddle, "zeros", fail)
        cache.append(0, k, v, None)
    expected = cached_attention(q, k, v, paddle.to_tensor(STARTS), None, 1.0)
    assert_same_after_padding(cache.attend(0, q, k, v, None, 1.0), expected, first=0)
    cache.begin_pass(4)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(paddle, "concat", fail)
        cache.reserve([0], 4)
    assert cache.reserve([0], 4).stored[0][0].shape[2] == 12


def test_kv_cache_layers_with_different_windows_share_a_step():
    cache = KVCache(STARTS)
    q, k, v = random_step(9, seed=1)
    cache.begin_pass(9)
    for layer, window in enumerate((None, 2)):
        expected = cached_attention(q, k, v, paddle.to_tensor(STARTS), window, 1.0)
        assert_same_after_padding(cache.attend(layer, q, k, v, window, 1.0), expected, first=0)


def test_kv_cache_stores_no_gradients():
    cache = KVCache(STARTS)
    for step, length in enumerate((3, 1, 5)):
        inputs = random_step(length, seed=step)
        cache.begin_pass(length)
        for x in inputs:
            x.stop_gradient = False
        assert cache.attend(0, *inputs, None, 1.0).stop_gradient


def test_next_positions_count_from_the_first_token_of_each_row():
    cache = KVCache([0, 2])
    assert cache.next_positions(4).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    cache.begin_pass(4)
    assert cache.next_positions(2).tolist() == [[4, 5], [2, 3]]


def test_select_rows_keeps_keys_and_padding():
    cache = KVCache(STARTS)
    q, k, v = random_step(7, seed=0)
    cache.begin_pass(7)
    cache.attend(0, q, k, v, None, 1.0)
    cache.select_rows([2, 0])
    np.testing.assert_array_equal(cache.key_starts.numpy(), [5, 0])
    cache.begin_pass(1)
    q2, k2, v2 = (x[paddle.to_tensor([2, 0])] for x in random_step(1, seed=1))
    both = [paddle.concat([old[paddle.to_tensor([2, 0])], new], axis=1) for old, new in ((k, k2), (v, v2))]
    expected = cached_attention(q2, *both, paddle.to_tensor([5, 0]), None, 1.0)
    np.testing.assert_allclose(cache.attend(0, q2, k2, v2, None, 1.0).numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
