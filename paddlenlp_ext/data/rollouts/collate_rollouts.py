"""Collate groups of completions into a batch; the completions of a group share the positions of their prompt.

A group has the layout of `TokenizedPair`, with any number of answers.

Shapes: B batch size, S positions of a batch row, T target tokens, C completions of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paddlenlp_ext.data.collate import PackedBatch, collate
from paddlenlp_ext.data.preference.collate_pairs import answer_index_of
from paddlenlp_ext.data.preference.tokenized_pair import TokenizedPair
from paddlenlp_ext.data.rollouts.rollout import Logps, Rollout


@dataclass(frozen=True)
class TrainingGroup:
    """A group of completions with the values that its loss reads.

    Attributes:
        rollout: the group.
        advantages: advantage of each completion, float [G].
        weights: weight of the tokens of each completion, float32 [G].
        is_counted: bool [G], False for completions that do not count in the loss.
    """

    rollout: Rollout
    advantages: np.ndarray
    weights: np.ndarray
    is_counted: np.ndarray


@dataclass(frozen=True, kw_only=True)
class RolloutBatch(PackedBatch):
    """Arrays of a micro-batch of groups.

    Attributes:
        completions: int64 [T], index of the completion of each target token, ascending.
        old_logps: float32 [T].
        sampling_logps: float32 [T].
        reference_logps: float32 [T]; None: not computed.
        advantages, weights: float32 [C].
        is_fresh: whether the model is unchanged since the completions were sampled.
        metrics: name of a metric -> its values, for evaluation.
    """

    completions: np.ndarray
    old_logps: np.ndarray
    sampling_logps: np.ndarray
    reference_logps: np.ndarray | None
    advantages: np.ndarray
    weights: np.ndarray
    is_fresh: bool = False
    metrics: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_completions(self) -> int:
        """Number of completions, including completions that do not count in the loss."""
        return len(self.advantages)

    @property
    def lengths(self) -> np.ndarray:
        """Number of target tokens of each completion, int64 [C]."""
        return np.bincount(self.completions, minlength=self.num_completions)


def collate_groups(
    groups: Sequence[TrainingGroup],
    *,
    share_prompt: bool = True,
    pad_to_multiple_of: int | None = None,
    pad_token_id: int = 0,
) -> RolloutBatch:
    """Concatenate groups in one batch row.

    Args:
        groups: groups of the micro-batch.
        share_prompt: whether completions attend to a single copy of their prompt; False: each has a copy.
        pad_to_multiple_of, pad_token_id: see `collate`.
    """
    rows = [_tokenized(group, share_prompt) for group in groups]
    batch = collate([rows], pad_to_multiple_of=pad_to_multiple_of, pad_token_id=pad_token_id)
    index_S = answer_index_of([rows], batch)[0]
    is_counted = np.concatenate([group.is_counted for group in groups])
    rollouts = [group.rollout for group in groups]

    def counted(logps: Sequence[Logps]) -> np.ndarray:
        kept = [each for each, keep in zip(itertools.chain(*logps), is_counted, strict=True) if keep]
        return np.concatenate([np.zeros(0, np.float32), *kept]).astype(np.float32)

    reference = [rollout.reference_logps for rollout in rollouts if rollout.reference_logps is not None]
    return RolloutBatch(
        **vars(batch),
        completions=index_S[index_S >= 0],
        old_logps=counted([rollout.old_logps for rollout in rollouts]),
        sampling_logps=counted([rollout.sampling_logps or rollout.old_logps for rollout in rollouts]),
        reference_logps=counted(reference) if len(reference) == len(rollouts) else None,
        advantages=np.concatenate([group.advantages for group in groups]).astype(np.float32),
        weights=np.concatenate([group.weights for group in groups]).astype(np.float32),
    )


def uncounted_group(rollout: Rollout) -> TrainingGroup:
    """Return a group for forward passes that compute only the log-probabilities of all tokens."""
    count = len(rollout.completion_ids)
    return TrainingGroup(rollout, np.zeros(count), np.zeros(count, np.float32), np.ones(count, bool))


def _tokenized(group: TrainingGroup, share_prompt: bool) -> TokenizedPair:
    """Return the prompt and all completions as one row."""
    rollout = group.rollout
    tokens = np.array([*rollout.prompt_ids, *itertools.chain(*rollout.completion_ids)], np.int32)
    start, lengths = len(rollout.prompt_ids), rollout.lengths
    starts = start + np.cumsum(lengths) - lengths
    loss_mask = np.concatenate([np.zeros(start, bool), np.repeat(group.is_counted, lengths)])
    flags = (True,) * len(lengths)
    return TokenizedPair(tokens, loss_mask, rollout.row_index, tuple(starts.tolist()), flags, share_prompt)
