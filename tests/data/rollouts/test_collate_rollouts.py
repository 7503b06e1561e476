"""Batches of groups: which token each position predicts, the values of its completion, and completions left out."""

from __future__ import annotations

import numpy as np
import pytest

from paddlenlp_ext.data.rollouts.collate_rollouts import TrainingGroup, collate_groups, uncounted_group
from paddlenlp_ext.data.rollouts.rollout import Rollout

PROMPTS = ([11, 12, 13], [14])
COMPLETIONS = (([21, 22], [23], [24, 25, 26]), ([31], [32, 33], [34, 35]))


def make_group(index: int, counted: tuple[bool, ...] = (True, True, True), has_reference: bool = False):
    completions = COMPLETIONS[index]

    def logps(offset: float):
        return tuple(np.array([-(offset + token) for token in each], np.float32) for each in completions)

    rollout = Rollout(
        row_index=index,
        prompt_ids=PROMPTS[index],
        completion_ids=completions,
        old_logps=logps(0.25),
        rewards=np.zeros(3),
        sampling_logps=logps(0.5) if index else None,
        reference_logps=logps(0.75) if has_reference else None,
    )
    values = np.arange(3.0) + 10 * index
    return TrainingGroup(rollout, values, (values + 0.5).astype(np.float32), np.array(counted))


def expected_targets(groups) -> list[tuple[int, int, int, int]]:
    """Return (previous token, position, target token, completion) for each target token."""
    found, number = [], 0
    for group in groups:
        prompt = group.rollout.prompt_ids
        for completion, is_counted in zip(group.rollout.completion_ids, group.is_counted, strict=True):
            tokens = [prompt[-1], *completion]
            if is_counted:
                found += [
                    (tokens[place], len(prompt) - 1 + place, tokens[place + 1], number)
                    for place in range(len(completion))
                ]
            number += 1
    return found


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("counted", [(True, True, True), (True, False, True), (False, False, True)])
@pytest.mark.parametrize("multiple", [None, 16])
def test_collate_groups_predicts_each_token_from_the_position_before_it(share_prompt, counted, multiple):
    groups = [make_group(0, counted), make_group(1)]
    batch = collate_groups(groups, share_prompt=share_prompt, pad_to_multiple_of=multiple, pad_token_id=9)
    positions = batch.loss_positions
    found = zip(
        batch.input_ids.ravel()[positions].tolist(),
        batch.position_ids.ravel()[positions].tolist(),
        batch.labels.ravel()[positions].tolist(),
        batch.completions.tolist(),
        strict=True,
    )
    assert list(found) == expected_targets(groups)
    assert batch.num_completions == 6
    lengths = [[len(ids) for ids in each] for each in COMPLETIONS]
    assert batch.lengths.tolist() == [n * keep for n, keep in zip(lengths[0], counted, strict=True)] + lengths[1]
    assert multiple is None or batch.input_ids.shape[1] % multiple == 0


def test_collate_groups_with_shared_prompts_has_fewer_positions():
    groups = [make_group(0), make_group(1)]
    shared, repeated = (collate_groups(groups, share_prompt=share).input_ids.size for share in (True, False))
    assert repeated - shared == 2 * (len(PROMPTS[0]) - 1), "two of three copies of a prompt, without its last token"


def test_collate_groups_gives_each_token_the_values_of_its_completion():
    groups = [make_group(0, (True, False, True), has_reference=True), make_group(1, has_reference=True)]
    batch = collate_groups(groups)
    tokens = batch.labels.ravel()[batch.loss_positions].astype(np.float32)
    np.testing.assert_array_equal(batch.old_logps, -(0.25 + tokens))
    is_second = batch.completions >= 3  # the first group has no other log-probabilities in sampling
    np.testing.assert_array_equal(batch.sampling_logps, -(np.where(is_second, 0.5, 0.25) + tokens))
    np.testing.assert_array_equal(batch.reference_logps, -(0.75 + tokens))
    np.testing.assert_array_equal(batch.advantages, [0, 1, 2, 10, 11, 12])
    np.testing.assert_array_equal(batch.weights, np.array([0.5, 1.5, 2.5, 10.5, 11.5, 12.5], np.float32))


def test_collate_groups_without_reference_in_a_group_has_no_reference():
    assert collate_groups([make_group(0, has_reference=True), make_group(1)]).reference_logps is None


def test_uncounted_group_keeps_all_tokens():
    batch = collate_groups([uncounted_group(make_group(0, (False, False, False)).rollout)])
    assert batch.lengths.tolist() == [2, 1, 3] and not batch.advantages.any() and not batch.weights.any()
