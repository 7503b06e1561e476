"""Signs that a run of GRPO no longer learns, in the completions of a sampled batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from paddlenlp_ext.policy_optimization.advantages import lack_gradient

_MOST_REPEATED = 0.9
"""Fraction of equal completions, to different prompts, that counts as a collapse."""
_MOST_TRUNCATED = 0.9
"""Fraction of completions without an end token that counts as a collapse."""


def describe_collapse(
    groups: Sequence[Sequence[Sequence[int]]], deviations_P: np.ndarray, is_truncated: np.ndarray
) -> dict[str, str]:
    """Return signs of a collapse and their remedies: name of a sign -> message; empty if there are none.

    Args:
        groups: tokens of the completions of each prompt.
        deviations_P: standard deviation of the rewards of each group; NaN with fewer than two rewards.
        is_truncated: True for completions without an end token.
    """
    found = {}
    if np.isnan(deviations_P).all():
        found["rewards"] = (
            "no prompt has two completions with rewards, so that the step has no gradient; check the reward functions, "
            "which return None for the other completions"
        )
    elif len(groups) > 1 and lack_gradient(deviations_P).all():
        found["rewards"] = (
            "all completions of each prompt have equal rewards, so that the step has no gradient; use easier or harder "
            "prompts, or raise temperature or num_generations"
        )
    most, total = _most_common(tokens for group in groups for tokens in group)
    if len(groups) > 1 and most > _MOST_REPEATED * total:
        found["repetition"] = (
            f"{most} of {total} completions, to {len(groups)} prompts, are equal; check the reward functions, and "
            "lower learning_rate or set beta"
        )
    if np.mean(is_truncated) > _MOST_TRUNCATED:
        found["length"] = (
            f"{np.mean(is_truncated):.0%} of the completions have no end token; raise max_completion_length, or reward "
            "short completions"
        )
    return found


def _most_common(completions: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Return the number of completions that equal the most common completion, and the number of all completions."""
    counts = Counter(tuple(tokens) for tokens in completions)
    return max(counts.values(), default=0), counts.total()
