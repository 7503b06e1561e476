"""Configuration of llm/run_reward.py: its keys, its rules, and the keys of other programs."""

from __future__ import annotations

import pytest

from paddlenlp_ext.config import ConfigError, RunConfig, load_run_config
from paddlenlp_ext.config.parser import run_config_from
from paddlenlp_ext.config.run_config import REWARD_SECTIONS
from paddlenlp_ext.config.sections.preference import PreferenceDataConfig
from paddlenlp_ext.config.sections.reward import RewardConfig
from paddlenlp_ext.config.validation import check_trainer_config
from paddlenlp_ext.peft.registry import peft_methods
from tests.config.config_cases import SMALLEST, problems, write
from tests.config.paddlenlp_files import COMMON, OTHER

METHODS = peft_methods()
SMALLEST_REWARD = {"model_name_or_path": "m", "output_dir": "out", "do_train": True, "train_dataset_path": "a.jsonl"}


def load(**keys) -> RunConfig:
    return run_config_from(SMALLEST_REWARD | keys, {}, METHODS, REWARD_SECTIONS)


def refused(**keys) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(**keys)
    return {problem.key: problem.message for problem in caught.value.problems}


def test_reward_keys_of_trl_and_paddlenlp_load(tmp_path):
    keys = {"center_rewards_coefficient": 0.01, "regularization": 0.001, "max_seq_len": 512, "max_prompt_len": 300}
    config = load(**keys, share_prompt=False)
    assert config.reward == RewardConfig(center_rewards_coefficient=0.01, regularization=0.001, share_prompt=False)
    assert (config.data.max_length, config.data.src_length) == (512, 300) and config.preference is None
    assert config.notes == [] and load().reward == RewardConfig()
    again = load_run_config([write(tmp_path, config.to_flat_dict())], METHODS, REWARD_SECTIONS)
    assert again.to_flat_dict() == config.to_flat_dict()


def test_reward_file_of_paddlenlp_loads(tmp_path):
    """Load the keys of PaddleNLP's files for preferences, which its reward models share."""
    fine_tuning = ("src_length", "max_length", "metric_for_best_model")
    written = {key: value for key, value in (COMMON | OTHER["kto"][0]).items() if key not in fine_tuning}
    config = load_run_config([write(tmp_path, {**written, "process_reward": False})], METHODS, REWARD_SECTIONS)
    assert (config.data.max_length, config.data.src_length) == (4096, 2048) and config.reward == RewardConfig()


def test_reward_rules_are_those_of_preference_data():
    found = refused(autoregressive=True, center_rewards_coefficient=-1, beta=0.2)
    assert set(found) == {"autoregressive", "center_rewards_coefficient", "beta"}
    assert "pnx dpo" in found["beta"]
    assert refused(process_reward=True)["process_reward"].startswith("process_reward: true is not available yet")
    with pytest.raises(ConfigError, match="autoregressive is for plain text"):
        check_trainer_config(RunConfig(reward=RewardConfig(), data=PreferenceDataConfig(autoregressive=True)))


EVALUATION = {"do_eval": True, "evaluation_strategy": "epoch"}


def test_reward_metrics_select_the_best_model(tmp_path):
    evaluation = {**EVALUATION, "dev_dataset_path": "dev.jsonl"}
    assert load(**evaluation, metric_for_best_model="eval_margin").train.metric_for_best_model == "margin"
    assert load(**evaluation, metric_for_best_model="accuracy").train.greater_is_better
    found = refused(**evaluation, metric_for_best_model="rewards/margins")
    assert "not measured by pnx reward; use one of loss, accuracy, margin" in found["metric_for_best_model"]
    (problem,) = problems(write(tmp_path, SMALLEST | EVALUATION | {"metric_for_best_model": "margin"}), methods=METHODS)
    assert "pnx reward" in problem.message


def test_reward_key_in_fine_tuning_names_the_program(tmp_path):
    (problem,) = problems(write(tmp_path, SMALLEST | {"regularization": 0.1}), methods=METHODS)
    assert problem.key == "regularization" and "pnx reward" in problem.message
