"""Logits processors, which change the logits of each row before its next token is chosen (sampling.py).

All processors run in NumPy on the host, so that equal logits give equal tokens on every device.

Shapes: B batch, V vocab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import paddle
from numpy.typing import NDArray

from paddlenlp_ext.generation.grammar import GrammarState
from paddlenlp_ext.ops.tensor_utils import in_dtype

Logits = NDArray[np.float32]
ModelLogits = paddle.Tensor | np.ndarray
"""Logits that a model returns: a tensor in the dtype and on the device of the model, or an fp32 array on the host."""
ALL_NAN_LOGITS = "all logits of a row are NaN; the model's weights are damaged, or its training diverged"


def on_host(logits: ModelLogits) -> np.ndarray:
    """Return logits in fp32 on the host."""
    # NumPy has no bfloat16, so Paddle would convert bfloat16 values to arrays of uint16.
    return logits if isinstance(logits, np.ndarray) else in_dtype(logits, paddle.float32).numpy()


def apply_repetition_penalty(logits_BV: Logits, seen_ids: Sequence[Sequence[int]], penalty: float) -> Logits:
    """Penalize the tokens that a row already contains (CTRL, arXiv:1909.05858, section 4.1).

    A positive logit is divided by `penalty`, and a negative logit is multiplied by `penalty`, once per distinct token.

    Args:
        logits_BV: logits of each row.
        seen_ids: prompt and generated tokens of each row, without padding.
        penalty: repetition penalty; values above 1 discourage repetition, and 1 has no effect.
    """
    if penalty == 1.0:
        return logits_BV
    penalized_BV = logits_BV.copy()
    for row_V, ids in zip(penalized_BV, seen_ids, strict=True):
        distinct = np.unique(np.asarray(ids, dtype=np.int64))
        seen = row_V[distinct]
        row_V[distinct] = np.where(seen < 0, seen * penalty, seen / penalty)
    return penalized_BV


def keep_allowed_tokens(
    logits_BV: Logits, grammars: Sequence[GrammarState | None], end_tokens: Collection[int]
) -> Logits:
    """Set the logits of tokens outside the grammar of a row to -inf.

    Args:
        logits_BV: logits of each row.
        grammars: position of each row in its grammar, or None for a row without a grammar.
        end_tokens: token ids that end a row.

    Raises:
        GrammarError: see `GrammarState.allowed_tokens`.
    """
    logits_BV = logits_BV.copy()
    for row_V, grammar in zip(logits_BV, grammars, strict=True):
        if grammar is not None:
            row_V[~grammar.allowed_tokens(len(row_V), end_tokens)] = -np.inf
    return logits_BV


def exclude_early_ends(
    logits_BV: Logits, num_generated: Sequence[int], minimum: int, end_tokens: Collection[int]
) -> Logits:
    """Set the logits of end tokens to -inf in rows with fewer than `minimum` generated tokens.

    Args:
        logits_BV: logits of each row.
        num_generated: number of generated tokens of each row.
        minimum: minimum number of generated tokens.
        end_tokens: token ids that end a row.
    """
    is_early_B = np.asarray(num_generated) < minimum
    if not is_early_B.any() or not end_tokens:
        return logits_BV
    logits_BV = logits_BV.copy()
    logits_BV[np.flatnonzero(is_early_B)[:, None], sorted(end_tokens)] = -np.inf
    return logits_BV


def apply_temperature(logits_BV: Logits, temperature: float) -> Logits:
    """Divide the logits by the temperature; values below 1 sharpen the distribution, values above 1 flatten it."""
    return logits_BV if temperature == 1.0 else np.divide(logits_BV, np.float32(temperature), dtype=np.float32)


def keep_top_k(logits_BV: Logits, top_k: int) -> Logits:
    """Set all logits of a row except the `top_k` largest to -inf.

    Logits equal to the k-th largest logit are kept. If `top_k` is 0, all logits are kept.
    """
    vocab_size = logits_BV.shape[1]
    if top_k == 0 or top_k >= vocab_size:
        return logits_BV
    kth_largest_B = np.partition(logits_BV, vocab_size - top_k, axis=1)[:, vocab_size - top_k]
    return np.where(logits_BV < kth_largest_B[:, None], np.float32(-np.inf), logits_BV)


def keep_top_p(logits_BV: Logits, top_p: float) -> Logits:
    """Set the logits outside the nucleus of each row to -inf (arXiv:1904.09751).

    The nucleus is the smallest set of most likely tokens, at least one, whose probabilities sum to at least `top_p`.
    Tokens that are as likely as the least likely token of the nucleus are kept.
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
    """Penalties and biases of single tokens, as defined in the OpenAI API.

    Attributes:
        frequency_penalty: value subtracted from the logit of a token for each time the token was generated.
        presence_penalty: value subtracted once from the logit of every generated token.
        logit_bias: value added to the logit of a token, by token id.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def apply(self, logits_1V: ModelLogits, generated: Sequence[int]) -> ModelLogits:
        """Adjust the logits [1, V] of a row.

        Args:
            logits_1V: logits of the row.
            generated: tokens that were generated in the row.

        Returns:
            Adjusted logits in fp32 on the host, or `logits_1V` if no adjustment applies.
        """
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
