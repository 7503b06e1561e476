"""Sampling: filters of logits as pure functions, and draws that do not depend on the other rows of a batch.

All functions use NumPy on the host, so draws are the same on every device; a row of logits is small.
Shapes: B batch, V vocab.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]
ALL_NAN_LOGITS = "all logits of a row are NaN; the model's weights are damaged, or its training diverged"


def apply_repetition_penalty(logits_BV: Logits, seen_ids: Sequence[Sequence[int]], penalty: float) -> Logits:
    """Make tokens that a row has already seen less likely (CTRL, arXiv:1909.05858, section 4.1).

    A positive logit is divided by `penalty`, a negative one multiplied, once per distinct token.

    Args:
        logits_BV: [B, V].
        seen_ids: prompt and generated tokens of each row, without padding.
        penalty: 1 changes nothing, values above 1 discourage repetition.
    """
    if penalty == 1.0:
        return logits_BV
    penalized_BV = logits_BV.copy()
    for row_V, ids in zip(penalized_BV, seen_ids, strict=True):
        distinct = np.unique(np.asarray(ids, dtype=np.int64))
        seen = row_V[distinct]
        row_V[distinct] = np.where(seen < 0, seen * penalty, seen / penalty)
    return penalized_BV


def exclude_early_ends(
    logits_BV: Logits, num_generated: Sequence[int], minimum: int, end_tokens: Collection[int]
) -> Logits:
    """Set the end tokens of each row with fewer than `minimum` generated tokens to -inf.

    Args:
        logits_BV: [B, V].
        num_generated: number of generated tokens of each row.
        minimum: number of tokens before which no row ends.
        end_tokens: token ids that end a row.
    """
    is_early_B = np.asarray(num_generated) < minimum
    if not is_early_B.any() or not end_tokens:
        return logits_BV
    logits_BV = logits_BV.copy()
    logits_BV[np.flatnonzero(is_early_B)[:, None], sorted(end_tokens)] = -np.inf
    return logits_BV


def apply_temperature(logits_BV: Logits, temperature: float) -> Logits:
    """Divide the logits by the temperature: below 1 sharpens the distribution, above 1 flattens it."""
    return logits_BV if temperature == 1.0 else np.divide(logits_BV, np.float32(temperature), dtype=np.float32)


def keep_top_k(logits_BV: Logits, top_k: int) -> Logits:
    """Set all but the `top_k` largest logits of each row to -inf; 0 keeps all. Ties with the smallest of these stay."""
    vocab_size = logits_BV.shape[1]
    if top_k == 0 or top_k >= vocab_size:
        return logits_BV
    kth_largest_B = np.partition(logits_BV, vocab_size - top_k, axis=1)[:, vocab_size - top_k]
    return np.where(logits_BV < kth_largest_B[:, None], np.float32(-np.inf), logits_BV)


def keep_top_p(logits_BV: Logits, top_p: float) -> Logits:
    """Keep the nucleus of each row (arXiv:1904.09751): the fewest tokens whose probabilities reach `top_p`.

    A token stays while the mass of the more likely tokens is below `top_p`. The most likely token always stays, and so
    do ties with the least likely token of the nucleus. All others become -inf.
    """
    if top_p >= 1.0:
        return logits_BV
    descending_BV = np.sort(logits_BV, axis=1)[:, ::-1]
    weights_BV = np.exp(descending_BV - descending_BV[:, :1])
    mass_BV = np.cumsum(weights_BV, axis=1, dtype=np.float64)
    in_nucleus_BV = mass_BV - weights_BV < top_p * mass_BV[:, -1:]
    nucleus_size_B = np.maximum(in_nucleus_BV.sum(axis=1), 1)
    smallest_B = descending_BV[np.arange(len(logits_BV)), nucleus_size_B - 1]
    return np.where(logits_BV < smallest_B[:, None], np.float32(-np.inf), logits_BV)


def greedy(logits_BV: Logits) -> NDArray[np.int64]:
    """Return the most likely token of each row [B]; ties go to the lowest id."""
    return np.argmax(logits_BV, axis=1)


class RowSampler:
    """Draw a token for each row from the row's own random generator.

    The generator depends only on (seed, row), and each token takes one number from it. A row's draws therefore do not
    depend on the other rows of its batch.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._streams: dict[int, np.random.Generator] = {}

    def draw(self, logits_BV: Logits, rows: Sequence[int]) -> NDArray[np.int64]:
        """Draw token ids [B] from softmax(logits_BV); `rows` holds the row number of each line.

        Raises:
            ValueError: a line has no finite logit.
        """
        pairs = zip(logits_BV, rows, strict=True)
        return np.array([_inverse_cdf(row_V, self._stream(row).random()) for row_V, row in pairs], dtype=np.int64)

    def _stream(self, row: int) -> np.random.Generator:
        if row not in self._streams:
            self._streams[row] = np.random.default_rng([self._seed, row])
        return self._streams[row]


def _inverse_cdf(row_V: Logits, uniform: float) -> int:
    """Return the first token, in the order of ids, whose cumulative probability exceeds `uniform` in [0, 1)."""
    possible = np.flatnonzero(row_V > -np.inf)
    if not len(possible):
        raise ValueError(ALL_NAN_LOGITS)
    weights = np.exp(row_V[possible] - row_V[possible].max())
    cumulated = np.cumsum(weights, dtype=np.float64)
    position = np.searchsorted(cumulated, uniform * cumulated[-1], side="right")
    return int(possible[min(int(position), len(possible) - 1)])
