"""Arguments under TRL's names: the keys that they set, arguments without effect, and errors."""

from __future__ import annotations

import inspect

import pytest

from paddlenlp_ext.config.parser import run_config_from
from paddlenlp_ext.peft.registry import peft_methods
from paddlenlp_ext.trl.arguments import DPOConfig, GRPOConfig, RewardConfig, SFTConfig

CLASSES = (SFTConfig, DPOConfig, RewardConfig, GRPOConfig)
DATA = {"model_name_or_path": "m", "dataset_name_or_path": "d", "do_train": True, "device": "cpu"}


def parsed(args):
    rewards = {"reward_funcs": ["exact_answer"]} if isinstance(args, GRPOConfig) else {}
    return run_config_from({**DATA, **rewards, **args.to_run_keys()}, {}, peft_methods(), args.sections)


@pytest.mark.parametrize("config_class", CLASSES)
def test_arguments_by_default_are_a_valid_run(config_class):
    config = parsed(config_class("out"))
    assert config.train.output_dir == "out" and config.train.logging_steps == 10


@pytest.mark.parametrize(
    ("arguments", "section", "expected"),
    [
        ({"learning_rate": 1e-3, "warmup_ratio": 0.1}, "optim", {"learning_rate": 1e-3, "warmup_ratio": 0.1}),
        ({"warmup_steps": 0.25}, "optim", {"warmup_ratio": 0.25, "warmup_steps": 0}),
        ({"warmup_steps": 25}, "optim", {"warmup_steps": 25}),
        ({"optim": "adamw_bnb_8bit"}, "optim", {"optim": "adamw_8bit"}),
        ({"eval_strategy": "epoch"}, "train", {"evaluation_strategy": "epoch"}),
        ({"gradient_checkpointing": True}, "train", {"recompute": True}),
        ({"neftune_noise_alpha": 7.0}, "train", {"neftune": True, "neftune_noise_alpha": 7.0}),
        ({"neftune_noise_alpha": None}, "train", {"neftune": False}),
        ({"report_to": "none"}, "train", {"report_to": ()}),
        ({"packing": True, "max_length": 256}, "data", {"greedy_zero_padding": True, "max_length": 256}),
        ({"run_keys": {"max_length": 77, "mask_reasoning": True}}, "data", {"max_length": 77, "mask_reasoning": True}),
        ({"bf16": False, "use_cpu": True}, "precision", {"bf16": False, "device": "cpu"}),
    ],
)
def test_sft_config_sets_the_key_of_each_argument(arguments, section, expected):
    values = vars(getattr(parsed(SFTConfig("out", **arguments)), section))
    assert {name: values[name] for name in expected} == expected


def test_dpo_config_sets_loss_limits_and_reference():
    config = parsed(
        DPOConfig("out", beta=0.3, loss_type=["ipo"], max_length=64, max_prompt_length=40, sync_ref_model=True)
    )
    assert (config.preference.beta, config.preference.loss_type, config.preference.ref_model_update_steps) == (
        0.3,
        "ipo",
        512,
    )
    assert (config.data.src_length, config.data.max_length) == (40, 128)
    assert parsed(DPOConfig("out", truncation_mode="keep_end")).data.truncation == "left"


@pytest.mark.parametrize(
    ("arguments", "section", "expected"),
    [
        ({}, "data", {"src_length": 1 << 30}),
        ({}, "grpo", {"num_generations": 8, "loss_type": "dapo", "steps_per_generation": None}),
        ({"max_completion_length": 64, "top_k": -1, "top_p": 0.9}, "generation", {"max_new_tokens": 64, "top_k": 0}),
        ({"top_k": None, "temperature": 0.7}, "generation", {"top_k": 0, "temperature": 0.7}),
        ({"max_prompt_length": 99}, "data", {"src_length": 99}),
        ({"beta": 0.1, "epsilon_high": 0.28, "delta": 2.0}, "grpo", {"beta": 0.1, "epsilon_high": 0.28, "delta": 2.0}),
        ({"scale_rewards": False, "num_iterations": 2}, "grpo", {"scale_rewards": "none", "num_iterations": 2}),
        ({"reward_weights": (1, 2)}, "rewards", {"reward_weights": [1, 2]}),
        ({"generation_batch_size": 32}, "grpo", {"steps_per_generation": 4}),
        ({"per_device_eval_batch_size": 16, "num_generations_eval": 4}, "train", {"per_device_eval_batch_size": 4}),
        ({"per_device_eval_batch_size": 2}, "train", {"per_device_eval_batch_size": 1}),
        ({"vllm_importance_sampling_mode": "token_mask"}, "grpo", {"importance_sampling_mode": "token_mask"}),
        ({"run_keys": {"dynamic_sampling": True}}, "grpo", {"dynamic_sampling": True}),
        ({"use_vllm": True, "vllm_mode": "server", "log_completions": True}, "grpo", {"beta": 0.0}),
    ],
)
def test_grpo_config_sets_the_key_of_each_argument(arguments, section, expected):
    values = vars(getattr(parsed(GRPOConfig("out", **arguments)), section))
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"generation_batch_size": 12},
            "generation_batch_size=12 must be a multiple of 8, per_device_train_batch_size",
        ),
        ({"steps_per_generation": 2}, "generation_batch_size and steps_per_generation exclude each other"),
    ],
)
def test_grpo_config_with_a_generation_batch_size_that_does_not_fit_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig("out", **{"generation_batch_size": 16, **arguments}).to_run_keys()


@pytest.mark.parametrize(
    ("config_class", "name"), [(each, name) for each in CLASSES for name in sorted(each.no_effect)]
)
def test_argument_without_effect_is_accepted_only_at_its_neutral_values(config_class, name):
    accepted, _ = config_class.no_effect[name]
    for value in accepted:
        assert config_class("out", **{name: value}).to_run_keys() == config_class("out").to_run_keys()
    if accepted:
        with pytest.raises(ValueError, match=f"{name}='other value'"):
            config_class("out", **{name: "other value"})


@pytest.mark.parametrize("config_class", CLASSES)
def test_unknown_argument_is_an_error_with_the_nearest_name(config_class):
    with pytest.raises(TypeError, match="no argument 'learning_rat'; did you mean 'learning_rate'"):
        config_class("out", learning_rat=1)


def test_dpo_config_with_two_losses_is_an_error():
    with pytest.raises(ValueError, match="pass the name of one loss"):
        DPOConfig("out", loss_type=["sigmoid", "sft"]).to_run_keys()


@pytest.mark.parametrize("config_class", CLASSES)
def test_signature_lists_every_field(config_class):
    assert list(inspect.signature(config_class).parameters)[:2] == ["output_dir", "overwrite_output_dir"]
