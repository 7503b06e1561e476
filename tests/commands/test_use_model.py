"""Command lines that `pnx` passes to the programs for the folder of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddlenlp_ext.commands import pnx


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Replace the programs, and collect the arguments that they get; the current folder has the run `run`."""
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "base", "task_type": "CAUSAL_LM"}
    Path("run/adapter_config.json").write_text(json.dumps(adapter))
    calls: list[Any] = []
    for program in ("predict.predict", "export_model.export_model", "run_evaluation.run_evaluation"):
        monkeypatch.setattr(f"paddlenlp_ext.cli.{program}", lambda *arguments: calls.append(arguments[0]))
    monkeypatch.setattr("paddlenlp_ext.cli.run_sampling.run_sampling", lambda *arguments: calls.extend(arguments))
    for program in ("merge_peft_params.run_merge", "export_gguf.run_export", "run_quantization.run_quantization"):
        monkeypatch.setattr(f"paddlenlp_ext.cli.{program}", lambda *arguments: calls.append(arguments[0]))
    monkeypatch.setattr("paddlenlp_ext.serve.server.serve", calls.append)
    return calls


def test_chat_with_a_run_loads_its_folder(called):
    pnx.run(["chat", "run", "--max-new-tokens", "7"])
    assert (called[0].model_name_or_path, called[0].data_file, called[0].max_length) == ("run", None, 7)


def test_chat_with_a_model_name_passes_it_on(called):
    pnx.run(["chat", "Qwen/Qwen3-0.6B"])
    assert called[0].model_name_or_path == "Qwen/Qwen3-0.6B"


def test_chat_with_model_and_adapter_needs_no_run(called):
    pnx.run(["chat", "-m", "base", "-a=run"])
    assert (called[0].model_name_or_path, called[0].lora_path) == ("base", "run")


def test_chat_with_rows_is_an_error(called):
    with pytest.raises(ValueError, match="use pnx predict"):
        pnx.run(["chat", "run", "-d", "rows.jsonl"])


def test_predict_with_short_names_passes_rows_and_output(called):
    pnx.run(["predict", "run", "-d", "rows.jsonl", "-o", "answers.jsonl"])
    assert (called[0].data_file, called[0].output_file) == ("rows.jsonl", "answers.jsonl")


def test_predict_without_rows_reads_the_dev_split_of_the_run(called):
    Path("data").mkdir()
    Path("data/dev.json").touch()
    Path("run/run_config.json").write_text('{"dataset_name_or_path": "data"}')
    pnx.run(["predict", "run"])
    assert called[0].data_file == str(Path("data/dev.json"))


def test_sample_passes_the_run_and_the_keys_of_rewards(called):
    pnx.run(
        ["sample", "run", "-d", "p.jsonl", "-o", "s.jsonl", "--reward_funcs", "length,f.py:g", "--max-new-tokens=7"]
    )
    assert (called[0].model_name_or_path, called[0].data_file, called[0].output_file) == ("run", "p.jsonl", "s.jsonl")
    assert called[0].max_length == 7 and called[1].reward_funcs == ("length", "f.py:g")


def test_predict_without_rows_and_dev_split_is_an_error(called):
    with pytest.raises(ValueError, match="no rows to answer; pass --data"):
        pnx.run(["predict", "run"])
    with pytest.raises(ValueError, match="unknown key 'dta'; did you mean 'data'"):
        pnx.run(["predict", "run", "--dta", "rows.jsonl"])


def test_merge_writes_beside_the_run(called):
    pnx.run(["merge", "run"])
    assert (called[0].adapter_path, called[0].output_path, called[0].model_name_or_path) == (
        "run",
        "run-merged",
        "base",
    )


def test_merge_of_a_model_without_adapter_is_an_error(called):
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    with pytest.raises(ValueError, match="no adapter, so there is nothing to merge"):
        pnx.run(["merge", "model"])


def test_exports_write_beside_the_run(called):
    pnx.run(["export", "gguf", "run", "--outtype", "q8_0"])
    pnx.run(["export", "static", "run"])
    assert (called[0].output_file, called[0].outtype, called[1].output_path) == ("run.gguf", "q8_0", "run-static")


def test_quantize_of_an_adapter_names_the_command_that_merges_it(called):
    with pytest.raises(ValueError, match="pnx merge run -o run-merged"):
        pnx.run(["quantize", "run", "-o", "out"])


def test_quantize_of_a_model_rounds_to_nearest(called):
    pnx.run(["quantize", "Qwen/Qwen3-0.6B", "-o", "out"])
    assert called[0] == ["--model", "Qwen/Qwen3-0.6B", "--do_ptq", "true", "--out", "out"]


def test_eval_without_a_task_asks_the_built_in_questions(called):
    pnx.run(["eval", "run"])
    assert (called[0].model_name_or_path, called[0].tasks, called[0].output_dir) == (
        "run",
        ("general",),
        "run-evaluation",
    )


def test_serve_with_a_run_serves_its_folder(called):
    pnx.run(["serve", "run", "--port", "0"])
    assert (called[0].model_name_or_path, called[0].port) == ("run", 0)
