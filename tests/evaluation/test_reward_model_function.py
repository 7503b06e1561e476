"""Rewards of a reward model, with the interface of a reward function."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paddlenlp_ext import AutoModelForSequenceClassification, AutoTokenizer, score
from paddlenlp_ext.config.sections.rewards import RewardsConfig
from paddlenlp_ext.rewards.load_rewards import load_rewards
from paddlenlp_ext.rewards.score import score as score_completions


def test_reward_model_scores_as_the_public_function(run_folders: Path) -> None:
    base, folder = run_folders / "model", run_folders / "reward"
    model = AutoModelForSequenceClassification.from_pretrained(base)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.save_pretrained(folder)
    rewards = load_rewards(RewardsConfig(reward_funcs=("reward_model",), reward_model_name_or_path=str(folder)))
    prompts, completions = ["red fig", "blue lime", "red fig"], ["fig red", " ", "lime"]
    found = score_completions(rewards, prompts, completions, [[1], [2], [3]], {})
    rows = [{"prompt": "red fig", "completion": "fig red"}, {"prompt": "red fig", "completion": "lime"}]
    expected = score(model, tokenizer, rows)
    np.testing.assert_allclose(found[[0, 2], 0], np.ravel(expected), rtol=1e-5)
    assert np.isnan(found[1, 0]) and expected[0] != expected[1]


def test_reward_model_without_a_score_head_is_an_error(run_folders: Path) -> None:
    config = RewardsConfig(reward_funcs=("reward_model",), reward_model_name_or_path=str(run_folders / "model"))
    with pytest.raises(ValueError, match="is a language model, without a score head"):
        load_rewards(config)
