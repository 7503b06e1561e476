"""Score groups of sampled completions with the reward functions of a run."""

from __future__ import annotations

from collections.abc import Sequence

from paddlenlp_ext.data.rollouts.prompt_dataset import PromptDataset
from paddlenlp_ext.data.rollouts.rollout import Rollout
from paddlenlp_ext.rewards.load_rewards import Reward
from paddlenlp_ext.rewards.score import score, total_rewards
from paddlenlp_ext.trainer.policy.sample_completions import Completion


def scored_rollouts(
    rewards: Sequence[Reward], rows: PromptDataset, indices: Sequence[int], groups: Sequence[Sequence[Completion]]
) -> list[Rollout]:
    """Return the group of each row with its rewards.

    Args:
        rewards: reward functions.
        rows: the dataset.
        indices: dataset indices of the rows.
        groups: completions of each row.

    Raises:
        ValueError: see `score`.
    """
    pairs = [
        (rows.rows[index], completion) for index, group in zip(indices, groups, strict=True) for completion in group
    ]
    names = dict.fromkeys(name for row, _ in pairs for name in row.columns)
    scores_NF = score(
        rewards,
        [row.value for row, _ in pairs],
        [row.completion(rows.text(completion.tokens)) for row, completion in pairs],
        [completion.tokens for _, completion in pairs],
        {name: [row.columns.get(name) for row, _ in pairs] for name in names},
        [f"{row.location.file}:{row.location.line}" for row, _ in pairs],
    )
    totals_N = total_rewards(scores_NF, rewards)
    rollouts, first = [], 0
    for index, group in zip(indices, groups, strict=True):
        own = slice(first, first + len(group))
        first += len(group)
        rollouts.append(
            Rollout(
                row_index=index,
                prompt_ids=rows.rows[index].ids,
                completion_ids=tuple(completion.tokens for completion in group),
                old_logps=tuple(completion.logps_array for completion in group),
                rewards=totals_N[own],
                scores={reward.name: scores_NF[own, place] for place, reward in enumerate(rewards)},
            )
        )
    return rollouts
