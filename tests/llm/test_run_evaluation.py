"""Test run_evaluation.py from command line to report, with a tiny model, its adapter and the merged model."""

from __future__ import annotations

import json
from pathlib import Path

import paddle
import pytest

from paddlenlp_ext.checkpoint.tokenizer import AutoTokenizer
from paddlenlp_ext.cli import run_evaluation
from paddlenlp_ext.evaluation import compare_models
from paddlenlp_ext.models.auto import AutoModelForCausalLM
from paddlenlp_ext.peft.methods.lora import LoRAConfig
from paddlenlp_ext.peft.methods.prompt_tuning import PromptTuningConfig
from paddlenlp_ext.peft.peft_model import get_peft_model
from paddlenlp_ext.utils.locks import RUN_LOCK, run_lock
from tests.common.models import write_tiny_data, write_tiny_model
from tests.common.processes import another_process
from tests.common.scripts import LLM, load_script

script = load_script(LLM / "run_evaluation.py")
QUESTIONS = [
    {"q": "red apple =", "choices": ["apple red", "fig"], "answer": 0},
    {"q": "blue | plum =", "choices": ["lime", "plum blue"], "answer": "B"},
]


def save_adapter(folder: Path, base: Path, config) -> Path:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    paddle.seed(2)
    for tensor in model.adapter_state().values():
        tensor.set_value(tensor + 0.3 * paddle.randn(tensor.shape))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write a model, adapters, rows and task files."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_tiny_model(folder / "base")
    write_tiny_data(folder / "data")
    save_adapter(folder / "lora", folder / "base", LoRAConfig(rank=4))
    save_adapter(folder / "prompt", folder / "base", PromptTuningConfig(num_virtual_tokens=2))
    (folder / "quiz.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    tasks = {
        "quiz": {"task": "multiple_choice", "data_file": "quiz.jsonl", "prompt": "{q}", "chat": False},
        "answers": {
            "task": "generation",
            "data_file": "data/dev.json",
            "max_new_tokens": 3,
            "metrics": ["exact_match", "f1", "bleu4"],
        },
        "loss": {"task": "perplexity", "data_file": "data/dev.json", "limit": 7},
    }
    for name, keys in tasks.items():
        (folder / f"{name}.json").write_text(json.dumps(keys))
    return folder


def run(folder: Path, *arguments: object) -> None:
    fixed = ["--model_name_or_path", folder / "base", "--chat_template", "none", "--device", "cpu"]
    script.main([str(argument) for argument in [*fixed, *arguments]])


def test_run_evaluation_compares_base_adapter_and_merged_model(folder, tmp_path, capsys):
    tasks = ",".join(str(folder / f"{name}.json") for name in ("quiz", "answers", "loss"))
    compared = ["--lora_path", folder / "lora", "--compare", "base,adapter,merged"]
    run(folder, *compared, "--tasks", tasks, "--output_dir", tmp_path / "out", "--batch_size", "3")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    lines = {(line["task"], line["metric"]): line for line in results["results"]}
    assert [(line["task"], line["num_rows"]) for line in lines.values()] == [
        *[("quiz", 2)] * 2, *[("answers", 12)] * 3, ("loss", 7),
    ]  # fmt: skip
    for line in lines.values():
        assert line["models"]["adapter"]["value"] == pytest.approx(line["models"]["merged"]["value"], rel=1e-5)
    loss = lines["loss", "perplexity"]["models"]
    assert loss["base"]["difference"] is None
    difference = loss["adapter"]["value"] - loss["base"]["value"]
    assert abs(difference) > 0.1
    assert loss["adapter"]["difference"]["difference"] == pytest.approx(difference)
    assert loss["base"]["interval"]["low"] < loss["base"]["value"] < loss["base"]["interval"]["high"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert [row["task"] for row in rows] == ["quiz"] * 2 + ["answers"] * 12
    assert rows[0]["models"]["base"]["output"] in QUESTIONS[0]["choices"]
    assert set(rows[5]["models"]["merged"]["scores"]) == {"exact_match", "f1"}
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| task | metric | rows | base | adapter | merged |" in report
    assert f"| {rows[2]['src']} | {rows[2]['tgt'].strip()} |" in report
    assert (tmp_path / "out" / "scores.png").stat().st_size > 5000
    assert "Differences from base" in capsys.readouterr().out


def test_run_evaluation_of_the_adapter_folder_compares_with_its_base(folder, tmp_path):
    arguments = ["--task", "multiple_choice", "--data_file", folder / "quiz.jsonl", "--prompt", "{q}", "--no_chat"]
    script.main([str(each) for each in ["--model_name_or_path", folder / "lora", "--output_dir", tmp_path, *arguments]])
    models = json.loads((tmp_path / "results.json").read_text())["models"]
    assert models == {
        "base": {"base": str(folder / "base"), "adapter": None, "merged": False},
        "adapter": {"base": str(folder / "base"), "adapter": str(folder / "lora"), "merged": False},
    }
    assert "blue \\| plum =" in (tmp_path / "report.md").read_text()


def test_run_evaluation_compares_with_other_models(folder, tmp_path, capsys):
    """Test a name that would be a style in the markup of the terminal."""
    copy = tmp_path / "copy[bold]"
    AutoModelForCausalLM.from_pretrained(folder / "base").save_pretrained(copy)
    AutoTokenizer.from_pretrained(folder / "base").save_pretrained(str(copy))
    run(folder, "--compare", f"base,{copy}", "--tasks", folder / "loss.json", "--output_dir", tmp_path)
    (line,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert line["models"]["base"]["value"] == line["models"][copy.name]["value"]
    assert line["models"][copy.name]["difference"]["p_value"] == 1.0
    assert copy.name in capsys.readouterr().out


def test_run_evaluation_into_the_folder_of_an_active_run_raises(folder, tmp_path):
    with another_process(run_lock(tmp_path)), pytest.raises(ValueError, match="in use by a run"):
        run(folder, "--tasks", folder / "loss.json", "--output_dir", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "base,merged"], "--compare merged needs an adapter; pass --lora_path ADAPTER"),
        (["--compare", "base,base"], "--compare base,base lists two models with the same name"),
        (["--output_dir", "{folder}/loss.json"], "loss.json is not a directory"),
        (["--output_dir", "{folder}/loss.json/out"], "loss.json is not a directory"),
        (["--lora_path", "{folder}/prompt", "--compare", "merged"], "cannot be merged, because its method does not"),
    ],
)
def test_run_evaluation_of_impossible_comparisons_raises_before_it_loads_a_model(
    folder, tmp_path, arguments, message, monkeypatch
):
    monkeypatch.setattr(compare_models, "load_unmerged", None)
    written = [each.format(folder=folder) for each in arguments]
    with pytest.raises(ValueError, match=message):
        run(folder, "--tasks", folder / "loss.json", "--output_dir", tmp_path / "out", *written)
    assert not (tmp_path / "out").exists()


def test_run_evaluation_locks_its_folder_while_it_measures(folder, tmp_path, monkeypatch):
    def stop(*_):
        assert (tmp_path / "out" / RUN_LOCK).is_file()
        raise ValueError("stop here")

    monkeypatch.setattr(run_evaluation, "find_candidates", stop)
    with pytest.raises(ValueError, match="stop here"):
        run(folder, "--tasks", folder / "loss.json", "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()
