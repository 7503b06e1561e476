"""Key weight_quantize_algo: one format or a map of formats, and its effect on other keys."""

from __future__ import annotations

import json

import pytest

from tests.config.config_cases import SMALLEST, load, problems, write

MAP = {".*q_proj": "nf4", "down_proj": "weight_only_int8", "v_proj": None}
LORA = {"lora": True}


def test_weight_quantize_algo_map_loads_from_file_and_command_line(tmp_path):
    path = write(tmp_path, SMALLEST | LORA | {"weight_quantize_algo": MAP})
    assert load(path).model.weight_quantize_algo == MAP
    path = write(tmp_path, SMALLEST | LORA)
    config = load(path, "--weight_quantize_algo", json.dumps(MAP))
    assert config.model.weight_quantize_algo == MAP
    assert load(write(tmp_path, config.to_flat_dict())).model.weight_quantize_algo == MAP
    assert load(path, "--weight_quantize_algo", "nf4").model.weight_quantize_algo == "nf4"


def test_weight_blocksize_spellings_are_one_key(tmp_path):
    values = {"weight_quantize_algo": "nf4", "qlora_weight_blocksize": 128, "qlora_weight_double_quant": True}
    model = load(write(tmp_path, SMALLEST | LORA | values)).model
    assert (model.weight_blocksize, model.weight_double_quant) == (128, True)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("nf5", "not one of: weight_only_int8"),
        ({"q_proj": "nf5"}, "not one of: weight_only_int8"),
        ({"q_proj": 4}, "expected a string or an object {name: string or null}"),
        (["nf4"], "expected a string or an object"),
        ("llm.int8", "use weight_only_int8"),
        ("a8w8", "use weight_only_int8"),
        ({"q_proj": "a8w8"}, "use weight_only_int8"),
        ({}, "does not name a format; leave it out"),
        ({"q_proj": None}, "does not name a format; leave it out"),
    ],
    ids=str,
)
def test_weight_quantize_algo_with_invalid_values_is_refused(tmp_path, value, words):
    (found,) = problems(write(tmp_path, SMALLEST | LORA | {"weight_quantize_algo": value}))
    assert words in found.message and found.key == "weight_quantize_algo"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("qlora_weight_blocksize", 63, "is odd"), ("weight_double_quant_block_size", 1, "allowed: at least 2")],
)
def test_weight_blocksize_invalid_is_refused(tmp_path, key, value, words):
    values = {"weight_quantize_algo": "nf4", "weight_double_quant": True, key: value}
    (found,) = problems(write(tmp_path, SMALLEST | LORA | values))
    assert words in found.message and found.key == key.removeprefix("qlora_")


@pytest.mark.parametrize("word", ["{", '{"q_proj": 4}', "[]"])
def test_weight_quantize_algo_with_unknown_names_is_refused(tmp_path, word):
    (found,) = problems(write(tmp_path, SMALLEST | LORA), "--weight_quantize_algo", word)
    assert found.key == "weight_quantize_algo"


def test_quantized_base_without_adapter_is_refused(tmp_path):
    values = SMALLEST | {"weight_quantize_algo": "nf4"}
    (found,) = problems(write(tmp_path, values))
    assert "set an adapter such as lora: true" in found.message
    (found,) = problems(write(tmp_path, values | LORA | {"lora_rank": 0}))
    assert found.key == "lora_rank", "an invalid adapter config is not reported as a missing adapter as well"
    load(write(tmp_path, values | {"do_train": False, "do_eval": True}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"weight_quantize_algo": "weight_only_int8", "weight_double_quant": True}, "it applies only to nf4, fp4"),
        ({"weight_quantize_algo": "nf4", "weight_double_quant_block_size": 64}, "weight_double_quant is false"),
        ({"weight_double_quant": True}, "weight_quantize_algo is off"),
    ],
    ids=str,
)
def test_quantization_keys_without_effect_are_noted(tmp_path, values, words):
    config = load(write(tmp_path, SMALLEST | LORA | {"device": "cpu"} | values))
    assert len(config.notes) == 1 and words in config.notes[0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "set an adapter such as lora: true"),
        (LORA | {"do_train": False, "do_eval": True}, "needs do_train: true"),
        (LORA | {"device": "gpu"}, "runs only on the CPU"),
        (LORA | {"tensor_parallel_degree": 2}, "not available with tensor_parallel_degree"),
        (LORA | {"pipeline_parallel_degree": 2}, "not available with pipeline_parallel_degree"),
        (LORA | {"expert_parallel_degree": 2}, "not available with expert_parallel_degree"),
    ],
    ids=str,
)
def test_int8_training_in_runs_that_cannot_use_it_is_refused(tmp_path, monkeypatch, values, words):
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")  # in one process, parallel degrees are ignored
    found = problems(write(tmp_path, SMALLEST | {"device": "cpu", "int8_training": True} | values))
    assert any(words in each.message and each.key == "int8_training" for each in found)


def test_int8_training_with_an_adapter_is_accepted(tmp_path):
    values = SMALLEST | LORA | {"device": "cpu", "int8_training": True}
    assert load(write(tmp_path, values)).model.int8_training
    assert load(write(tmp_path, values | {"weight_quantize_algo": "nf4"})).model.int8_training
