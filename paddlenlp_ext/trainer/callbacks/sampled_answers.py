"""Answers of the newest sampled batch of a GRPO run, as texts with their rewards, for the history of the run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from paddlenlp_ext.data.rollouts.prompt_dataset import PromptDataset, PromptRow
from paddlenlp_ext.data.rollouts.rollout import read_rollouts

NUM_TIMES = 10
"""Number of times in a run that sampled answers are written, in addition to the first step."""
_NUM_ANSWERS = 10
_MAX_CHARACTERS = 1000


def are_due(step: int, total_steps: int) -> bool:
    """Return whether sampled answers are written after a step."""
    return step == 1 or step % max(1, total_steps // NUM_TIMES) == 0


def newest_answers(output_dir: Path, rows: PromptDataset) -> list[dict[str, Any]]:
    """Return answers of the newest file in `output_dir/rollouts`: one of each group, then another of each group.

    An answer is a dict with the keys prompt, answer, reward and scores (name of a reward function -> reward). Rewards
    are None if no function applies.

    Args:
        output_dir: folder of the run.
        rows: prompts of the run.
    """
    file = max(output_dir.glob("rollouts/*.jsonl"), key=lambda path: path.stat().st_mtime, default=None)
    groups = [] if file is None else read_rollouts(file)
    by_place = itertools.zip_longest(*([(each, place) for place in range(len(each.rewards))] for each in groups))
    found = [pair for pairs in by_place for pair in pairs if pair is not None][:_NUM_ANSWERS]
    return [
        {
            "prompt": _last_text(rows.rows[group.row_index])[-_MAX_CHARACTERS:],
            "answer": rows.text(group.completion_ids[place])[:_MAX_CHARACTERS],
            "reward": _number(group.rewards[place]),
            "scores": {name: _number(values[place]) for name, values in group.scores.items()},
        }
        for group, place in found
    ]


def _last_text(row: PromptRow) -> str:
    """Return the text of a prompt, or of the last message of a conversation."""
    return row.value if isinstance(row.value, str) else str(row.value[-1]["content"] or "")


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
