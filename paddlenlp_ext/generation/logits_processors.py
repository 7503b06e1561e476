"""Logits processors: changes of the logits of each row before its next token is chosen.

The filters are pure functions and use NumPy on the host, so that draws are the same on every device; a row of logits is
small. sampling.py applies them.

Shapes: B batch, V vocab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import paddle
from numpy.typing import NDArray

from paddlenlp_ext.ops.tensor_utils import in_dtype

Logits = NDArray[np.float32]
ModelLogits = paddle.Tensor | np.ndarray
"""Logits as a model returns them: in its dtype on its device, or in fp32 on the host."""
ALL_NAN_LOGITS = "all logits of a row are NaN; the model's weights are damaged, or its training diverged"


def on_host(logits: ModelLogits) -> np.ndarray:
    """Return logits in fp32 on the host."""
    # NumPy has no bfloat16: Paddle would return the bits as integers.
    return logits if isinstance(logits, np.ndarray) else in_dtype(logits, paddle.float32).numpy()


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


@dataclass(frozen=True)
class LogitAdjustments:
    """Penalties and biases of single logits, as in OpenAI's API.

    Attributes:
        frequency_penalty: subtracted once for each time that a token was generated.
        presence_penalty: subtracted from every token that was generated.
        logit_bias: number added to the logit of each token id.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def apply(self, logits_1V: ModelLogits, generated: Sequence[int]) -> ModelLogits:
        """Return the logits [1, V] after the tokens `generated`; fp32 on the host if any of them changes."""
        changes = dict(self.logit_bias)
        if self.frequency_penalty or self.presence_penalty:
            for token, count in Counter(generated).items():
                penalty = self.frequency_penalty * count + self.presence_penalty
                changes[token] = changes.get(token, 0.0) - penalty
        if not changes:
            return logits_1V
        adjusted_1V = on_host(logits_1V).copy()
        adjusted_1V[0, [*changes]] += np.array([*changes.values()], np.float32)
        return adjusted_1V
