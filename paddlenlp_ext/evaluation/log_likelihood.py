"""Log-likelihoods of continuations, computed in batches.

The rows of a batch are concatenated without padding. Up to `MAX_SHARING` continuations of the same prompt attend to a
single copy of the prompt. If a sequence exceeds `max_length`, its prompt is truncated from the left.

Shapes: T positions of a batch, R target positions, D hidden size, A continuations of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddlenlp_ext.data.collate import PackedBatch, collate
from paddlenlp_ext.data.preference.collate_pairs import PreferenceBatch, collate_pairs
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.data.tokenization.encoded_row import EncodedRow
from paddlenlp_ext.trainer.evaluate import evaluation_mode
from paddlenlp_ext.trainer.forward_backward import hidden_states
from paddlenlp_ext.utils.labels import IGNORED_LABEL

MAX_SHARING = 16
"""Maximum number of continuations that are computed with a single copy of their prompt."""
_CHUNK = 256


@dataclass(frozen=True)
class Continuation:
    """Token ids to score after the token ids of a prompt. The prompt has at least one token."""

    prompt: Sequence[int]
    tokens: Sequence[int]


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of a continuation.

    Attributes:
        logprob: sum of the log-probabilities of the continuation's tokens.
        is_greedy: True if greedy decoding would generate the continuation; None if not computed.
    """

    logprob: float
    is_greedy: bool | None = None


def log_likelihoods(
    model: Any,
    continuations: Sequence[Continuation],
    *,
    batch_size: int,
    max_length: int,
    with_greedy: bool = False,
    advance: Callable[[int], object] = lambda _: None,
) -> list[Likelihood]:
    """Return the log-likelihood of every continuation, in order. An empty continuation has the log-likelihood 0.

    Args:
        model: a language model.
        continuations: continuations to score, with their prompts.
        batch_size: prompts per batch.
        max_length: maximum input positions of a sequence. The last token of a continuation is predicted but not an
            input, so that a sequence may have `max_length` + 1 tokens.
        with_greedy: whether to compute `Likelihood.is_greedy`.
        advance: progress callback, which takes the number of newly scored continuations.

    Raises:
        ValueError: a prompt is empty, a continuation exceeds `max_length`, or log-probabilities are NaN.
    """
    results = [Likelihood(0.0, True if with_greedy else None) for _ in continuations]
    groups = _groups([truncate_left(each, max_length) for each in continuations])
    groups.sort(key=lambda group: -group.num_tokens)
    with evaluation_mode(model):
        for first in range(0, len(groups), batch_size):
            batch = groups[first : first + batch_size]
            found = iter(_scores(model, [group.row(first + index) for index, group in enumerate(batch)], with_greedy))
            for group in batch:
                for indices in group.indices:
                    likelihood = next(found)
                    for index in indices:
                        results[index] = likelihood
            advance(sum(len(indices) for group in batch for indices in group.indices))
    advance(sum(not each.tokens for each in continuations))
    return results


def row_losses(
    model: Any, rows: Sequence[EncodedRow], *, batch_size: int, advance: Callable[[int], object] = lambda _: None
) -> np.ndarray:
    """Return the total negative log-likelihood of each row's target tokens, float64 [rows].

    Args:
        model: a language model.
        rows: tokenized rows.
        batch_size: rows per batch.
        advance: progress callback, which takes the number of newly scored rows.

    Raises:
        ValueError: log-probabilities are NaN.
    """
    losses = np.zeros(len(rows))
    longest_first = sorted(range(len(rows)), key=lambda index: -rows[index].length)
    with evaluation_mode(model):
        for first in range(0, len(rows), batch_size):
            indices = longest_first[first : first + batch_size]
            batch = collate([[rows[index] for index in indices]])
            logprobs_T, _ = _token_logprobs(model, batch)
            starts = np.cumsum([0, *(rows[index].length for index in indices[:-1])])
            losses[indices] = -np.add.reduceat(logprobs_T, starts)
            advance(len(indices))
    return losses


def truncate_left(each: Continuation, max_length: int) -> Continuation:
    """Return a continuation whose prompt is truncated from the left to fit `max_length` (see `prompt_room`).

    Raises:
        ValueError: the prompt is empty, or the continuation alone exceeds `max_length`.
    """
    if not each.prompt:
        raise ValueError("a continuation needs a prompt of at least one token")
    return Continuation(each.prompt[-prompt_room(each.tokens, max_length) :], each.tokens)


def prompt_room(tokens: Sequence[int], max_length: int) -> int:
    """Return the number of prompt tokens that fit before a continuation, for `max_length` input tokens.

    The last token of the continuation is not an input, because no token is predicted from the last token.

    Raises:
        ValueError: the continuation alone exceeds `max_length`.
    """
    if len(tokens) > max_length:
        raise ValueError(f"a continuation has {len(tokens)} tokens, more than max_length {max_length}")
    return max_length + 1 - len(tokens)


@dataclass(frozen=True)
class _Group:
    """Distinct continuations of one prompt, and the indices of each continuation in the list to score."""

    prompt: tuple[int, ...]
    continuations: list[tuple[int, ...]]
    indices: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.continuations))

    def row(self, number: int) -> TokenizedPair:
        """Return the prompt and the continuations as a preference row with one answer per continuation."""
        segments = [self.prompt, *self.continuations]
        starts = np.cumsum([len(segment) for segment in segments])[:-1]
        tokens = np.concatenate([np.array(segment, np.int32) for segment in segments])
        mask = np.arange(len(tokens)) >= len(self.prompt)
        return TokenizedPair(tokens, mask, number, tuple(starts.tolist()), (False,) * len(self.continuations))


def _groups(continuations: Sequence[Continuation]) -> list[_Group]:
    by_prompt: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for index, each in enumerate(continuations):
        if each.tokens:
            by_prompt.setdefault(tuple(each.prompt), {}).setdefault(tuple(each.tokens), []).append(index)
    groups = []
    for prompt, members in by_prompt.items():
        for first in range(0, len(members), MAX_SHARING):
            some = list(members.items())[first : first + MAX_SHARING]
            groups.append(_Group(prompt, [tokens for tokens, _ in some], [indices for _, indices in some]))
    return groups


def _scores(model: Any, rows: list[TokenizedPair], with_greedy: bool) -> Iterator[Likelihood]:
    """Yield the log-likelihood of each answer in the rows."""
    batch: PreferenceBatch = collate_pairs([rows])
    logprobs_T, hidden_TD = _token_logprobs(model, batch)
    answers_T = batch.answer_index.ravel()
    targets_R = np.flatnonzero(answers_T >= 0)
    sums_A = np.bincount(answers_T[targets_R], logprobs_T[targets_R], batch.num_answers)
    if not with_greedy:
        yield from (Likelihood(logprob) for logprob in sums_A.tolist())
        return
    is_other_R = _most_likely(model, hidden_TD, targets_R) != batch.labels.ravel()[targets_R]
    others_A = np.bincount(answers_T[targets_R], is_other_R, batch.num_answers)
    yield from (Likelihood(logprob, others == 0) for logprob, others in zip(sums_A.tolist(), others_A, strict=True))


def _token_logprobs(model: Any, batch: PackedBatch) -> tuple[np.ndarray, paddle.Tensor]:
    """Return the log-probability of each label, float64 [T], and the hidden states [T, D].

    Positions without a label have the log-probability 0.

    Raises:
        ValueError: log-probabilities are NaN.
    """
    hidden_BSD = hidden_states(model, batch)
    hidden_TD = hidden_BSD.reshape([-1, hidden_BSD.shape[-1]])
    labels_T = batch.labels.ravel()
    assert (labels_T != IGNORED_LABEL).any(), "a batch must have at least one target"
    logprobs_T = model.token_logprobs(hidden_TD, paddle.to_tensor(labels_T)).numpy().astype(np.float64)
    if np.isnan(logprobs_T).any():
        raise ValueError(
            "log-probabilities are NaN: the weights are damaged, or the training diverged; use another checkpoint"
        )
    return logprobs_T, hidden_TD


def _most_likely(model: Any, hidden_TD: paddle.Tensor, positions_R: np.ndarray) -> np.ndarray:
    """Return the most likely next token at each position, int64 [R]."""
    found = []
    for first in range(0, len(positions_R), _CHUNK):
        chosen = paddle.gather(hidden_TD, paddle.to_tensor(positions_R[first : first + _CHUNK]))
        found.append(model.logits(chosen).argmax(axis=-1).numpy())
    return np.concatenate(found)
