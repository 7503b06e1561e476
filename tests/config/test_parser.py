"""Merging files and the command line, aliases, adapter methods, and the conversion back to a flat file."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.config import ConfigError, load_run_config
from tests.config.config_cases import (
    METHODS,
    SMALLEST,
    FakeLoKrConfig,
    FakeLoRAConfig,
    FakePissaConfig,
    load,
    problems,
    write,
)


def test_load_run_config_defaults_follow_the_documentation():
    config = load("--model_name_or_path", "m", "--dataset_name_or_path", "d", "--output_dir", "o", "--do_train")
    assert config.optim.learning_rate == 5e-5
    assert config.train.num_train_epochs == 3 and config.train.save_strategy == "no"
    assert config.train.per_device_train_batch_size == config.train.per_device_eval_batch_size == 8
    assert (config.data.src_length, config.data.max_length) == (1024, 2048)
    assert (config.generation.top_k, config.generation.top_p) == (1, 1.0)
    assert config.train.neftune_noise_alpha == 5.0 and config.optim.warmup_steps == 0
    assert config.peft is None and config.notes == []


def test_load_run_config_merges_files_then_command_line(tmp_path):
    first = write(tmp_path, SMALLEST | {"seed": 1, "max_steps": 1, "logging_steps": 1, "eval_steps": 9}, "a.json")
    second = write(tmp_path, {"max_steps": 2, "logging_steps": 2, "eval_steps": None}, "b.json")
    config = load(first, second, "--logging_steps", "3", "--logging_steps=4")
    assert (config.train.seed, config.train.max_steps, config.train.logging_steps) == (1, 2, 4)
    assert config.train.eval_steps == 4, "null removes the 9 of the first file; the default is logging_steps"
    assert load(second, first).train.max_steps == 1
    assert load(first, second, "--eval_steps", "0").train.eval_steps == 2, "0 is unset, as in PaddleNLP"


def test_load_run_config_reports_an_overridden_error(tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | {"seed": "x"}), "--seed", "3")
    assert found.key == "seed" and found.line == 6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--lora"], True),
        (["--lora", "true"], True),
        (["--lora=YES"], True),
        (["--lora", "0"], False),
        (["--lora", "--no_lora"], False),
        (["--no-lora", "--lora", "on"], True),
        (["--lora", "null"], False),
    ],
)
def test_command_line_switches_stand_alone_or_negated(tmp_path, arguments, expected):
    config = load(*arguments, write(tmp_path, SMALLEST))
    assert (config.peft is not None) is expected


def test_command_line_values_are_converted(tmp_path):
    path = write(tmp_path, SMALLEST)
    config = load(
        *("--max-steps", "-1", "--learning_rate", "1e-4", "--lora", "--lora_target_modules", "q_proj,v_proj"),
        *("--resume_from_checkpoint", path, "--chat_template=none", "--weight_decay", "1"),
        path,
    )
    assert config.train.max_steps == -1 and config.optim.learning_rate == 1e-4 and config.optim.weight_decay == 1.0
    assert config.peft.target_modules == ("q_proj", "v_proj")
    assert config.train.resume_from_checkpoint == path and config.data.chat_template == "none"
    config = load(path, "--resume_from_checkpoint", "--lora", "--lora_target_modules", '[".*[qk]_proj{1,2}"]')
    assert config.train.resume_from_checkpoint is True and config.peft.target_modules == (".*[qk]_proj{1,2}",)


def test_command_line_errors_are_located(tmp_path):
    path = write(tmp_path, SMALLEST)
    found = problems(path, "-x", "--max_steps", "--lora_rank", "1e1", "--no_lora=3", "--saveing_steps", "5", "--seed")
    assert [str(problem).split(": ")[1] for problem in found] == [
        *("-x", "--max_steps", "--lora_rank", "--no_lora", "--saveing_steps", "--seed")
    ]
    assert "did you mean 'save_steps'?" in found[4].message and "a value is missing" in found[5].message


@pytest.mark.parametrize(
    ("written", "value", "key"),
    [("eval_step", 7, "eval_steps"), ("save_total_lim", 1, "save_total_limit"), ("greedy_zero", True, None)],
)
def test_abbreviation_of_one_key_is_read_with_a_note(tmp_path, written, value, key):
    key = key or "greedy_zero_padding"
    used = SMALLEST | {"evaluation_strategy": "steps", "do_eval": True, "zero_padding": True}
    for config in (
        load(write(tmp_path, used | {written: value})),
        load(write(tmp_path, used), f"--{written}", str(value)),
    ):
        assert config.to_flat_dict()[key] == value
        (note,) = config.notes
        assert note.startswith(f"{written} is read as {key}")
    path = write(tmp_path, used)
    assert load("--greedy_zero", path).data.greedy_zero_padding, "the file is no value of an abbreviated switch"
    assert load(path, "--data_cache_d", "chat.json").data.data_cache_dir == "chat.json"


def test_chat_template_kwargs_are_an_object_in_files_and_on_the_command_line(tmp_path):
    kwargs = {"enable_thinking": False, "documents": [{"title": "a"}]}
    path = write(tmp_path, SMALLEST | {"chat_template_kwargs": kwargs})
    assert load(path).data.chat_template_kwargs == kwargs
    assert (
        load(write(tmp_path, SMALLEST), "--chat_template_kwargs", json.dumps(kwargs)).data.chat_template_kwargs
        == kwargs
    )
    (found,) = problems(path, "--chat_template_kwargs", "enable_thinking")
    assert "expected an object" in str(found)


def test_abbreviation_of_several_keys_is_refused(tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | {"save_st": 5}))
    assert found.message.endswith(
        "is an abbreviation of several keys: save_steps, save_strategy; write one of them in full"
    )
    (found,) = problems(write(tmp_path, SMALLEST), "--", "5")
    assert found.message == "unknown key ''; --help lists the keys"


def test_abbreviation_that_differs_from_its_key_is_refused(tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | {"logging_steps": 3, "logging_ste": 4}))
    assert "logging_ste and logging_steps are names of the same key" in found.message


@pytest.mark.parametrize("wins", [True, False])
def test_intokens_wins_over_zero_padding_in_one_file(tmp_path, wins):
    for values in ({"intokens": wins, "zero_padding": not wins}, {"zero_padding": not wins, "intokens": wins}):
        config = load(write(tmp_path, SMALLEST | values))
        assert config.data.zero_padding is wins
        (note,) = config.notes
        assert note.startswith("zero_padding has no effect: intokens is the same key, and takes precedence")


def test_task_name_or_path_is_the_dataset(tmp_path):
    config = load(write(tmp_path, SMALLEST | {"task_name_or_path": "other"}))
    assert config.data.dataset_name_or_path == "other" and config.data.task_name is None


def test_aliases_load_as_their_key(tmp_path):
    pairs = {
        "flashmask": ("flash_mask", True),
        "flash_attention": ("use_flash_attention", True),
        "intokens": ("zero_padding", True),
        "eval_strategy": ("evaluation_strategy", "no"),
        "qlora_weight_blocksize": ("weight_blocksize", 64),
        "qlora_weight_double_quant": ("weight_double_quant", False),
        "qlora_weight_double_quant_block_size": ("weight_double_quant_block_size", 256),
        "lokr_dim": ("lokr_rank", 4),
    }
    others = {alias: value for alias, (_, value) in pairs.items()}
    flat = load(write(tmp_path, SMALLEST | others | {"lokr": True})).to_flat_dict()
    assert {key: flat[key] for key, _ in pairs.values()} == dict(pairs.values())
    both = SMALLEST | {"intokens": True, "zero_padding": True}
    assert load(write(tmp_path, both)).data.zero_padding
    (found,) = problems(write(tmp_path, SMALLEST | {"flashmask": True, "flash_mask": False}))
    assert found.line == 7 and "flash_mask and flashmask are names of the same key" in found.message
    first = write(tmp_path, SMALLEST | {"intokens": True}, "a.json")
    assert not load(first, write(tmp_path, {"zero_padding": False}, "b.json")).data.zero_padding


def test_convert_takes_0_and_1_for_booleans(tmp_path):
    config = load(write(tmp_path, SMALLEST | {"continue_training": 1, "sequence_parallel": 0, "bf16": 0}))
    assert config.model.continue_training is True and config.parallel.sequence_parallel is False
    assert problems(write(tmp_path, SMALLEST | {"bf16": 2}))[0].key == "bf16"


def test_adapter_switch_selects_the_method(tmp_path):
    values = {"lora": True, "lora_rank": 4, "lora_target_modules": "q_proj", "rslora": True, "lora_plus_scale": 16}
    config = load(write(tmp_path, SMALLEST | values))
    expected = FakeLoRAConfig(rank=4, target_modules=("q_proj",), rslora=True, plus_scale=16.0)
    assert config.peft == expected and config.peft_switch == "lora"
    assert "not_a_key" not in config.to_flat_dict() and "lora_not_a_key" not in config.to_flat_dict()


def test_adapter_refinement_needs_the_method_it_refines(tmp_path):
    config = load(write(tmp_path, SMALLEST | {"lora": True, "pissa": True, "lora_rank": 4}))
    assert config.peft == FakePissaConfig(rank=4)
    assert load(write(tmp_path, config.to_flat_dict(), "again.json")).peft == config.peft
    (found,) = problems(write(tmp_path, SMALLEST | {"pissa": True}))
    assert found.message == "pissa also needs lora: true"


def test_adapter_switches_exclude_each_other(tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | {"lora": True, "lokr": True}))
    assert found.line == 7 and found.message == "several adapter methods are on: lora, lokr; keep one"
    switches = {"lora": True, "lokr": True, "hra": True}
    (found,) = problems(write(tmp_path, SMALLEST | switches), methods=METHODS | {"hra": FakeLoRAConfig})
    assert found.line == 8 and found.message == "several adapter methods are on: lora, lokr, hra; keep one"


def test_adapter_config_error_is_located_at_its_key(tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | {"lora_rank": 13, "lora": True}))
    assert (found.line, found.column) == (6, 18) and "take 12" in found.message


def test_adapter_keys_without_their_switch_are_noted(tmp_path):
    config = load(write(tmp_path, SMALLEST | {"lora_rank": 4, "lora": False}))
    assert config.peft is None and config.notes == [f"lora_rank has no effect: lora is false ({tmp_path}/run.json:6)"]


def test_adapter_keys_are_known_only_if_registered(tmp_path):
    values = SMALLEST | {"lokr": True, "lokr_dim": 4}
    assert load(write(tmp_path, values)).peft == FakeLoKrConfig(rank=4)
    without = {name: method for name, method in METHODS.items() if name != "lokr"}
    found = problems(write(tmp_path, values), methods=without)
    assert [problem.message.split(";")[0] for problem in found] == ["unknown key 'lokr'", "unknown key 'lokr_dim'"]


def test_to_flat_dict_loads_to_the_same_tree(tmp_path):
    values = {"lora": True, "lora_rank": 4, "eval_strategy": "epoch", "report_to": "none", "flashmask": None}
    config = load(write(tmp_path, SMALLEST | values))
    again = load(write(tmp_path, config.to_flat_dict(), "run_config.json"))
    config.notes.clear(), again.notes.clear()
    assert again == config and json.dumps(config.to_flat_dict())
    assert config.train.do_eval and config.model.tokenizer_name_or_path == "model"
    assert config.precision.device in ("cpu", "gpu")


def test_load_run_config_expands_home_in_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    file = write(tmp_path, SMALLEST | {"output_dir": "~/runs", "resume_from_checkpoint": "~/runs/checkpoint-3"})
    train = load(file).train
    assert (train.output_dir, train.resume_from_checkpoint) == ("/home/me/runs", "/home/me/runs/checkpoint-3")
    assert load(file, "--resume_from_checkpoint", "true").train.resume_from_checkpoint is True


def test_command_keys_in_a_file_are_refused(tmp_path):
    (found,) = problems(write(tmp_path, SMALLEST | {"dry_run": True}))
    assert found.line == 6 and "--dry_run" in found.message
    config = load(write(tmp_path, SMALLEST), "--dry_run", "--show_data", "3")
    assert config.command.dry_run and config.command.preview_data == 3
    assert "dry_run" not in config.to_flat_dict()


def test_load_run_config_with_help_lists_the_keys_of_the_methods_and_exits_with_0(capsys):
    with pytest.raises(SystemExit) as stop:
        load_run_config(["--help"], METHODS)
    assert stop.value.code == 0
    assert "  --lokr_rank " in (text := capsys.readouterr().out) and "--lokr_dim" in text


def test_load_run_config_without_arguments_shows_the_usage():
    (found,) = problems()
    assert "CONFIG.json" in found.message


def test_config_error_lists_problems_in_reading_order(tmp_path):
    first = write(tmp_path, '{"seed": "x", "do_train": true,\n "output_dir": 3, "sed": 1}', "z.json")
    second = write(tmp_path, '{"max_steps": 0, "model_name_or_path": "m", "dataset_name_or_path": "d"}', "a.json")
    with pytest.raises(ConfigError) as error:
        load(first, second, "--top_p", "2")
    places = [(problem.file, problem.line, problem.column) for problem in error.value.problems]
    assert places == [(first, 1, 10), (first, 2, 16), (first, 2, 19), *places[3:]]
    assert str(error.value).startswith(f"{len(places)} problems in the configuration:\n  1. {first}:1:10: seed")
    assert str(error.value.problems[-1]).startswith("command line: --top_p")
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("written", "optimizer"),
    [
        *(("adamw_torch", "adamw"), ("adamw_torch_fused", "adamw"), ("paged_adamw_32bit", "adamw")),
        *(("adamw_bnb_8bit", "adamw_8bit"), ("paged_adamw_8bit", "adamw_8bit")),
    ],
)
def test_optimizer_names_of_transformers_are_read_as_the_optimizer_with_the_same_updates(tmp_path, written, optimizer):
    assert load(write(tmp_path, SMALLEST | {"optim": written})).optim.optim == optimizer


def test_cosine_with_min_lr_is_read_as_cosine(tmp_path):
    keys = {"lr_scheduler_type": "cosine_with_min_lr", "min_learning_rate": 1e-6}
    optim = load(write(tmp_path, SMALLEST | keys)).optim
    assert (optim.lr_scheduler_type, optim.final_learning_rate) == ("cosine", 1e-6)
