"""Rotary position embedding against the formula, forward and backward."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.rope import apply_rope
from paddlenlp_ext.ops.rope.cpp import rope_cpp
from paddlenlp_ext.ops.rope.plain_cpu import rope_plain_cpu
from paddlenlp_ext.ops.rope.reference import rope_reference
from tests.common.arrays import assert_all_close, normal, run_both_ways
from tests.common.marks import needs_cpp

CPP = pytest.param(rope_cpp, marks=needs_cpp)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("implementation", [apply_rope, CPP, rope_plain_cpu, rope_reference])
@pytest.mark.parametrize(("heads", "head_dim", "rotary_dim"), [(1, 2, 2), (3, 6, 6), (9, 64, 64), (5, 74, 38)])
def test_apply_rope_rotates_pairs_and_rotates_gradients_back(implementation, interleaved, heads, head_dim, rotary_dim):
    angles = normal(1, 2, 5, rotary_dim // 2)
    x, gradient = normal(2, 2, 5, heads, head_dim), normal(3, 2, 5, heads, head_dim)
    cos, sin = (np.tile(table(angles), 2) for table in (np.cos, np.sin))
    actual = run_both_ways(lambda x, c, s: implementation(x, c, s, interleaved), [x, cos, sin], gradient, frozen=[1, 2])

    def turn(vectors: np.ndarray, direction: int) -> np.ndarray:
        channels = np.arange(rotary_dim)
        first, second = channels.reshape(-1, 2).T if interleaved else channels.reshape(2, -1)
        turned = (vectors[..., first] + 1j * vectors[..., second]) * np.exp(1j * direction * angles)[:, :, None]
        result = vectors.copy()  # the other channels are not rotated
        result[..., first], result[..., second] = turned.real, turned.imag
        return result

    assert_all_close(actual, [turn(x, 1), turn(gradient, -1), None, None], atol=2e-6)


@pytest.mark.parametrize("head_dim", [8, 11])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_cpu_gives_bits_of_the_reference(interleaved, head_dim):
    x, gradient = normal(1, 1, 7, 3, head_dim), normal(2, 1, 7, 3, head_dim)
    cos, sin = normal(3, 1, 7, 8), normal(4, 1, 7, 8)
    sin[..., 4:] = sin[..., :4]
    runs = [
        run_both_ways(lambda *xs, rope=rope: rope(*xs, interleaved), [x, cos, sin], gradient, frozen=[1, 2])
        for rope in (rope_plain_cpu, rope_reference)
    ]
    assert_all_close(*runs, atol=0.0)


@needs_cpp
def test_rope_cpp_with_different_table_halves_matches_the_reference():
    x, gradient, cos, sin = normal(1, 2, 67, 5, 34), normal(2, 2, 67, 5, 34), normal(3, 2, 67, 34), normal(4, 2, 67, 34)
    runs = [run_both_ways(backend, [x, cos, sin], gradient, frozen=[1, 2]) for backend in (rope_cpp, rope_reference)]
    assert_all_close(*runs, atol=2e-6)


@needs_cpp
def test_rope_cpp_reads_heads_within_longer_rows():
    x, cos, sin = normal(1, 1, 7, 6, 8), normal(2, 1, 7, 8), normal(3, 1, 7, 8)
    out = rope_cpp(paddle.to_tensor(x)[..., 2:5, :], *map(paddle.to_tensor, (cos, sin)))
    contiguous = rope_cpp(*map(paddle.to_tensor, (x, cos, sin)))
    np.testing.assert_array_equal(out.numpy(), contiguous.numpy()[..., 2:5, :])
