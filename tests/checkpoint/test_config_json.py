"""Test config.json and generation_config.json: precedence, and errors that name the file."""

from __future__ import annotations

import json

import pytest

from paddlenlp_ext.checkpoint.config_json import (
    read_generation_config,
    read_model_config,
    write_generation_config,
    write_model_config,
)
from tests.stress.wrong_values import OF_OTHER_TYPE


def folder_with(tmp_path, config: dict, generation: dict | None = None):
    write_model_config(tmp_path, {"model_type": "llama"} | config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_write_model_config_reads_back(tmp_path):
    write_model_config(tmp_path / "new", {"model_type": "llama", "name": "ä", "rope_scaling": None})
    assert read_model_config(tmp_path / "new") == {"model_type": "llama", "name": "ä", "rope_scaling": None}


def test_read_generation_config_wins_over_config(tmp_path):
    folder = folder_with(tmp_path, {"eos_token_id": 1, "bos_token_id": 5}, {"eos_token_id": [2, 3], "top_p": 0.9})
    assert read_generation_config(folder) == {
        "eos_token_id": [2, 3],
        "bos_token_id": 5,
        "pad_token_id": None,
        "top_p": 0.9,
    }


def test_read_generation_config_falls_back_to_config(tmp_path):
    assert read_generation_config(folder_with(tmp_path, {"eos_token_id": 1}))["eos_token_id"] == [1]


def test_read_generation_config_without_eos_is_empty_list(tmp_path):
    assert read_generation_config(folder_with(tmp_path, {}))["eos_token_id"] == []


def test_write_generation_config_empty_eos_is_null(tmp_path):
    """Check that null is written for no end tokens; transformers reads the first entry of a list."""
    folder = folder_with(tmp_path, {"eos_token_id": 4})
    write_generation_config(folder, {"eos_token_id": []})
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": None}
    assert read_generation_config(folder)["eos_token_id"] == []


def test_read_generation_config_non_integer_ids_raise(tmp_path):
    with pytest.raises(ValueError, match=r"eos_token_id in config.json must be an integer.* got '</s>'"):
        read_generation_config(folder_with(tmp_path, {"eos_token_id": "</s>"}))
    folder = folder_with(tmp_path, {"eos_token_id": 2})
    (folder / "generation_config.json").write_text('{"bos_token_id": 1.5}')
    with pytest.raises(ValueError, match=r"bos_token_id in generation_config.json must be an integer.* got 1.5"):
        read_generation_config(folder)


def test_read_model_config_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    with pytest.raises(ValueError, match=r'config\.json: "model_type" is missing'):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{hidden_size")
    with pytest.raises(ValueError, match=r"config\.json:\d+:\d+: damaged or not JSON"):
        read_model_config(tmp_path)
    with pytest.raises(ValueError, match="no such directory"):
        read_model_config(tmp_path / "nowhere")


def test_read_generation_config_value_of_another_type_raises_with_its_key(tmp_path):
    generation = {
        "eos_token_id": [2], "pad_token_id": 0, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50,
        "repetition_penalty": 1.1, "max_new_tokens": 100,
    }  # fmt: skip
    for key, value in generation.items():
        for wrong in OF_OTHER_TYPE[type(value)]:
            if key == "eos_token_id" and wrong == 2:
                continue
            with pytest.raises(ValueError, match=rf"^{tmp_path}: {key} in generation_config\.json must be"):
                read_generation_config(folder_with(tmp_path, {}, {**generation, key: wrong}))
