"""What a command finds in the output_dir of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paddlenlp_ext.cli.run_folder import find_run, is_model_name, newest_run


def write_run(folder: Path, task: str = "CAUSAL_LM", **settings: str) -> Path:
    folder.mkdir(parents=True)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "base", "task_type": task}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    (folder / "run_config.json").write_text(json.dumps(settings))
    (folder / "trainer_state.json").write_text("{}")
    return folder


def test_find_run_of_an_adapter_returns_base_and_method(tmp_path):
    run = find_run(str(write_run(tmp_path / "run")))
    assert (run.base, run.adapter, run.weights, run.is_reward_model) == ("base", "LORA", tmp_path / "run", False)


def test_find_run_of_a_reward_adapter_says_so(tmp_path):
    assert find_run(str(write_run(tmp_path / "run", "SEQ_CLS"))).is_reward_model


def test_find_run_of_a_model_has_no_adapter(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    run = find_run(str(tmp_path))
    assert (run.adapter, run.weights, run.is_reward_model) == (None, tmp_path, False)


def test_find_run_that_has_not_ended_returns_its_newest_checkpoint(tmp_path):
    write_run(tmp_path / "checkpoint-9")
    write_run(tmp_path / "checkpoint-10")
    (tmp_path / "run_config.json").write_text("{}")
    assert find_run(str(tmp_path)).weights == tmp_path / "checkpoint-10"


def test_find_run_in_a_missing_folder_names_a_similar_one(tmp_path):
    write_run(tmp_path / "quickstart")
    with pytest.raises(ValueError, match=f"quickstrat does not exist; did you mean '{tmp_path}/quickstart'"):
        find_run(str(tmp_path / "quickstrat"))


def test_find_run_in_a_folder_of_runs_lists_them(tmp_path):
    write_run(tmp_path / "run")
    with pytest.raises(ValueError, match=f"no model or adapter.*it contains the runs {tmp_path}/run"):
        find_run(str(tmp_path))


def test_newest_run_returns_the_only_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended_early = write_run(Path("checkpoints/killed"))
    (ended_early / "adapter_config.json").unlink()
    run = write_run(Path("checkpoints/quickstart/lora"))
    write_run(run / "checkpoint-3")
    assert newest_run().path == run


def test_newest_run_of_several_lists_the_newest_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, seconds in (("old", 1), ("new", 2)):
        os.utime(write_run(Path("checkpoints") / name) / "trainer_state.json", (seconds, seconds))
    with pytest.raises(ValueError, match=r"several runs; pass one of them: checkpoints/new, checkpoints/old"):
        newest_run()


def test_newest_run_without_runs_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no run in \./checkpoints"):
        newest_run()


def test_is_model_name_of_paths_is_false(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    words = ["smollm2-135m-instruct", "Qwen/Qwen3-0.6B", "m.gguf", "runs", "runs/typo", "checkpoints/typo", "a\\b", "a"]
    assert [word for word in words if is_model_name(word)] == words[:3]
