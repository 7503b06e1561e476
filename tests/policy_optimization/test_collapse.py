"""Signs of a collapse of GRPO, each with a batch that just lacks it."""

from __future__ import annotations

import numpy as np

from paddlenlp_ext.policy_optimization.collapse import describe_collapse

DIFFERENT = [[[1, 2], [3, 2]], [[4, 2], [5, 2]]]
ENDED = np.zeros(4, bool)


def test_collapse_of_rewards_is_named_if_no_group_has_a_gradient():
    assert "no gradient" in describe_collapse(DIFFERENT, np.zeros(2), ENDED)["rewards"]
    assert describe_collapse(DIFFERENT, np.array([0.0, 0.1]), ENDED) == {}
    assert describe_collapse(DIFFERENT[:1], np.zeros(1), ENDED[:2]) == {}, "one prompt may be too easy or too hard"


def test_collapse_without_rewards_names_the_reward_functions():
    assert "check the reward functions" in describe_collapse(DIFFERENT, np.full(2, np.nan), ENDED)["rewards"]
    assert "equal rewards" in describe_collapse(DIFFERENT, np.array([0.0, np.nan]), ENDED)["rewards"]
    assert describe_collapse(DIFFERENT, np.array([0.1, np.nan]), ENDED) == {}


def test_collapse_to_one_completion_is_named_with_its_count():
    same = [[[7, 2]] * 10, [[7, 2]] * 10]
    message = describe_collapse(same, np.ones(2), np.zeros(20, bool))["repetition"]
    assert message.startswith("20 of 20 completions, to 2 prompts, are equal")
    assert describe_collapse(same[:1], np.ones(1), np.zeros(10, bool)) == {}, "one prompt may have one answer"
    mixed = [[[7, 2]] * 10, [[7, 2]] * 8 + [[1, 2], [3, 2]]]
    assert describe_collapse(mixed, np.ones(2), np.zeros(20, bool)) == {}


def test_collapse_of_the_length_is_named_with_the_share():
    assert describe_collapse(DIFFERENT, np.ones(2), ~ENDED)["length"].startswith("100% of the completions")
    assert describe_collapse(DIFFERENT, np.ones(2), np.array([True, True, True, False])) == {}
