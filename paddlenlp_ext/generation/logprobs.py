"""Log-probabilities of given tokens, and of the most likely tokens at the same positions.

Shapes: S positions, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import paddle

from paddlenlp_ext.generation.logits_processors import ModelLogits, on_host
from paddlenlp_ext.generation.prefill_and_decode import GenerationModel

_POSITIONS_PER_PART = 32  # limits the memory for the logits of a long prompt


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token before temperature and penalties.

    Attributes:
        token: token id.
        logprob: natural logarithm of the probability.
        top: pairs (token id, log-probability) of the most likely tokens at the same position, most likely first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: ModelLogits, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return the log-probability of one given token at each position.

    Args:
        logits: logits [S, V] in any floating-point dtype.
        tokens: token id at each of the S positions.
        num_top: number of most likely tokens to return at each position.
    """
    logits_SV = on_host(logits)
    # float64, because a float32 sum over 50,000 logits has an error of 1e-4. NumPy, because Paddle's logsumexp takes 10
    # times as long.
    largest_S1 = logits_SV.max(axis=1, keepdims=True).astype(np.float64)
    total_S1 = largest_S1 + np.log(np.exp(logits_SV - largest_S1).sum(axis=1, keepdims=True))
    chosen = (np.take_along_axis(logits_SV, np.array([*tokens]).reshape(-1, 1), axis=1) - total_S1).ravel().tolist()
    top: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if num_top:
        values_ST, ids_ST = paddle.topk(paddle.to_tensor(logits_SV), min(num_top, logits_SV.shape[1]), axis=-1)
        pairs = zip(ids_ST.numpy().tolist(), (values_ST.numpy() - total_S1).tolist(), strict=True)
        top = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    return [TokenLogprob(*each) for each in zip(tokens, chosen, top, strict=True)]


def sequence_logprobs(
    model: GenerationModel, hidden_SD: paddle.Tensor, tokens: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """Return the log-probability of the next token at each position of a sequence.

    Args:
        model: the language model.
        hidden_SD: hidden states of the positions.
        tokens: next token at each position.
        num_top: number of most likely tokens to return at each position.
    """
    found = []
    for start in range(0, len(tokens), _POSITIONS_PER_PART):
        part = tokens[start : start + _POSITIONS_PER_PART]
        found += token_logprobs(model.logits(hidden_SD[start : start + len(part)]), part, num_top)
    return found
