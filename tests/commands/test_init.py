"""Questions of `pnx init`, and the configuration that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddlenlp_ext.commands import init, pnx
from paddlenlp_ext.commands.suggest_config import _steps
from paddlenlp_ext.config import load_run_config
from paddlenlp_ext.peft.registry import peft_methods
from tests.common.marks import needs_cpp


@pytest.fixture
def written(run_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs `pnx init` on the tiny model and its data, and returns the written keys."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> dict:
        pnx.run(["init", "-m", str(run_folders / "model"), "-d", str(run_folders / "data"), *words])
        return json.loads(Path("run.json").read_text())

    return run


def test_init_with_yes_writes_a_valid_configuration_and_prints_the_next_command(written, capsys):
    Path("checkpoints/run").mkdir(parents=True)
    keys = written("--yes", "--memory", "8")
    config = load_run_config(["run.json"], peft_methods())
    assert (config.train.max_steps, keys["output_dir"]) == (keys["max_steps"], str(Path("checkpoints/run-2")))
    assert "recompute" not in keys and "weight_quantize_algo" not in keys
    printed = capsys.readouterr().out
    assert "optimizer steps" in printed and printed.rstrip().endswith("sft run.json")


@pytest.mark.parametrize(
    "prompts",
    [["red ="] * 24, ["red =", "pear ="], ["two ="] * 24],
    ids=["equal rows, not held out", "two rows, not held out", "equal rows, held out"],
)
def test_init_with_a_split_that_would_be_empty_writes_a_run_without_evaluation(
    prompts, run_folders, monkeypatch, caplog
):
    monkeypatch.chdir(run_folders)
    lines = [json.dumps({"src": prompt, "tgt": "4"}) for prompt in prompts]
    Path("rows.jsonl").write_text("\n".join(lines))
    pnx.run(["init", "-m", "model", "-d", "rows.jsonl", "--yes", "--memory", "8"])
    assert not {"do_eval", "dev_ratio", "eval_steps"} & json.loads(Path("run.json").read_text()).keys()
    assert "the run has no eval rows: rows.jsonl" in caplog.text


@pytest.mark.parametrize("has_bf16", [pytest.param(True, marks=needs_cpp), False])
def test_init_on_a_cpu_sets_bf16_if_the_processor_has_bf16_arithmetic(has_bf16, written, monkeypatch):
    monkeypatch.setattr("paddlenlp_ext.commands.suggest_config.has_gpu", lambda: False)
    monkeypatch.setattr("paddlenlp_ext.commands.suggest_config.has_bf16_arithmetic", lambda: has_bf16)
    assert written("--yes", "--memory", "8").get("bf16") == (True if has_bf16 else None)


def test_init_on_a_cpu_without_the_cpp_library_does_not_set_bf16(written, monkeypatch):
    monkeypatch.setattr("paddlenlp_ext.commands.suggest_config.has_gpu", lambda: False)
    monkeypatch.setattr("paddlenlp_ext.commands.suggest_config.has_bf16_arithmetic", lambda: True)
    monkeypatch.setattr("paddlenlp_ext.ops.cpp.bf16.unavailable_reason", lambda: "a compiler is missing")
    assert "bf16" not in written("--yes", "--memory", "8")


def test_init_asks_for_what_no_argument_answers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    questions, answers = [], []
    monkeypatch.setattr(init, "_write_and_plan", lambda arguments, out: answers.append(arguments))

    def answer(question: str) -> str:
        questions.append(question)
        return "chat" if question.startswith("Goal") else ""

    monkeypatch.setattr("builtins.input", answer)
    pnx.run(["init", "-m", "m", "-d", "d"])
    assert [question.split()[0] for question in questions] == ["Goal", "Memory"]
    assert (answers[0].model, answers[0].goal) == ("m", "chat") and answers[0].memory > 0


def test_init_without_a_terminal_names_the_flag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def end(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    with pytest.raises(ValueError, match="pass --yes to accept the defaults"):
        pnx.run(["init"])


def test_init_does_not_replace_a_file(written):
    Path("run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"run\.json exists; choose another name"):
        written("--yes")


def test_init_with_too_little_memory_names_what_a_run_needs(written):
    with pytest.raises(ValueError, match=r"needs at least 0\.\d GB, more than the 0\.001 GB"):
        written("--yes", "--memory", "0.001")
    assert not Path("run.json").exists()


@pytest.mark.parametrize(
    ("rows", "packs_per_step", "steps"),
    [(10, 1, 10), (60, 1, 20), (100, 1, 30), (800, 1, 200), (20_000, 3, 200)],
)
def test_steps_follow_the_number_of_rows(rows, packs_per_step, steps, monkeypatch):
    monkeypatch.setattr("paddlenlp_ext.commands.suggest_config.has_gpu", lambda: False)
    keys = _steps(rows, 50.0, 512, has_dev=True)
    assert (keys["gradient_accumulation_steps"], keys["max_steps"]) == (packs_per_step, steps)
    assert keys["logging_steps"] < keys["eval_steps"] == keys["save_steps"] <= keys["max_steps"]


@pytest.mark.parametrize(
    ("row", "goal"),
    [('{"chosen": 1}', "preferences"), ('{"messages": []}', "chat"), ('{"src": ""}', "instructions")],
)
def test_default_goal_follows_the_rows(row, goal, tmp_path):
    (tmp_path / "rows.jsonl").write_text(row)
    assert init._default_goal(str(tmp_path / "rows.jsonl")) == goal
