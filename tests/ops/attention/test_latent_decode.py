"""Decode attention over cached latents against the formula of the keys and values that they stand for."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddlenlp_ext.ops.attention.alibi import alibi_slopes
from paddlenlp_ext.ops.attention.decode_attention import VisiblePositions
from paddlenlp_ext.ops.attention.latent_decode import latent_decode_attention
from paddlenlp_ext.ops.attention.score_options import ScoreOptions
from tests.common.arrays import normal

L, R, U = 11, 6, 5
PREFIX_END = 3


def formula(u, p, latents, keys, to_keys, ranges, slopes, positions):
    """Compute the mean latents in float64 from each head's keys, one query and head at a time."""
    out = np.empty((*u.shape[:3], L))
    for row, position, head in np.ndindex(*u.shape[:3]):
        first, end, own_first, own_end = ranges[row, position]
        seen = [*range(first, end), *range(own_first, own_end)]
        c = latents[row, 0, seen].astype(np.float64)
        scores = 0.37 * (c @ to_keys[head].T @ u[row, position, head] + keys[row, 0, seen] @ p[row, position, head])
        if slopes is not None:
            before = [positions[row, position] + end - slot for slot in range(first, end)]
            scores -= slopes[head] * np.array([*before, *(own_end - 1 - slot for slot in range(own_first, own_end))])
        weights = np.exp(scores - scores.max())
        out[row, position, head] = weights / weights.sum() @ c
    return out


@pytest.mark.parametrize("has_slopes", [False, True])
@pytest.mark.parametrize(("batch", "length", "heads", "slots"), [(1, 1, 1, 4), (2, 1, 6, 37), (2, 5, 3, 21)])
def test_latent_decode_attention_matches_the_formula(batch, length, heads, slots, has_slopes):
    rng = np.random.default_rng(slots)
    u, p = normal(1, batch, length, heads, U), normal(2, batch, length, heads, R)
    latents, keys, to_keys = normal(3, batch, 1, slots, L), normal(4, batch, 1, slots, R), normal(5, heads, U, L)
    own_first = rng.integers(PREFIX_END, slots, (batch, length))
    own_end = rng.integers(own_first + 1, slots + 1)
    prefix_first = rng.integers(0, PREFIX_END + 1, (batch, length))
    ranges = np.stack([prefix_first, np.full_like(own_first, PREFIX_END), own_first, own_end], axis=-1)
    slopes, positions = (alibi_slopes(heads), own_end - 1 - own_first) if has_slopes else (None, None)
    q_latent = np.einsum("bsnu,nul->bsnl", u, to_keys)
    tensors = (paddle.to_tensor(x) for x in (q_latent, p, latents, keys))
    out = latent_decode_attention(*tensors, VisiblePositions(ranges, positions), 0.37, ScoreOptions(slopes=slopes))
    expected = formula(u, p, latents, keys, to_keys, ranges, slopes, positions)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
