"""Dynamic sampling: which groups are replaced, by which rows, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paddlenlp_ext.data.rollouts.prompt_dataset import StoredRollouts
from paddlenlp_ext.data.rollouts.rollout import Rollout
from paddlenlp_ext.trainer.policy.dynamic_sampling import drop_stored_without_gradient, sample_with_gradient


def group(row: int, rewards: Sequence[float]) -> Rollout:
    completions = tuple([token] for token in range(len(rewards)))
    logps = tuple(np.zeros(1, np.float32) for _ in rewards)
    return Rollout(row, [1], completions, logps, np.array(rewards, np.float64))


class Sampler:
    """Function that records its rounds; the rewards of the rows in `useful` differ."""

    def __init__(self, useful: set[int]) -> None:
        self.useful, self.rounds = useful, []

    def __call__(self, rows: Sequence[int]) -> list[Rollout]:
        self.rounds.append(list(rows))
        return [group(row, [0.0, float(row in self.useful)]) for row in rows]


def rows_of(groups: Sequence[Rollout]) -> list[int]:
    return [each.row_index for each in groups]


def test_sample_with_gradient_replaces_only_groups_with_equal_rewards_by_other_rows():
    sample = Sampler(useful={3, 1, 10, 11, 12})
    batch = sample_with_gradient(sample, [3, 8, 1, 6], 20, max_rounds=10, seed=5)
    first, second, third, fourth = rows_of(batch.groups)
    assert (first, third) == (3, 1) and second != fourth and {second, fourth} <= {10, 11, 12}
    tried = [row for rows in sample.rounds for row in rows]
    assert len(tried) == len(set(tried)), "no row is sampled twice"
    assert rows_of(batch.sampled) == tried and batch.num_rounds == len(sample.rounds) > 1


def test_sample_with_gradient_without_equal_rewards_samples_once():
    sample = Sampler(useful=set(range(20)))
    batch = sample_with_gradient(sample, [3, 8], 20, max_rounds=10, seed=5)
    assert rows_of(batch.groups) == [3, 8] and sample.rounds == [[3, 8]]


def test_sample_with_gradient_samples_as_many_rows_as_the_fraction_of_dropped_groups_requires():
    sample = Sampler(useful=set(range(6)))  # 2 of 8 are missing, and 6 of 8 are useful: 2 / 0.75 rounded up
    sample_with_gradient(sample, list(range(8)), 100, max_rounds=2, seed=5)
    assert [len(rows) for rows in sample.rounds] == [8, 3]
    sample = Sampler(useful={0})  # 7 / 0.125 is more than the batch has
    sample_with_gradient(sample, list(range(8)), 100, max_rounds=2, seed=5)
    assert [len(rows) for rows in sample.rounds] == [8, 8]


@pytest.mark.parametrize(("max_rounds", "num_rows", "num_rounds"), [(3, 100, 3), (1, 100, 1), (10, 4, 2), (10, 2, 1)])
def test_sample_with_gradient_keeps_groups_that_it_cannot_replace(max_rounds, num_rows, num_rounds):
    sample = Sampler(useful=set())
    batch = sample_with_gradient(sample, [0, 1], num_rows, max_rounds, seed=5)
    assert rows_of(batch.groups) == [0, 1] and batch.num_rounds == len(sample.rounds) == num_rounds


def test_sample_with_gradient_depends_only_on_the_seed():
    runs = [sample_with_gradient(Sampler({40, 41}), [0, 1], 50, 30, seed) for seed in (5, 5, 6)]
    assert rows_of(runs[0].sampled) == rows_of(runs[1].sampled) != rows_of(runs[2].sampled)


def test_drop_stored_without_gradient_keeps_groups_whose_rewards_differ(caplog):
    groups = [group(0, [1, 1]), group(1, [1, 0]), group(2, [1, np.nan]), group(3, [0, 0.5])]
    kept = drop_stored_without_gradient(StoredRollouts(groups, "r.jsonl"))
    assert [each.rewards.tolist() for each in kept.rollouts] == [[1, 0], [0, 0.5]]
    assert rows_of(kept.rollouts) == [0, 1], "indices of the remaining groups"
    assert [kept.source(index) for index in range(2)] == [("r.jsonl", 2), ("r.jsonl", 4)], "lines of the file"
    assert "dropped 2 of 4 groups of r.jsonl" in caplog.text


def test_drop_stored_without_gradient_of_all_groups_is_an_error():
    with pytest.raises(ValueError, match=r"r\.jsonl: .* no group has a gradient"):
        drop_stored_without_gradient(StoredRollouts([group(0, [1, 1])], "r.jsonl"))
