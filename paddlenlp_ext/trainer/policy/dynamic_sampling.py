"""Dynamic sampling (DAPO, arXiv:2503.14476): groups without a gradient are replaced by groups of other prompts.

Example with a sampled batch of four prompts; x: all rewards of the group are equal

    round    sampled rows     groups of the batch
    1        3  8  1  6       3  8x 1  6x
    2        5x 0  2x 7       3  0  1  7

A group depends only on the weights, its row and the seed, and the other rows have a fixed random order. A resumed run
therefore samples the same groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paddlenlp_ext.data.rollouts.prompt_dataset import StoredRollouts
from paddlenlp_ext.data.rollouts.rollout import Rollout
from paddlenlp_ext.policy_optimization.advantages import group_deviations, lack_gradient
from paddlenlp_ext.utils.logging import get_logger


@dataclass(frozen=True)
class SampledGroups:
    """Groups of a sampled batch.

    Attributes:
        groups: the groups to train on, one for each row that was planned.
        sampled: all groups that were sampled, in order.
        num_rounds: number of rounds of sampling.
    """

    groups: list[Rollout]
    sampled: list[Rollout]
    num_rounds: int


def sample_with_gradient(
    sample: Callable[[Sequence[int]], list[Rollout]],
    planned: Sequence[int],
    num_rows: int,
    max_rounds: int,
    seed: int,
) -> SampledGroups:
    """Sample the groups of a batch; replace groups without a gradient, until there are none or a limit is reached.

    A round samples as many rows as the fraction of dropped groups so far requires, at most as many as the batch has.
    No row is sampled twice for a batch. Groups that cannot be replaced remain in the batch.

    Args:
        sample: function that returns the groups of some rows.
        planned: dataset indices of the rows of the batch.
        num_rows: number of rows of the dataset.
        max_rounds: maximum number of rounds; 1: no group is replaced.
        seed: random seed of the order of the other rows.
    """
    groups, num_rounds = sample(planned), 1
    sampled = list(groups)
    missing = [place for place, group in enumerate(groups) if _lacks_gradient(group)]
    known = set(planned)
    others = (int(row) for row in np.random.default_rng(seed).permutation(num_rows) if row not in known)
    while missing and num_rounds < max_rounds:
        fraction = sum(not _lacks_gradient(group) for group in sampled) / len(sampled)
        count = min(len(planned), math.ceil(len(missing) / fraction)) if fraction else len(planned)
        rows = list(itertools.islice(others, count))
        if not rows:
            break
        more, num_rounds = sample(rows), num_rounds + 1
        sampled += more
        found = [group for group in more if not _lacks_gradient(group)]
        for place, group in zip(missing, found, strict=False):
            groups[place] = group
        missing = missing[len(found) :]
    return SampledGroups(groups, sampled, num_rounds)


def count_without_gradient(groups: Sequence[Rollout]) -> int:
    """Return the number of groups whose rewards are equal, or that have fewer than two rewards."""
    return sum(map(_lacks_gradient, groups))


def drop_stored_without_gradient(stored: StoredRollouts) -> StoredRollouts:
    """Return stored groups without the groups that have no gradient, and log their number.

    Raises:
        ValueError: no group has a gradient.
    """
    kept = [index for index, group in enumerate(stored.rollouts) if not _lacks_gradient(group)]
    if not kept:
        raise ValueError(
            f"{stored.file}: the rewards of each group are equal, so that no group has a gradient; use other rollouts, "
            "or set dynamic_sampling: false to train on them"
        )
    num_dropped = len(stored.rollouts) - len(kept)
    if num_dropped:
        get_logger(__name__).info(
            "dynamic_sampling: dropped %d of %d groups of %s, whose rewards are equal",
            num_dropped,
            len(stored.rollouts),
            stored.file,
        )
    return stored.select(kept)


def _lacks_gradient(group: Rollout) -> bool:
    return bool(lack_gradient(group_deviations(group.rewards[None]))[0])
