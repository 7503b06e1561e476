"""Leak between the documents of a pack, computed without Paddle and PyTorch, for scripts of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LENGTHS = (61, 89, 3, 1, 64)
"""Lengths of the packed documents; the second document is the neighbour that changes."""
_CHANGED = 1

Documents = Sequence[np.ndarray]
"""Token ids of each document of a pack, [length]."""


@dataclass(frozen=True)
class Pass:
    """Results of a forward and backward pass over a pack of S positions.

    The loss is the sum of the cross entropies of the target tokens: all tokens except the first of each document.

    Attributes:
        logits: logits of all positions, [S, V].
        embeddings: gradient of the loss for the input embeddings, [S, D].
        weights: gradient of the loss for each parameter, by name.
    """

    logits: np.ndarray
    embeddings: np.ndarray
    weights: Mapping[str, np.ndarray]


def measure_leak(run: Callable[[Documents], Pass], vocab_size: int) -> dict[str, float | int]:
    """Measure the influence of packed documents on each other.

    Args:
        run: computes the pass over the documents of a pack.
        vocab_size: number of token ids from which the documents are drawn.

    Returns:
        logits: largest difference of a logit between the pack and the documents alone, over the largest logit.
        gradient: largest difference of a weight's gradient, over the largest gradient. Gradients of the documents alone
            are added up.
        changed_bits: number of bits of the logits and embedding gradients of the other documents that change if the
            second document has other tokens.
        bits: number of all these bits.
    """
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, vocab_size, length) for length in LENGTHS]
    packed, alone = run(documents), [run([document]) for document in documents]
    logits_SV = np.concatenate([one.logits for one in alone])
    sums = {name: np.sum([one.weights[name] for one in alone], axis=0) for name in packed.weights}
    distance = max(_distance(packed.weights[name], sums[name]) for name in sums)
    documents[_CHANGED] = rng.integers(0, vocab_size, LENGTHS[_CHANGED])
    changed_bits, bits = _changed_bits(packed, run(documents))
    return {
        "logits": _distance(packed.logits, logits_SV) / _largest(logits_SV),
        "gradient": distance / max(map(_largest, sums.values())),
        "changed_bits": changed_bits,
        "bits": bits,
    }


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max())


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return _largest(one - other)


def _changed_bits(before: Pass, after: Pass) -> tuple[int, int]:
    """Count the bits that differ between two passes outside the changed document, and all bits outside of it."""
    start = sum(LENGTHS[:_CHANGED])
    others = np.r_[:start, start + LENGTHS[_CHANGED] : sum(LENGTHS)]
    changed = bits = 0
    for name in ("logits", "embeddings"):
        one, other = (np.ascontiguousarray(getattr(each, name)[others]).view(np.uint8) for each in (before, after))
        changed += int(np.unpackbits(one ^ other).sum())
        bits += 8 * one.size
    return changed, bits
